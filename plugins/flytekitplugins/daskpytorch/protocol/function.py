"""The user's function with its arguments: checks, names, and the pickle that travels to the ranks.

The driver packs a call, and a rank unpacks it. Scheduler and Dask workers never do. `evaluate` calls the function of an
evaluation in a rank.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.records import numbers

MAX_NAME = 100
"""Maximum length of a function's name in a key, in characters. Longer names lose their beginning."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# ---- Checks and names


def check_function(function: Callable[..., Any], *, may_be_async: bool = False) -> None:
    """Check that calling the function can train. Otherwise ranks would silently return a new object.

    Args:
        function: The function.
        may_be_async: Accepts coroutine functions.

    Raises:
        TypeError: The call only makes an object. The message says what to pass instead.
    """
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


def check_arguments(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Check that the function accepts these arguments, before any rank calls the function.

    Raises:
        TypeError: The function rejects the arguments. The message contains the function's signature.
    """
    called = function_of(function)
    with contextlib.suppress(ValueError):  # a few builtins have no signature
        signature = _signature(called)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{len(args)} by position" + "".join(f", {name}" for name in kwargs)
            raise TypeError(
                f"{name_of(function)}{signature} cannot be called with the arguments given ({what}): {error}"
            ) from error


def _signature(called: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the outermost wrapper, which may differ from the wrapped function's.

    Hydra's wrapper, for example, takes no argument.

    Raises:
        ValueError: Neither wrapper nor wrapped function has a signature.
    """
    try:
        return inspect.signature(called, follow_wrapped=False)
    except ValueError:  # the wrapper is written in C, as with `functools.lru_cache`
        return inspect.signature(called)


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, those left at their default included."""
    try:
        bound = inspect.signature(function_of(function)).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, as of a few builtins
        return dict(kwargs)
    bound.apply_defaults()
    names = {each.kind: name for name, each in bound.signature.parameters.items()}
    found: dict[str, Any] = dict(bound.arguments)
    rest = names.get(inspect.Parameter.VAR_POSITIONAL, "")
    if not found.get(rest, True):
        del found[rest]
    more: dict[str, Any] = found.pop(names.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    return found | more


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function. A `partial` has the name of the function inside it."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def function_of(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a Flyte task. Any other callable is returned as it is."""
    return getattr(called, "_task_function", called)


def key_of(function: Callable[..., Any]) -> str:
    """Return a function's name in a form that fits into a path: letters, digits, `_` and `-`."""
    name = name_of(function).replace("<locals>.", "")
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[-MAX_NAME:].strip("-")


# ---- Packing, in the driver


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    aside: list[memoryview] | None = None,
) -> bytes:
    """Pickle a call: the function by name if its module has the function, else (`__main__`, closures) by value.

    Args:
        function: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        aside: List that gets the memory of each large array and tensor, which the pickle then lacks. None keeps
            everything in the pickle.

    Raises:
        TypeError: The function or an argument cannot be pickled. The message names the part.
    """
    by_name = _by_name(function)
    try:
        return pickling.dumps((by_name or function, tuple(args), dict(kwargs)), aside=aside)
    except Exception as error:
        parts = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        parts["the function itself"] = by_name or function
        culprits = [name for name, value in parts.items() if not _can_pickle(value)]
        raise TypeError(
            f"{name_of(function)} cannot be sent to the ranks, because {', '.join(culprits) or 'a part of it'} cannot "
            f"be pickled: {error}. Pass plain data, and open files, locks and connections inside the function."
        ) from error


def _by_name(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return a function's module and name if the module has the function under this name, else None."""
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


def unpack_call(
    data: bytes | memoryview, aside: Sequence[memoryview] = (), present: Mapping[str, Any] | None = None
) -> Call:
    """Unpickle a call that `pack_call` has pickled. `sys.path` must contain the project's sources.

    Args:
        data: The pickle.
        aside: Memory that `pack_call` has put aside, in order.
        present: Names of `__main__` that keep their values. None: all present names.
    """
    function, args, kwargs = pickling.loads(data, aside, present)
    return Call(function=_find(*function) if type(function) is tuple else function, args=args, kwargs=kwargs)


def _find(module: str, qualname: str) -> Callable[..., Any]:
    """Return a function by module and name. If the name belongs to a Flyte task, return the task's function."""
    found: Any = import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return function_of(found)


# ---- Of an evaluation


class Metrics(dict[str, float]):
    """Metrics by name. As a rank's return value, they go to the driver as they are, and not as a task's outputs."""


def evaluate(function: Callable[..., Any], names: Sequence[str], **inputs: Any) -> Metrics:
    """Call a user's function, and return its metrics as floats by name.

    Args:
        function: Function of `Evaluate`.
        names: Names of the inputs that the function gets.
        inputs: All inputs of the training, or those of `names` alone.

    Raises:
        TypeError: The function has not returned a dictionary of names and numbers.
    """
    metrics = function(**{name: inputs[name] for name in names})
    call = f"{name_of(function)} returned ("
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{call}{metrics!r:.200}): must be a dictionary of names and numbers, the metrics")
    return Metrics(numbers(metrics, call=call))


# ---- Values that a rank of a staying gang keeps


values: dict[int, Any] = {}
"""Values that this rank keeps, by the number of the call that has returned the value. Empty in other processes."""


def kept_value(number: int) -> Any:
    """Return the value that this rank keeps from the call with this number. Pickled references call this function.

    Raises:
        LookupError: The rank keeps no such value.
    """
    try:
        return values[number]
    except KeyError:
        raise LookupError(
            f"this rank keeps no value of call {number}: gang.keep returned its reference in another gang, or the "
            "value was freed with its reference"
        ) from None
