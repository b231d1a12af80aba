"""Events of a gang as JSON objects for machines, in place of the displays for people. Runs in the driver."""

import logging
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from flytekitplugins.daskpytorch.display.notebook import is_notebook
from flytekitplugins.daskpytorch.display.terminal import Board, Display, ProgressDisplay
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process import log
from flytekitplugins.daskpytorch.protocol.observer import GoodputObserver, Observer, Shape, Training
from flytekitplugins.daskpytorch.records import LogRecord


def progress(
    name: str, key: str = "", *, is_plain: bool = False, unsaid: tuple[type[Exception], ...] = (Exception,)
) -> "ProgressDisplay | MachineLog":
    """Return the observer that shows a gang: JSON objects if `DASKPYTORCH_LOG=json`, else lines for people.

    Gangs that train at the same time share one board. Lines of the second gang and of later ones begin with the key.

    Args:
        name: Name of the task, function or script. Two gangs may have the same name.
        key: Key of the gang, unique in this process. Empty: the name without its module.
        is_plain: True for plain lines instead of a live display.
        unsaid: Classes of errors without a line of their own. Default: all, since a task raises its error.
    """
    if log.is_for_machines():
        return MachineLog(name)
    with _lock:
        if (other := next((each for each in _gangs if not each.is_over), None)) is not None:
            label = key or name.rpartition(".")[2]
            display = ProgressDisplay(other.board, label, f"{label}, ", unsaid=unsaid)
        else:
            board = Board(is_plain=is_plain, is_quiet=is_notebook())  # a notebook's table has the metrics
            display = ProgressDisplay(board, name.rpartition(".")[2], unsaid=unsaid)
        _gangs.add(display)
    return display


def echo() -> Observer:
    """Return the observer that shows a gang of `dispatch.run` in a task: JSON objects, or notices and output only."""
    return MachineLog() if log.is_for_machines() else Display(Board(is_quiet=True))


class MachineLog(GoodputObserver):
    """Observer that logs each event of a gang as a JSON object, with the gang's id and the attempt's number, from 0."""

    def __init__(self, name: str = "") -> None:
        self._gang = name
        self._model: int | None = None
        self._attempt: int | None = None
        self._hosts: dict[int, str] = {}
        """Host names by rank."""

    def begins(self, training: Training) -> None:
        """Log the training's name and inputs, and keep its id for later events."""
        self._gang, self._model = training.id, training.index
        self._tell("begun", name=training.name, inputs=training.inputs)

    def resumed(self, step: int) -> None:
        """Log the step of the checkpoint that the gang resumes from."""
        self._tell("resumed", step=step)

    def placed(self, shape: Shape) -> None:
        """Log the gang's size, backend and hosts, and count the attempt."""
        self._attempt = 0 if self._attempt is None else self._attempt + 1
        placed = zip(shape.nodes, shape.places, strict=True)
        self._hosts = {place.rank: node.host for node, here in placed for place in here}
        hosts = [node.host for node in shape.nodes]
        self._tell("placed", world_size=shape.world_size, backend=shape.backend, hosts=hosts)

    def formed(self, seconds: float) -> None:
        """Log the seconds from the request for the gang until all ranks had joined the process group."""
        self._tell("formed", seconds=seconds)

    def calling(self, name: str) -> None:
        """Log the begin of a staying gang's call."""
        self._tell("calling", name=name)

    def called(self, name: str, error: Exception | None) -> None:
        """Log the end of a staying gang's call with its error, at level ERROR, or WARNING for an interrupt."""
        if error is None:
            self._tell("called", name=name)
        else:
            level = logging.WARNING if isinstance(error, CancelledError) else logging.ERROR
            self._tell("called", level, name=name, text=str(error), error=type(error).__name__)

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Log each line of a rank's output. A line that is this package's own JSON object keeps its fields."""
        for line in lines:
            said = log.object_in(line) or {"event": "output", "text": line}
            level = logging.getLevelNamesMapping().get(str(said.pop("level", "")), logging.INFO)
            log.tell(str(said.pop("event")), {**said, **self._about(rank)}, level)

    def logged(self, record: LogRecord) -> None:
        """Log a record's metrics, at level INFO for rank 0 and DEBUG for other ranks."""
        level = logging.INFO if record.rank == 0 else logging.DEBUG
        self._tell(
            "metrics",
            level,
            rank=record.rank,
            step=record.step,
            num_steps=record.num_steps,
            metrics=record.bare().metrics,
        )

    def kept(self, step: int) -> None:
        """Log the step of a committed checkpoint."""
        self._tell("checkpoint", step=step)

    def restarting(self, reason: str, step: int | None) -> None:
        """Log the reason for a restart and the step of its checkpoint, at level WARNING."""
        self._tell("restarting", logging.WARNING, text=reason, step=step)

    def noted(self, text: str) -> None:
        """Log a notice."""
        self._tell("note", text=text)

    def say(self, text: str) -> None:
        """Log a notice of the task itself."""
        self.noted(text)

    def ended(self, error: Exception | None) -> None:
        """Log the account of the gang's time, and the gang's end with its error, at level ERROR for a failure."""
        if self.goodput is not None:
            log.tell("goodput", {**self.goodput.as_dict(), **self._about(None)})
        if error is None or isinstance(error, StoppedEarlyError):
            self._tell("ended", text="" if error is None else str(error))
        else:
            self._tell("ended", logging.ERROR, text=str(error), error=type(error).__name__)

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        """Log how the task has ended, the advice for the user, and the addresses of outputs and tracker runs."""
        self._tell("concluded", text=how, places=dict(places), advice=advice)

    def _tell(self, event: str, level: int = logging.INFO, rank: int | None = None, **fields: Any) -> None:
        log.tell(event, {**fields, **self._about(rank)}, level)

    def _about(self, rank: int | None) -> dict[str, Any]:
        about = {"gang": self._gang or None, "model": self._model, "attempt": self._attempt, "rank": rank}
        return about | ({"host": self._hosts[rank]} if rank in self._hosts else {})


_lock = threading.Lock()
_gangs: weakref.WeakSet[ProgressDisplay] = weakref.WeakSet()
"""Displays of this process's gangs, whose board new gangs share until they have ended."""
