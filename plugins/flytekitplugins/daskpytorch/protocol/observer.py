"""The interface of observers: displays, trackers and the user's own. Runs in the driver and in rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.function import pack_call, unpack_call
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage, SavedCheckpoint

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)
HINT_END = "(A hint, given once; Gang(hints=False) for none.)"
"""End of each hint's text, by which the Deck finds hints among the notes."""
NOTICE_INTERVAL = 10.0
"""Minimum number of seconds between two reminders to the user that the gang waits."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ranks of a gang and their places, as `Observer.placed` receives them.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, Observer, Shape, dispatch
        >>> class Machines(Observer):
        ...     def placed(self, shape: Shape) -> None:
        ...         print(f"{shape.world_size} ranks on {len(shape.nodes)} nodes, by {shape.backend}")
        >>> def train() -> None:
        ...     pass
        >>> done = dispatch.run(client, train, backend="gloo", gang=Gang(observers=(Machines,))).result()
        2 ranks on 2 nodes, by gloo
    """

    name: str
    """Name of the task, or of the function."""
    backend: str
    """Backend of the process group, `gloo` or `nccl`."""
    nodes: list[Node]
    """The Dask workers, or the task's own node, each with the name of its host."""
    places: list[list[Place]]
    """The ranks of each node, in the order of `nodes`."""
    log_folder: str | None = None
    """Folder of the gang's log files, on the machine of each rank. None without `Gang(log_dir=...)`."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(here) for here in self.places)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The name, id and inputs of a training, as `Observer.begins` receives them. Trackers find a run again by the id.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, Observer, Training, dispatch
        >>> class Titles(Observer):
        ...     def begins(self, training: Training) -> None:
        ...         print(training.name, dict(training.inputs))
        >>> def train(epochs: int) -> None:
        ...     pass
        >>> done = dispatch.run(client, train, epochs=3, gang=Gang(observers=(Titles,))).result()
        train {'epochs': 3}
    """

    name: str
    """Name of the task, or of the function."""
    id: str
    """Unique name of the training, the same in each attempt of its Flyte task. Random outside of Flyte's executions.
    Consists of the characters A-Z, a-z, 0-9, '_', '.' and '-'."""
    group: str | None = None
    """Name that all models of one sweep (`dispatch.map`) share, with the same characters as `id`. None outside of a
    sweep."""
    index: int | None = None
    """Index of the model in its sweep (`dispatch.map`), from 0. None outside of a sweep."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The task's inputs, or the arguments of the function of `dispatch`, as numbers, strings, booleans and None.
    A dataclass is replaced by its fields, and a long collection by its length, as `num_<name>`. Other values become
    strings. `(hidden)` replaces a value whose name suggests a secret, such as `api_key`."""
    link: str | None = None
    """URL of the training's Flyte execution in Flyte's console. None if unknown, as outside of Flyte."""


class RankObserver:
    """An observer inside rank 0. Override any of the methods. The rank waits until each method returns.

    An exception in a method is logged. The observer is then not called any more, and the training goes on.

    Examples:
        A rank observer receives values that the driver never sees, such as tensors:

        >>> import tempfile, torch
        >>> from flytekitplugins.daskpytorch import (
        ...     Gang, LogRecord, Observer, RankObserver, current_rank, dispatch
        ... )
        >>> file = tempfile.mkdtemp() + "/newest.pt"
        >>> class Weights(RankObserver):
        ...     def logged(self, record: LogRecord) -> None:
        ...         self.newest = record.metrics["weight"].clone()
        ...
        ...     def close(self, exit_code: int, stopped_early: str | None = None) -> None:
        ...         torch.save(self.newest, file)
        >>> class KeepsWeights(Observer):
        ...     def for_rank(self) -> type[Weights]:
        ...         return Weights
        >>> def train() -> None:
        ...     for step in range(3):
        ...         current_rank().log({"weight": torch.full((2,), float(step))}, step=step)
        >>> done = dispatch.run(client, train, gang=Gang(observers=(KeepsWeights,))).result()
        >>> torch.load(file)
        tensor([2., 2.])
    """

    def begins(self) -> None:
        """Called before rank 0 calls the user's function. The function starts after the return."""

    def logged(self, record: LogRecord) -> None:
        """Called after rank 0 called `log`. The record has the metrics as given, histograms and pictures included.

        Also called with the metrics of each evaluation of `Gang(evaluate=...)`, then from another thread.
        """

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Called after rank 0 called `watch` to record a model's gradients every `log_freq` steps."""

    def noted(self, text: str) -> None:
        """Called with a line that a user should read."""

    def accounted(self, goodput: Goodput) -> None:
        """Called once with the account of the gang's time, when all ranks' functions have returned."""

    def close(self, exit_code: int, stopped_early: str | None = None) -> None:
        """Called at the end of rank 0. A second call must have no effect.

        The time limit is 75 seconds after a successful training. After a failure that ends the gang, the limit is half
        the gang's grace period, by default 10 seconds. Before a restart the limit is one second, or less with a grace
        period below 15 seconds.

        Args:
            exit_code: 0 if the training is complete, or was stopped early without a failure. Else 1.
            stopped_early: The reason why a training was stopped without a failure. None otherwise.
        """


class Observer:
    """An observer in the driver, called on the gang's own thread. Override any of the methods.

    An exception in a method is logged. The observer is then not called any more, and the training goes on. Only a
    `StoppedEarlyError` from `logged` ends the gang.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, LogRecord, Observer, current_rank, dispatch
        >>> class Lowest(Observer):
        ...     loss = float("inf")
        ...
        ...     def logged(self, record: LogRecord) -> None:
        ...         self.loss = min(self.loss, record.numbers["loss"])
        ...
        ...     def ended(self, error: Exception | None) -> None:
        ...         print(f"lowest loss: {self.loss}, error: {error}")
        >>> def train() -> None:
        ...     for step in range(4):
        ...         current_rank().log({"loss": 1 / (step + 1)}, step=step)
        >>> done = dispatch.run(client, train, gang=Gang(observers=(Lowest,))).result()
        lowest loss: 0.25, error: None
    """

    def begins(self, training: Training) -> None:
        """Called once, before all other methods. Restarts do not repeat the call."""

    def places(self) -> Mapping[str, str]:
        """Return links to the observer's records, such as a tracker's run: name -> URL.

        Called while a Flyte task runs, and at the task's end.
        """
        return {}

    def placed(self, shape: Shape) -> None:
        """Called when all agents have connected and the ranks start; called again at each restart."""

    def for_rank(self) -> Callable[[], RankObserver] | None:
        """Return a picklable factory of this observer's `RankObserver` for rank 0. None: rank 0 gets no observer.

        Called after `placed`.
        """
        return None

    def resumed(self, step: int) -> None:
        """Called before `placed` with a checkpoint's step, if the gang starts from an earlier attempt's checkpoint."""

    def formed(self, seconds: float) -> None:
        """Called when all ranks have joined the process group, with the seconds that this took.

        The seconds count from the call that asked for the gang. After a restart, they count from the attempt's start.
        """

    def calling(self, name: str) -> None:
        """Called when the ranks of a gang that stays begin a call, with the function's name."""

    def called(self, name: str, error: Exception | None) -> None:
        """Called when a call of a gang that stays has ended in all ranks, with its error. None: all have returned.

        The error is a `concurrent.futures.CancelledError` after Ctrl-C or `cancel`.
        """

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Called with the lines that a rank wrote to its standard output and error."""

    def logged(self, record: LogRecord) -> None:
        """Called after a rank called `log`, and with the metrics of each evaluation of `Gang(evaluate=...)`."""

    def kept(self, step: int) -> None:
        """Called when the checkpoint of this step is safe: on the driver's disk, or in storage if it is sharded."""

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """Called after `resumed`, `kept` and evaluations, and at the end, with all checkpoints that the gang keeps."""

    def used(self, usage: RankUsage) -> None:
        """Called with a rank's use of its machine and its work so far, at most every two seconds for each rank."""

    def accounted(self, goodput: Goodput) -> None:
        """Called with the gang's time account so far, at most every two seconds, and a last time before `ended`."""

    def debugging(self, rank: int | None) -> None:
        """Called with a rank whose debugger takes the terminal, or None when the debugger gives the terminal back."""

    def failed(self, kind: str) -> None:
        """Called before `restarting` after a failure, with its kind as in `GangError.kind`."""

    def restarting(self, reason: str, step: int | None) -> None:
        """Called at a restart, with the reason and the checkpoint's step. None: the gang starts from the beginning."""

    def noted(self, text: str) -> None:
        """Called with a line that a user should read."""

    def ended(self, error: Exception | None) -> None:
        """Called when all ranks are gone, with None if all ranks' functions have returned.

        Otherwise the argument is the error that ended the gang. The error need not be a failure: it may be a
        `StoppedEarlyError`, a `GangCancelledError` or a `PreemptedError`.
        """


class GoodputObserver(Observer):
    """Base of this package's observers that read the account of the gang's time later."""

    goodput: Goodput | None = None
    """Newest account of the gang's time. None before the first account."""

    def accounted(self, goodput: Goodput) -> None:
        """Keep the account."""
        self.goodput = goodput


class Observers:
    """The observers of one gang, or of its rank 0. An observer that fails is left out from then on."""

    stopped_early: StoppedEarlyError | None = None
    """First request of an observer to stop the gang early. None: no request."""

    def __init__(
        self,
        observers: Iterable[Observer] = (),
        *,
        name: str = "",
        hints: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with these observers. In rank 0, `open` adds more.

        Args:
            observers: The gang's observers.
            name: Name of the gang's function or task, with which each note to the user begins.
            hints: True if the user gets hints about calls that the code seems to lack.
            clock: Returns seconds, and never goes back.
        """
        self._observers: list[Any] = list(observers)
        self._name = name.rpartition(".")[2]
        self._hints = hints
        self._hints_given: set[str] = set()
        self._now = clock
        self._noticed_at = clock()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, method: str, *args: object) -> None:
        """Call a method of all observers. The first `StoppedEarlyError` that one raises becomes `stopped_early`."""
        for observer in self._observers:
            try:
                getattr(observer, method)(*args)
            except StoppedEarlyError as error:
                self.stopped_early = self.stopped_early or error
            except Exception as error:
                self._leave_out(observer, f"{type(observer).__name__}.{method}", error)

    def note(self, text: str) -> None:
        """Send observers a line about an event of the gang."""
        self.tell("noted", f"{self._name}: {text}")

    def remind(self, text: str) -> None:
        """Send observers a line about the gang's wait, at most every 10 seconds (`NOTICE_INTERVAL`)."""
        if self._now() - self._noticed_at >= NOTICE_INTERVAL:
            self._noticed_at = self._now()
            self.note(text)

    def hint(self, kind: str, text: str) -> None:
        """Send observers a hint for the user, once for each kind, unless `Gang(hints=False)`."""
        if self._hints and kind not in self._hints_given:
            self._hints_given.add(kind)
            self.note(f"{text} {HINT_END}")

    def for_rank(self) -> list[bytes]:
        """Return the pickled factories of the driver's observers for their `RankObserver` in rank 0."""
        parts = []
        for observer in self._observers:
            try:
                if (make := observer.for_rank()) is not None:
                    parts.append(pack_call(make, (), {}))
            except Exception as error:
                self._leave_out(observer, f"{type(observer).__name__}.for_rank", error)
        return parts

    def open(self, parts: Iterable[bytes]) -> None:
        """Add the observers that these pickled factories make. Called in rank 0."""
        for part in parts:
            try:
                self._observers.append(unpack_call(part).function())
            except Exception as error:
                self._leave_out(part, "what an observer has in rank 0", error)

    def _leave_out(self, observer: object, what: str, error: Exception) -> None:
        """Call an observer no more, after an error of a display or of a user's own code."""
        self._observers = [other for other in self._observers if other is not observer]
        text = f"{what} failed ({type(error).__name__}: {error}) and is not called any more"
        logger.warning("%s; the training goes on", text, exc_info=error)
        self.tell("noted", text)
