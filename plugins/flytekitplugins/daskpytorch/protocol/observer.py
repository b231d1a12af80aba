"""The interface of observers: displays, trackers and the user's own. Runs in the driver and in rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.function import pack_call, unpack_call
from flytekitplugins.daskpytorch.protocol.journal import Shape, Training
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage

logger = logging.getLogger(__name__)
NOTICE_INTERVAL = 10.0
"""Seconds between two reminders to the user that the gang waits."""


METHODS: Mapping[type[journal.Event], tuple[str, tuple[str, ...]]] = {
    journal.Began: ("on_begin", ("training",)),
    journal.Placed: ("on_start", ("shape",)),
    journal.Formed: ("on_formed", ("seconds",)),
    journal.Logged: ("on_log", ("record",)),
    journal.Checkpointed: ("on_checkpoint", ("step",)),
    journal.Restarted: ("on_restart", ("reason", "step")),
    journal.Used: ("on_usage", ("usage",)),
    journal.Accounted: ("on_goodput", ("goodput",)),
    journal.Noted: ("on_note", ("line",)),
    journal.Ended: ("on_end", ("error",)),
}


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
        ...     def on_log(self, record: LogRecord) -> None:
        ...         self.newest = record.metrics["weight"].clone()
        ...
        ...     def on_end(self, exit_code: int, stopped_early: str | None = None) -> None:
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

    def on_begin(self) -> None:
        """Called before rank 0 calls the user's function. The function starts after the return."""

    def on_log(self, record: LogRecord) -> None:
        """Called after rank 0 called `log`. The record has the metrics as given, histograms and pictures included.

        Also called with the metrics of each evaluation of `Gang(evaluate=...)`, then from another thread.
        """

    def on_goodput(self, goodput: Goodput) -> None:
        """Called once with the account of the gang's time, when all ranks' functions have returned."""

    def on_end(self, exit_code: int, stopped_early: str | None = None) -> None:
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
    `StoppedEarlyError` from `on_log` ends the gang.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, LogRecord, Observer, current_rank, dispatch
        >>> class Lowest(Observer):
        ...     loss = float("inf")
        ...
        ...     def on_log(self, record: LogRecord) -> None:
        ...         self.loss = min(self.loss, record.numbers["loss"])
        ...
        ...     def on_end(self, error: Exception | None) -> None:
        ...         print(f"lowest loss: {self.loss}, error: {error}")
        >>> def train() -> None:
        ...     for step in range(4):
        ...         current_rank().log({"loss": 1 / (step + 1)}, step=step)
        >>> done = dispatch.run(client, train, gang=Gang(observers=(Lowest,))).result()
        lowest loss: 0.25, error: None
    """

    def on_event(self, event: journal.Event) -> None:
        """Called with every event of the gang: all that `flytekitplugins.daskpytorch.protocol.journal` lists.

        By default, calls the method below that fits the event. An event without such a method is ignored.
        """
        method, fields = METHODS.get(type(event), ("", ()))
        if method:
            getattr(self, method)(*(getattr(event, name) for name in fields))

    def on_begin(self, training: Training) -> None:
        """Called once, before all other methods. Restarts do not repeat the call."""

    def on_start(self, shape: Shape) -> None:
        """Called when all agents have connected and the ranks start; called again at each restart."""

    def on_formed(self, seconds: float) -> None:
        """Called when all ranks have joined the process group, with the seconds that this took.

        The seconds count from the call that asked for the gang. After a restart, they count from the attempt's start.
        """

    def on_log(self, record: LogRecord) -> None:
        """Called after a rank called `log`, and with the metrics of each evaluation of `Gang(evaluate=...)`."""

    def on_checkpoint(self, step: int) -> None:
        """Called when the checkpoint of this step is safe: on the driver's disk, or in storage if it is sharded."""

    def on_restart(self, reason: str, step: int | None) -> None:
        """Called at a restart, with the reason and the checkpoint's step. None: the gang starts from the beginning."""

    def on_usage(self, usage: RankUsage) -> None:
        """Called with a rank's use of its machine and its work so far, at most every two seconds for each rank."""

    def on_goodput(self, goodput: Goodput) -> None:
        """Called with the gang's time account so far, at most every two seconds, and a last time before `on_end`."""

    def on_note(self, text: str) -> None:
        """Called with a line that a user should read."""

    def on_end(self, error: Exception | None) -> None:
        """Called when all ranks are gone, with None if all ranks' functions have returned.

        Otherwise the argument is the error that ended the gang. The error need not be a failure: it may be a
        `StoppedEarlyError`, a `GangCancelledError` or a `PreemptedError`.
        """

    def places(self) -> Mapping[str, str]:
        """Return links to the observer's records, such as a tracker's run: name -> URL.

        Called while a Flyte task runs, and at the task's end.
        """
        return {}

    def for_rank(self) -> Callable[[], RankObserver] | None:
        """Return a picklable factory of this observer's `RankObserver` for rank 0. None: rank 0 gets no observer.

        Called after `on_start`.
        """
        return None


class _Called:
    """Observers that are called together. One that fails is left out from then on."""

    stopped_early: StoppedEarlyError | None = None

    def __init__(self, observers: Iterable[object] = ()) -> None:
        self._observers: list[Any] = list(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def call(self, method: str, *args: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, method)(*args)
            except StoppedEarlyError as error:
                self.stopped_early = self.stopped_early or error
            except Exception as error:
                self._leave_out(observer, f"{type(observer).__name__}.{method}", error)

    def _leave_out(self, observer: object, what: str, error: Exception) -> None:
        self._observers = [other for other in self._observers if other is not observer]
        self._say(f"{what} failed ({type(error).__name__}: {error}) and is not called any more", error)

    def _say(self, text: str, error: Exception) -> None:
        logger.warning("%s; the training goes on", text, exc_info=error)


class RankObservers(_Called):
    def open(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            try:
                self._observers.append(unpack_call(part)())
            except Exception as error:
                self._leave_out(part, "what an observer has in rank 0", error)


class Observers(_Called):
    def __init__(
        self, observers: Iterable[Observer] = (), *, name: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(observers)
        self._name = name.rpartition(".")[2]
        self._now = clock
        self._noticed_at = clock()

    def tell(self, event: journal.Event) -> None:
        self.call("on_event", event)

    def note(self, text: str) -> None:
        self.tell(journal.Noted(text=text, gang=self._name))

    def remind(self, text: str) -> None:
        if self._now() - self._noticed_at >= NOTICE_INTERVAL:
            self._noticed_at = self._now()
            self.note(text)

    def for_rank(self) -> list[bytes]:
        parts = []
        for observer in self._observers:
            try:
                if (make := observer.for_rank()) is not None:
                    parts.append(pack_call(make, (), {}))
            except Exception as error:
                self._leave_out(observer, f"{type(observer).__name__}.for_rank", error)
        return parts

    def _say(self, text: str, error: Exception) -> None:
        super()._say(text, error)
        self.tell(journal.Noted(text=text))
