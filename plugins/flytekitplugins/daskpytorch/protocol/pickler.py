"""Pickles of classes and exceptions, for the ways from the driver to its ranks and back.

A class of `__main__`, or of a function, is pickled as an empty class that is filled afterwards. Cloudpickle makes it by
a class statement without body and keywords: the script's metaclass, `__init_subclass__` and `Enum` would run once more,
and fail or register the class twice. So it is made without them.

On the way back, a class that the driver has sent is a reference: the driver's own class stays as it is.
"""

# ruff: noqa: SLF001 - docs/private_names.md lists the private names

import abc
import copyreg
import functools
import io
import pickle
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping
from enum import Enum, EnumMeta
from importlib import import_module
from typing import Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as parts  # cloudpickle 3.0 to 3.1
from tblib.pickling_support import pickle_traceback

Reduced = tuple[Any, ...]
HEAP_TYPE, IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""Flags of classes: made by Python code; cannot be changed."""
LARGE = 1 << 20
"""Bytes from which an array's or tensor's memory may stay outside the pickle."""
COMMON_FIELDS = ("__traceback__", "__cause__", "__context__", "__suppress_context__", "__notes__")
"""Attributes that no exception's own pickle has. `__cause__` sets `__suppress_context__`."""


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
            functools.singledispatchmethod: lambda it: _reduce_dispatcher(type(it), it.func, it.dispatcher.registry),
            weakref.WeakValueDictionary: lambda it: (weakref.WeakValueDictionary, (dict(it),)),
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if issubclass(kind, BaseException):
            return _reduce_exception(obj)
        if issubclass(kind, Enum):
            return _reduce_member(obj)
        if issubclass(kind, type) and _is_by_value(obj):
            return self.reduce_class(obj)
        if kind is types.FunctionType and obj.__code__ is _DISPATCHER:
            return _reduce_dispatcher(functools.singledispatch, obj.__wrapped__, obj.registry)
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


def _is_by_value(cls: type) -> bool:
    return cls not in parts._BUILTIN_TYPE_NAMES and not parts._should_pickle_by_reference(cls)


def class_by_value(cls: type) -> Reduced:
    kind, name, _, given, tracker_id, _ = parts._class_getnewargs(cls)
    given |= {key: vars(cls)[key] for key in ("__slots__", "__orig_bases__") if key in vars(cls)}
    given["__qualname__"] = cls.__qualname__
    attributes, _ = parts._class_getstate(cls)
    for key, value in list(attributes.items()):
        if key in given or isinstance(value, types.MemberDescriptorType):
            del attributes[key]
    if issubclass(cls, Enum):  # other values are combinations of flags, which come back by themselves
        members = attributes["_value2member_map_"].items()
        attributes["_value2member_map_"] = {key: it for key, it in members if it._name_ in cls._member_map_}
    return _empty_class, (kind, name, cls.__bases__, given, tracker_id), attributes, None, None, _fill


def _empty_class(kind: type, name: str, bases: tuple[type, ...], given: dict[str, Any], tracker_id: str) -> Any:
    known = parts._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is None:
        known = parts._lookup_class_or_track(tracker_id, _made(kind, name, bases, given))
        _RECEIVED.add(known)
    return known


def _made(kind: type, name: str, bases: tuple[type, ...], given: dict[str, Any]) -> type:
    """Make a class. Only a library's own metaclass and `__init_subclass__` run, unless they demand keywords."""
    above = dict.fromkeys(cls for base in bases for cls in base.__mro__ if not cls.__flags__ & IMMUTABLE_TYPE)
    hooks = {cls: vars(cls)["__init_subclass__"] for cls in above if "__init_subclass__" in vars(cls)}
    own = {cls: hook for cls, hook in hooks.items() if cls in parts._DYNAMIC_CLASS_TRACKER_BY_CLASS}
    if not own and kind not in parts._DYNAMIC_CLASS_TRACKER_BY_CLASS and not issubclass(kind, EnumMeta):
        try:
            return types.new_class(name, bases, {"metaclass": kind}, lambda namespace: namespace.update(given))
        except TypeError:
            own = hooks
    for cls in own:
        type.__delattr__(cls, "__init_subclass__")
    try:
        made: type = type.__new__(kind, name, bases, dict(given))
    finally:
        for cls, hook in own.items():
            type.__setattr__(cls, "__init_subclass__", hook)
    if isinstance(made, abc.ABCMeta):
        abc._abc_init(made)  # type: ignore[attr-defined]
    return made


def _fill(cls: type, attributes: dict[str, Any]) -> None:
    """Set a class's attributes, whatever its metaclass forbids. A process's own classes stay as they are."""
    if cls in _RECEIVED:
        registry = attributes.pop("_abc_impl", ())
        for name, value in attributes.items():
            type.__setattr__(cls, name, value)
        for registered in registry:
            abc.ABCMeta.register(cls, registered)  # type: ignore[arg-type]


def _class_of_driver(tracker_id: str, name: str) -> Any:
    known = parts._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    return functools.reduce(getattr, name.split("."), import_module("__main__")) if known is None else known


def _reduce_member(member: Any) -> Any:
    cls = type(member)
    if not _is_by_value(cls) or member._name_ not in cls._member_map_:
        return NotImplemented
    plain = cls._member_type_
    make, args, *_ = plain.__reduce_ex__(member, 2) if plain is not object else (None, ())
    values = args[1:] if make is copyreg.__newobj__ else args  # type: ignore[attr-defined]
    return _member, (cls, member._name_, plain, values), vars(member), None, None, _fill_member


def _member(cls: Any, name: str, plain: Any, values: tuple[Any, ...]) -> Any:
    known = vars(cls).get("_member_map_", {}).get(name)
    return plain.__new__(cls, *values) if known is None else known


def _fill_member(member: Any, attributes: Mapping[str, Any]) -> None:
    if not vars(member):
        vars(member).update(attributes)


_DISPATCHER = functools.singledispatch(_fill).__code__  # type: ignore[attr-defined]


def _reduce_dispatcher(make: Any, function: Any, registry: Mapping[type, Any]) -> Reduced:
    return make, (function,), dict(registry), None, None, _fill_dispatcher


def _fill_dispatcher(dispatcher: Any, registry: Mapping[type, Any]) -> None:
    for cls, function in registry.items():
        dispatcher.register(cls, function)


# ---- Exceptions


def _reduce_exception(error: Any) -> Reduced:
    classes = type(error).__mro__
    fields = {name: value for name in COMMON_FIELDS if (value := getattr(error, name, None)) is not None}
    if any("__reduce__" in vars(cls) or "__reduce_ex__" in vars(cls) for cls in classes if cls.__flags__ & HEAP_TYPE):
        make, args, *state = error.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return make, args, (state[0] if state else None, fields), None, None, _fill_exception
    for name, field in (item for cls in classes for item in vars(cls).items()):
        if isinstance(field, (types.MemberDescriptorType, types.GetSetDescriptorType)) and name[:2] != "__":
            fields.setdefault(name, getattr(error, name, None))
    group = (error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else ()
    for name in ("message", "exceptions") if group else ("obj",):  # of an AttributeError: may be anything
        fields.pop(name, None)
    return _empty_exception, (type(error), group), (vars(error), fields), None, None, _fill_exception


def _empty_exception(cls: Any, args: tuple[Any, ...]) -> Any:
    base = cls
    while base.__flags__ & HEAP_TYPE:
        base = base.__base__
    return base.__new__(cls, *args)


def _fill_exception(error: Any, state: tuple[Any, Mapping[str, Any]]) -> None:
    own, fields = state
    if own:
        error.__setstate__(own)
    for name, value in fields.items():
        if value is not None:  # OSError prints a file name that is None
            setattr(error, name, value)
