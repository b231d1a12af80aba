"""The user's objects as bytes. What `__main__` defines travels by value, and becomes the `__main__` of the rank.

A class that is unpickled by value is in no module, so that plain `pickle` could not name it: in `all_gather_object`,
`torch.save`, or what goes to a worker of a DataLoader. So functions come with the namespace of the rank's `__main__`
as their globals, and whatever the bytes reach of the driver's is put there under its own name.
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
"""Bytes of an array's or a tensor's memory from which on it need not be in the pickle."""


def dumps(value: object, max_size: int | None = None, put_aside: Callable[[memoryview], object] | None = None) -> bytes:
    """Pickle a value together with all that it reaches in `__main__`.

    What is large in it goes to `put_aside`, as it lies in memory; with None it is in the pickle, too.

    Raises:
        OverflowError: It takes more than `max_size` bytes, or something in it does.
    """
    file = io.BytesIO() if max_size is None else _Bounded(max_size)
    pickler = _Pickler(file, max_size, put_aside)
    pickler.dump(value)
    pickler.dump_definitions()
    return file.getvalue()


def loads(data: bytes | memoryview, aside: Iterable[memoryview] = ()) -> Any:
    """The value, which uses what was put aside as it is; definitions with it are in `__main__` from now on."""
    namespace = vars(sys.modules["__main__"])
    present = dict(namespace)  # stays: functions that ask for `__file__` bring the driver's
    file = io.BytesIO(data)
    unpickler = pickle.Unpickler(file, buffers=aside)  # noqa: S301 - from our own driver, by our agent's pipe
    value = unpickler.load()
    while file.tell() < len(data):
        namespace.update(unpickler.load())
    namespace.update(present)
    return value


def definitions() -> dict[str, Any]:
    """The classes and functions that `__main__` itself defines, by their names."""
    namespace = vars(sys.modules["__main__"])
    return {name: value for name, value in list(namespace.items()) if _name_in_main(value) == name}


def spare_parts(max_size: int) -> Mapping[str, bytes]:
    """The classes of `__main__`, each by itself, for who finds their names in a file; those that are small and can be.

    What the function reaches comes with its call, and this is not looked at.
    """
    parts = {}
    for name, value in definitions().items():
        if isinstance(value, type):
            try:
                parts[name] = dumps(value, max_size)
            except Exception:  # noqa: S112 - whatever a user's own object may raise; it was not asked for
                continue
    return parts


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    _, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code, (code.co_filename, *parts)


def _code(file_name: str, *parts: Any) -> CodeType:
    """Code that knows its file, for tracebacks, debuggers and `inspect`: since 3.1.3 cloudpickle leaves that out."""
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
        """Pickle what has been reached of `__main__`, by its names, with what that reaches."""
        done: set[str] = set()
        while new := self._reached - done:
            self.dump({name: self._namespace[name] for name in sorted(new)})
            done |= new

    def reducer_override(self, obj: Any) -> Any:
        """Take note of `__main__`, and of modules that are objects of a class of their own: these go by name.

        Cloudpickle takes `torch.classes`, which is one, along with every function that has `torch` and says
        `x.classes`.
        """
        if (name := _name_in_main(obj)) is not None:
            self._reached.add(name)
        if (instead := driver_objects.reduce(obj) or _reduce_module(obj)) is not None:
            return instead
        if self._max_size is not None and not isinstance(obj, type):
            size = getattr(obj, "nbytes", 0)
            if isinstance(size, int) and size > self._max_size:  # before it is copied
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
            attributes["__qualname__"] = obj.__qualname__  # cloudpickle forgets of which class it is a part
        return reduced

    def _reduce_named(self, obj: Any) -> tuple[Any, ...] | None:
        """Pickle an object by value that would be found by its name in `__main__`, which is empty in a rank."""
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
        """Whether memory goes into the pickle, as pickle asks of each that could be left out."""
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
    """Unpickled it is the namespace of `__main__` there."""

    def __reduce__(self) -> Any:
        return _main_namespace, ()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _main_namespace() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _name_in_main(obj: object) -> str | None:
    """By which name `__main__` has this class or function, or the class around it; None: it is not of there."""
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
