"""The rank's view of its gang, for the user's code. Runs in a rank, and in any other process as rank 0 of 1."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import reprlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.media import Histogram, Picture

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint",
    "LogRecord",
    "Progress",
    "RankContext",
    "SavedCheckpoint",
    "StopSignal",
    "current_rank",
    "numbers",
]

logger = logging.getLogger(__name__)

MAX_BITS = sys.float_info.max_exp
"""Maximum number of bits of a whole number that a float can hold."""
PLAIN = frozenset((int, float, bool, str))
"""Types of a metric's value that every process can unpickle."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One call of `RankContext.log`, as `Observer.logged` receives it.

    Examples:
        >>> from flytekitplugins.daskpytorch import LogRecord, Observer
        >>> class Lowest(Observer):
        ...     loss = float("inf")
        ...
        ...     def logged(self, record: LogRecord) -> None:
        ...         self.loss = min(self.loss, record.numbers.get("loss", self.loss))
        >>> lowest = Lowest()
        >>> lowest.logged(LogRecord(rank=0, step=7, num_steps=None, time=0.0, metrics={"loss": 0.5, "note": "warm"}))
        >>> lowest.loss
        0.5
    """

    rank: int
    """Rank that logged the record, from 0 to world_size - 1."""
    step: int
    """The call's `step`, by default the number of earlier calls."""
    num_steps: int | None
    """Total number of steps of the training. None if the call did not give it."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    metrics: Mapping[str, Any]
    """Values by name. One-element tensors and arrays have become plain numbers."""

    @property
    def numbers(self) -> dict[str, float]:
        """Numeric metrics by name, as floats."""
        return {name: _as_float(value) for name, value in self.metrics.items() if isinstance(value, (int, float))}

    @property
    def epoch(self) -> int | None:
        """The metric `epoch` as a whole number. None without a finite number."""
        value = self.metrics.get("epoch")
        return int(value) if isinstance(value, (int, float)) and math.isfinite(_as_float(value)) else None

    @property
    def drawings(self) -> dict[str, Histogram | Picture]:
        """Metrics that trackers draw: each `Histogram` and `Picture`, by name."""
        return {name: value for name, value in self.metrics.items() if type(value) in (Histogram, Picture)}

    def sent(self) -> LogRecord:
        """Return the record without values of the user's classes, and without drawings unless from rank 0."""
        if PLAIN.issuperset(map(type, self.metrics.values())):
            return self
        bare = self.bare()
        return replace(bare, metrics={**bare.metrics, **self.drawings}) if self.rank == 0 else bare

    def bare(self) -> LogRecord:
        """Return the record with its numbers and strings alone."""
        values = {name: _bare(value) for name, value in self.metrics.items() if isinstance(value, (int, float, str))}
        return replace(self, metrics=values)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """Description of a checkpoint that the gang keeps.

    Examples:
        Load the best checkpoint at the end of the training:

        >>> from flytekitplugins.daskpytorch import Gang, Keep, current_rank, dispatch
        >>> def train() -> tuple[int, float]:
        ...     checkpoint = current_rank().checkpoint
        ...     for step, loss in enumerate([0.5, 0.2, 0.3, 0.4]):
        ...         checkpoint.save({"step": step}, step, metrics={"loss": loss})
        ...         checkpoint.flush()  # since these steps take no time
        ...     checkpoint.load(best=True)
        ...     return checkpoint.loaded.step, checkpoint.loaded.metrics["loss"]
        >>> dispatch.run(client, train, gang=Gang(keep=Keep(best=1, metric="loss"))).result()[0]
        (1, 0.2)
    """

    step: int
    """Training step of the saved state."""
    metrics: Mapping[str, float]
    """Metrics that were given to the save, by name."""
    size: int
    """Size in bytes."""
    place: str | None
    """Address in storage: the checkpoint's file, or the folder of a sharded checkpoint. The file's upload may still be
    in progress. None without storage: the driver's disk has the only copy."""


class Checkpoint:
    """Saves and loads the training's checkpoints: `current_rank().checkpoint`. Outside a gang, a save keeps no state.

    Examples:
        A restarted gang, and the next attempt of a Flyte task, continue from the newest checkpoint:

        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> def train(num_steps: int) -> int:
        ...     checkpoint = current_rank().checkpoint
        ...     state = checkpoint.load() or {"step": 0}
        ...     while state["step"] < num_steps:
        ...         state = {"step": state["step"] + 1}  # and model.state_dict(), optimizer.state_dict()
        ...         checkpoint.save(state, state["step"])
        ...     return state["step"]
        >>> dispatch.run(client, train, 3).result()
        [3, 3]
    """

    @property
    def loaded(self) -> SavedCheckpoint | None:
        """Description of the checkpoint that was loaded last.

        None before the first load, and if the last load found no checkpoint. `load_sharded` without `best` and `step`
        leaves the description as it is.
        """
        return None

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Save `state` as the newest checkpoint. Training continues while the checkpoint is written.

        Every rank may call `save`, and only rank 0's state is saved. Values that differ between ranks, for example
        random generators, must first be gathered into rank 0's state. The call copies the state before it returns, so
        the training may change the state afterwards.

        Args:
            state: Any object that pickles: tensors on any device, in dictionaries, lists, dataclasses.
            step: Training step of the state.
            metrics: Numbers or one-element tensors by name, which rate the state. Rank 0's metrics count.
                `Gang(keep=Keep(best=..., metric=...))` keeps the best checkpoints by one of these metrics.

        Raises:
            TypeError: A metric is not a number, or `state` has an object that cannot be saved.
        """
        numbers(metrics)

    def load(self, *, best: bool = False, step: int | None = None) -> Any | None:
        """Return the state from which this attempt of the gang starts, or None on a fresh start.

        All ranks get the same state: the newest complete checkpoint from before the gang's restart, or from an earlier
        attempt of the Flyte task. A better but older checkpoint does not count. Tensors arrive on the CPU.

        `best` or `step` select another checkpoint, for example at the end of a training. Rank 0 must make this call:
        rank 0 waits until its earlier saves have succeeded or failed, and then chooses. Other ranks may make the call,
        too. The n-th call of each rank gets the same checkpoint.

        Args:
            best: True for the best checkpoint, by the metric of `Gang(keep=Keep(best=..., metric=...))`. The result is
                None if no checkpoint has the metric.
            step: Training step of the wanted checkpoint.

        Raises:
            ValueError: The gang's `keep` has no metric for the best checkpoint, or `best` and `step` are both given.
            LookupError: The gang keeps no checkpoint of this step.
            OSError: The transfer to this rank failed, or took longer than the gang's `start_timeout`.
        """
        return None

    def save_sharded(self, state: dict[str, Any], step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Save a state that is sharded over the ranks as the newest checkpoint. Each rank writes its own shard.

        All ranks call `save_sharded` together. The call returns when the state is copied to host memory. Each rank
        then uploads its shard to storage (`Gang(checkpoint_uri=...)`) while the training continues. The checkpoint
        counts once all shards are stored. One checkpoint is written at a time, and a newer checkpoint replaces one that
        waits for its turn. Host memory must have room for two copies of this rank's shard.

        Values outside of `DTensor`s must be equal on all ranks: one rank writes each value.

        Args:
            state: A dictionary that `torch.distributed.checkpoint.save` accepts: `DTensor`s, tensors, plain values and
                `Stateful` objects, nested to any depth. For example
                `dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))` of
                `torch.distributed.checkpoint.state_dict`.
            step: Training step of the state, the same on all ranks.
            metrics: Numbers or one-element tensors by name, as for `save`.

        Raises:
            TypeError: A value is neither a dense tensor nor plain data, or a metric is not a number. The message names
                the key of a sparse, nested or quantized tensor, or of a tensor on the meta device.
            ValueError: The ranks save different steps, or their shards do not make up complete tensors.
        """
        numbers(metrics)

    def load_sharded(self, state: dict[str, Any], *, best: bool = False, step: int | None = None) -> int | None:
        """Fill a state from the newest checkpoint of `save_sharded`. Each rank reads its own part.

        The number of ranks may differ from the number at the save. All ranks call `load_sharded` together. The call
        fills tensors in place, replaces plain values in `state`, and loads `Stateful` objects. A model and an optimizer
        then take the state by `set_state_dict` of `torch.distributed.checkpoint.state_dict`.

        Args:
            state: A state with the same keys and shapes as the saved state.
            best: True for the best checkpoint, as for `load`. The call first waits for all earlier saves.
            step: Training step of the wanted checkpoint.

        Returns:
            The checkpoint's step, or None on a fresh start, which leaves `state` as it is.

        Raises:
            OSError: Storage does not answer, or the checkpoint is damaged and `state` has been changed.
            ValueError: `state` has other keys or shapes. Or the gang's `keep` has no metric for the best checkpoint, or
                `best` and `step` are both given.
            LookupError: The gang keeps no checkpoint of this step.
        """
        return None

    def list(self) -> Sequence[SavedCheckpoint]:
        """Return the kept checkpoints of both kinds, ordered by step, as far as this rank knows.

        The driver sends the list to every rank each time that it has stored a checkpoint. A checkpoint that was just
        saved may be missing. A checkpoint that the driver has just removed may still be listed.
        """
        return ()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest checkpoint is written, for at most `timeout` seconds. None: without a limit."""


@dataclass
class Progress:
    """This rank's progress, by which the driver tells a slow rank from a rank that hangs."""

    step: int | None = None
    """Newest step that the function gave to `log` or to a checkpoint. None before the first."""
    num_moves: int = 0
    """Number of signs of life: optimizer steps, log records, checkpoints, results, calls of `should_stop`."""
    num_moves_since: int = 0
    """Number of signs of life after `step` was given."""

    def move(self) -> None:
        """Count a sign of life."""
        self.num_moves += 1
        self.num_moves_since += 1

    def reach(self, step: int, *, anew: bool = False) -> None:
        """Set the newest step and count a sign of life. `anew`: reset `num_moves_since` even for the same step."""
        self.num_moves += 1
        if anew or step != self.step:
            self.step, self.num_moves_since = step, 0


class StopSignal:
    """Answers `should_stop`, so that the same call is the first to return True on every rank.

    Each rank counts its calls. To stop the gang, the driver asks every rank for its count, and the rank holds back its
    next call. The driver then sends the greatest count to all ranks. Each rank's first call beyond the greatest count
    returns True.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._num_calls = 0
        self._is_held = False
        self._last_call: int | None = None
        self.has_fired = False
        """True once a call has returned True."""

    def __call__(self) -> bool:
        """Count this call, and return True if the rank has to stop."""
        # The call counts itself before it reads `_is_held`, so `hold` cannot miss a call that was let through. `hold`
        # may miss or count a call that is held back: that call is answered by its own number. Taking the lock here
        # would double the cost of a call.
        self._num_calls += 1
        if not self._is_held:
            return False
        with self._lock:
            self._lock.wait_for(lambda: self._last_call is not None)
            self.has_fired = self._last_call is not None and self._num_calls > self._last_call
            return self.has_fired

    def hold(self) -> int:
        """Hold back later calls of `should_stop`. Return the number of calls so far, a held one included."""
        self._is_held = True
        return self._num_calls

    def release(self, last_call: int) -> None:
        """Answer held calls of `should_stop`: False up to call number `last_call`, then True (stop)."""
        with self._lock:
            self._last_call, self._is_held = last_call, True  # held, so that the next call reads `_last_call`
            self._lock.notify_all()


class Link:
    """A rank's link to its driver. This class serves processes outside a gang, which have no driver."""

    takes_results = False
    """True if a driver receives the results that `submit` sends."""
    worker_data: Any = None
    """The rank's access to the data of its Dask worker (`WorkerData`). None without a Dask worker."""

    def log(self, record: LogRecord) -> None:
        """Report a log record."""
        logger.info("step %d: %s", record.step, ", ".join(f"{n}={v}" for n, v in record.metrics.items()))

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Have the trackers in rank 0 record the gradients of a model."""

    def submit(self, key: str, path: str, data: bytes) -> None:
        """Send a result to the driver. Outside a gang, discard the result.

        Args:
            key: `key` of the `DaskResultsHandler` that receives the result.
            path: Path of the result's file, relative to the folder into which the driver writes results.
            data: Content of the file.
        """

    def results_folder(self) -> Any:
        """Return the folder of the task's results, or None outside the ranks of a `DaskDDP` or `SpawnDDP` task."""
        return None

    def spending(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Count the time of a `with` block under this field of `Goodput`."""
        return contextlib.nullcontext()

    def goodput(self) -> Goodput:
        """Return the account of the gang's time so far."""
        return Goodput()


@dataclass
class RankContext:
    """This process's place in the gang, and its link to the driver. Outside a gang: rank 0 of 1.

    Examples:
        >>> from flytekitplugins.daskpytorch import current_rank
        >>> rank = current_rank()
        >>> for step in range(100):
        ...     if rank.should_stop():
        ...         break
        ...     rank.log({"loss": 1 / (step + 1)}, step=step, num_steps=100)
        >>> f"rank {rank.rank} of {rank.world_size}"
        'rank 0 of 1'
    """

    rank: int = 0
    """Rank in the gang, from 0 to world_size - 1. Rank 0's return value is the task's output."""
    local_rank: int = 0
    """Rank among the ranks of the same worker, from 0 to local_world_size - 1."""
    world_size: int = 1
    """Number of ranks in the gang."""
    local_world_size: int = 1
    """Number of ranks on this worker."""
    # CUDA index of the rank's own GPU, for `device`.
    device_index: int = field(default=0, repr=False)
    checkpoint: Checkpoint = field(default_factory=Checkpoint, repr=False)
    """Saves and loads the training's state."""
    # Progress that the hang detector reads.
    progress: Progress = field(default_factory=Progress, repr=False)
    # Link for reports and questions to the driver.
    link: Link = field(default_factory=Link, repr=False)
    # Signal that answers `should_stop`.
    stop_signal: StopSignal = field(default_factory=StopSignal, repr=False)
    _num_logged: int = field(default=0, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The rank's own GPU, or `cpu`. The GPU is `cuda:0` unless `Gang(devices="all")` shows other GPUs, too."""
        import torch  # late, so that `current_rank()` in a driver does not import torch

        return torch.device("cuda", self.device_index) if torch.cuda.is_available() else torch.device("cpu")

    def log(self, metrics: Mapping[str, Any], step: int | None = None, *, num_steps: int | None = None) -> None:
        """Report metrics to the driver, without waiting for other ranks or the driver.

        Rank 0's metrics go to Weights & Biases, the progress display and the Deck. Every rank's metrics show the driver
        the rank's progress. Rank 0 sends its log records within 0.2 s, other ranks within 1 s. In a gang of n > 500
        ranks, other ranks send within n / 500 seconds. A rank that is killed or crashes may lose its last records. The
        progress display shows `epoch`, `loss` and `samples_per_second` in places of their own.

        Args:
            metrics: Values by name. Numbers and one-element tensors go to all trackers and displays. Tensors are read
                by `.item()`, which waits for the device. Rank 0's `Histogram` and `Picture` go to all trackers. Other
                objects, for example `wandb.Image`, go to Weights & Biases alone.
            step: Training step of the values. None: the number of earlier calls.
            num_steps: Total number of steps of the training, for the length of the progress bar. None: unknown.

        Raises:
            ValueError: `step` or `num_steps` is not a whole number of up to 64 bits.
        """
        record = LogRecord(
            rank=self.rank,
            step=self._num_logged if step is None else _whole("step", step),
            num_steps=None if num_steps is None else _whole("num_steps", num_steps),
            time=time.time(),
            metrics={str(name): _plain(value) for name, value in metrics.items()},
        )
        self._num_logged += 1
        if step is None:
            self.progress.move()
        else:
            self.progress.reach(record.step)
        self.link.log(record)

    def watch(self, model: torch.nn.Module, *, log_freq: int = 100) -> None:
        """Record histograms of a model's gradients in the Weights & Biases run, if there is one.

        Unlike `wandb.watch`, `watch` records the gradients that the optimizer gets: DistributedDataParallel's average
        over all ranks. The next call of `log` sends the histograms, as `gradients/<parameter>`.

        Args:
            model: Any module, also in DistributedDataParallel. Every rank may call `watch`, and rank 0's call counts.
            log_freq: Number of optimizer steps from one record of the gradients to the next.
        """
        self.link.watch(model, log_freq)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Count the time of a `with` block as `Goodput.evaluation`."""
        return self.link.spending("evaluation")

    def goodput(self) -> Goodput:
        """Return the driver's account of the gang's time so far, which a task may return as its output.

        Every rank may call `goodput`. The n-th call of each rank gets the same account. Outside a gang, all fields are
        0.

        Raises:
            TimeoutError: The driver did not answer within the gang's `start_timeout`.
        """
        return self.link.goodput()

    def should_stop(self) -> bool:
        """Return True if the task or a worker is being stopped: the function has to save a checkpoint and return.

        Call `should_stop` once per step on every rank. All ranks get True at the same step. A call takes a microsecond.
        """
        self.progress.move()
        return self.stop_signal()


def current_rank() -> RankContext:
    """Return the context of this rank. In a process outside a gang, the context is rank 0 of 1.

    A process that a rank forked, for example a DataLoader worker, gets a copy that sends no reports.

    Examples:
        >>> from flytekitplugins.daskpytorch import current_rank, dispatch
        >>> def place() -> str:
        ...     return f"rank {current_rank().rank} of {current_rank().world_size}"
        >>> place()
        'rank 0 of 1'
        >>> dispatch.run(client, place).result()
        ['rank 0 of 2', 'rank 1 of 2']
    """
    pid, context = _current
    if pid == os.getpid():
        return context
    return RankContext(
        rank=context.rank,
        local_rank=context.local_rank,
        world_size=context.world_size,
        local_world_size=context.local_world_size,
        device_index=context.device_index,
    )


def enter(context: RankContext) -> None:
    """Set the context that `current_rank` returns in this process."""
    global _current
    _current = (os.getpid(), context)


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics of a checkpoint as floats, by name.

    Raises:
        TypeError: `metrics` is no dictionary of names and numbers.
    """
    if not isinstance(metrics, Mapping | None):
        raise TypeError(f"save(metrics={reprlib.repr(metrics)}): must be a dictionary of names and numbers")
    plain = {name: _plain(value) for name, value in (metrics or {}).items()}
    for name, value in plain.items():
        if not isinstance(name, str) or not isinstance(value, (int, float)):
            raise TypeError(
                f"save(metrics={{{reprlib.repr(name)}: {reprlib.repr(value)}}}): must be a name and a number, or a "
                "tensor that holds one"
            )
    return {name: _as_float(value) for name, value in plain.items()}


def _plain(value: Any) -> Any:
    """Return the Python number of a one-element tensor, array or NumPy scalar. Return other values unchanged.

    Whole numbers too large for a float become infinite, as trackers can neither draw nor print these numbers.
    """
    if type(value) in PLAIN and (type(value) is not int or value.bit_length() <= MAX_BITS):
        return value
    num_elements = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    if num_elements == 1 and hasattr(value, "item"):
        return value.item()
    return _as_float(value) if isinstance(value, int) and value.bit_length() > MAX_BITS else value


def _bare(value: float | str) -> float | str:
    """Return a plain number or string, also for an instance of a subclass."""
    if type(value) in (int, float, bool, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    return float.__float__(value) if isinstance(value, float) else int.__int__(value)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _whole(name: str, value: Any) -> int:
    if type(value) is int and value.bit_length() < 64:
        return value
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"log({name}={reprlib.repr(value)}): must be a whole number, or a tensor that holds one ({error})"
        ) from error
    if number.bit_length() >= 64:
        raise ValueError(f"log({name}=...): a number of {number.bit_length()} bits, must lie between -2**63 and 2**63")
    return number


_current: tuple[int, RankContext] = (os.getpid(), RankContext())
