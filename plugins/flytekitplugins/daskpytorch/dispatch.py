"""Functions that train on any Dask cluster: `run` starts one gang, and `map` starts a gang per experiment.

Runs in the driver. Example: `first, *others = dispatch.run(client, train, epochs=5).result()`. The way of a call:

    protocol/function    what to call: the function and its arguments, checked ─▶ in debug mode, `task/debug` calls it
    dask/agents          where it runs: the workers for agents, or this node (`node/agent`)
    driver/request       what travels: the pickled call
    task/run             where it is kept: the gang's key and folders; who watches: display, page, records
    driver/supervisor    start: agents, and the project's sources to them (`protocol/code`)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from distributed import Client

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems
from flytekitplugins.daskpytorch.dask.agents import HOW_TO_GET_WORKERS, DaskAgents
from flytekitplugins.daskpytorch.driver.request import request_for, request_for_calls
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.node.agent import OwnNode
from flytekitplugins.daskpytorch.node.hardware import num_ranks_here
from flytekitplugins.daskpytorch.protocol.function import check_call, function_of, key_of
from flytekitplugins.daskpytorch.protocol.script import as_script
from flytekitplugins.daskpytorch.settings import EarlyStopping, Gang, Wandb, is_debugging
from flytekitplugins.daskpytorch.task.config import rules_of_own_node
from flytekitplugins.daskpytorch.task.run import Run, RunFutures
from flytekitplugins.daskpytorch.task.staying import StayingGang

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher
    from flytekitplugins.daskpytorch.sweep.keys import Grouped, KeyedModels
    from flytekitplugins.daskpytorch.sweep.models import ModelFutures
    from flytekitplugins.daskpytorch.sweep.storage import SweepStorage

__all__ = ["gang", "map", "run"]


def run(
    client: Client | None,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    pass_local_rank: bool = False,
    gang: Gang | None = None,
    **kwargs: Any,
) -> RunFutures:
    """Call a function in every rank of a new gang, which takes all of the client's workers or `gang.workers` of them.

    In the function, `torch.distributed` is initialised. Several gangs may run side by side on one cluster.

    In a later attempt of a Flyte task, a call goes on from the newest checkpoint of the matching call in the attempt
    before: that with the same `gang.key`, or else of the same function with the same number in the task, whatever the
    arguments.

    Outside a Flyte task, the gang has a live line at a terminal. Its checkpoints are kept on
    the driver's disk. The same command with `DASKPYTORCH_RESUME=1` goes on from them. With `gang.checkpoint_uri`, the
    same call goes on from the checkpoints there. Ctrl-C ends the gang, and then raises `KeyboardInterrupt`.

    Args:
        client: Client of a Dask cluster whose workers have this package. None: the ranks run on this node without Dask,
            `gang.ranks_per_worker` of them.
        pytorch_function: Function that each rank calls, or `run_script` or `run_module`. The workers need not have the
            function's module.
        *args: Picklable positional arguments of the function, equal in all ranks. Large ones are sent to each worker
            once, and each rank has a copy.
        backend: Backend of the process group. `auto`: use `gang.backend`.
        pass_local_rank: True: also pass `local_rank`, the rank's index among the ranks of its worker.
        gang: Settings of the gang. None: the defaults.
        **kwargs: Keyword arguments of the function.

    Returns:
        Sequence with a future per rank, in rank order. The sequence also has `result`, `exception` and `cancel`. During
        the training and after its end it has rank 0's newest 100,000 log records as `records`, the newest value of each
        metric as `metrics`, the gang's account of time as `goodput`, and the kept checkpoints as `checkpoints`,
        `newest_checkpoint` and `best_checkpoint`. `report(path)` writes the page that a Flyte task has as its Deck.

    Raises:
        GangStartError: The cluster has no workers, or fewer than `gang.min_workers` or else `gang.workers`, or its
            scheduler does not answer.
        ValueError: An argument is invalid, or another gang of the task has the same key. Or `gang.ranks_per_worker` is
            `auto`, and workers have unequal numbers of GPUs.
        TypeError: The function or an argument cannot be pickled, or the function cannot be called with these arguments.
            Or calling the function would not train: a class, a coroutine or generator function, a `dask.delayed`
            object.

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
    rules = RULES_OF_RUN if client is not None else RULES_OF_RUN | RULES_WITHOUT_CLIENT
    Problems("dispatch.run", SimpleNamespace(**locals()), rules).raise_any()
    function, args = as_script(pytorch_function, args)
    own = {"local_rank": 0} if pass_local_rank else {}
    check_call(function, *args, **(kwargs | own))
    settings = gang or Gang()
    if not isinstance(backend, str) or backend != "auto":
        settings = replace(settings, backend=backend)
    if is_debugging(settings):
        called = functools.partial(function_of(function), *args, **(kwargs | own))
        return Run(function, args, kwargs, settings).call_here(called)
    with _launched(client, settings) as (launcher, settings):
        request = request_for(function, args, kwargs, settings, pass_local_rank=pass_local_rank)
        run = Run(function, args, kwargs, settings)
        return RunFutures(run, run.supervised(request, launcher), launcher.num_wanted * request.ranks_per_worker)


def gang(client: Client | None = None, *, gang: Gang | None = None) -> StayingGang:
    """Start a gang whose ranks stay, for call after call with loaded models, data, process group and GPUs.

    An idle gang takes no processor time. Leave the `with` block, or call `close`, to end the ranks.

    A gang that stays never restarts: a rank that is lost, hangs or leaves others in a collective ends the gang. Each
    later call then says why. With `gang.checkpoint_uri`, a new gang goes on from the newest checkpoint.

    Args:
        client: Client of a Dask cluster whose workers have this package. None: the ranks run on this node without Dask,
            `gang.ranks_per_worker` of them.
        gang: Settings of the gang, except `max_restarts`, which has no effect. None: the defaults.

    Returns:
        The gang, whose ranks have met. `call(function, *args, **kwargs)` calls a function in every rank, and returns a
        future per rank. `keep(function, *args, **kwargs)` keeps the return values in the ranks, and returns a reference
        that later calls take as an argument.

    Raises:
        GangStartError: The gang did not start, as for `run`.
        ValueError: An argument is invalid, or `run` would refuse `gang`. Or debug mode is on, which has no gang.

    Examples:
        >>> import torch
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> def load(size: int) -> torch.Tensor:
        ...     return torch.full((size,), float(current_rank().rank + 1))
        >>> def total(values: torch.Tensor) -> float:
        ...     result = values.sum()
        ...     torch.distributed.all_reduce(result)
        ...     return result.item()
        >>> with dispatch.gang(client) as gang:
        ...     values = gang.keep(load, 10)
        ...     print(gang.call(total, values).result())
        [30.0, 30.0]
    """
    rules = RULES_OF_GANG if client is not None else RULES_WITHOUT_CLIENT | RULES_OF_GANG
    problems = Problems("dispatch.gang", SimpleNamespace(**locals()), rules)
    settings = replace(gang or Gang(), max_restarts=0) if isinstance(gang, Gang | None) else Gang()
    problems.unless(not is_debugging(settings), "gang", "without debug mode, in which dispatch.run calls functions")
    problems.raise_any()
    with _launched(client, settings) as (launcher, settings):
        request = request_for_calls(settings)
        num_ranks = launcher.num_wanted * request.ranks_per_worker
        return StayingGang(Run(_gang, (), {}, settings), request, launcher, num_ranks)


@overload
def map(  # noqa: A001 - what it is to the builtin, `run` is to a call
    client: Client,
    pytorch_function: Callable[..., Any],
    experiments: Grouped,
    *,
    models_per_worker: int | None = None,
    gang: Gang | None = None,
    storage: str | None = None,
    name: str | None = None,
) -> KeyedModels: ...


@overload
def map(  # noqa: A001
    client: Client,
    pytorch_function: Callable[..., Any],
    experiments: Iterable[Any],
    *,
    workers: int | Callable[[Any], int] = 1,
    gang: Gang | None = None,
    stop_early: EarlyStopping | None = None,
    wandb: Wandb | None = None,
    storage: str | None = None,
    name: str | None = None,
) -> ModelFutures: ...


def map(  # noqa: A001
    client: Client,
    pytorch_function: Callable[..., Any],
    experiments: Iterable[Any] | Grouped,
    *,
    workers: int | Callable[[Any], int] = 1,
    models_per_worker: int | None = None,
    gang: Gang | None = None,
    stop_early: EarlyStopping | None = None,
    wandb: Wandb | None = None,
    storage: str | None = None,
    name: str | None = None,
) -> ModelFutures | KeyedModels:
    """Train one model per experiment, each in its own gang. Gangs run side by side while workers are free.

    A failure or restart concerns one gang only, which replaces lost workers by free ones.

    Args:
        client: Client of a Dask cluster whose workers have this package.
        pytorch_function: Function that each rank calls with its experiment. The workers need not have the function's
            module.
        experiments: Experiments, one picklable argument of the function per model, in a fixed order. A model finds its
            checkpoints by its index, so the order must be equal in all attempts of a Flyte task. A set is therefore
            refused. Each experiment is pickled when workers become free: do not change it before. Or
            `frame.groupby("store")` of a Dask or pandas frame: ranks of one gang call the function with a key and its
            rows.
        workers: Number of workers per experiment, or a function that returns the number for an experiment.
        models_per_worker: Ranks per worker, for a data frame. None: one per GPU, or one.
        gang: Settings of each gang. None: the defaults.
        stop_early: Rule that stops models which fall behind the others. The future of a stopped model raises
            `StoppedEarlyError`, and `result` of all models has None in its place. None: train all models to the end.
        wandb: Settings of the Weights & Biases runs, one per model, with its experiment as the configuration and the
            function's name or `wandb.name` with its index. All belong to the group `wandb.group`, by default named by
            function and execution, or a random name in local runs. In a Flyte task, `wandb.secret` must be among the
            task's `secret_requests`.
        storage: Folder or fsspec URL (`s3://bucket/prefix`) that keeps the results, records and checkpoints of each
            model in `storage/name/index`. A repeated call, in another process, in a Flyte retry, or with more
            experiments at the end, trains only missing models. Failed and cancelled ones go on from their newest
            checkpoints. A data frame's keys are trained again if their rows or the function have changed. Files that
            ranks submit are not kept. Two processes must not use one name at a time. Stored files are pickles, which
            are trusted when they are read: let nobody else write there.
        name: Name of the folder in `storage`. None: the function's name.

    Returns:
        Sequence with a future per experiment, in the experiments' order. A future has rank 0's return value as `result`
        and rank 0's newest 100,000 log records as `records`. The sequence also has `result`, `exception`, `cancel`,
        `best` and `to_frame`: only `to_frame`, `done` and `cancel` for a data frame. A failed experiment does not end
        the others.

    Raises:
        ValueError: An argument has the wrong type, or a number of workers is not a whole number from 1 up. Or `wandb`
            has an id, `storage` has another call's models, or `run` would refuse `gang`.
        GangStartError: The cluster has fewer workers than an experiment takes.
        TypeError: The function or an experiment cannot be pickled, or `run` would refuse the function or its arguments.

    Examples:
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
    problems.unless(name is None or storage is not None, "name", "None without storage")
    settings = gang or Gang()
    if _is_grouped(experiments):
        from flytekitplugins.daskpytorch.sweep import keys

        keys.check(problems, settings)
        kept = _kept(storage, name, pytorch_function)
        each_key = keys.each_key(client, pytorch_function, experiments, models_per_worker, kept)
        ranks = run(client, each_key, gang=replace(settings, ranks_per_worker=models_per_worker or "auto"))
        return keys.KeyedModels(client, each_key, ranks, kept)
    problems.unless(models_per_worker is None, "models_per_worker", "left out without a data frame's groupby")
    problems.unless(getattr(wandb, "id", None) is None, "wandb", "without an id, since each model has a run of its own")
    problems.raise_any()
    from flytekitplugins.daskpytorch.sweep.models import train_all
    from flytekitplugins.daskpytorch.sweep.sweep import Sweep

    experiments = list(cast("Iterable[Any]", experiments))
    for experiment in experiments:
        check_call(pytorch_function, experiment)
    sweep = Sweep(
        cluster=DaskAgents(client),
        function=pytorch_function,
        experiments=experiments,
        workers=workers,
        settings=settings,
        stop_early=stop_early,
        wandb=wandb,
        storage=_kept(storage, name, pytorch_function),
    )
    return train_all(sweep)


def _kept(storage: str | None, name: str | None, function: Callable[..., Any]) -> SweepStorage | None:
    from flytekitplugins.daskpytorch.sweep.storage import SweepStorage

    return SweepStorage(storage, name or key_of(function)) if storage is not None else None


@contextlib.contextmanager
def _launched(client: Client | None, settings: Gang) -> Iterator[tuple[AgentLauncher, Gang]]:
    if client is None:
        num_ranks = num_ranks_here(settings.ranks_per_worker, settings.backend)
        yield OwnNode(), replace(settings, ranks_per_worker=num_ranks)
        return
    kept = settings.evaluate.workers if settings.evaluate is not None else None
    with contextlib.ExitStack() as undo:
        agents = DaskAgents(client, settings.workers, kept)
        undo.callback(agents.close)  # else an error that the caller keeps would hold the workers
        if len(agents.workers) < (least := settings.min_workers or max(1, (settings.workers or 0) - (kept or 0))):
            more = f" and {kept} for Gang(evaluate=...)" if kept else ""
            raise GangStartError(
                f"the cluster at {agents.scheduler} has {len(agents.addresses)} workers, but needs {least}{more}. "
                f"{HOW_TO_GET_WORKERS}"
            )
        yield agents, replace(settings, ranks_per_worker=agents.ranks_per_worker(settings))
        undo.pop_all()


def _gang() -> None:
    """Give a gang that stays its name, its key and its folders, as a function of the user's program."""


_gang.__module__, _gang.__qualname__ = "__main__", "gang"


def _is_grouped(experiments: object) -> bool:
    return all(hasattr(experiments, name) for name in ("obj", "aggregate", "get_group"))


def _is_ordered(experiments: object) -> bool:
    is_other = isinstance(experiments, (str, bytes, Mapping, set, frozenset))
    return _is_grouped(experiments) or (isinstance(experiments, Iterable) and not is_other)


CLIENT = checks.must_be("a distributed.Client", lambda client: isinstance(client, Client))
RULES = {
    "client": CLIENT,
    "pytorch_function": checks.must_be("something that can be called", callable),
    "gang": checks.optional(checks.instance_of(Gang)),
}
RULES_OF_RUN = RULES | {"pass_local_rank": checks.BOOLEAN, "client": checks.optional(CLIENT)}
RULES_WITHOUT_CLIENT = rules_of_own_node("ranks_per_worker")
RULES_OF_GANG = {
    "client": checks.optional(CLIENT),
    "gang": RULES["gang"],
    "gang.evaluate": checks.left_out("; a call of the gang can evaluate, too"),
}
RULES_OF_MAP = RULES | {
    "gang.workers": checks.left_out("; dispatch.map(workers=...) is the number"),
    "gang.evaluate": checks.left_out("; evaluate a model in its own function, or after the sweep"),
    "experiments": checks.must_be("a list or another iterable that has an order", _is_ordered),
    "stop_early": checks.optional(checks.instance_of(EarlyStopping)),
    "wandb": checks.optional(checks.instance_of(Wandb)),
    "storage": checks.optional(
        checks.must_be(
            f"a folder or a URL {checks.STABLE}", lambda value: checks.is_text(value) and checks.has_stable_path(value)
        )
    ),
    "name": checks.optional(checks.KEY),
}
