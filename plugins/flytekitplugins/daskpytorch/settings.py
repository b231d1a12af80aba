"""What a user may ask of a gang, and whether it makes sense. Light: every rank and every agent reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch.documented import documented
from flytekitplugins.daskpytorch.extras import is_installed, require_extra

if TYPE_CHECKING:
    import optuna
    from flytekit import Secret

__all__ = ["EarlyStopping", "Gang", "Keep", "Profile", "Search", "Wandb"]

SCHEDULER_VARIABLE = "DASK_SCHEDULER_ADDRESS"
"""Set by the Dask operator in the job-runner's pod."""
DEBUG_VARIABLE = "DASKPYTORCH_DEBUG"
"""Set by the user: train in one rank, in the calling process."""

BACKENDS = ("auto", "gloo", "nccl")
DEVICES = ("own", "all")
WANDB_MODES = ("online", "offline", "disabled")
MODES = ("min", "max")

MAX_COUNT = 1_000_000
COUNT = f"a whole number from 1 to {MAX_COUNT}"
MAX_SECONDS = 1_209_600
"""Two weeks; some of what waits counts milliseconds in 32 bits."""
SECONDS = f"seconds above 0 and at most {MAX_SECONDS}"
MIN_HANG_TIMEOUT = 0.1
"""Ranks report five times as often: below that they would do little else."""
MAX_SHOWN = 200
"""Characters of a value in a message."""
TEXT = "a text without control characters"
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""And halves of characters, which cannot be written as UTF-8."""
A_URI = "a folder or an fsspec URL such as s3://bucket/prefix"
KEY = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
A_KEY = "up to 100 of the characters A-Z, a-z, 0-9, '_', '.' and '-', the first none of the last two"
RUN_ID = re.compile(r"[^/\\#?%:]{1,128}")
"""What Weights & Biases takes."""


@documented
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
        problems = Problems("Keep", self)
        problems.unless(is_count(self.last), "last", COUNT)
        has_best = is_whole(self.best, 1, MAX_COUNT)
        problems.unless(has_best or is_whole(self.best, 0, 0), "best", f"a whole number from 0 to {MAX_COUNT}")
        problems.unless(self.metric is None or is_text(self.metric), "metric", "None or a metric's name")
        problems.unless(not has_best or self.metric is not None, "best", "0 without a metric to be best by")
        problems.unless(has_best or self.metric is None, "metric", "None, unless best says how many are kept by it")
        problems.unless(is_among(self.mode, MODES), "mode", f"one of {', '.join(MODES)}")
        problems.raise_any()


@documented
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
        problems = Problems("Profile", self)
        steps = self.steps
        is_range = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(map(is_count, steps))
        problems.unless(is_range and steps[0] <= steps[1], "steps", "the first and the last step, counted from 1")
        problems.unless(
            isinstance(self.ranks, (tuple, list)) and all(is_whole(rank, 0, MAX_COUNT) for rank in self.ranks),
            "ranks",
            "a tuple of ranks, counted from 0",
        )
        problems.unless(isinstance(self.with_stack, bool), "with_stack", "True or False")
        if self.folder is not None and (allowed := instead_of(self.folder, f"None, {A_URI}")) is not None:
            problems.unless(False, "folder", allowed)
        problems.raise_any()


@documented
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
        problems = Problems("Gang", self)
        problems.unless(is_among(self.backend, BACKENDS), "backend", f"one of {', '.join(BACKENDS)}")
        problems.unless(
            is_among(self.ranks_per_worker, ("auto",)) or is_count(self.ranks_per_worker),
            "ranks_per_worker",
            f"'auto' or {COUNT}",
        )
        problems.unless(is_among(self.devices, DEVICES), "devices", f"one of {', '.join(DEVICES)}")
        problems.unless(self.min_workers is None or is_count(self.min_workers), "min_workers", f"None or {COUNT}")
        problems.unless(
            is_whole(self.max_restarts, 0, MAX_COUNT), "max_restarts", f"a whole number from 0 to {MAX_COUNT}"
        )
        problems.unless(is_seconds(self.start_timeout), "start_timeout", SECONDS)
        problems.unless(
            self.hang_timeout is None
            or is_among(self.hang_timeout, ("auto",))
            or is_seconds(self.hang_timeout, MIN_HANG_TIMEOUT),
            "hang_timeout",
            f"'auto', None or seconds from {MIN_HANG_TIMEOUT} to {MAX_SECONDS}",
        )
        problems.unless(is_seconds(self.grace_period), "grace_period", SECONDS)
        problems.unless(isinstance(self.hints, bool), "hints", "True or False")
        problems.unless(isinstance(self.keep, Keep), "keep", "a Keep")
        problems.unless(isinstance(self.debug, bool), "debug", "True or False")
        problems.unless(self.profile is None or isinstance(self.profile, Profile), "profile", "None or a Profile")
        problems.unless(
            self.key is None or is_key(self.key),
            "key",
            f"None or {A_KEY}",
        )
        if self.checkpoint_uri is not None and (allowed := instead_of(self.checkpoint_uri, f"None, {A_URI}")):
            problems.unless(False, "checkpoint_uri", allowed)
        problems.unless(
            self.shard_cache is None or (isinstance(self.shard_cache, str) and self.shard_cache.startswith("/")),
            "shard_cache",
            "None or an absolute path",
        )
        problems.unless(
            isinstance(self.observers, (tuple, list)) and all(map(callable, self.observers)),
            "observers",
            "a tuple of classes of observers, or of functions that make one",
        )
        problems.raise_any()


@documented
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
        problems = Problems("EarlyStopping", self)
        problems.unless(isinstance(self.metric, str) and bool(self.metric), "metric", "a metric's name")
        problems.unless(is_among(self.mode, MODES), "mode", f"one of {', '.join(MODES)}")
        problems.unless(
            is_whole(self.reduction_factor, 2, MAX_COUNT), "reduction_factor", f"a whole number from 2 to {MAX_COUNT}"
        )
        problems.unless(is_count(self.grace_period), "grace_period", COUNT)
        problems.raise_any()


@documented
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
        problems = Problems("Search", self)
        problems.unless(hasattr(self.study, "ask") and hasattr(self.study, "tell"), "study", "an optuna.Study")
        problems.unless(callable(self.suggest), "suggest", "a function that makes an experiment of a trial")
        problems.unless(is_count(self.num_models), "num_models", COUNT)
        problems.unless(
            self.metric is None or (isinstance(self.metric, str) and bool(self.metric)), "metric", "None or a name"
        )
        problems.raise_any()


@documented
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
        problems = Problems("Wandb", self)
        problems.unless(is_text(self.project), "project", "a project's name")
        problems.unless(
            self.secret is None or all(hasattr(self.secret, name) for name in ("group", "key", "group_version")),
            "secret",
            "None or a flytekit.Secret",
        )
        problems.unless(
            self.mode is None or is_among(self.mode, WANDB_MODES), "mode", f"None or one of {', '.join(WANDB_MODES)}"
        )
        problems.unless(
            self.id is None or (is_text(self.id) and RUN_ID.fullmatch(self.id) is not None),
            "id",
            r"None or a text of up to 128 characters without any of /\#?%:",
        )
        for name in ("entity", "name", "group"):
            problems.unless((value := getattr(self, name)) is None or is_text(value), name, f"None or {TEXT}")
        problems.unless(
            isinstance(self.tags, (tuple, list)) and all(map(is_text, self.tags)), "tags", "a tuple of texts"
        )
        problems.unless(
            isinstance(self.config, Mapping) and all(isinstance(name, str) for name in self.config),
            "config",
            "a dictionary whose keys are texts",
        )
        problems.unless(is_text(self.host), "host", "a server's address")
        problems.unless(
            self.dir is None or isinstance(self.dir, os.PathLike) or is_text(self.dir), "dir", "None or a folder's path"
        )
        problems.raise_any()


def instead_of(uri: object, allowed: str = A_URI) -> str | None:
    """What to give in place of a URI that no file system is known for; None: it is a good one."""
    if not is_text(uri):
        return allowed
    protocol, separator, rest = str(uri).partition("://")
    if not separator:  # a bucket's address without one of its slashes is no folder's name
        return allowed if re.match(r"(s3a?|gc?s|abfss?|az)(:|//)", protocol) else None
    from fsspec.registry import known_implementations, registry

    if protocol == "memory" or not rest.strip("/") or protocol not in {*registry, *known_implementations}:
        return f"{allowed}, which every rank can reach" if protocol == "memory" else allowed
    package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    if protocol in registry or is_installed(package):
        return None
    return f"reached by a package that is not installed: {known_implementations[protocol].get('err', package)}"


def is_local() -> bool:
    """Whether a task makes its own cluster in this process, because no backend gave it one."""
    return not os.environ.get(SCHEDULER_VARIABLE)


def is_debugging(gang: Gang | None = None) -> bool:
    """Whether training is to run in one rank, in the calling process; of all gangs, or of this one."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") or (gang is not None and gang.debug)


class Problems:
    """Gathers everything that is wrong with one config, so that a user sees it all at once."""

    def __init__(self, owner: str, fields: object) -> None:
        self._owner = owner
        self._fields = fields
        self._found: list[str] = []

    def unless(self, ok: bool, name: str, allowed: str) -> None:
        """Note a problem with the field of this name, which may have dots, unless it is `ok`."""
        if not ok:
            value = attrgetter(name)(self._fields)
            self._found.append(f"{self._owner}({name}={shown(value)}): must be {allowed}")

    def raise_any(self) -> None:
        """Raise one `ValueError` that names every problem found."""
        if self._found:
            raise ValueError("; ".join(self._found))


def shown(value: object) -> str:
    """A value as a message has it: written as in Python, and cut where it is long."""
    try:
        text = repr(value)
    except Exception as error:  # the value's own, or that of a number with thousands of digits
        return f"<a {type(value).__name__} that cannot be written: {type(error).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether it is a whole number in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_count(value: object) -> bool:
    """Whether it is a whole number from 1 up, and not absurdly large."""
    return is_whole(value, 1, MAX_COUNT)


def is_seconds(value: object, least: float = 0.0) -> bool:
    """Whether it is a number of seconds that everything that waits can wait for."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= MAX_SECONDS and value > 0  # type: ignore[operator]


def is_among(value: object, words: tuple[str, ...]) -> bool:
    """Whether it is one of these words."""
    return isinstance(value, str) and value in words


def is_key(value: object) -> bool:
    """Whether it may be a part of paths and names."""
    return isinstance(value, str) and KEY.fullmatch(value) is not None


def is_text(value: object) -> bool:
    """Whether it is a text that says something, and can be written anywhere."""
    return isinstance(value, str) and bool(value.strip()) and CONTROL_CHARACTERS.search(value) is None
