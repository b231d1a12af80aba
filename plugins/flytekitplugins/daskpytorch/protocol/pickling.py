"""Pickles of the user's objects, for the ways from the driver to its ranks and back.

Cloudpickle pickles the classes of `__main__`, or of a function. On the way back, a class that the driver has sent is a
reference: the driver's own class stays as it is.

Definitions of `__main__` travel to the ranks by value, and the rank's `__main__` gets them. A class that is unpickled
by value belongs to no module, but `all_gather_object`, `torch.save` and DataLoader workers need a name. So unpickled
functions have the rank's `__main__` as their globals.

Some objects of libraries, such as an `Accelerator`, hold the driver's world size of one. With a copy, each rank would
train separately. Ranks refuse them.
"""

# ruff: noqa: SLF001 - docs/private_names.md lists the private names

import builtins
import copyreg
import functools
import io
import os
import pickle
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from types import FunctionType, ModuleType
from typing import IO, Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as parts  # cloudpickle 3.0 to 3.1
from tblib.pickling_support import pickle_exception, pickle_traceback

Reduced = tuple[Any, ...]
LARGE = 1 << 20
"""Bytes from which a tensor's memory is pickled without copies. The unpickled tensor cannot be resized."""
BUILTIN_INITS = tuple(
    each.__init__ for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException)
)
INTERPRETERS = (
    *("numpy.random.mtrand._rand", "os.environ", "os.environb", "random._inst"),
    *("sys.stderr", "sys.stdin", "sys.stdout", "torch.default_generator"),
)
"""Objects that each process has of its own. `from random import random` is a method of `_inst`."""
REFUSED = {
    ("accelerate.accelerator", "Accelerator"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
    ("accelerate.data_loader", "DataLoaderShard"),
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "PartialState"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("transformers.training_args", "TrainingArguments"),
}
"""Classes whose objects ranks refuse, as they keep the driver's world size."""


# ---- Both ways


def dumps_by_value(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _reduce_code(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[Any, ...]]:
    _, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _code, (code.co_filename, *parts)


def _code(file_name: str, *parts: Any) -> types.CodeType:
    """Cloudpickle >= 3.1.3 omits the file name, which tracebacks and debuggers need."""
    return types.CodeType(*parts).replace(co_filename=file_name)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[ChainMap[type, Callable[..., Any]]] = ChainMap(
        {
            types.CodeType: _reduce_code,
            types.TracebackType: pickle_traceback,
            functools.cached_property: lambda it: (functools.cached_property, (it.func,), {"attrname": it.attrname}),
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if issubclass(kind, BaseException):
            return pickle_exception(obj, builtin_inits=BUILTIN_INITS)
        if kind.__module__ == "torch.storage":
            from flytekitplugins.daskpytorch.protocol.torch_parts import reduce_storage

            if (large := reduce_storage(obj, LARGE)) is not None:
                return large
        is_known = issubclass(kind, type) and obj in parts._BUILTIN_TYPE_NAMES
        if issubclass(kind, type) and not is_known and not parts._should_pickle_by_reference(obj):
            return self.reduce_class(obj)
        return super().reducer_override(obj)

    def reduce_class(self, cls: type) -> Reduced:
        if cls in _RECEIVED and cls.__module__ == "__main__" and "<locals>" not in cls.__qualname__:
            return _class_of_driver, (parts._get_or_create_tracker_id(cls), cls.__qualname__)
        return class_by_value(cls)


# ---- Classes


_RECEIVED: weakref.WeakSet[type] = weakref.WeakSet()


def class_by_value(cls: type) -> Reduced:
    make, args, state, *_ = parts._dynamic_class_reduce(cls)
    if not issubclass(cls, Enum):  # cloudpickle 3.1.3 omits slots and qualified names
        kind, name, _, given, *rest = args
        given |= {key: vars(cls)[key] for key in ("__slots__", "__orig_bases__") if key in vars(cls)}
        args = kind, name, cls.__bases__, given | {"__qualname__": cls.__qualname__}, *rest
    return _empty_class, (make, *args), state, None, None, _fill


def _empty_class(make: Callable[..., type], *args: Any) -> type:
    *_, tracker_id, _ = args
    is_own = tracker_id in parts._DYNAMIC_CLASS_TRACKER_BY_ID
    cls = make(*args)
    if not is_own:
        _RECEIVED.add(cls)
    return cls


def _fill(cls: type, state: Reduced) -> None:
    if cls in _RECEIVED:  # a process's own classes stay as they are
        parts._class_setstate(cls, state)


def _class_of_driver(tracker_id: str, name: str) -> Any:
    known = parts._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    return functools.reduce(getattr, name.split("."), import_module("__main__")) if known is None else known


# ---- To the ranks


def dumps(value: object) -> bytes:
    """Pickle a value, with all definitions of `__main__` that it reaches."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    pickler.dump_definitions()
    return file.getvalue()


def loads(data: bytes | IO[bytes], present: Mapping[str, Any] | None = None) -> Any:
    """Return the value of a pickle, and put the pickled definitions into this process's `__main__`.

    Names in `present` (None: all of `__main__`) keep their values: functions that use `__file__` bring the driver's.
    """
    namespace = vars(sys.modules["__main__"])
    present = dict(namespace) if present is None else present
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    unpickler = pickle.Unpickler(file)  # noqa: S301 - from the gang's own driver, over the agent's pipe
    value = unpickler.load()
    while definitions := unpickler.load():
        namespace.update(definitions)
    namespace.update(present)
    return value


_LRU_CACHE = type(functools.lru_cache(lambda: None))


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._namespace = vars(sys.modules["__main__"])
        self._reached: set[str] = set()
        self.globals_ref[id(self._namespace)] = _MainNamespace(name="not empty, else cloudpickle fills it")
        self._interpreters = dict(_interpreters_objects())

    def dump_definitions(self) -> None:
        done: set[str] = set()
        while new := self._reached - done:
            self.dump({name: self._namespace[name] for name in sorted(new)})
            done |= new
        self.dump({})

    def reducer_override(self, obj: Any) -> Any:
        """Pickle modules with a custom class by name.

        Cloudpickle adds `torch.classes` to functions with torch and an attribute `classes`.
        """
        if (name := _name_in_main(obj)) is not None:
            self._reached.add(name)
        if (own := self._interpreters.get(id(obj))) is not None:
            return own
        if (reducer := _reducer_of(type(obj))) is not None:  # type: ignore[arg-type]  # mypy takes no class for hashable
            return reducer(obj)
        if (by_name := _reduce_module(obj)) is not None:
            return by_name
        reduced = super().reducer_override(obj)
        return self._reduce_named(obj) if reduced is NotImplemented else reduced

    def _reduce_named(self, obj: Any) -> Any:
        own: Any = type(obj)
        is_named = getattr(obj, "__module__", None) == "__main__" and not isinstance(obj, (type, FunctionType))
        if not is_named or own in self.dispatch_table:
            return NotImplemented
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, str):
            return reduced
        if self._namespace.get(reduced) is obj:
            self._reached.add(reduced)
        if isinstance(obj, _LRU_CACHE):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return copyreg.__newobj__, (own,), obj.__getstate__()  # type: ignore[attr-defined]


def _interpreters_objects() -> Iterator[tuple[int, Reduced]]:
    for path in INTERPRETERS:
        module, _, name = path.rpartition(".")
        if (value := getattr(sys.modules.get(module), name, None)) is not None:
            yield id(value), (getattr, (sys.modules[module], name))


def _reduce_module(value: object) -> Reduced | None:
    if isinstance(value, ModuleType) and type(value) is not ModuleType:
        for name, module in list(sys.modules.items()):
            if module is value:
                return import_module, (name,)
    return None


class _MainNamespace(dict[str, Any]):
    def __reduce__(self) -> Any:
        return getattr, (sys.modules["__main__"], "__dict__")


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _name_in_main(obj: object) -> str | None:
    if not isinstance(obj, (type, FunctionType)) or getattr(obj, "__module__", None) != "__main__":
        return None
    found: Any = sys.modules["__main__"]
    outer, *inner = obj.__qualname__.split(".")
    for name in (outer, *inner):
        found = vars(found).get(name) if isinstance(found, (type, ModuleType)) else None
    return outer if getattr(found, "__func__", found) is obj else None


# ---- Objects that hold the driver's rank: in the driver


@functools.lru_cache(1024)  # a pickle has many objects of few classes
def _reducer_of(cls: type) -> Callable[[Any], Reduced] | None:
    reducers = (_REDUCERS.get((base.__module__, base.__qualname__)) for base in cls.__mro__)
    return next((reducer for reducer in reducers if reducer is not None), None)


def _reduce_refused(value: Any) -> Reduced:
    make, arguments, *rest = value.__reduce_ex__(2)
    return _made_unless_in_gang, (type(value).__name__, make, arguments), *rest


def _reduce_sampler(value: Any) -> Reduced:
    return _reduce_refused(value) if value.num_replicas == 1 else value.__reduce_ex__(2)


_REDUCERS: dict[tuple[str, str], Callable[[Any], Reduced]] = dict.fromkeys(REFUSED, _reduce_refused) | {
    ("flytekitplugins.daskpytorch.context", "RankContext"): lambda _: (_current_rank, ()),
    ("torch.utils.data.distributed", "DistributedSampler"): _reduce_sampler,
}


# ---- ... and in a rank


def _made_unless_in_gang(name: str, make: Callable[..., Any], arguments: Reduced) -> Any:
    if (world_size := int(os.environ["WORLD_SIZE"])) > 1:
        raise ValueError(
            f"this {name} was made in the driver, outside the gang's ranks: it knows a world of one process, and each "
            f"of the {world_size} ranks would train alone. Make it inside the function that the ranks call, not at the "
            "top of the script and not as an argument."
        )
    return make(*arguments)


def _current_rank() -> Any:
    from flytekitplugins.daskpytorch.context import current_rank

    return current_rank()
