"""Events of a gang: what observers receive, and what a journal keeps. Made and read in the driver.

    core and parts of a gang ─▶ Event ─▶ RunState (the one fold) ─▶ terminal, Deck, futures, OpenTelemetry
                                  ├────▶ trackers, observers of users
                                  └────▶ fields_of ─▶ JSON log, journal file ─▶ event_of ─▶ RunState

The JSON form of an event is an object with `time` (ISO 8601, UTC), `event` (the class's name in small letters) and the
fields of the class. A dataclass becomes an object, and NaN and infinities become strings. Histograms and pictures are
left out.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flytekitplugins.daskpytorch.errors import GangCancelledError, PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.process.streams import plain
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, RankUsage, SavedCheckpoint

OUTCOMES: Mapping[type[BaseException], str] = {
    PreemptedError: "interrupted",
    KeyboardInterrupt: "interrupted",
    GangCancelledError: "cancelled",
    CancelledError: "cancelled",
    StoppedEarlyError: "stopped early",
}
ODD_NUMBERS = ("nan", "inf", "-inf")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The ranks of a gang and their places, as `Observer.on_start` receives them.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, Observer, Shape, dispatch
        >>> class Machines(Observer):
        ...     def on_start(self, shape: Shape) -> None:
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

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(len(here) for here in self.places)

    @functools.cached_property
    def hosts(self) -> Mapping[int, str]:
        """Name of each rank's host, by rank."""
        placed = zip(self.nodes, self.places, strict=True)
        return {place.rank: node.host for node, here in placed for place in here}


@dataclass(frozen=True, kw_only=True)
class Training:
    """The name, id and inputs of a training, as `Observer.on_begin` receives them. Trackers find a run again by the id.

    Examples:
        >>> from flytekitplugins.daskpytorch import Gang, Observer, Training, dispatch
        >>> class Titles(Observer):
        ...     def on_begin(self, training: Training) -> None:
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


@dataclass(frozen=True, kw_only=True)
class End:
    word: str = "done"
    """`done`, `stopped early`, `interrupted` (Ctrl-C, a preemption), `cancelled` or `failed`."""
    text: str = ""
    error: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> End:
        if error is None:
            return cls()
        word = next((word for kind, word in OUTCOMES.items() if isinstance(error, kind)), "failed")
        return cls(word=word, text=str(error.__cause__ or error) or type(error).__name__, error=type(error).__name__)


# ---- Events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, on the driver's clock."""


@dataclass(frozen=True, kw_only=True)
class Began(Event):
    """The first event: the gang was asked for."""

    training: Training


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The gang goes on from a checkpoint of an earlier attempt or run. Comes before `Placed`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Placed(Event):
    """All agents have connected, and the ranks start, at first or again."""

    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Formed(Event):
    seconds: float
    """Since the call that asked for the gang, or since a restarted attempt's start."""


@dataclass(frozen=True, kw_only=True)
class Calling(Event):
    name: str


@dataclass(frozen=True, kw_only=True)
class Called(Event):
    name: str
    end: End = field(default_factory=End)


@dataclass(frozen=True, kw_only=True)
class Wrote(Event):
    """Not in the journal's file."""

    rank: int
    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """A rank called `log`, or an evaluation of `Gang(evaluate=...)` has ended."""

    record: LogRecord


@dataclass(frozen=True, kw_only=True)
class Checkpointed(Event):
    """A checkpoint is safe: on the driver's disk, or in storage if it is sharded."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Listed(Event):
    """All checkpoints that the gang keeps. Comes after `Resumed`, `Checkpointed` and evaluations, and at the end."""

    checkpoints: Sequence[SavedCheckpoint]


@dataclass(frozen=True, kw_only=True)
class Used(Event):
    """Comes at most every two seconds for each rank."""

    usage: RankUsage


@dataclass(frozen=True, kw_only=True)
class Accounted(Event):
    """Comes at most every two seconds, and a last time before `Ended`."""

    goodput: Goodput


@dataclass(frozen=True, kw_only=True)
class Prompted(Event):
    """A rank's debugger takes the terminal, or gives it back (None). Not in the journal's file."""

    rank: int | None


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    reason: str
    step: int | None
    """Step of the checkpoint from which the gang goes on, or None from the beginning."""
    kind: str | None = None
    """Kind of the failure, as `GangError.kind`, or None if the gang grows and nothing has failed."""


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    text: str
    gang: str = ""
    """Function with whose name the line begins, or empty if the text is the whole line."""

    @property
    def line(self) -> str:
        return f"{self.gang}: {self.text}" if self.gang else self.text


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The last event."""

    end: End = field(default_factory=End)
    error: Any = field(default=None, repr=False)
    """Only in the process of its gang, not in a journal that is read again."""

    @classmethod
    def by(cls, error: BaseException | None) -> Ended:
        return cls(end=End.of(error), error=error)


KINDS: Mapping[str, type[Event]] = {kind.__name__.lower(): kind for kind in Event.__subclasses__()}


# ---- JSON -----------------------------------------------------------------------------------------------------------


def fields_of(event: Event) -> dict[str, Any]:
    if isinstance(event, Logged):
        event = dataclasses.replace(event, record=event.record.bare())
    moment = datetime.fromtimestamp(event.time, UTC).isoformat(timespec="microseconds")
    names = [each.name for each in dataclasses.fields(event) if each.repr and each.name != "time"]
    found = {name: plain(getattr(event, name)) for name in names}
    return {"time": moment, "event": type(event).__name__.lower(), **found}


def event_of(fields: Mapping[str, Any]) -> Event:
    """Raises ValueError for what is no event of this version."""
    try:
        moment = datetime.fromisoformat(fields["time"])
        record = {"record": _with_numbers(fields["record"])} if "record" in fields else {}
        event: Event = _decoder(fields["event"])({**fields, **record, "time": moment.timestamp()})
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"no event of a journal: {error!r}") from error
    return event


@functools.cache
def _decoder(kind: str) -> Callable[[Mapping[str, Any]], Any]:
    from mashumaro.codecs.basic import BasicDecoder

    return BasicDecoder(KINDS[kind]).decode


def _with_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    metrics = record["metrics"].items()
    return {**record, "metrics": {name: float(value) if value in ODD_NUMBERS else value for name, value in metrics}}
