"""Pickles of the user's objects. Definitions of `__main__` are pickled by value, and the rank's `__main__` gets them.

A class that is unpickled by value belongs to no module, so that plain `pickle` cannot name the class.
`all_gather_object`, `torch.save` and DataLoader workers need a name. So unpickled functions have the namespace of the
rank's `__main__` as their globals. All definitions that a pickle reaches are put there by name.
"""

import copyreg
import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle

from flytekitplugins.daskpytorch.protocol import driver_objects

LARGE = 1 << 20
"""Minimum number of bytes of an array or a tensor whose memory may stay outside the pickle."""


def dumps(value: object, max_size: int | None = None, put_aside: Callable[[memoryview], object] | None = None) -> bytes:
    """Pickle a value, with all definitions of `__main__` that the value reaches.

    Args:
        value: Any object.
        max_size: Most bytes of the pickle. None means no limit.
        put_aside: Takes the memory of each large array and tensor. None leaves them in the pickle.

    Raises:
        OverflowError: The pickle, or an object inside, exceeds `max_size` bytes.
    """
    file = io.BytesIO() if max_size is None else _Bounded(max_size)
    pickler = _Pickler(file, max_size, put_aside)
    pickler.dump(value)
    pickler.dump_definitions()
    return file.getvalue()


def loads(data: bytes | memoryview, aside: Iterable[memoryview] = ()) -> Any:
    """Return the value of a pickle, and put the definitions in the pickle into `__main__`.

    Args:
        data: The pickle from `dumps`.
        aside: The memory that `dumps` has put aside, in order. The value uses the memory without a copy.
    """
    namespace = vars(sys.modules["__main__"])
    present = dict(namespace)  # restored below: functions that use `__file__` bring the driver's value
    file = io.BytesIO(data)
    unpickler = pickle.Unpickler(file, buffers=aside)  # noqa: S301 - from the gang's own driver, over the agent's pipe
    value = unpickler.load()
    while file.tell() < len(data):
        namespace.update(unpickler.load())
    namespace.update(present)
    return value


def definitions() -> dict[str, Any]:
    """Return the classes and functions that `__main__` itself defines, by name."""
    namespace = vars(sys.modules["__main__"])
    return {name: value for name, value in list(namespace.items()) if _name_in_main(value) == name}


def spare_parts(max_size: int) -> Mapping[str, bytes]:
    """Pickle each class of `__main__` by itself, for ranks that load files which name the classes.

    The classes that the function reaches come with its call. The rank uses these pickles only for others.

    Args:
        max_size: Most bytes of a pickle. Larger classes, and those that cannot be pickled, are left out.
    """
    parts = {}
    for name, value in definitions().items():
        if isinstance(value, type):
            try:
                parts[name] = dumps(value, max_size)
            except Exception:  # noqa: S112 - a user's object may raise any exception
                continue
    return parts


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    _, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code, (code.co_filename, *parts)


def _code(file_name: str, *parts: Any) -> CodeType:
    """Make a code object with its file name, for tracebacks, debuggers and `inspect`. Cloudpickle >= 3.1.3 omits it."""
    return CodeType(*parts).replace(co_filename=file_name)


_LRU_CACHE = type(functools.lru_cache(lambda: None))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[ChainMap[type, Callable[..., Any]]] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(
        self, file: io.BytesIO, max_size: int | None, put_aside: Callable[[memoryview], object] | None
    ) -> None:
        super().__init__(file, buffer_callback=self._takes if put_aside is not None else None)
        self._max_size = max_size
        self._put_aside = put_aside
        self._namespace = vars(sys.modules["__main__"])
        self._reached: set[str] = set()
        self.globals_ref[id(self._namespace)] = _MainNamespace(name="not empty, else cloudpickle fills it")

    def dump_definitions(self) -> None:
        """Pickle all definitions of `__main__` that the value reaches, directly or indirectly."""
        done: set[str] = set()
        while new := self._reached - done:
            self.dump({name: self._namespace[name] for name in sorted(new)})
            done |= new

    def reducer_override(self, obj: Any) -> Any:
        """Note definitions of `__main__`, and choose how to pickle the objects that cloudpickle cannot handle.

        Modules with a custom class are pickled by name. Cloudpickle adds one example, `torch.classes`, to every
        function that uses `torch` and an attribute `classes`.
        """
        if (name := _name_in_main(obj)) is not None:
            self._reached.add(name)
        if (instead := driver_objects.reduce(obj) or _reduce_module(obj)) is not None:
            return instead
        if self._max_size is not None and not isinstance(obj, type):
            size = getattr(obj, "nbytes", 0)
            if isinstance(size, int) and size > self._max_size:  # checked before the memory is copied
                raise OverflowError
        if self._put_aside is not None and type(obj).__module__ == "torch.storage":
            from flytekitplugins.daskpytorch.protocol import storages

            if (apart := storages.reduce(obj, at_least=LARGE)) is not None:
                return apart
        if (by_value := self._reduce_named(obj)) is not None:
            return by_value
        reduced = super().reducer_override(obj)
        if name is not None and isinstance(obj, type) and isinstance(reduced, tuple):
            _, _, (attributes, _), *_ = reduced
            attributes["__qualname__"] = obj.__qualname__  # cloudpickle drops the names of enclosing classes
        return reduced

    def _reduce_named(self, obj: Any) -> tuple[Any, ...] | None:
        """Pickle by value an object that pickle would look up in `__main__`. A rank's `__main__` starts empty.

        Returns:
            The reduced form, like `__reduce_ex__`. None for other objects.
        """
        own: Any = type(obj)
        if isinstance(obj, (type, FunctionType)) or getattr(obj, "__module__", None) != "__main__":
            return None
        if own.__reduce__ is object.__reduce__ and own.__reduce_ex__ is object.__reduce_ex__:
            return None
        if own in self.dispatch_table:
            return None
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(reduced, str):
            return reduced  # type: ignore[no-any-return]
        if self._namespace.get(reduced) is obj:
            self._reached.add(reduced)
        if isinstance(obj, _LRU_CACHE):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return copyreg.__newobj__, (own,), obj.__getstate__()  # type: ignore[attr-defined]

    def _takes(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if a buffer's memory goes into the pickle. Pickle calls this method for each buffer."""
        with buffer.raw() as memory:
            if memory.nbytes < LARGE or self._put_aside is None:
                return True
            self._put_aside(memory)
            return False


def _reduce_module(value: object) -> tuple[Any, ...] | None:
    if isinstance(value, ModuleType) and type(value) is not ModuleType:
        for name, module in list(sys.modules.items()):
            if module is value:
                return import_module, (name,)
    return None


class _MainNamespace(dict[str, Any]):
    """Stands for the namespace of `__main__`. Unpickles as the namespace of the receiver's `__main__`."""

    def __reduce__(self) -> Any:
        return _main_namespace, ()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _main_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _name_in_main(obj: object) -> str | None:
    """Return the name in `__main__` of a class or function, or its outermost class. None for other modules' objects."""
    if not isinstance(obj, (type, FunctionType)) or getattr(obj, "__module__", None) != "__main__":
        return None
    found: Any = sys.modules["__main__"]
    outer, *inner = obj.__qualname__.split(".")
    for name in (outer, *inner):
        found = vars(found).get(name) if isinstance(found, (type, ModuleType)) else None
    return outer if getattr(found, "__func__", found) is obj else None


class _Bounded(io.BytesIO):
    def __init__(self, max_size: int) -> None:
        super().__init__()
        self._max_size = max_size

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._max_size:
            raise OverflowError
        return super().write(data)
