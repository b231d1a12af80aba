"""Pickles of classes and exceptions, for the ways from the driver to its ranks and back.

Cloudpickle pickles the classes of `__main__`, or of a function. On the way back, a class that the driver has sent is a
reference: the driver's own class stays as it is.
"""

# ruff: noqa: SLF001 - docs/private_names.md lists the private names

import builtins
import functools
import io
import pickle
import types
import weakref
from collections import ChainMap
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as parts  # cloudpickle 3.0 to 3.1
from tblib.pickling_support import pickle_exception, pickle_traceback

Reduced = tuple[Any, ...]
LARGE = 1 << 20
"""Bytes from which an array's or tensor's memory may stay outside the pickle."""
BUILTIN_INITS = tuple(
    each.__init__ for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException)
)


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
        is_known = issubclass(kind, type) and obj in parts._BUILTIN_TYPE_NAMES
        if issubclass(kind, type) and not is_known and not parts._should_pickle_by_reference(obj):
            return self.reduce_class(obj)
        return super().reducer_override(obj)

    def reduce_class(self, cls: type) -> Reduced:
        if cls in _RECEIVED and cls.__module__ == "__main__" and "<locals>" not in cls.__qualname__:
            return _class_of_driver, (parts._get_or_create_tracker_id(cls), cls.__qualname__)
        return class_by_value(cls)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def put_apart(aside: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    def takes(buffer: pickle.PickleBuffer) -> bool:
        if (memory := buffer.raw()).nbytes < LARGE:
            return True
        aside.append(memory)
        return False

    return takes


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
