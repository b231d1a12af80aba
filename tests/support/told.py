"""Arguments of observers' methods: a gang's shape, log records and usages, with defaults."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flytekitplugins.daskpytorch.display.run_state import View
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.journal import Shape
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage


def record(step: int = 0, rank: int = 0, num_steps: int | None = None, time: float = 0.0, **metrics: Any) -> LogRecord:
    return LogRecord(rank=rank, step=step, num_steps=num_steps, time=time, metrics=metrics)


def usage(rank: int, time: float = 0.0, num_steps: int = 0, **changes: Any) -> RankUsage:
    seconds = {"stepping": 1.5, "data": 0.25}
    given = {"seconds": seconds, "cpu": 2.0, "memory": 3 << 30, "gpu_memory": None, "gpu_utilization": None} | changes
    return RankUsage(rank=rank, time=time, num_steps=num_steps, **given)


def node(worker: str = "w", host: str = "h", **changes: Any) -> Node:
    usual = {"num_cores": 8, "gpus": (), "gpu_names": (), "interface": None, "versions": {}}
    return Node(worker=worker, host=host, **usual | changes)


def shape_of(*nodes: Node, per_worker: int = 1) -> Shape:
    return Shape(name="flows.train", backend="gloo", nodes=[*nodes], places=place_ranks(nodes, per_worker))


EVENTS: dict[str, tuple[Any, ...]] = {
    "begins": (journal.Began, "training"),
    "resumed": (journal.Resumed, "step"),
    "placed": (journal.Placed, "shape"),
    "formed": (journal.Formed, "seconds"),
    "calling": (journal.Calling, "name"),
    "wrote": (journal.Wrote, "rank", "lines"),
    "logged": (journal.Logged, "record"),
    "kept": (journal.Checkpointed, "step"),
    "keeps": (journal.Listed, "checkpoints"),
    "used": (journal.Used, "usage"),
    "accounted": (journal.Accounted, "goodput"),
    "debugging": (journal.Prompted, "rank"),
}
"""Name of an event in `To` -> the event, and its fields."""


class To:
    """Gives an observer an event of each kind, as a gang does: first to the state that the observer reads."""

    def __init__(self, *observers: Any) -> None:
        self.observers = observers

    def event(self, event: journal.Event) -> None:
        for observer in self.observers:
            read = observer.state if isinstance(observer, View) else observer
            event = replace(event, time=getattr(read, "clock", time.time)())
            if isinstance(observer, View):
                observer.state.on_event(event)
            observer.on_event(event)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what gives an event of `EVENTS`, by the values of its fields."""
        kind, *fields = EVENTS[name]
        return lambda *values: self.event(kind(**dict(zip(fields, values, strict=True))))

    def called(self, name: str, error: BaseException | None) -> None:
        self.event(journal.Called(name=name, end=journal.End.of(error)))

    def restarting(self, reason: str, step: int | None, kind: str | None = "exit") -> None:
        self.event(journal.Restarted(reason=reason, step=step, kind=kind))

    def noted(self, text: str) -> None:
        gang, _, words = text.rpartition(": ") if text.count(": ") == 1 else ("", "", text)
        self.event(journal.Noted(text=words, gang=gang))

    def ended(self, error: BaseException | None) -> None:
        self.event(journal.Ended.by(error))
