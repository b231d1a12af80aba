"""The user's function with its arguments: checks, names, and the pickle that travels from the driver to the ranks.

Scheduler and Dask workers never unpack a call.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import IO, Any

from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.records import numbers

MAX_NAME = 100


# ---- Checks and names


def check_function(function: Callable[..., Any], *, may_be_async: bool = False) -> None:
    """Raise TypeError if a call would only make an object, which ranks would silently return."""
    name = name_of(function)
    if hasattr(function, "__dask_graph__"):
        raise TypeError(f"{name} is a dask.delayed object, whose call trains nothing: give the function itself")
    if isinstance(function, type):
        raise TypeError(f"{name} is a class, whose call only makes an object: give a function that trains")
    called = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    if inspect.iscoroutinefunction(called) and not may_be_async:
        raise TypeError(
            f"{name} is a coroutine function, whose call trains nothing: give a function that runs it, by "
            f"asyncio.run({name}(...))"
        )
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(f"{name} is a generator function, whose call trains nothing: give a function without yield")


def check_call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    check_function(function)
    called = function_of(function)
    with contextlib.suppress(ValueError):  # what is written in C may have no signature
        signature = inspect.signature(called, follow_wrapped=False)  # Hydra's wrapper takes no argument
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{len(args)} by position" + "".join(f", {name}" for name in kwargs)
            raise TypeError(
                f"{name_of(function)}{signature} cannot be called with the arguments given ({what}): {error}"
            ) from error


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(function_of(function)).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, as of a few builtins
        return dict(kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(name)
    return found


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def function_of(called: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(called, "_task_function", called)


def key_of(function: Callable[..., Any]) -> str:
    name = name_of(function).replace("<locals>.", "")
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[-MAX_NAME:].strip("-")


# ---- Packing, in the driver


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call: the function by name if its module has the function, else (`__main__`, closures) by value.

    TypeError names the part that cannot be pickled.
    """
    by_name = _by_name(function)
    try:
        return pickling.dumps((by_name or function, tuple(args), dict(kwargs)))
    except Exception as error:
        parts = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        parts["the function itself"] = by_name or function
        culprits = [name for name, value in parts.items() if not _can_pickle(value)]
        raise TypeError(
            f"{name_of(function)} cannot be sent to the ranks, because {', '.join(culprits) or 'a part of it'} cannot "
            f"be pickled: {error}. Pass plain data, and open files, locks and connections inside the function."
        ) from error


def _by_name(function: Callable[..., Any]) -> tuple[str, str] | None:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<locals>" in qualname or "<lambda>" in qualname:
        return None
    try:
        return (module, qualname) if module in sys.modules and _find(module, qualname) is function else None
    except AttributeError:
        return None


def _can_pickle(value: object) -> bool:
    try:
        pickling.dumps(value)
    except Exception:
        return False
    return True


# ---- Unpacking, in a rank


def unpack_call(data: bytes | IO[bytes], present: Mapping[str, Any] | None = None) -> partial[Any]:
    function, args, kwargs = pickling.loads(data, present)
    return partial(_find(*function) if type(function) is tuple else function, *args, **kwargs)


def _find(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return function_of(found)


# ---- Of an evaluation


class Metrics(dict[str, float]):
    """As a rank's return value, metrics go to the driver as they are, and not as a task's outputs."""


def evaluate(function: Callable[..., Any], names: Sequence[str], **inputs: Any) -> Metrics:
    """Call `Evaluate`'s function with those `inputs` that `names` has. TypeError: it has not returned metrics."""
    metrics = function(**{name: inputs[name] for name in names})
    call = f"{name_of(function)} returned ("
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{call}{metrics!r:.200}): must be a dictionary of names and numbers, the metrics")
    return Metrics(numbers(metrics, call=call))


# ---- Values that a rank of a staying gang keeps


values: dict[int, Any] = {}


def kept_value(number: int) -> Any:
    """Return a call's value, for pickled references. LookupError: this rank does not keep it."""
    try:
        return values[number]
    except KeyError:
        raise LookupError(
            f"this rank keeps no value of call {number}: gang.keep returned its reference in another gang, or the "
            "value was freed with its reference"
        ) from None
