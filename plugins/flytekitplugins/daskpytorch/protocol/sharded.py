"""A checkpoint of which each rank writes its own part, as ranks, driver and storage name it to each other.

Its objects lie in one folder that one attempt of the gang alone writes to: the ranks' parts, what is in them
(`layout.json`) and, for plain `torch.distributed.checkpoint.load`, the same as torch has it (`.metadata`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flytekitplugins.daskpytorch.context import SavedCheckpoint

LAYOUT = "layout.json"
"""The object that says what is where in the others."""
METADATA = ".metadata"
"""File that plain `torch.distributed.checkpoint.load` reads. No code of this package reads the file."""
OBJECT = re.compile(r"(__\d+_\d+\.distcp|layout\.json|\.metadata)(\.[0-9a-f]{32})?")
"""Objects of a checkpoint's folder. A name ends in these digits while the object is being written."""
FOLDER = re.compile(r"step-(?:-?\d+)/(\d+)-(\d+)-(\w+)")
"""Of a checkpoint: the attempt's number, the save's, and whose."""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One object that a rank has written."""

    name: str
    """In the checkpoint's folder."""
    size: int
    """In bytes; its items, each with a digest, are all there is in it."""


@dataclass(frozen=True, kw_only=True)
class StoredItem:
    """A chunk of a tensor, or a value of another kind, and where it is; read whole, and only with the right digest."""

    key: str
    """Its name in the flattened state."""
    offset: tuple[int, ...] | None
    """Where in the whole tensor the chunk begins; None: it is no tensor."""
    index: int | None
    """Which of the tensor's chunks, as torch numbers them."""
    part: str
    """The object that it is in."""
    start: int
    """Where it begins in there, in bytes."""
    length: int
    """In bytes."""
    digest: str
    """XXH3 of these bytes, 128 bits in hexadecimal digits: it shows damage, at twenty times the speed of SHA-256."""


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """What one rank has written of a checkpoint."""

    attempt: int
    """The attempt of the gang that wrote it."""
    number: int
    """Which of the attempt's calls of `save_sharded` it was, from 0: a step may be saved more than once."""
    step: int
    parts: tuple[StoredPart, ...]
    items: tuple[StoredItem, ...]
    state: str | None
    """Of rank 0: the state's keys, with shapes, dtypes and chunks, as JSON; None of the others."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class ShardedCheckpoint:
    """A whole one, as the manifest has it and as the ranks of a later attempt are told of it."""

    attempt: int
    step: int
    world_size: int
    """Ranks that wrote it."""
    uri: str
    """Its folder: a path or an fsspec URL."""
    size: int
    """Of all its parts, in bytes."""
    layout_digest: str
    """SHA-256 of `layout.json`."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def saved(self) -> SavedCheckpoint:
        """What a user is told of it."""
        return SavedCheckpoint(step=self.step, metrics=self.metrics, size=self.size, place=self.uri)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Where the ranks of an attempt write their shards, and what they may start from."""

    base: str
    """The folder, or fsspec URL, below which a folder is made for each checkpoint."""
    nonce: str
    """Drawn at the start of the attempt: no other one, of any driver, writes to the same folders."""
    token: str | None = None
    """The path of a file of the driver's, by which a rank knows that a local `base` is its own, too; None: a URL."""
    start: tuple[ShardedCheckpoint, ...] = ()
    """What there is, the newest first."""
    cache: str | None = None
    """A folder of each node's, in which copies of the newest shards are kept; None: there are none."""


def folder_name(attempt: int, nonce: str, step: int, number: int) -> str:
    """A checkpoint's folder, below where all of the gang's are: of one save of one attempt of one gang alone."""
    return f"step-{step}/{attempt}-{number}-{nonce}"


def is_object(name: str) -> bool:
    """Return True for the name of an object that this package writes into a checkpoint's folder."""
    return OBJECT.fullmatch(name) is not None


def save_of(folder: str) -> tuple[tuple[int, int], str] | None:
    """Of a checkpoint's folder: the attempt and which of its saves, and by whose nonce; None: it is no such folder."""
    found = FOLDER.fullmatch(folder)
    return None if found is None else ((int(found[1]), int(found[2])), found[3])


def layout_of(written: Sequence[WrittenShards]) -> bytes:
    """The content of `layout.json`, from what all ranks have written, in their order."""
    first = written[0]
    content = {
        "attempt": first.attempt,
        "number": first.number,
        "step": first.step,
        "world_size": len(written),
        "metrics": dict(first.metrics),
        "state": json.loads(first.state or "null"),
        "parts": [asdict(part) for each in written for part in each.parts],
        "items": [asdict(item) for each in written for item in each.items],
    }
    return json.dumps(content).encode()
