"""Events of a gang as JSON objects for machines, in place of the displays for people. Runs in the driver."""

import logging
from collections.abc import Mapping
from typing import Any

from flytekitplugins.daskpytorch.display.terminal import Board, Display, ProgressDisplay
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process import log
from flytekitplugins.daskpytorch.protocol.observer import Observer, Shape, Training
from flytekitplugins.daskpytorch.records import Goodput, LogRecord


def progress(name: str, *, is_plain: bool = False) -> "ProgressDisplay | MachineLog":
    """Return the display of a task.

    Args:
        name: Name of the task.
        is_plain: True for plain lines instead of a live display.
    """
    return MachineLog(name) if log.is_for_machines() else ProgressDisplay(Board(is_plain=is_plain), name)


def echo() -> Observer:
    """Return the display of `dispatch.run`."""
    return MachineLog() if log.is_for_machines() else Display(Board(is_quiet=True))


class MachineLog(Observer):
    """Writes each event of one gang, with the gang's id and the number of the attempt, from 0."""

    def __init__(self, name: str = "") -> None:
        self._gang = name
        self._model: int | None = None
        self._attempt: int | None = None
        self._hosts: dict[int, str] = {}
        """Host names by rank."""
        self._goodput: Goodput | None = None

    def begins(self, training: Training) -> None:
        """Write the training's name and inputs, and keep its id for later events."""
        self._gang, self._model = training.id, training.index
        self._tell("begun", name=training.name, inputs=training.inputs)

    def resumed(self, step: int) -> None:
        """Write the step of the checkpoint that the gang resumes from."""
        self._tell("resumed", step=step)

    def placed(self, shape: Shape) -> None:
        """Write the gang's size, backend and hosts, and count the attempt."""
        self._attempt = 0 if self._attempt is None else self._attempt + 1
        placed = zip(shape.nodes, shape.places, strict=True)
        self._hosts = {place.rank: node.host for node, here in placed for place in here}
        hosts = [node.host for node in shape.nodes]
        self._tell("placed", world_size=shape.world_size, backend=shape.backend, hosts=hosts)

    def formed(self, seconds: float) -> None:
        """Write the seconds until all ranks met."""
        self._tell("formed", seconds=seconds)

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Write a rank's output, a log record in the output with its own fields."""
        for line in lines:
            said = log.object_in(line) or {"event": "output", "text": line}
            level = logging.getLevelNamesMapping().get(str(said.pop("level", "")), logging.INFO)
            log.tell(str(said.pop("event")), {**said, **self._about(rank)}, level)

    def logged(self, record: LogRecord) -> None:
        """Write a rank's record, at the level DEBUG for ranks other than 0."""
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
        """Write the step of a committed checkpoint."""
        self._tell("checkpoint", step=step)

    def restarting(self, reason: str, step: int | None) -> None:
        """Write the reason and the step of a restart, at the level WARNING."""
        self._tell("restarting", logging.WARNING, text=reason, step=step)

    def noted(self, text: str) -> None:
        """Write a notice."""
        self._tell("note", text=text)

    def say(self, text: str) -> None:
        """Write a notice of the task itself."""
        self.noted(text)

    def accounted(self, goodput: Goodput) -> None:
        """Keep the newest account of the gang's time for the end."""
        self._goodput = goodput

    def ended(self, error: Exception | None) -> None:
        """Write the account of the gang's time, and the end with its error."""
        if self._goodput is not None:
            log.tell("goodput", {**self._goodput.as_dict(), **self._about(None)})
        if error is None or isinstance(error, StoppedEarlyError):
            self._tell("ended", text="" if error is None else str(error))
        else:
            self._tell("ended", logging.ERROR, text=str(error), error=type(error).__name__)

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        """Write how the task has ended, the advice, and the addresses of outputs and runs."""
        self._tell("concluded", text=how, places=dict(places), advice=advice)

    def _tell(self, event: str, level: int = logging.INFO, rank: int | None = None, **fields: Any) -> None:
        log.tell(event, {**fields, **self._about(rank)}, level)

    def _about(self, rank: int | None) -> dict[str, Any]:
        about = {"gang": self._gang or None, "model": self._model, "attempt": self._attempt, "rank": rank}
        return about | ({"host": self._hosts[rank]} if rank in self._hosts else {})
