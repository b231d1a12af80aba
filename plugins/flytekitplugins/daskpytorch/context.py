"""Who am I: the rank's view of its gang. Runs in a rank, and in any ordinary process as rank 0 of 1."""

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
"""Of a whole number that a float may hold."""
PLAIN = frozenset((int, float, bool, str))
"""What every process can read."""


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One call of `RankContext.log`: what observers hear of.

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
    """The rank that logged."""
    step: int
    """The step given, or the number of calls before this one."""
    num_steps: int | None
    """How many steps there will be, where the rank knows."""
    time: float
    """Seconds since the epoch, on the rank's clock."""
    metrics: Mapping[str, Any]
    """Names and values; plain numbers and strings where they can be made so."""

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are numbers, as floats."""
        return {name: _as_float(value) for name, value in self.metrics.items() if isinstance(value, (int, float))}

    @property
    def epoch(self) -> int | None:
        """The epoch that it says it belongs to, where that can be counted."""
        value = self.metrics.get("epoch")
        return int(value) if isinstance(value, (int, float)) and math.isfinite(_as_float(value)) else None

    @property
    def drawings(self) -> dict[str, Histogram | Picture]:
        """The metrics that are drawn."""
        return {name: value for name, value in self.metrics.items() if type(value) in (Histogram, Picture)}

    def sent(self) -> LogRecord:
        """What a driver that knows none of the user's classes can read: of rank 0 what is drawn, too."""
        if PLAIN.issuperset(map(type, self.metrics.values())):
            return self
        bare = self.bare()
        return replace(bare, metrics={**bare.metrics, **self.drawings}) if self.rank == 0 else bare

    def bare(self) -> LogRecord:
        """The same with only the numbers and texts."""
        values = {name: _bare(value) for name, value in self.metrics.items() if isinstance(value, (int, float, str))}
        return replace(self, metrics=values)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that is kept.

    Examples:
        The best, once the training is over:

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
    """The training step that the state belongs to."""
    metrics: Mapping[str, float]
    """What it was saved with."""
    size: int
    """In bytes."""
    place: str | None
    """Its file in storage, or its folder if it is sharded; a file may still be on its way there. None: there is no
    storage, and it lies on the driver's disk alone."""


class Checkpoint:
    """What a rank leaves for the next attempt of its gang: `current_rank().checkpoint`. Outside a gang nothing is kept.

    Examples:
        A gang that starts again, and the next attempt of a Flyte task, go on where the newest checkpoint was saved:

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
        """What is known of the state that `load` has returned last, or `load_sharded` as the best or by its step."""
        return None

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Keep `state` as the newest checkpoint; training goes on while it is written.

        Every rank may call this; rank 0's state is the one that is kept, so what differs between ranks (random
        generators, say) must be gathered into it. It is copied before the call returns, and may be changed then.

        Args:
            state: Anything that pickles: tensors on any device, in dictionaries, lists, dataclasses.
            step: The training step that the state belongs to.
            metrics: How good it is: names with numbers or one-element tensors. Rank 0's count, and by them
                `Gang(keep=Keep(best=..., metric=...))` keeps the best beside the last.

        Raises:
            TypeError: A metric is something else; or what `state` holds cannot be kept.
        """
        numbers(metrics)

    def load(self, *, best: bool = False, step: int | None = None) -> Any | None:
        """The state that this attempt of the gang starts from, the same on every rank; None on a fresh start.

        That is the newest state that was kept whole before the gang was started again, or by the attempt before; the
        best one only if it is the newest. Tensors arrive on the CPU.

        Another one is had by `best` or `step`, as at a training's end. Rank 0 must make such a call: it waits until
        what it has saved before is kept or lost, and decides. Others may make it, too; as many calls get the same.

        Args:
            best: The best that is kept, by the metric that `Gang(keep=Keep(best=..., metric=...))` names; None if none
                was saved with it.
            step: The one of this step.

        Raises:
            ValueError: The gang's `keep` does not say what is best.
            LookupError: No checkpoint of this step is kept.
            OSError: It did not arrive.
        """
        return None

    def save_sharded(self, state: dict[str, Any], step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Keep a state that is spread over the ranks as the newest checkpoint; each rank writes its own part.

        All ranks call this together. It returns when the state is copied to host memory; the parts go from there
        straight to storage (`Gang(checkpoint_uri=...)`) while the training goes on, and the checkpoint counts once all
        are there. One is written at a time: a newer one takes the place of one that still waits for its turn. In host
        memory there is room for two copies of this rank's part.

        What is no `DTensor` counts as the same on all ranks: one of them writes it.

        Args:
            state: What `torch.distributed.checkpoint.save` takes: a dictionary, nested as you like, of `DTensor`s,
                tensors, plain values and `Stateful` objects; such as
                `dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))` of
                `torch.distributed.checkpoint.state_dict`.
            step: The training step that the state belongs to, the same on all ranks.
            metrics: As for `save`.

        Raises:
            TypeError: Something in it is neither a dense tensor nor plain data (sparse, nested and quantized tensors,
                and tensors on the meta device, are refused by their keys), or a metric is no number.
            ValueError: The ranks save different steps, or their parts do not make up a whole.
        """
        numbers(metrics)

    def load_sharded(self, state: dict[str, Any], *, best: bool = False, step: int | None = None) -> int | None:
        """Fill a state with the newest one that `save_sharded` kept, at any number of ranks, each reading its own part.

        All ranks call this together. Tensors are filled in place; plain values are replaced in `state`, and `Stateful`
        objects take theirs. A model and an optimizer then take it with `set_state_dict` of
        `torch.distributed.checkpoint.state_dict`.

        Args:
            state: One with the same keys and shapes as that which was saved.
            best: Not the newest but the best that is kept, as for `load`; all saves before are waited for.
            step: Not the newest but the one of this step.

        Returns:
            The step it was saved at; None on a fresh start, which leaves `state` as it is.

        Raises:
            OSError: The storage does not answer, or what it holds is damaged and `state` has been changed.
            ValueError: `state` has other keys or shapes; or the gang's `keep` does not say what is best.
            LookupError: No checkpoint of this step is kept.
        """
        return None

    def list(self) -> Sequence[SavedCheckpoint]:
        """The checkpoints that are kept, of both kinds and by step, as far as this rank knows.

        Those that were there when this attempt of the gang started, and as it goes on all that are safe with the
        driver, of which every rank is told: what was saved a moment ago may be missing, and what the driver has removed
        since may still be named.
        """
        return ()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest state is written, or for `timeout` seconds."""


@dataclass
class Progress:
    """How far this rank has come; what tells a rank that is slow from one that hangs."""

    step: int | None = None
    """The newest step that was named, to `log` or to a checkpoint."""
    num_moves: int = 0
    """Signs of life altogether: optimizer steps, log records, checkpoints, results, looks at `should_stop`."""
    num_moves_since: int = 0
    """Those since that step was named."""

    def move(self) -> None:
        """Note a sign of life."""
        self.num_moves += 1
        self.num_moves_since += 1

    def reach(self, step: int, *, anew: bool = False) -> None:
        """Note that a named step has been reached; `anew`: count from here even if it was reached before."""
        self.num_moves += 1
        if anew or step != self.step:
            self.step, self.num_moves_since = step, 0


class StopSignal:
    """Turns true on every rank at the same call of `should_stop`.

    Ranks count their calls. When the gang is to stop, each says how many it has made and then holds the next one back
    until the greatest of these numbers has come round: the first call beyond it is true, everywhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._num_calls = 0
        self._is_held = False
        self._last_call: int | None = None
        self.has_fired = False
        """A call has returned True."""

    def __call__(self) -> bool:
        """Whether to stop now."""
        # Counted before it is looked whether calls are held, and without the lock, which costs a step as much as all
        # the rest: a call that finds them free has been counted by the time that `hold` reads the number. One that
        # finds them held may be in it or not, and is answered by its own number.
        self._num_calls += 1
        if not self._is_held:
            return False
        with self._lock:
            self._lock.wait_for(lambda: self._last_call is not None)
            self.has_fired = self._last_call is not None and self._num_calls > self._last_call
            return self.has_fired

    def hold(self) -> int:
        """Hold back the calls to come; the number of those made, perhaps with one that is held already."""
        self._is_held = True
        return self._num_calls

    def release(self, last_call: int) -> None:
        """Let calls through: false up to this one, true from the next."""
        with self._lock:
            self._last_call, self._is_held = last_call, True  # so that the next looks
            self._lock.notify_all()


class Link:
    """A rank's link to its driver. This class is the link of a process that no gang started: it has no driver."""

    takes_results = False
    """True if a driver takes what `submit` sends."""
    worker_data: Any = None
    """The rank's way to the data of its Dask worker (`WorkerData`); None without a Dask worker."""

    def log(self, record: LogRecord) -> None:
        """Report a log record."""
        logger.info("step %d: %s", record.step, ", ".join(f"{n}={v}" for n, v in record.metrics.items()))

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Have the trackers in rank 0 record the gradients of a model."""

    def submit(self, key: str, path: str, data: bytes) -> None:
        """Send a result, where a driver takes it.

        Args:
            key: That of the handler.
            path: Below the driver's prefix.
            data: The file's content.
        """

    def results_folder(self) -> Any:
        """Return the folder of the task's results; None outside the ranks of a `DaskDDP` or `SpawnDDP` task."""
        return None

    def spending(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Count the time in a `with` block as this part of the rank's work."""
        return contextlib.nullcontext()

    def goodput(self) -> Goodput:
        """Return where the gang's time has gone so far."""
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
    """0 … world_size - 1; rank 0's return value is the task's output."""
    local_rank: int = 0
    """0 … local_world_size - 1, among the ranks of one worker."""
    world_size: int = 1
    """The number of ranks in the gang."""
    local_world_size: int = 1
    """The number of ranks on this worker."""
    # Behind `device`: the rank's own GPU, where there is one.
    device_index: int = field(default=0, repr=False)
    checkpoint: Checkpoint = field(default_factory=Checkpoint, repr=False)
    """Saves and loads the training's state."""
    # What the hang detector looks at.
    progress: Progress = field(default_factory=Progress, repr=False)
    # Behind all that is reported or asked of the driver.
    link: Link = field(default_factory=Link, repr=False)
    # Behind `should_stop`.
    stop_signal: StopSignal = field(default_factory=StopSignal, repr=False)
    _num_logged: int = field(default=0, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The rank's own GPU, which is `cuda:0` unless `Gang(devices="all")` shows it others too; or `cpu`."""
        import torch  # late, so that a driver that only asks for its rank stays light

        return torch.device("cuda", self.device_index) if torch.cuda.is_available() else torch.device("cpu")

    def log(self, metrics: Mapping[str, Any], step: int | None = None, *, num_steps: int | None = None) -> None:
        """Report metrics, without waiting for anyone.

        Rank 0's values feed Weights & Biases, the live progress and the Deck; every rank's tell the driver how far it
        has come. Rank 0's go there within 0.2 s, those of others within a second (of more than 500 ranks, n, within
        n / 500 seconds): a rank that is killed or crashes may take the last ones with it, one that ends in any other
        way does not. The names `epoch`, `loss` and `samples_per_second` have their own places in the progress display.

        Args:
            metrics: Names and values. Numbers and one-element tensors (read with `.item()`, which waits for the
                device) go everywhere; rank 0's `Histogram` and `Picture` go to all trackers; other objects, such as
                `wandb.Image`, to Weights & Biases alone.
            step: The step the values belong to; by default the number of earlier calls.
            num_steps: How many steps there will be, for the length of the progress bar.

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

        What `wandb.watch` does, but of the gradients that the optimizer gets: those of all ranks, averaged by
        DistributedDataParallel. They go with the next call of `log`, as `gradients/<parameter>`.

        Args:
            model: Any module, also one wrapped in DistributedDataParallel. Every rank may call this; rank 0's counts.
            log_freq: Optimizer steps from one look at the gradients to the next.
        """
        self.link.watch(model, log_freq)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Have what is done in a `with` block count as evaluation where the gang's time has gone."""
        return self.link.spending("evaluation")

    def goodput(self) -> Goodput:
        """Where the gang's time has gone so far, as its driver has it; good as a task's output.

        Every rank may ask, and as many requests get the same. Outside a gang nobody counts, and all is 0.

        Raises:
            TimeoutError: The driver has not answered within the gang's `start_timeout`.
        """
        return self.link.goodput()

    def should_stop(self) -> bool:
        """Whether the gang is to save a checkpoint and return, because the task or a worker is being taken away.

        Call it once per step on every rank: it turns true on all of them at the same step. Costs a microsecond.
        """
        self.progress.move()
        return self.stop_signal()


def current_rank() -> RankContext:
    """The context of this rank; in a process that no gang started, rank 0 of 1.

    A process that a rank forked (a DataLoader worker, say) is not a rank: it gets a copy that reports nowhere.

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
    """Make `context` this process's own."""
    global _current
    _current = (os.getpid(), context)


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics of a checkpoint, as plain numbers.

    Raises:
        TypeError: They are none.
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
    """A one-element tensor, array or NumPy scalar as the Python number it holds; anything else as it is.

    Whole numbers that no float can hold become infinite: nobody could draw or even print them.
    """
    if type(value) in PLAIN and (type(value) is not int or value.bit_length() <= MAX_BITS):
        return value
    num_elements = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    if num_elements == 1 and hasattr(value, "item"):
        return value.item()
    return _as_float(value) if isinstance(value, int) and value.bit_length() > MAX_BITS else value


def _bare(value: float | str) -> float | str:
    """The number or text itself, also of an instance of a class of its own."""
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
