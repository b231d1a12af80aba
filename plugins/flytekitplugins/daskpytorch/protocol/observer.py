"""Those who watch a gang without taking part: displays, trackers, your own. Runs in the driver and in rank 0."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.documented import documented
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput, RankUsage
from flytekitplugins.daskpytorch.protocol.code import pack_call, unpack_call
from flytekitplugins.daskpytorch.protocol.placement import Node, Place

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


@documented
@dataclass(frozen=True, kw_only=True)
class Shape:
    """A gang as it was formed: what `Observer.placed` is told.

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
    """The task's, or the function's."""
    backend: str
    """The process group's, `gloo` or `nccl`."""
    nodes: list[Node]
    """The Dask workers, or the task's own node; each with the name of its host."""
    places: list[list[Place]]
    """For each node its ranks."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(here) for here in self.places)


@documented
@dataclass(frozen=True, kw_only=True)
class Training:
    """What a gang is there for, and by which name a tracker finds it again: what `Observer.begins` is told.

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
    """The task's, or the function's."""
    id: str
    """Names it among all trainings, alike in each attempt of its Flyte task; in no execution of Flyte it is random. Of
    the characters A-Z, a-z, 0-9, '_', '.' and '-'."""
    group: str | None = None
    """What all models of one `dispatch.map` share, written as `id` is."""
    index: int | None = None
    """Which of these models it is."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The task's inputs, the function's arguments or the model's experiment: numbers, texts and truth values; nothing
    that is named like a secret."""
    link: str | None = None
    """The execution in Flyte's console."""


class RankObserver:
    """Hears of what happens in rank 0, there. Every method may be left as it is; none should take its time.

    An error of its own costs a line in the log, and it is not called any more; the training goes on.

    Examples:
        What the driver never sees, such as a tensor, is there:

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
        """The rank's function is about to be called, and waits for this."""

    def logged(self, record: LogRecord) -> None:
        """The rank called `log`; the metrics are as it gave them, histograms and pictures among them."""

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """The rank called `watch`."""

    def noted(self, text: str) -> None:
        """Something happened that a user should read."""

    def accounted(self, goodput: Goodput) -> None:
        """Where the gang's time has gone, as its driver has it; once, after all ranks' functions have returned."""

    def close(self, exit_code: int, stopped_early: str | None = None) -> None:
        """The rank ends: with 0 after its function has returned, else with 1. May be called twice; the first counts.

        There are 75 seconds for it after a training that went well; after one that did not half the gang's grace
        period, 10 of 20 seconds, and a twentieth of it, one second, where the gang starts again.

        Args:
            exit_code: As of a process.
            stopped_early: Why a training that did not fail was ended.
        """


class Observer:
    """Hears of what happens in a gang, in the driver, on the gang's own thread. Every method may be left as it is.

    An error of its own costs a line in the log, and it is not called any more; the training goes on. Only that `logged`
    raises a `StoppedEarlyError`, once, ends the gang.

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
        """The gang is asked for; called before all else, and once, however often the gang starts again."""

    def places(self) -> Mapping[str, str]:
        """Where to find what it records: what it is, and its place. Asked while a task runs, and at its end."""
        return {}

    def placed(self, shape: Shape) -> None:
        """The agents are there and the ranks are being started; called again when the gang starts again."""

    def for_rank(self) -> Callable[[], RankObserver] | None:
        """What makes its part in rank 0; called after `placed`, and travels pickled. None: it has none there."""
        return None

    def resumed(self, step: int) -> None:
        """The gang starts from the checkpoint of this step, of an attempt before; called before `placed`."""

    def formed(self, seconds: float) -> None:
        """All ranks have met, this long after the gang was asked for."""

    def wrote(self, rank: int, lines: list[str]) -> None:
        """A rank wrote lines to its output."""

    def logged(self, record: LogRecord) -> None:
        """A rank called `log`."""

    def kept(self, step: int) -> None:
        """A checkpoint of this step is safe: with the driver, or, where each rank has written its part, in storage."""

    def keeps(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
        """These checkpoints are kept now, all in all; called after `resumed` and `kept`."""

    def used(self, usage: RankUsage) -> None:
        """What a rank has used, and done so far; of each rank at most every two seconds."""

    def accounted(self, goodput: Goodput) -> None:
        """Where the gang's time has gone so far; at most every two seconds, and a last time just before `ended`."""

    def debugging(self, rank: int | None) -> None:
        """A rank's debugger talks to the user in the terminal; None: it has left it, perhaps for a moment."""

    def restarting(self, reason: str, step: int | None) -> None:
        """The gang starts again, after this, from the checkpoint of that step; None: from the beginning."""

    def noted(self, text: str) -> None:
        """Something happened that a user should read."""

    def ended(self, error: Exception | None) -> None:
        """All ranks are gone."""


class Observers:
    """Those of one gang, or of its rank 0, none of whom may harm it: one that fails is left out from then on."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers: list[Any] = list(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, method: str, *args: object) -> StoppedEarlyError | None:
        """Call a method of all; the first wish of one of them to end the gang."""
        wish: StoppedEarlyError | None = None
        for observer in self._observers:
            with self._left_out_if_failing(observer, f"{type(observer).__name__}.{method}"):
                try:
                    getattr(observer, method)(*args)
                except StoppedEarlyError as error:
                    wish = wish or error
        return wish

    def for_rank(self) -> list[bytes]:
        """What makes their parts in rank 0, pickled."""
        parts = []
        for observer in self._observers:
            with self._left_out_if_failing(observer, f"{type(observer).__name__}.for_rank"):
                if (make := observer.for_rank()) is not None:
                    parts.append(pack_call(make, (), {}))
        return parts

    def open(self, parts: Iterable[bytes]) -> None:
        """Have these take part, in rank 0."""
        for part in parts:
            with self._left_out_if_failing(part, "what an observer has in rank 0"):
                self._observers.append(unpack_call(part).function())

    @contextlib.contextmanager
    def _left_out_if_failing(self, observer: object, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a display or a user's own code raises
            self._observers = [other for other in self._observers if other is not observer]
            text = f"{what} failed ({type(error).__name__}: {error}) and is not called any more"
            logger.warning("%s; the training goes on", text, exc_info=error)
            self.tell("noted", text)
