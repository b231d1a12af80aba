"""Request for the gangs that evaluate a training's checkpoints, with checks of the user's function. In the driver."""

import contextlib
import inspect
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flytekitplugins.daskpytorch.driver.request import Request, check_function, request_for
from flytekitplugins.daskpytorch.protocol.code import function_of, name_of
from flytekitplugins.daskpytorch.protocol.host import RankHost
from flytekitplugins.daskpytorch.rank.evaluation import evaluate
from flytekitplugins.daskpytorch.settings import Keep


def request_of_evaluation(of: Request, inputs: Mapping[str, Any], *, host: RankHost | None = None) -> Request | None:
    """Return the request for the gangs that evaluate a training's checkpoints. None without `Gang(evaluate=...)`.

    Args:
        of: Request of the training's gang.
        inputs: The training's inputs by name.
        host: Access to the task's host in ranks, which then has the inputs' values. None for gangs of `dispatch`.

    Raises:
        TypeError: The function or an input cannot be pickled, or a call of the function would only make an object.
        ValueError: The function has an argument that no input has.
    """
    if (asked := of.settings.evaluate) is None:
        return None
    names = names_of_evaluation(asked.function, inputs, of.name)
    settings = replace(
        of.settings,
        evaluate=None,
        workers=None,
        min_workers=None,
        max_restarts=0,
        hang_timeout=None if of.settings.hang_timeout is None else "auto",
        on_error="stop",
        hints=False,
        key=None,
        keep=Keep(),
        checkpoint_uri=None,
        gpu_check=of.settings.gpu_check if asked.workers or of.settings.gpu_check == "off" else "quick",
        profile=None,
        observers=(),
    )
    values = {name: inputs[name] for name in names} if host is None else {}
    request = request_for(partial(evaluate, asked.function, names), (), values, settings)
    return replace(
        request,
        name=name_of(asked.function),
        ranks_per_worker=of.ranks_per_worker if asked.workers else 1,
        num_gpus=of.num_gpus,
        host=pickle.dumps(host) if host is not None else None,
        environment=of.environment,
    )


def names_of_evaluation(function: Callable[..., Any], inputs: Collection[str], training: str) -> list[str]:
    """Return the names of the inputs that the function of `Evaluate` gets.

    Args:
        function: The function.
        inputs: Names of the training's inputs.
        training: Name of the training, for the error.

    Raises:
        TypeError: A call of the function would only make an object.
        ValueError: The function has an argument without a default that no input has.
    """
    check_function(function)
    kinds = inspect.Parameter
    named: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(ValueError):  # a few builtins have no signature
        named = inspect.signature(function).parameters
    named = {name: each for name, each in named.items() if each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
    for name, each in named.items():
        if each.kind == kinds.POSITIONAL_ONLY or (name not in inputs and each.default is kinds.empty):
            raise ValueError(
                f"Evaluate(function={name_of(function)}): must have arguments that are inputs of {training}, by name. "
                f"{name} is not: the inputs are {', '.join(inputs) or 'none'}. Rename {name}, or give it a default"
            )
    return [name for name in named if name in inputs]


def arguments_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included. Those of `*args` are left out."""
    called = function_of(function)
    try:
        bound = inspect.signature(called, follow_wrapped=False).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, as of a few builtins
        return dict(kwargs)
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, each in bound.signature.parameters.items():
        if each.kind == inspect.Parameter.VAR_KEYWORD:
            found |= bound.arguments[name]
        elif each.kind != inspect.Parameter.VAR_POSITIONAL:
            found[name] = bound.arguments[name]
    return found
