"""What a user may ask of a gang, and whether it makes sense. Light: every rank and every agent reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.extras import require_extra

if TYPE_CHECKING:
    import optuna
    from flytekit import Secret

__all__ = ["EarlyStopping", "Gang", "Keep", "Profile", "Search", "Wandb"]

SCHEDULER_VARIABLE = "DASK_SCHEDULER_ADDRESS"
"""Set by the Dask operator in the job-runner's pod."""
DEBUG_VARIABLE = "DASKPYTORCH_DEBUG"
"""Set by the user: train in one rank, in the calling process."""

MODE = checks.one_of("min", "max")
NAME = checks.text("a metric's name")
MIN_HANG_TIMEOUT = 0.1
"""Seconds. Ranks report five times as often: below that they would do little else."""
RUN_ID = re.compile(r"[^/\\#?%:]{1,128}")
"""What Weights & Biases takes."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which of a gang's checkpoints stay, on the driver's disk and in storage; the others are removed.

    A gang that starts again, and the task's next attempt, go on from the newest, never from the best.

    Raises:
        ValueError: A field is not what it must be.

    Examples:
        The newest two, and of all others the three with the lowest loss:

        >>> from flytekitplugins.daskpytorch import Gang, Keep
        >>> gang = Gang(keep=Keep(best=3, metric="held_out_loss"))
        >>> gang.keep.last
        2

        Each says how good it is: `current_rank().checkpoint.save(state, step, metrics={"held_out_loss": loss})`.
    """

    last: int = 2
    """The newest ones: that, and those before it should it turn out to be damaged."""
    best: int = 0
    """And so many of the best of all, by `metric`; of equal ones the earlier."""
    metric: str | None = None
    """What the best are best by: a name in the `metrics` that `checkpoint.save` was given. A checkpoint without it, or
    one where it is not a number (NaN), is never among the best."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high values are good."""

    def __post_init__(self) -> None:
        rules = {
            "last": checks.COUNT,
            "best": checks.whole(0),
            "metric": checks.optional(NAME),
            "mode": MODE,
        }
        problems = checks.Problems("Keep", self, rules)
        has_best = checks.is_whole(self.best, 1)
        problems.unless(not has_best or self.metric is not None, "best", "0 without a metric to be best by")
        problems.unless(has_best or self.metric is None, "metric", "None, unless best says how many are kept by it")
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps of which ranks `torch.profiler` records; each is a Chrome trace, for ui.perfetto.dev and the like.

    Raises:
        ValueError: A field is not what it must be.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, Profile
        >>> gang = Gang(profile=Profile(steps=(100, 110), ranks=(0, 3)))
    """

    steps: tuple[int, int]
    """The first and the last. They are the calls of an optimizer's `step`, counted from 1 in each attempt; what comes
    before such a call, back to the one before, is the step's. Where the function returns earlier, fewer are kept."""
    ranks: tuple[int, ...] = (0,)
    """Whose."""
    with_stack: bool = False
    """Record the calls of Python functions, too, which makes these steps slower."""
    folder: str | None = None
    """Where the traces go: a folder, or an fsspec URL, that these ranks reach. None: they are submitted, as
    `profiles/rank-0-steps-100-110.pt.trace.json.gz`, and so in a task are in the folder of its results."""

    def __post_init__(self) -> None:
        rules = {
            "steps": checks.must_be("the first and the last step, counted from 1", _is_range),
            "ranks": checks.tuple_of("ranks, counted from 0", lambda rank: checks.is_whole(rank, 0)),
            "with_stack": checks.BOOLEAN,
            "folder": checks.optional(checks.uri),
        }
        checks.Problems("Profile", self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Gang:
    """How the ranks of one training run are formed.

    Raises:
        ValueError: A field is not what it must be.

    Examples:
        Four ranks on each worker; it goes on as long as three workers are left, and a rank may be silent for an hour:

        >>> from flytekitplugins.daskpytorch import Gang
        >>> gang = Gang(ranks_per_worker=4, min_workers=3, hang_timeout=3600.0)

        Whatever is wrong is said at once, before anything starts:

        >>> Gang(backend="mpi", max_restarts=-1)
        Traceback (most recent call last):
        ValueError: Gang(backend='mpi'): must be one of auto, gloo, nccl; Gang(max_restarts=-1): must be a whole...
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The process group's backend; `auto` is nccl where every rank has a GPU of its own, else gloo."""
    ranks_per_worker: int | Literal["auto"] = "auto"
    """Ranks on each Dask worker; `auto` is the number of GPUs in the limits of a `DaskDDP` task's workers, or of those
    that the workers of `dispatch.run` and `dispatch.map` see (workers of one host share them), else 1."""
    devices: Literal["own", "all"] = "own"
    """Which GPUs a rank sees. `own`: its own alone, as device 0, with `LOCAL_RANK=0`. `all`: those of its worker, its
    own is the current one, and `LOCAL_RANK` its number, for code that says `cuda:{local_rank}`, or that uses several
    GPUs in each rank. `current_rank().device` is the rank's own either way."""
    min_workers: int | None = None
    """Start, and go on after losses, with at least this many workers; None waits for all of them."""
    max_restarts: int = 3
    """How often a failed gang starts again from its newest checkpoint: this often after losses of infrastructure, and
    as often after errors of the function; after an exception only if a checkpoint has been saved since the attempt
    began, it does not come from the same line at the same step twice, and it is no missing name or import. 0: never."""
    start_timeout: float = 600.0
    """Seconds within which the scheduler answers, the workers come, or come back, and all ranks form their process
    group."""
    hang_timeout: float | Literal["auto"] | None = "auto"
    """When a gang that gives no sign of life is ended, with a report of what each rank was doing.

    `auto`: once all ranks wait in collectives, so that nobody is left who could go on, and none has moved for five
    minutes, and for ten times as long as any took before from one sign to the next. While a rank may be at work, as in
    an evaluation, its loader or a loop without end, the others run into the process group's own time-out, whose error
    names that rank as well. (It needs the flight recorder of a recent torch.) A number: seconds of silence
    after which a single rank counts as hung, whatever it does: allow for the longest time between two signs, the
    evaluation and the start of the training included. None: never. Signs of life are optimizer steps and the calls of
    `log`, `should_stop` and `checkpoint` on `current_rank()`.

    A proven deadlock ends the gang within 10 s, whatever this setting says: every rank has returned or waits in a gloo
    collective, `recv` or `send` that no rank is left to complete. The proof needs the flight recorder, too.
    """

    grace_period: float = 20.0
    """Seconds for the ranks to save and return once the task or a worker is told to end (SIGTERM). What follows, such
    as the checkpoint's way to storage, takes up to half as long again: a pod's `terminationGracePeriodSeconds` must be
    one and a half times this, which with 20 is Kubernetes' own 30."""

    hints: bool = True
    """Say in a line, once each, what looks forgotten: a loss that is no number any more, ranks that call no collective,
    a shuffling `DistributedSampler` without `set_epoch`, a metric of `keep` that no checkpoint has."""

    key: str | None = None
    """Names the gang among those of its task, so that the next attempt finds its checkpoints, and may not be given
    twice there; with `dispatch.map` the experiment's index is added. None is the function's name and which of its calls
    in the task this is: give a key where attempts may make other calls, or the same in another order, as by threads."""
    keep: Keep = field(default_factory=Keep)
    """Which checkpoints stay; by default the last two."""
    debug: bool = False
    """Train in one rank that is the calling process, with a process group of its own: no fork, no Dask, no restarts, so
    that breakpoints, profilers and `pytest --pdb` work as in any program. `DASKPYTORCH_DEBUG=1` asks it of all gangs.
    `dispatch.map` trains as ever."""
    checkpoint_uri: str | None = None
    """Where the ranks write sharded checkpoints: a folder that all workers have, or an fsspec URL (`s3://bucket/prefix`);
    for each gang a folder is made below. None is where Flyte keeps the task's checkpoints; without Flyte a folder of
    the driver's that goes with it, and that ranks on other machines cannot reach. Outside a Flyte task all that is
    needed to go on lies there, in a folder for each `key`. Without a `key` the folder is that of the function's first,
    second, ... call in the process. The next process goes on from it. In the same process an equal call goes on from
    one that has failed or was cancelled; after one that has ended well it starts afresh, in a folder of its own. A line
    says from where a gang goes on. A second gang with the same folder is refused meanwhile."""
    shard_cache: str | None = None
    """A folder on each node's own disk (an absolute path) for copies of the newest sharded checkpoint: a gang that
    starts again reads them there instead of from storage. They take up to twice the space of the node's part of the
    state, and go when the gang has succeeded. None: there are none."""
    profile: Profile | None = None
    """Steps to be recorded by `torch.profiler`; None: none. With `debug` a profiler of your own does."""
    observers: tuple[Callable[[], Any], ...] = ()
    """Each makes an `Observer` of the gang (its class, say); called in the driver, for each gang anew."""

    def __post_init__(self) -> None:
        rules = {
            "backend": checks.one_of("auto", "gloo", "nccl"),
            "ranks_per_worker": checks.auto_or(checks.COUNT),
            "devices": checks.one_of("own", "all"),
            "min_workers": checks.optional(checks.COUNT),
            "max_restarts": checks.whole(0),
            "start_timeout": checks.SECONDS,
            "hang_timeout": checks.must_be(
                f"'auto', None or seconds from {MIN_HANG_TIMEOUT} to {checks.MAX_SECONDS}",
                lambda value: value is None or checks.is_auto(value) or checks.is_seconds(value, MIN_HANG_TIMEOUT),
            ),
            "grace_period": checks.SECONDS,
            "hints": checks.BOOLEAN,
            "keep": checks.instance_of(Keep),
            "debug": checks.BOOLEAN,
            "profile": checks.optional(checks.instance_of(Profile)),
            "key": checks.optional(checks.KEY),
            "checkpoint_uri": checks.optional(checks.uri),
            "shard_cache": checks.optional(checks.must_be("an absolute path", _is_absolute)),
            "observers": checks.tuple_of("classes of observers, or of functions that make one", callable),
        }
        checks.Problems("Gang", self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Which of many models are stopped before their training's end: asynchronous successive halving (Li et al. 2018).

    A model is compared at its rungs, after `grace_period`, `grace_period * reduction_factor`, `grace_period *
    reduction_factor**2`, ... epochs, with the values that all models had there so far, and goes on if it is among the
    best `1 / reduction_factor` of them; of fewer than twice `reduction_factor`, if it is the best. Nobody waits for
    others, so the first at a rung always goes on.

    Raises:
        ImportError: The extra `sweep` is not installed.
        ValueError: A field is not what it must be.

    Examples:
        >>> from flytekitplugins.daskpytorch import EarlyStopping, current_rank, dispatch
        >>> def train(rate: float) -> float:
        ...     for epoch in range(1, 10):
        ...         current_rank().log({"epoch": epoch, "loss": rate / epoch})
        ...     return rate
        >>> models = dispatch.map(client, train, [0.1, 0.2, 0.4], stop_early=EarlyStopping(metric="loss"))
        >>> models.best("loss").experiment
        0.1
    """

    metric: str
    """What is compared. It is taken from those of rank 0's `log` records that have both `epoch`, which should count
    from 1, and this name; the first of an epoch counts, so log it at the epoch's end. A model whose metric is not a
    number (NaN) at a rung is stopped."""
    mode: Literal["min", "max"] = "min"
    """Whether low or high values are good."""
    reduction_factor: int = 4
    """One in so many goes on."""
    grace_period: int = 1
    """Epochs that every model gets."""

    def __post_init__(self) -> None:
        require_extra("sweep", "EarlyStopping(...)")
        rules = {"metric": NAME, "mode": MODE, "reduction_factor": checks.whole(2), "grace_period": checks.COUNT}
        checks.Problems("EarlyStopping", self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Search:
    """Experiments for `dispatch.map` that an Optuna study suggests, each as soon as there are workers for it.

    The study's sampler knows of all that have ended by then. Its pruner, which is a `MedianPruner` where none was
    chosen, stops models early by what rank 0 logs with both `epoch` and the metric; the first of an epoch counts.

    Raises:
        ValueError: A field is not what it must be.

    Examples:
        >>> import optuna
        >>> from flytekitplugins.daskpytorch import Search, dispatch
        >>> def suggest(trial: optuna.Trial) -> float:
        ...     return trial.suggest_float("rate", 0.01, 1.0, log=True)
        >>> def train(rate: float) -> float:
        ...     return (rate - 0.3) ** 2  # stands for a held-out loss
        >>> study = optuna.create_study(direction="minimize")
        >>> models = dispatch.map(client, train, Search(study=study, suggest=suggest, num_models=4))
        >>> min(models.result()) == study.best_value
        True
    """

    study: optuna.Study
    """As `optuna.create_study` makes it, with a storage or without; each of its trials says as `user_attrs["model"]`
    which model it is."""
    suggest: Callable[[optuna.Trial], Any]
    """Makes an experiment of a trial, by its `suggest_float` and the like. Called in this process, and only there."""
    num_models: int
    """How many models are trained."""
    metric: str | None = None
    """What the study is told of a finished model: the newest value of this name that rank 0 has logged. None: what rank
    0 returns, a number, or several for a study with several directions, and no model is stopped early."""

    def __post_init__(self) -> None:
        rules = {
            "study": checks.must_be("an optuna.Study", lambda study: hasattr(study, "ask") and hasattr(study, "tell")),
            "suggest": checks.must_be("a function that makes an experiment of a trial", callable),
            "num_models": checks.COUNT,
            "metric": checks.optional(NAME),
        }
        checks.Problems("Search", self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """One Weights & Biases run for the whole gang, fed by rank 0.

    Raises:
        ImportError: The extra `wandb` is not installed.
        ValueError: A field is not what it must be.

    Examples:
        >>> from flytekit import Secret
        >>> from flytekitplugins.daskpytorch import DaskDDP, Wandb
        >>> key = Secret(group="wandb", key="api_key")
        >>> config = DaskDDP(wandb=Wandb(project="pet-names", secret=key, tags=("lstm",)))
    """

    project: str
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team; None is the key's default."""
    secret: Secret | None = None
    """The Flyte secret that holds the API key; None takes the key that wandb finds: in `WANDB_API_KEY`, say, or what
    `wandb login` has stored."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """None is wandb's own mode (`WANDB_MODE`, `wandb offline`): online with a key, else offline with one line of
    notice; never a prompt."""
    id: str | None = None
    """The run's id; None derives it from the execution and the node, so that a retry continues the run."""
    name: str | None = None
    """The run's display name; None is `WANDB_NAME`, or else the task's name."""
    group: str | None = None
    """Groups runs on the project's page."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    config: dict[str, Any] = field(default_factory=dict)
    """Added to the run's configuration beside the task's inputs and the gang's shape."""
    host: str = "https://wandb.ai"
    """The server whose page the Flyte console links to."""
    dir: str | None = None
    """Where offline runs are written; None is `WANDB_DIR`, or the directory that the task was started in."""

    def __post_init__(self) -> None:
        require_extra("wandb", "Wandb(...)")
        rules = {
            "project": checks.text("a project's name"),
            **dict.fromkeys(("entity", "name", "group"), checks.optional(checks.text())),
            "secret": checks.optional(checks.must_be("a flytekit.Secret", _is_secret)),
            "mode": checks.optional(checks.one_of("online", "offline", "disabled")),
            "id": checks.optional(
                checks.must_be(
                    r"a text of up to 128 characters without any of /\#?%:",
                    lambda value: checks.is_text(value) and RUN_ID.fullmatch(value) is not None,
                )
            ),
            "tags": checks.tuple_of("texts", checks.is_text),
            "config": checks.must_be(
                "a dictionary whose keys are texts",
                lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
            ),
            "host": checks.text("a server's address"),
            "dir": checks.optional(checks.path_or("a folder's path")),
        }
        checks.Problems("Wandb", self, rules).raise_any()


def is_local() -> bool:
    """Whether a task makes its own cluster in this process, because no backend gave it one."""
    return not os.environ.get(SCHEDULER_VARIABLE)


def is_debugging(gang: Gang | None = None) -> bool:
    """Whether training is to run in one rank, in the calling process; of all gangs, or of this one."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") or (gang is not None and gang.debug)


def _is_range(steps: object) -> bool:
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(checks.is_whole(step, 1) for step in steps)
    return is_pair and steps[0] <= steps[1]  # type: ignore[index]


def _is_absolute(path: object) -> bool:
    return isinstance(path, str) and path.startswith("/")


def _is_secret(value: object) -> bool:
    return all(hasattr(value, name) for name in ("group", "key", "group_version"))
