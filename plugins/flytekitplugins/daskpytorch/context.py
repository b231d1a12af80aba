"""The rank's view of its gang, for the user's code. Runs in a rank, and in any other process as rank 0 of 1."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.records import LogRecord, SavedCheckpoint, numbers

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "Progress", "RankContext", "StopSignal", "current_rank"]

logger = logging.getLogger(__name__)


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
        """Description of the checkpoint that this rank has loaded last.

        Set by `load`, and by `load_sharded` with `best` or `step`: `load_sharded(state)` alone returns the step. None
        before the first load, and if the last load found no checkpoint.
        """
        return None

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Save `state` as the newest checkpoint. Training continues while the checkpoint is written.

        Every rank may call `save`, and only rank 0's state is saved: gather values that differ between ranks, such as
        random generators, into it. The state is copied, so the training may change it afterwards.

        Args:
            state: Any object that pickles: tensors on any device, in dictionaries, lists, dataclasses.
            step: Training step of the state.
            metrics: Numbers or one-element tensors by name, by one of which `Gang(keep=Keep(best=..., metric=...))`
                keeps the best checkpoints. Rank 0's metrics count.

        Raises:
            TypeError: A metric is not a number, or `state` has an object that cannot be saved.
        """
        numbers(metrics)

    def load(self, *, best: bool = False, step: int | None = None) -> Any | None:
        """Return the state from which this attempt of the gang starts, or None on a fresh start.

        All ranks get the same state: the newest complete checkpoint from before the gang's restart, or from an earlier
        attempt of the Flyte task. A better but older checkpoint does not count. Tensors arrive on the CPU.

        `best` or `step` select another checkpoint. Rank 0 must make this call, and other ranks may. Rank 0 waits until
        its earlier saves have succeeded or failed. The n-th call of each rank gets the same checkpoint.

        Args:
            best: True for the best checkpoint, by the metric of `Gang(keep=...)`. None is returned if no checkpoint has
                it.
            step: Training step of the wanted checkpoint.

        Raises:
            ValueError: The gang's `keep` has no metric for the best checkpoint, or `best` and `step` are both given.
            LookupError: The gang keeps no checkpoint of this step.
            OSError: The transfer to this rank failed, or took longer than the gang's `start_timeout`.
        """
        return None

    def save_sharded(self, state: dict[str, Any], step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Save a state that is sharded over the ranks as the newest checkpoint. Each rank writes its own shard.

        All ranks call `save_sharded` together. The call waits until the sharded checkpoint before is written, copies
        the state to host memory and returns. Each rank then writes its shard to storage (`Gang(checkpoint_uri=...)`) by
        `torch.distributed.checkpoint`, while the training continues. The checkpoint counts once all shards are stored.
        Host memory must have room for a copy of this rank's shard.

        Values outside of `DTensor`s must be equal on all ranks: one rank writes each value.

        Args:
            state: A dictionary that `torch.distributed.checkpoint.save` accepts, nested to any depth, for example
                `dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))` of
                `torch.distributed.checkpoint.state_dict`.
            step: Training step of the state, the same on all ranks.
            metrics: Numbers or one-element tensors by name, as for `save`.

        Raises:
            TypeError: A value is neither a dense tensor nor plain data (the message names its key), or a metric is not
                a number.
            ValueError: The ranks save different steps.
            OSError: This rank does not see the driver's folder, and no `Gang(checkpoint_uri=...)` is set.
        """
        numbers(metrics)

    def load_sharded(self, state: dict[str, Any], *, best: bool = False, step: int | None = None) -> int | None:
        """Fill a state from the sharded checkpoint from which this attempt starts. Each rank reads its own part.

        The checkpoint is the newest undamaged one from before the gang's restart, or from an earlier attempt of the
        Flyte task. The number of ranks may have been another. All ranks call `load_sharded` together. The call fills
        tensors in place, replaces plain values in `state`, and loads `Stateful` objects. A model and an optimizer then
        take the state by torch's `set_state_dict`.

        Args:
            state: A state with the same keys and shapes as the saved state.
            best: True for the best checkpoint, as for `load`, after this rank's earlier saves.
            step: Training step of the wanted checkpoint, after this rank's earlier saves.

        Returns:
            The checkpoint's step. None: there is no such checkpoint, and `state` stays unchanged.

        Raises:
            OSError: Storage does not answer, or the checkpoint is damaged and `state` has been changed.
            ValueError: `state` has other keys or shapes. Or the gang's `keep` has no metric for the best checkpoint, or
                `best` and `step` are both given.
            LookupError: The gang keeps no checkpoint of this step.
        """
        return None

    def list(self) -> Sequence[SavedCheckpoint]:
        """Return the kept checkpoints, whole and sharded, ordered by step, as far as this rank knows.

        A checkpoint that was just saved may be missing, and one that was just removed may still be listed.
        """
        return ()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest checkpoint is written, for at most `timeout` seconds. None: without a limit."""


@dataclass
class Progress:
    """This rank's progress, by which the driver tells a slow rank from a rank that hangs."""

    step: int | None = None
    """Newest training step that the rank's function gave to `log` or to a checkpoint."""
    num_moves: int = 0
    """Signs of life: optimizer steps, log records, checkpoints, results, `should_stop` calls."""
    num_moves_since: int = 0
    """Signs of life since the function gave the newest `step`."""

    def move(self) -> None:
        """Count a sign of life of this rank."""
        self.num_moves += 1
        self.num_moves_since += 1

    def reach(self, step: int, *, anew: bool = False) -> None:
        """Set the newest step, and count a sign of life. `anew` resets `num_moves_since` even for an equal step."""
        self.num_moves += 1
        if anew or step != self.step:
            self.step, self.num_moves_since = step, 0


class StopSignal:
    """Answers calls of `should_stop`. On every rank, the call with the same number is the first to return True.

    Each rank counts its calls. To stop the gang, the driver asks every rank for its count, and the rank holds back its
    next call. The driver sends the greatest count to all ranks, and each rank's first call beyond it returns True.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._num_calls = 0
        self._is_held = False
        self._last_call: int | None = None
        self.has_fired = False
        """True once a call of `should_stop` has returned True on this rank."""

    def __call__(self) -> bool:
        """Count this call of `should_stop`, and return True if the rank has to stop."""
        # The call counts itself before it reads `_is_held`, so `hold` cannot miss a call that was let through. A call
        # that is held back is answered by its own number, whether `hold` counts it or not. A lock would double a
        # call's cost.
        self._num_calls += 1
        if not self._is_held:
            return False
        with self._lock:
            self._lock.wait_for(lambda: self._last_call is not None)
            self.has_fired = self._last_call is not None and self._num_calls > self._last_call
            return self.has_fired

    def hold(self) -> int:
        """Let later calls of `should_stop` wait for `release`. Return the number of calls, a waiting one included."""
        self._is_held = True
        return self._num_calls

    def release(self, last_call: int) -> None:
        """Answer waiting and later calls: False up to call number `last_call`, then True."""
        with self._lock:
            self._last_call, self._is_held = last_call, True  # held, so that the next call reads `_last_call`
            self._lock.notify_all()


class Link:
    """A rank's link to its driver. This base class serves processes outside a gang, which have no driver."""

    takes_results = False
    """True if a driver receives the files that `submit` sends."""
    worker_data: Any = None
    """`WorkerData` of the rank's Dask worker. None without a Dask worker."""

    def log(self, record: LogRecord) -> None:
        """Report a log record to the driver. Outside a gang, write it to the `logging` module's log."""
        logger.info("step %d: %s", record.step, ", ".join(f"{n}={v}" for n, v in record.metrics.items()))

    def submit(self, path: str, data: bytes) -> None:
        """Send a file to the driver, which writes it below its folder for results. Outside a gang, discard the file."""

    def results_folder(self) -> Any:
        """Return the folder of the task's results, or None outside the ranks of a `DaskDDP` or `SpawnDDP` task."""
        return None

    def spending(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Count the time of a `with` block under a field of `Goodput`, for example `evaluation`."""
        return contextlib.nullcontext()

    def adapt(self, text: str) -> None:
        """Tell the driver that the training adapts to a lack of memory, for rank 0 with the way as text."""


@dataclass(frozen=True)
class RankAttempt:
    """The present attempt of the gang: `current_rank().attempt`."""

    number: int = 0
    """Restarts of the gang so far."""
    num_after_memory: int = field(default=0, repr=False)
    link: Link = field(default_factory=Link, repr=False)

    @property
    def after_memory(self) -> int:
        """Restarts of the gang so far after a lack of memory.

        A training that reads this number, or calls `micro_batch`, restarts up to three times after lacks of memory,
        apart from `Gang(max_restarts=...)`.
        """
        self.link.adapt("")
        return self.num_after_memory


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
    """Saves and loads the training's checkpoints."""
    progress: Progress = field(default_factory=Progress, repr=False)
    link: Link = field(default_factory=Link, repr=False)
    stop_signal: StopSignal = field(default_factory=StopSignal, repr=False)
    attempt: RankAttempt = field(default_factory=RankAttempt, repr=False)
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

        Rank 0's metrics go to trackers, the progress display and the Deck. Every rank's metrics show the driver the
        rank's progress. Rank 0 sends its records within 0.2 s, other ranks within 1 s, or within n / 500 s in a gang of
        n > 500 ranks. A rank that is killed may lose its last records. The progress display shows `epoch`, `loss` and
        `samples_per_second` apart from other metrics.

        Args:
            metrics: Values by name: numbers and one-element tensors (read by `.item()`, which waits for the device).
                Rank 0's `Histogram` and `Picture` go to all trackers, other objects, such as `wandb.Image`, to Weights
                & Biases alone.
            step: Training step of the values. None: the number of earlier calls.
            num_steps: Total number of steps, for the progress bar. None: unknown.

        Raises:
            ValueError, TypeError, OverflowError, RuntimeError: `int` does not take `step` or `num_steps`.
        """
        record = LogRecord.of(self.rank, self._num_logged if step is None else step, num_steps, metrics)
        self._num_logged += 1
        if step is None:
            self.progress.move()
        else:
            self.progress.reach(record.step)
        self.link.log(record)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Count the time of a `with` block as evaluation in the gang's account of time (`Goodput.evaluation`)."""
        return self.link.spending("evaluation")

    def micro_batch(self, batch_size: int) -> tuple[int, int]:
        """Return the size of a micro batch and their number, to accumulate the gradients of this rank's batch.

        `(32, 1)` for 32 samples, after each restart for lack of memory half: `(16, 2)`, `(8, 4)`, `(4, 8)`.
        `batch.split(size)` gives that many parts. The last one may be smaller: 3, 3, 3 and 1 of 10 samples.

        Raises:
            ValueError: `batch_size` is not a whole number from 1 up.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"micro_batch({batch_size!r}): must be a whole number of samples, from 1 up")
        size = math.ceil(batch_size / 2**self.attempt.num_after_memory)
        count = math.ceil(batch_size / size)
        self.link.adapt(
            f"in attempt {self.attempt.number}: micro batches of {size}, {count} for a batch of {batch_size}"
        )
        return size, count

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
    attempt, link = replace(context.attempt, link=Link()), Link()
    return replace(
        context, checkpoint=Checkpoint(), progress=Progress(), link=link, stop_signal=StopSignal(), attempt=attempt
    )


def enter(context: RankContext) -> None:
    global _current
    _current = (os.getpid(), context)


_current: tuple[int, RankContext] = (os.getpid(), RankContext())
