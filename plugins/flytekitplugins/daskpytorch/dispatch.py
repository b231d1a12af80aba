"""Runs a PyTorch function as a gang on any Dask cluster. Runs in the driver; its `_serve` runs on the workers.

For example `first, *others = dispatch.run(client, train, epochs=5).result()`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from distributed import Client

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems
from flytekitplugins.daskpytorch.dask.agents import HOW_TO_GET_WORKERS, DaskAgents
from flytekitplugins.daskpytorch.display import machine, training
from flytekitplugins.daskpytorch.driver.futures import GangFutures, SettledFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import (
    call_of,
    check_arguments,
    check_function,
    key_of,
    named,
    note_unfinished,
    request_for,
    storage_of,
    take_keys,
)
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.code import name_of
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import EarlyStopping, Gang, Search, Wandb, is_debugging
from flytekitplugins.daskpytorch.task import local_runs

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.sweep.models import ModelFutures

__all__ = ["map", "run"]


def run(
    client: Client,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    pass_local_rank: bool = False,
    gang: Gang | None = None,
    **kwargs: Any,
) -> GangFutures:
    """Call a function in every rank of a new gang on the client's workers, all of which take part.

    Inside it `torch.distributed` is initialised and `current_rank()` tells which rank it is. Every call trains anew,
    and gangs may run side by side on one cluster.

    In a Flyte task that is tried again, a call goes on from the newest checkpoint of the same call in the attempt
    before: the function's first, second, ... in the task, whatever its arguments, or the one with the same `gang.key`.
    Elsewhere a call goes on from what lies in `gang.checkpoint_uri`, see there, and a line says from which step. Ctrl-C
    while somebody waits for the result ends the gang before `KeyboardInterrupt` is raised.

    Args:
        client: Connected to any Dask cluster whose workers have this package.
        pytorch_function: What each rank calls. Its module need not exist on the workers.
        *args: Its positional arguments, the same in every rank; they must pickle. What is large in them (arrays,
            tensors) reaches each worker once, and its ranks share the memory until they write to it.
        backend: Overrides `gang.backend` unless it is `auto`.
        pass_local_rank: Also pass `local_rank`, the rank's index among those of its worker.
        gang: How to form it.
        **kwargs: Its keyword arguments.

    Returns:
        One future per rank, in the order of the ranks; the whole has `result`, `exception` and `cancel` too.

    Raises:
        GangStartError: The cluster has no workers, or fewer than `gang.min_workers`, or its scheduler does not answer.
        ValueError: An argument is of the wrong kind, the workers have unequal numbers of GPUs while
            `gang.ranks_per_worker` is `auto`, or another gang of the task has the same `gang.key`.
        TypeError: The function or an argument cannot be pickled, the function cannot be called with these arguments, or
            does not train when it is called: a class, a coroutine or generator function, a `dask.delayed` object.

    Examples:
        On two workers:

        >>> import torch
        >>> from distributed import Client
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> def train(epochs: int) -> float:
        ...     total = torch.tensor(float(current_rank().rank + 1))
        ...     torch.distributed.all_reduce(total)  # 1 + 2
        ...     return epochs * total.item()
        >>> client = Client(n_workers=2)  # or that of any cluster: Client("tcp://scheduler:8786")
        >>> dispatch.run(client, train, epochs=5).result()
        [15.0, 15.0]
    """
    Problems("dispatch.run", SimpleNamespace(**locals()), RULES_OF_RUN).raise_any()
    _tell_of_resume("dispatch.run", "Gang(checkpoint_uri=...)")
    check_function(pytorch_function)
    check_arguments(pytorch_function, *args, **(kwargs | ({"local_rank": 0} if pass_local_rank else {})))
    settings = gang or Gang()
    if not isinstance(backend, str) or backend != "auto":
        settings = replace(settings, backend=backend)
    if is_debugging(settings):
        return _run_here(pytorch_function, args, kwargs | ({"local_rank": 0} if pass_local_rank else {}), settings)
    agents = DaskAgents(client)
    if len(agents.workers) < (settings.min_workers or 1):
        raise GangStartError(
            f"the cluster at {agents.scheduler} has {len(agents.workers)} workers, "
            f"but needs {settings.min_workers or 1}. {HOW_TO_GET_WORKERS}"
        )
    settings = replace(settings, ranks_per_worker=agents.ranks_per_worker(settings))
    request = request_for(pytorch_function, args, kwargs, settings, pass_local_rank=pass_local_rank)
    call = call_of(pytorch_function, args, kwargs, settings)
    [key] = take_keys(pytorch_function, settings.key, call=call)
    about = training.of_call(pytorch_function, key, current_execution(), args, kwargs)
    request = replace(named(request, key), training=about)
    supervisor = Supervisor(request, agents, [machine.echo()])
    note = functools.partial(note_unfinished, call, key)
    return GangFutures(supervisor, len(agents.workers) * request.ranks_per_worker, note)


def map(  # noqa: A001 - what it is to the builtin, `run` is to a call
    client: Client,
    pytorch_function: Callable[..., Any],
    experiments: Iterable[Any] | Search,
    *,
    workers: int | Callable[[Any], int] = 1,
    gang: Gang | None = None,
    stop_early: EarlyStopping | None = None,
    wandb: Wandb | None = None,
    storage: str | None = None,
    name: str | None = None,
) -> ModelFutures:
    """Train one model per experiment, as many at once as the client's workers can carry, each as its own gang.

    A gang starts when all its workers are free, the largest first; smaller ones fill the gaps. Faults and restarts
    concern one gang alone: what it loses comes from the free workers.

    Args:
        client: Connected to any Dask cluster whose workers have this package.
        pytorch_function: What each rank calls with its experiment. Its module need not exist on the workers.
        experiments: What the models differ in; anything that pickles. Each is packed when its workers are free, so
            that of a thousand with large arrays only those that train take memory twice; change none before. In an
            order that is the same in every attempt of a Flyte task, since by its index a model finds its checkpoints;
            so in no set. Or a `Search`, by which an Optuna study suggests each when there are workers for it.
        workers: How many workers each experiment takes, or a function of the experiment that says so.
        gang: How to form each gang.
        stop_early: Stop models that fall behind the others, so that their workers are free for the next ones. A
            stopped model's future raises `StoppedEarlyError`, and `result` of the whole has None in its place. None:
            train all to their ends.
        wandb: Record each model in a Weights & Biases run of its own, whose configuration is the experiment. Each is
            called `wandb.name`, or like the function, with the experiment's index. All are in one group:
            `wandb.group`, or that name with the execution's, or with a random one in local runs. Runs of finished
            and of stopped models have exit code 0, those of failed ones 1. Offline runs are written where their rank
            0 is. In a Flyte task a `wandb.secret` must be among the task's `secret_requests`.
        storage: A folder or an fsspec URL (`s3://bucket/prefix`) that keeps what comes of each model, as it comes, in
            `storage/name/index`. The same call again, after an interruption, by another process, in a Flyte retry or
            with more experiments at the end, trains what is missing only and takes up what was begun: a finished model
            has its result and records again, one that was stopped early its records (without `stop_early` it is trained
            on), and any other goes on from its newest checkpoint, failed and cancelled ones included. Files that ranks
            submit are not kept. Two processes must not use one name at a time. Results, records and checkpoints are
            pickles, which are trusted when they are read back: let nobody else write there.
        name: Of the folder in `storage`; None is the function's name. Kept there of another function, or with other
            experiments where models have begun, is an error that says what differs.

    Returns:
        One future per experiment, in their order, with rank 0's return value and, as `records`, what rank 0 has logged
        so far; the whole has `result`, `exception`, `cancel`, `as_completed`, `best` and `to_frame` too. A failed
        experiment fails alone. In a notebook a table shows how it stands with all, until they have ended.

    Raises:
        ValueError: An argument is of the wrong kind, a number of workers is not a whole number from 1 up, `wandb` has
            an id, `storage` has another call's models, or what `run` says of `gang`.
        GangStartError: The cluster has fewer workers than some experiment takes.
        TypeError: The function or an experiment cannot be pickled, or what `run` says of functions and arguments.

    Examples:
        Three models on two workers, two at a time:

        >>> from distributed import Client
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> def train(experiment: dict[str, float]) -> float:
        ...     loss = (experiment["lr"] - 0.3) ** 2  # stands for a training
        ...     current_rank().log({"loss": loss})
        ...     return loss
        >>> client = Client(n_workers=2)
        >>> models = dispatch.map(client, train, [{"lr": rate} for rate in (0.1, 0.3, 0.9)])
        >>> [round(loss, 2) for loss in models.result()]
        [0.04, 0.0, 0.36]
        >>> models.best("loss").experiment
        {'lr': 0.3}
    """
    problems = Problems("dispatch.map", SimpleNamespace(**locals()), RULES_OF_MAP)
    is_search = isinstance(experiments, Search)
    problems.unless(not is_search or stop_early is None, "stop_early", "None with a Search, whose study has a pruner")
    problems.unless(name is None or storage is not None, "name", "None without storage")
    problems.raise_any()
    from flytekitplugins.daskpytorch.sweep import models
    from flytekitplugins.daskpytorch.sweep.storage import SweepStorage

    _tell_of_resume("dispatch.map", "storage=...")
    check_function(pytorch_function)
    experiments = experiments if isinstance(experiments, Search) else list(experiments)
    for experiment in [None] if isinstance(experiments, Search) else experiments:
        check_arguments(pytorch_function, experiment)
    return models.train_all(
        client,
        pytorch_function,
        experiments,
        workers=workers,
        settings=gang or Gang(),
        stop_early=stop_early,
        wandb=wandb,
        storage=None if storage is None else SweepStorage(storage, name or key_of(pytorch_function)),
    )


def _run_here(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Gang
) -> GangFutures:
    from flytekitplugins.daskpytorch.driver.in_process import run_here

    received = ReceivedResults()
    again = call_of(function, args, kwargs, settings)
    [key] = take_keys(function, settings.key, call=again)
    called = functools.partial(getattr(function, "_task_function", function), *args, **kwargs)

    def call() -> Any:
        try:
            return run_here(
                called,
                name_of(function),
                settings,
                received,
                observers=[machine.echo(), *(make() for make in settings.observers)],
                training=training.of_call(function, key, current_execution(), args, kwargs),
                storage=storage_of(current_execution(), key, settings),
            )
        except BaseException:
            note_unfinished(again, key)
            raise

    return SettledFutures(received, call)


def _tell_of_resume(caller: str, place: str) -> None:
    asked = os.environ.get(local_runs.RESUME_VARIABLE)
    if asked and local_runs.local_run.get() is None:
        say(
            f"{local_runs.RESUME_VARIABLE}={asked} has no effect on {caller} outside a task: with {place} a call goes "
            "on from what an earlier one has left there"
        )


def _is_ordered(experiments: object) -> bool:
    is_other = isinstance(experiments, (str, bytes, Mapping, set, frozenset))
    return isinstance(experiments, Search) or (isinstance(experiments, Iterable) and not is_other)


RULES = {
    "client": checks.must_be("a distributed.Client", lambda client: isinstance(client, Client)),
    "pytorch_function": checks.must_be("something that can be called", callable),
    "gang": checks.optional(checks.instance_of(Gang)),
}
RULES_OF_RUN = RULES | {"pass_local_rank": checks.BOOLEAN}
RULES_OF_MAP = RULES | {
    "experiments": checks.must_be("a list or another iterable that has an order, or a Search", _is_ordered),
    "stop_early": checks.optional(checks.instance_of(EarlyStopping)),
    "wandb": checks.optional(checks.instance_of(Wandb)),
    "storage": checks.optional(checks.text("a folder or a URL")),
    "name": checks.optional(checks.KEY),
}
