"""Events of a gang as JSON objects for machines, in place of the displays for people. Runs in the driver."""

import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from flytekitplugins.daskpytorch.display.run_state import RunState, View
from flytekitplugins.daskpytorch.display.terminal import Board, Display, ProgressDisplay
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process import streams
from flytekitplugins.daskpytorch.protocol import journal

LEVELS = {journal.Restarted: logging.WARNING, journal.Listed: logging.DEBUG}


def progress(
    name: str, key: str = "", *, is_plain: bool = False, unsaid: tuple[type[Exception], ...] = (Exception,)
) -> "ProgressDisplay | MachineLog":
    """Return the observer that shows a gang: JSON objects if `DASKPYTORCH_LOG=json`, else lines for people.

    Gangs that train at the same time share one board. Errors of the classes `unsaid` have no line of their own, by
    default none, since a task raises its error.
    """
    if streams.is_for_machines():
        return MachineLog(name)
    with _lock:
        if (other := next((each for each in _gangs if not each.is_over), None)) is not None:
            label = key or name.rpartition(".")[2]
            display = ProgressDisplay(other.board, label, f"{label}, ", unsaid=unsaid)
        else:
            display = ProgressDisplay(Board(is_plain=is_plain), name.rpartition(".")[2], unsaid=unsaid)
        _gangs.add(display)
    return display


def echo() -> View:
    return MachineLog() if streams.is_for_machines() else Display(Board(is_quiet=True))


class MachineLog(View):
    """Logs each event of a gang as a JSON object, with the gang's id and the attempt's number, from 0."""

    def __init__(self, name: str = "") -> None:
        self.state = RunState(name=name)

    def on_event(self, event: journal.Event) -> None:
        """Log an event, and a rank's output line by line. A line that is this package's own object keeps its fields."""
        match event:
            case journal.Wrote():
                for line in event.lines:
                    said = streams.object_in(line) or {"event": "output", "text": line}
                    level = logging.getLevelNamesMapping().get(str(said.pop("level", "")), logging.INFO)
                    streams.tell(str(said.pop("event")), {**said, **self._about(event.rank)}, level)
            case journal.Prompted() | journal.Accounted():  # the last account comes with the end
                pass
            case journal.Logged():
                self._log(event, logging.INFO if event.record.rank == 0 else logging.DEBUG, event.record.rank)
            case journal.Called() | journal.Ended():
                if isinstance(event, journal.Ended) and self.state.goodput is not None:
                    self._log(journal.Accounted(time=event.time, goodput=self.state.goodput))
                is_stop = event.end.error in ("", StoppedEarlyError.__name__)
                self._log(event, logging.INFO if is_stop else logging.ERROR)
            case journal.Used():
                self._log(event, logging.DEBUG, event.usage.rank)
            case _:
                self._log(event, LEVELS.get(type(event), logging.INFO))

    def say(self, text: str) -> None:
        self._log(journal.Noted(text=text))

    def conclude(self, how: str, places: Mapping[str, str], advice: str | None = None) -> None:
        streams.tell("concluded", {"text": how, "places": dict(places), "advice": advice, **self._about()})

    def _log(self, event: journal.Event, level: int = logging.INFO, rank: int | None = None) -> None:
        fields = journal.fields_of(event)
        streams.tell(fields.pop("event"), {**fields, **self._about(rank)}, level)

    def _about(self, rank: int | None = None) -> dict[str, Any]:
        state = self.state
        gang = state.training.id if state.training is not None else state.name
        about = {"gang": gang or None, "model": state.training and state.training.index, "attempt": state.attempt}
        hosts = state.shape.hosts if state.shape is not None else {}
        return about | ({} if rank is None else {"rank": rank, "host": hosts.get(rank)})


_lock = threading.Lock()
_gangs: weakref.WeakSet[ProgressDisplay] = weakref.WeakSet()
"""New gangs share the board of one that has not ended."""
