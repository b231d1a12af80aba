"""Request for one gang, with all that travels to its ranks. Made in the driver."""

import contextlib
import inspect
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from flytekitplugins.daskpytorch.driver.part import Part
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.function import arguments_of, check_function, evaluate, name_of, pack_call
from flytekitplugins.daskpytorch.protocol.host import Execution, RankHost, StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.job import Job, in_order
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.protocol.script import Script
from flytekitplugins.daskpytorch.settings import Gang, Keep


@dataclass(frozen=True, kw_only=True)
class Request:
    name: str
    call: bytes | None = field(repr=False)
    """The pickled call. None: the gang stays, with `calls`."""
    ranks_per_worker: int
    num_gpus: int = 0
    settings: Gang
    gpu_check: bytes | None = field(default=None, repr=False)
    pass_local_rank: bool = False
    host: bytes | None = field(default=None, repr=False)
    execution: bytes | None = field(default=None, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of a Flyte task for its ranks, which may hold secrets."""
    observers: Sequence[Observer] = ()
    training: Training | None = None
    """None: `Observer.on_begin` is not called."""
    storage: StoragePaths | None = None
    """None if no later attempt or call looks for checkpoints."""
    code: Code | None = None
    script: Script | None = None
    """The program that ranks run as their `__main__`, instead of a function."""
    key: str = ""
    """Unique among the task's gangs, equal in every attempt. Empty for a task's only gang."""
    calls: Part | None = field(default=None, repr=False, compare=False)
    evaluation: "Request | None" = field(default=None, repr=False)
    start: CheckpointEntry | None = None
    """Checkpoint that this gang evaluates, a whole one with its file on the driver's disk. None: no evaluation."""
    keep: object = field(default=None, repr=False, compare=False)
    """The call's function and arguments, referenced until the gang's end: Dask then keeps the data of their Dask
    futures."""

    @property
    def stays(self) -> bool:
        return self.calls is not None

    def job(self, **of_attempt: Any) -> Job:
        settings, evaluate = self.settings, self.settings.evaluate
        gpu_check: Literal["off", "quick"] = "off" if settings.gpu_check == "off" else "quick"
        return Job(
            call=in_order(self.call) if self.call is not None else None,
            pass_local_rank=self.pass_local_rank,
            settings=replace(settings, observers=(), evaluate=None, gpu_check=gpu_check),
            gpu_check=self.gpu_check,
            storage=self.storage.own if self.storage is not None else None,
            host=self.host,
            execution=self.execution,
            environment={**self.environment, **settings.environment},
            patience=evaluate.timeout if evaluate is not None else 0.0,
            **of_attempt,
        )


def request_for(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Gang,
    *,
    pass_local_rank: bool = False,
    code: Code | None = None,
    execution: Execution | None = None,
) -> Request:
    call = pack_call(function, args, kwargs)
    request = replace(
        _request(settings, execution or current_execution(), name=name_of(function), call=call),
        pass_local_rank=pass_local_rank,
        code=code,
        script=function if isinstance(function, Script) else None,
        keep=(function, args, kwargs),
    )
    return replace(request, evaluation=request_of_evaluation(request, arguments_of(function, args, kwargs)))


def request_for_calls(settings: Gang) -> Request:
    return _request(settings, current_execution(), name="gang", call=None)


def _request(settings: Gang, execution: Execution, *, name: str, call: bytes | None) -> Request:
    in_ranks = execution.in_ranks()
    return Request(
        name=name,
        call=call,
        execution=pickle.dumps(in_ranks) if in_ranks is not None else None,
        ranks_per_worker=1 if settings.ranks_per_worker == "auto" else settings.ranks_per_worker,
        settings=settings,
        gpu_check=packed_check(settings),
        observers=[make() for make in settings.observers],
    )


def packed_check(settings: Gang) -> bytes | None:
    return None if isinstance(settings.gpu_check, str) else pack_call(settings.gpu_check, (), {})


def request_of_evaluation(of: Request, inputs: Mapping[str, Any], *, host: RankHost | None = None) -> Request | None:
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
