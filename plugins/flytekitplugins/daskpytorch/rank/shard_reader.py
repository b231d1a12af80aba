"""Reads a rank's part of a sharded checkpoint, which any number of ranks may have written. Runs in a rank.

layout --planned by torch--> ranges --read ahead in threads--> digests checked --> tensors, in place
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from flytekitplugins.daskpytorch.protocol.checkpoints import LAYOUT, ShardedCheckpoint, StoredItem, from_layout
from flytekitplugins.daskpytorch.rank.quick_s3 import quick_files
from flytekitplugins.daskpytorch.rank.shard_plan import as_dicts, check_fillable

NUM_READERS = 8
"""Maximum number of parallel requests with which a rank reads a sharded checkpoint from storage."""
MAX_RANGE = 4 << 20
"""Maximum number of bytes that one read fetches for several neighbouring items: stored chunks of tensors, or other
values. A single item may be larger."""
PIECE = 8 << 20
"""Maximum number of bytes of one read request to storage. Requests for pieces of a large item run in parallel."""
MAX_AHEAD = 128 << 20
"""Maximum number of bytes that a rank reads ahead of the stored item that is being loaded into the state. A single item
may be larger."""
MAX_GAP = 64 << 10
"""Maximum gap, in bytes, between two stored items that are read together. Reading the gap is faster than another
request."""
RETRY_AFTER = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry of a failed read from storage."""
MAX_TOLD = 8
"""Maximum number of keys of each kind (missing, surplus, of another shape) that an error names."""
T = TypeVar("T")


class DamagedError(Exception):
    """A sharded checkpoint is damaged: an object is missing, or has a wrong size or digest."""


class DiffersError(Exception):
    """The keys or shapes of a state differ from those in the sharded checkpoint that should fill the state."""


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Neighbouring items of a stored object, which are read together."""

    part: str
    items: Sequence[StoredItem]

    @property
    def start(self) -> int:
        return self.items[0].start

    @property
    def end(self) -> int:
        return self.items[-1].start + self.items[-1].length

    @property
    def size(self) -> int:
        return self.end - self.start


class ShardReader:
    """Reads one sharded checkpoint into the state of this rank."""

    def __init__(
        self,
        files: Any,
        checkpoint: ShardedCheckpoint,
        state: dict[str, Any],
        *,
        moved: Callable[[], None],
    ) -> None:
        self._files = files
        """The fsspec file system of the checkpoint's folder."""
        self._checkpoint = checkpoint
        self._state = state
        self._moved = moved
        self._content = as_dicts(state)
        self._planner = _Planner()
        self._wanted: dict[StoredItem, list[ReadItem]] = defaultdict(list)
        self.unread: frozenset[str] = frozenset()
        """Keys that are in the checkpoint but not in this rank's state. Empty before `prepare`."""

    def prepare(self) -> None:
        """Plan the reads, and check that the checkpoint is complete and fits the state. The state stays unchanged.

        Raises:
            DamagedError: An object of the checkpoint is missing, or has a wrong size or digest.
            DiffersError: Keys or shapes of the state differ from the checkpoint's.
            TensorKindError: A tensor of the state cannot be written to.
            OSError: Storage does not answer.
        """
        layout = self._read_layout()
        metadata = from_layout(layout)
        self._planner.set_up_planner(self._content, metadata)
        check_fillable(self._planner.state_dict)
        _check(self._planner.state_dict, metadata.state_dict_metadata)
        self.unread = frozenset(metadata.state_dict_metadata.keys() - self._planner.state_dict.keys())
        items = _items(layout)
        for read in self._planner.create_local_plan().items:
            self._wanted[items[read.storage_index]].append(read)
        self._check_sizes({part["name"]: part["size"] for part in layout["parts"]})

    def read(self) -> None:
        """Read the checkpoint into the state. Call after `prepare`.

        Raises:
            DamagedError: An object of the checkpoint is missing, or a part of it has a wrong digest.
            OSError: Storage does not answer.
        """
        with ThreadPoolExecutor(NUM_READERS, "daskpytorch-shards") as pool:
            try:
                for together, data in self._read_ahead(pool):
                    for item, piece in _items_of(together, data):
                        self._planner.put(piece, self._wanted[item])
                        self._moved()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for key, value in self._state.items():
            if isinstance(value, Stateful):
                value.load_state_dict(self._content[key])
            else:
                self._state[key] = self._content[key]

    def _read_layout(self) -> Mapping[str, Any]:
        data: bytes = self._with_retries(functools.partial(self._files.cat_file, f"{self._checkpoint.uri}/{LAYOUT}"))
        if hashlib.sha256(data).hexdigest() != self._checkpoint.layout_digest:
            raise DamagedError(f"its {LAYOUT} has changed since the save: has another program written to it?")
        layout: Mapping[str, Any] = json.loads(data)
        return layout

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        names = sorted({item.part for item in self._wanted})
        paths = [f"{self._checkpoint.uri}/{name}" for name in names]
        found = self._with_retries(lambda: self._files.sizes(paths))
        for name, size in zip(names, found, strict=True):
            if size != sizes[name]:
                raise DamagedError(f"{name} has {size:,} bytes of {sizes[name]:,}")

    def _read_ahead(self, pool: ThreadPoolExecutor) -> Iterator[tuple[_Range, bytes]]:
        """Yield each range of wanted items with its bytes."""
        ahead: deque[tuple[_Range, list[Future[bytes]]]] = deque()
        size = 0
        for together in _ranges(self._wanted):
            while ahead and size + together.size > MAX_AHEAD:
                size -= ahead[0][0].size
                yield _joined(*ahead.popleft())
            starts = range(together.start, together.end, PIECE)
            pieces = [
                pool.submit(self._read, together.part, start, min(start + PIECE, together.end)) for start in starts
            ]
            ahead.append((together, pieces))
            size += together.size
        while ahead:
            yield _joined(*ahead.popleft())

    def _read(self, part: str, start: int, end: int) -> bytes:
        path = f"{self._checkpoint.uri}/{part}"
        data: bytes
        with contextlib.suppress(Exception):  # s3fs may succeed, or give the error
            if (quick := quick_files(self._files, path)) is not None:
                data = quick.cat_file(path, start=start, end=end)
                return data
        data = self._with_retries(functools.partial(self._files.cat_file, path, start=start, end=end))
        return data

    def _with_retries(self, ask: Callable[[], T]) -> T:
        for wait in RETRY_AFTER:
            try:
                return ask()
            except FileNotFoundError as error:
                raise DamagedError(f"a file of it is missing ({error})") from error
            except Exception:  # any error of a store's client
                time.sleep(wait)
        return ask()


class _Planner(DefaultLoadPlanner):
    """Writes loaded items into a state. Unpickles with `weights_only=True`, which runs no code from the checkpoint."""

    def put(self, data: bytes, reads: Sequence[ReadItem]) -> None:
        """Write a tensor's chunk or another value, as stored, into the state.

        Args:
            data: The stored bytes.
            reads: Destinations in the state, each with the wanted part of the chunk.
        """
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for read in reads:
            if read.type is LoadItemType.BYTE_IO:
                _put(self.original_state_dict, self.mappings[read.dest_index.fqn], loaded)
            else:
                piece = loaded
                for dim, (start, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                    piece = piece.narrow(dim, start, length)
                self.resolve_tensor(read).detach().copy_(piece)


def _put(state: Any, path: Sequence[str | int], value: Any) -> None:
    """Replace the value at a path of keys in a nested state. In `path`, torch writes keys of all types as text."""
    *above, last = path
    for part in above:
        state = state[_key(state, part)]
    state[_key(state, last)] = value


def _key(container: Any, part: str | int) -> Any:
    if isinstance(container, list) or part in container:
        return part
    return next(key for key in container if str(key) == part)


def _items(layout: Mapping[str, Any]) -> Mapping[MetadataIndex, StoredItem]:
    items = (
        StoredItem(**{**item, "offset": None if item["offset"] is None else tuple(item["offset"])})
        for item in layout["items"]
    )
    return {MetadataIndex(item.key, item.offset): item for item in items}


def _ranges(items: Iterable[StoredItem]) -> Iterator[_Range]:
    together: list[StoredItem] = []
    for item in sorted(items, key=lambda item: (item.part, item.start)):
        if together and not _belongs(item, together):
            yield _Range(part=together[0].part, items=together)
            together = []
        together.append(item)
    if together:
        yield _Range(part=together[0].part, items=together)


def _joined(together: _Range, pieces: Sequence[Future[bytes]]) -> tuple[_Range, bytes]:
    data = [piece.result() for piece in pieces]
    return together, data[0] if len(data) == 1 else b"".join(data)


def _items_of(together: _Range, data: bytes) -> Sequence[tuple[StoredItem, bytes]]:
    """Return each stored item of a range (a tensor's chunk, or another value) with its bytes, cut from `data`.

    Raises:
        DamagedError: An item has a wrong digest.
    """
    pieces = []
    for item in together.items:
        start = item.start - together.start
        piece = data[start : start + item.length]  # a large item has its own range: the slice copies nothing
        if xxhash.xxh3_128_hexdigest(piece) != item.digest:
            raise DamagedError(f"{item.key} in {item.part} is not what was written")
        pieces.append((item, piece))
    return pieces


def _belongs(item: StoredItem, together: Sequence[StoredItem]) -> bool:
    first, last = together[0], together[-1]
    is_near = item.part == last.part and item.start - (last.start + last.length) <= MAX_GAP
    return is_near and item.start + item.length - first.start <= MAX_RANGE


def _check(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a state has the keys and shapes of a sharded checkpoint.

    Raises:
        DiffersError: Keys or shapes differ from the checkpoint's.
    """
    missing = [key for key in state if key not in saved]
    differing = [
        f"{key}: {_kind(value)}, saved as {_saved_kind(saved[key])}"
        for key, value in state.items()
        if key in saved and _kind(value) != _saved_kind(saved[key])
    ]
    if not missing and not differing:
        return
    surplus = [key for key in saved if key not in state] if missing else []
    kinds = [("not in the checkpoint", missing), ("only in the checkpoint", surplus), ("of another shape", differing)]
    raise DiffersError("; ".join(f"{kind}: {_named(keys)}" for kind, keys in kinds if keys))


def _kind(value: Any) -> str:
    return str(tuple(value.size())) if isinstance(value, torch.Tensor) else "no tensor"


def _saved_kind(entry: Any) -> str:
    return str(tuple(entry.size)) if isinstance(entry, TensorStorageMetadata) else "no tensor"


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - MAX_TOLD} more" if len(keys) > MAX_TOLD else ""
    return ", ".join(keys[:MAX_TOLD]) + more
