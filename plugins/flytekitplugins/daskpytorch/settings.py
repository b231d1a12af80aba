"""Settings of gangs, evaluations, sweeps and trackers, with their checks.

Imports little, since every rank and agent loads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import require_extra

if TYPE_CHECKING:
    from flytekit import Secret

__all__ = ["EarlyStopping", "Evaluate", "Gang", "Keep", "Profile", "Wandb"]

SCHEDULER_VARIABLE = "DASK_SCHEDULER_ADDRESS"
"""Set by the Dask operator in the job-runner's pod."""
DEBUG_VARIABLE = "DASKPYTORCH_DEBUG"
"""Environment variable that makes gangs train in one rank, in the calling process, for debugging."""

SET_BY_GANGS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|NODE_LOCAL_RANK|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|CUDA_VISIBLE_DEVICES)"
)
NAME = checks.text("a metric's name")
MIN_HANG_TIMEOUT = 0.1
"""Seconds. Ranks report to the driver five times per timeout, so that a shorter one would leave no time to train."""


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Retention policy: which of a gang's checkpoints are kept on the driver's disk and in storage. Others are removed.

    A restart of the gang and the task's next attempt begin from the newest checkpoint, never from the best one.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Keep the newest two checkpoints, and the three with the lowest loss:

        >>> from flytekitplugins.daskpytorch import Gang, Keep
        >>> gang = Gang(keep=Keep(best=3, metric="held_out_loss"))
        >>> gang.keep.last
        2

        Save the metric, too: `current_rank().checkpoint.save(state, step, metrics={"held_out_loss": loss})`.
    """

    last: int = 2
    """Number of newest checkpoints to keep, from 1 up. With 2 or more, the gang survives a damaged newest one."""
    best: int = 0
    """Number of best checkpoints, by `metric`, to keep besides the newest. The earlier wins a tie."""
    metric: str | None = None
    """Metric that ranks the checkpoints, as given to `checkpoint.save(..., metrics=...)` or returned by the function of
    `Gang(evaluate=...)`. Checkpoints whose metric is missing or NaN are never among the best. None if `best` is 0."""
    mode: Literal["min", "max"] | None = None
    """`min` if low values are best, `max` if high values are best.

    None: by words of the metric's name, such as loss, error or perplexity for `min`, and accuracy, auc or f1 for `max`.
    A name without such a word, or with words of both directions, needs `mode`.
    """

    def __post_init__(self) -> None:
        rules = {"last": checks.COUNT, "best": checks.whole(0), "metric": checks.optional(NAME), "mode": checks.MODE}
        problems = checks.Problems("Keep", self, rules)
        has_best = checks.is_whole(self.best, 1)
        problems.unless(not has_best or self.metric is not None, "best", "0 if metric is None")
        problems.unless(has_best or self.metric is None, "metric", "None if best is 0")
        checks.check_direction(problems, self.metric, self.mode)
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps and ranks that `torch.profiler` records. Each rank submits a Chrome trace, which ui.perfetto.dev shows.

    The traces are among the results, with names like `profiles/rank-0-steps-100-110.pt.trace.json.gz`.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, Profile
        >>> gang = Gang(profile=Profile(steps=(100, 110), ranks=(0, 3)))
    """

    steps: tuple[int, int]
    """First and last step to record, counted from 1 in each attempt.

    A step lasts from one call of an optimizer's `step` to the next.
    """
    ranks: tuple[int, ...] = (0,)
    """Ranks to record, counted from 0."""

    def __post_init__(self) -> None:
        rules = {
            "steps": checks.must_be("the first and the last step, counted from 1", _is_range),
            "ranks": checks.tuple_of("ranks, counted from 0", lambda rank: checks.is_whole(rank, 0)),
        }
        checks.Problems("Profile", self, rules).raise_any()


@dataclass(frozen=True)
class Evaluate:
    """Evaluation of a gang's checkpoints by a gang of its own, beside the training: `Gang(evaluate=...)`.

    One checkpoint is evaluated at a time. Of the checkpoints that arrive meanwhile, all but the newest are skipped, and
    counted at the end. A failed evaluation costs this evaluation alone: a notice names the rank and the cause, and the
    training goes on.

    The metrics go to trackers, displays, the Deck and `records`, under the checkpoint's step. The checkpoint gets them,
    too, so that `Gang(keep=Keep(best=..., metric=...))` ranks it.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Train on one of two workers, and evaluate on the other:

        >>> from flytekitplugins.daskpytorch import Evaluate, Gang, Keep, current_rank, dispatch
        >>> def evaluate(target: int) -> dict[str, float]:
        ...     state = current_rank().checkpoint.load()
        ...     return {"held_out_loss": (state["weight"] - target) ** 2}
        >>> def train(target: int) -> int:
        ...     checkpoint = current_rank().checkpoint
        ...     for step in (1, 2):
        ...         checkpoint.save({"weight": 3 - step}, step)
        ...         checkpoint.flush()  # since these steps take no time
        ...     checkpoint.load(best=True)  # waits for the evaluations
        ...     return checkpoint.loaded.step
        >>> gang = Gang(evaluate=Evaluate(evaluate), keep=Keep(best=1, metric="held_out_loss"))
        >>> dispatch.run(client, train, target=2, gang=gang).result()
        [1]
    """

    function: Callable[..., Mapping[str, Any]]
    """Function that every rank of the evaluation's gang calls, which gets the checkpoint from
    `current_rank().checkpoint.load()` or `load_sharded`. Its arguments get the training's inputs or arguments of the
    same names. Rank 0 returns the metrics: numbers or one-element tensors by name.
    """
    _: KW_ONLY
    workers: int = 1
    """Number of the cluster's workers that are kept for evaluations, with as many ranks on each as in the training.

    0: one rank beside the ranks of the training, on their node or on one of their workers.
    """
    every: int = 1
    """Number of kept checkpoints from one evaluation to the next.

    Each attempt counts anew, and also evaluates the checkpoint from which it starts, unless that one was evaluated
    before.
    """
    timeout: float = 1800.0
    """Timeout, in seconds, of one evaluation.

    The gang's end and `load(best=True)` wait for the running evaluation, and for that of the newest checkpoint.
    """

    def __post_init__(self) -> None:
        rules = {
            "function": checks.must_be("a function", callable),
            "workers": checks.whole(0),
            "every": checks.COUNT,
            "timeout": checks.SECONDS,
        }
        checks.Problems("Evaluate", self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Settings of a gang: ranks, restarts, timeouts and checkpoints of a training run.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Start four ranks on each worker, go on with as few as three workers, and let a rank be silent for an hour:

        >>> from flytekitplugins.daskpytorch import Gang
        >>> gang = Gang(ranks_per_worker=4, min_workers=3, hang_timeout=3600.0)

        One error names all invalid values, before anything starts:

        >>> Gang(backend="mpi", max_restarts=-1)
        Traceback (most recent call last):
        ValueError: Gang(backend='mpi'): must be one of auto, gloo, nccl; Gang(max_restarts=-1): must be a whole...
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of the process group. `auto`: nccl if every rank has its own GPU, else gloo."""
    ranks_per_worker: int | Literal["auto"] = "auto"
    """Number of ranks on each Dask worker, from 1 up.

    `auto`: one per GPU, or one without GPUs. A `DaskDDP` task counts GPUs in its workers' limits, or else requests.
    `dispatch` counts the GPUs that the workers see, and divides a host's GPUs among its workers.
    """
    workers: int | None = None
    """Number of the cluster's workers that a `dispatch.run` takes, from 1 up: those on which the fewest gangs train.

    Workers for `evaluate` are among them. None: all workers. Tasks and `dispatch.map` have numbers of their own.
    """
    devices: Literal["own", "all"] = "own"
    """GPUs that a rank sees.

    `own`: only its own GPU, as device 0, with `LOCAL_RANK=0`. `all`: all GPUs of its worker, for code that uses
    `cuda:{local_rank}` or several GPUs in each rank. The rank's own GPU is then torch's current device, with the index
    `LOCAL_RANK`.
    """
    gpu_check: Literal["off", "quick"] | Callable[[int], None] = "quick"
    """Check of each rank's GPU before the process group forms, at each start of the gang.

    - `quick`: NVML must report neither uncorrectable or pending memory errors, nor a GPU that needs a reset. Of AMD's
      GPUs, `amdsmi` must report no uncorrectable memory errors. With NCCL, a small kernel must also compute right.
    - A function: The quick check, and then the function in each rank. The argument is the CUDA index of the rank's GPU.
      Its exception is the fault of the GPU.
    - `off`: No check.

    A GPU with a fault counts as a lost worker: the gang starts again without the GPU's worker, if `min_workers` or
    another worker allows that. Ranks without a GPU, and debug mode, have no check.
    """
    min_workers: int | None = None
    """Minimum number of workers, from 1 up, with which the gang starts, or restarts after losing workers. None: all."""
    max_restarts: int = 3
    """Maximum number of restarts of a failed gang, each from its newest checkpoint. 0: never restart.

    Losses of infrastructure and errors of the function are counted apart, each up to this number. Lacks of memory are
    counted apart from both, up to three, if the function uses `RankContext.micro_batch`. After an exception of
    the function, the gang restarts under three conditions:

    - The attempt has saved a checkpoint.
    - The previous failure came from another line of code, or at another step.
    - The exception is not of a kind that each attempt repeats, such as `NameError` or `ImportError`.
    """
    start_timeout: float = 600.0
    """Timeout, in seconds, for the scheduler to answer, for workers to arrive or return, and for all ranks to form
    their process group."""
    hang_timeout: float | Literal["auto"] | None = "auto"
    """Timeout, in seconds or `auto`, after which a gang without signs of life ends with an error. None: no timeout.

    Signs of life are optimizer steps, and calls of `log`, `should_stop` and `checkpoint` on `current_rank()`.

    - `auto`: The gang ends once all ranks wait in collectives without a sign of life for five minutes. If a rank has
      once taken longer than half a minute between two signs of life, the limit is ten times that time. If a rank is
      busy with an evaluation, its data loader or an endless loop, the other ranks run into the process group's timeout.
      The error of that timeout names the busy rank. `auto` needs the flight recorder of a recent torch.
    - A number: Seconds of silence after which a single rank counts as hung. Allow for the longest time between two
      signs of life, including evaluation and the start of training.
    """
    grace_period: float = 20.0
    """Seconds for ranks to save and return after the task or a worker receives SIGTERM.

    Later steps, such as the checkpoint's upload, take up to half as long again. Set the pod's
    `terminationGracePeriodSeconds` to one and a half times this value: 30, Kubernetes' default, for 20.
    """
    attach_timeout: float = 300.0
    """Timeout, in seconds, for `daskpytorch attach` to open a rank's debugger. The gang keeps its GPUs meanwhile."""
    on_error: Literal["stop", "hold"] = "stop"
    """`stop`: an exception ends the attempt at once.

    `hold`: a rank that raises an exception waits in pdb's post-mortem mode until a terminal has attached and left, or
    `attach_timeout` is over. Other ranks stand still in their next collective, and all GPUs stay taken. The default
    process group's timeout is `attach_timeout` and an hour. Other groups keep torch's: ten minutes with NCCL.
    """
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Environment variables of all ranks, as if set before each rank's Python started. They win over those of the task
    and the workers. The gang itself sets `CUDA_VISIBLE_DEVICES` and what `torchrun` sets, such as `RANK`.

    Ranks are forked from a process that has imported torch. If a variable that Python, torch, OpenMP or NumPy reads
    before differs there, such as `TORCH_LOGS`, the gang's ranks start as fresh interpreters, which takes seconds. In
    debug mode the variables are set in the calling process, where such variables come too late. `LD_LIBRARY_PATH`
    reaches only the programs that a rank starts.
    """
    key: str | None = None
    """Name of the gang, unique in its task, by which the task's next attempt finds its checkpoints.

    `dispatch.map` adds the index of the experiment. None: the function's name and the number of its call in the task.
    Set a key if a later attempt may make other calls, or the same calls in another order, for example from threads.
    """
    keep: Keep = field(default_factory=Keep)
    """Retention policy for checkpoints. Default: the newest two are kept."""
    debug: bool = False
    """True: train in one rank, the calling process, where breakpoints, profilers and `pytest --pdb` work as usual.

    `DASKPYTORCH_DEBUG=1` does so for all gangs. `dispatch.map` ignores both.
    """
    checkpoint_uri: str | None = None
    """Storage for sharded checkpoints, and outside Flyte tasks for all checkpoints: a folder that all workers reach,
    or an fsspec URL (`s3://bucket/prefix`). Each gang gets a folder in this storage.

    None: Flyte's storage for the task's checkpoints. Outside a Flyte task, `dispatch.run` keeps checkpoints in a folder
    of the driver's machine (`DASKPYTORCH_CHECKPOINTS`), and the same program goes on from them with
    `DASKPYTORCH_RESUME=1`. `dispatch.map` uses a temporary folder of the driver. Ranks on other machines cannot write
    shards to either.

    Outside a Flyte task the folder has all that a later call needs to go on: the call with the same `key`, or else the
    call of the same function with the same number in its process. The log names the step and the folder. A second gang
    is refused while another one uses the same folder.
    """
    compile_cache: str | None = None
    """Storage for what `torch.compile` builds, which later ranks, gangs and machines load: a folder or an fsspec URL.

    Debug mode leaves it out. None: torch's own folder on each machine.
    """
    profile: Profile | None = None
    """Steps that `torch.profiler` records. None: no steps."""
    evaluate: Evaluate | None = None
    """Evaluation of checkpoints by a gang of its own. `dispatch.map` refuses it, and debug mode leaves it out."""
    observers: tuple[Callable[[], Any], ...] = ()
    """Functions or classes that return an `Observer`. The driver calls each once per gang."""

    def __post_init__(self) -> None:
        rules = {
            "backend": checks.one_of("auto", "gloo", "nccl"),
            "ranks_per_worker": checks.auto_or(checks.COUNT),
            "workers": checks.optional(checks.COUNT),
            "devices": checks.one_of("own", "all"),
            "gpu_check": checks.must_be(
                "'off', 'quick' or a function of a GPU's index",
                callable,
                lambda value: isinstance(value, str) and value in ("off", "quick"),
            ),
            "min_workers": checks.optional(checks.COUNT),
            "max_restarts": checks.whole(0),
            "start_timeout": checks.SECONDS,
            "hang_timeout": checks.must_be(
                f"'auto', None or seconds from {MIN_HANG_TIMEOUT} to {checks.MAX_SECONDS}",
                lambda value: value is None or checks.is_auto(value) or checks.is_seconds(value, MIN_HANG_TIMEOUT),
            ),
            "grace_period": checks.SECONDS,
            "attach_timeout": checks.SECONDS,
            "on_error": checks.one_of("stop", "hold"),
            "environment": _problem_of_variables,
            "keep": checks.instance_of(Keep),
            "debug": checks.BOOLEAN,
            "profile": checks.optional(checks.instance_of(Profile)),
            "evaluate": checks.optional(checks.must_be("an Evaluate", lambda value: isinstance(value, Evaluate))),
            "key": checks.optional(checks.KEY),
            "checkpoint_uri": checks.optional(checks.uri),
            "compile_cache": checks.optional(checks.uri),
            "observers": checks.tuple_of("classes of observers, or of functions that make one", callable),
        }
        problems = checks.Problems("Gang", self, rules)
        if not problems.found and self.workers is not None:
            check_workers(problems, self.evaluate, self.min_workers, self.workers, "workers")
        problems.raise_any()
        object.__setattr__(self, "environment", dict(self.environment))  # a copy: pickle refuses `os.environ`


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Rule by which `dispatch.map` stops models early: asynchronous successive halving (Li et al. 2018).

    A model is compared at its rungs, the epochs `grace_period * reduction_factor**n`. At a rung, the best `1 /
    reduction_factor` of the models that have reached the rung go on. With fewer than twice `reduction_factor` models
    there, only the best one goes on. Models do not wait for each other, so the first model at a rung always goes on.

    Raises:
        ValueError: A field's value is invalid.

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
    """Metric that is compared at the rungs.

    Rank 0 must log the metric together with `epoch`, which should count from 1. The first record of an epoch counts, so
    log the metric at the epoch's end. A model whose metric is NaN at a rung is stopped.
    """
    mode: Literal["min", "max"] | None = None
    """`min` if low values are best, `max` if high values are best. None: by the metric's name, as in `Keep`."""
    reduction_factor: int = 4
    """Divisor, from 2 up: one in `reduction_factor` compared models goes on."""
    grace_period: int = 1
    """Number of epochs, from 1 up, that every model trains before its first comparison."""

    def __post_init__(self) -> None:
        rules = {"metric": NAME, "mode": checks.MODE, "reduction_factor": checks.whole(2), "grace_period": checks.COUNT}
        problems = checks.Problems("EarlyStopping", self, rules)
        checks.check_direction(problems, self.metric, self.mode)
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class Wandb:
    """Settings of the Weights & Biases run that rank 0 writes for the whole gang.

    Raises:
        ImportError: The extra `wandb` is not installed.
        ValueError: A field's value is invalid.

    Examples:
        >>> from flytekit import Secret
        >>> from flytekitplugins.daskpytorch import DaskDDP, Wandb
        >>> key = Secret(group="wandb", key="api_key")
        >>> config = DaskDDP(wandb=Wandb(project="pet-names", secret=key, tags=("lstm",)))
    """

    project: str
    """Weights & Biases project that gets the run."""
    entity: str | None = None
    """User or team that owns the run. None: the default of the API key."""
    secret: Secret | None = None
    """Flyte secret with the API key.

    None: the key that wandb finds, for example in `WANDB_API_KEY` or from `wandb login`.
    """
    mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of the run.

    None: wandb's own (`WANDB_MODE`, `wandb offline`), by default online with an API key, else offline with a line in
    the log. Never a prompt.
    """
    id: str | None = None
    r"""Id of the run: up to 128 characters without any of `/\#?%:`. None: `WANDB_RUN_ID`, or else derived from
    the Flyte execution and the workflow node, so that a retry continues the run. Random outside Flyte."""
    name: str | None = None
    """Display name of the run. None: `WANDB_NAME`, or else the task's name."""
    group: str | None = None
    """Group of the run on the project's page."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of the run's configuration, beside the task's inputs and the gang's size and backend."""
    host: str = "https://wandb.ai"
    """Address of the server, for the link from the Flyte console to the run's page."""
    dir: str | None = None
    """Folder for wandb's local files, such as offline runs, on rank 0's machine.

    None: rank 0's `WANDB_DIR` or working directory.
    """

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
                    lambda value: checks.is_text(value) and re.fullmatch(r"[^/\\#?%:]{1,128}", value) is not None,
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


def check_workers(
    problems: checks.Problems, evaluate: Evaluate | None, least: int | None, number: int, name: str, prefix: str = ""
) -> None:
    num_kept = evaluate.workers if evaluate is not None else 0
    if num_kept >= number:
        problems.unless(False, f"{prefix}evaluate.workers", f"less than {name}, which is {number}")
    else:
        less = f" less the {num_kept} of evaluate" if num_kept else ""
        is_few = (least or 1) <= number - num_kept
        problems.unless(is_few, f"{prefix}min_workers", f"at most {name}{less}, which is {number - num_kept}")


def is_local() -> bool:
    """Return True if Flyte's backend gave the task no Dask cluster, so that the task starts one on this machine."""
    return not os.environ.get(SCHEDULER_VARIABLE)


def is_debugging(gang: Gang | None = None) -> bool:
    """Return True if `DASKPYTORCH_DEBUG` or the gang's setting asks to train in one rank, in the calling process."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") or (gang is not None and gang.debug)


def _problem_of_variables(variables: object) -> str | None:
    if not isinstance(variables, Mapping):
        return "a mapping of names to texts"
    for name, value in variables.items():
        are_texts = isinstance(name, str) and isinstance(value, str)
        if not are_texts or not name or "=" in name or "\0" in name + value:
            return f"a mapping of names to texts, also for {checks.shown(name)}"
        if SET_BY_GANGS.fullmatch(name):
            return f"a mapping without {name}, which the gang itself sets in each rank"
    return None


def _is_range(steps: object) -> bool:
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(checks.is_whole(step, 1) for step in steps)
    return is_pair and steps[0] <= steps[1]  # type: ignore[index]


def _is_secret(value: object) -> bool:
    return all(hasattr(value, name) for name in ("group", "key", "group_version"))
