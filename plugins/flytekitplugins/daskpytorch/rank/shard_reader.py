"""Reads a rank's part of a sharded checkpoint, which any number of ranks may have written. Runs in a rank.

objects --read ahead in threads, digests checked--> items --torch.load--> tensors, in place
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from flytekitplugins.daskpytorch.protocol.checkpoints import DIGESTS, METADATA, CheckpointEntry
from flytekitplugins.daskpytorch.rank.quick_s3 import quick_files
from flytekitplugins.daskpytorch.rank.shard_writer import Digests, with_retries

NUM_READERS = 8
MAX_RANGE = 4 << 20
"""Bytes of one read for several neighbouring items. A single item may be larger."""
PIECE = 8 << 20
"""Bytes of one request. Those for pieces of a large item run in parallel."""
MAX_AHEAD = 128 << 20
"""Bytes read ahead of the item that is being loaded. A single item may be larger."""
MAX_GAP = 64 << 10
"""Bytes between two items that are read together, as a request takes longer."""
T = TypeVar("T")


class DamagedError(Exception):
    """An object of a checkpoint is missing, or has a wrong size or digest."""


@dataclass(frozen=True, kw_only=True)
class _Range:
    part: str
    items: list[_StorageInfo] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.items[0].offset

    @property
    def end(self) -> int:
        return self.items[-1].offset + self.items[-1].length

    def takes(self, item: _StorageInfo) -> bool:
        is_near = item.relative_path == self.part and item.offset - self.end <= MAX_GAP
        return is_near and item.offset + item.length - self.start <= MAX_RANGE


class ShardReader(StorageReader):
    """Reads one sharded checkpoint, and checks all digests.

    Raises `DamagedError`, or `OSError` if storage does not answer.
    """

    def __init__(self, files: Any, checkpoint: CheckpointEntry, *, moved: Callable[[], None]) -> None:
        self._files = files
        self._checkpoint = checkpoint
        self._moved = moved
        self._metadata = Metadata({})
        self._digests: dict[str, Digests] = {}
        self.has_begun = False
        """Tensors of the state may have been written to."""

    def open(self) -> None:
        digests = self._whole(DIGESTS, self._checkpoint.digest)
        told = json.loads(digests)
        self._digests = {
            name: Digests(entry["size"], {int(start): digest for start, digest in entry["items"].items()})
            for name, entry in told["objects"].items()
        }
        # The gang's own rank 0 has written the pickle: its digest follows from the manifest's.
        self._metadata = pickle.loads(self._whole(METADATA, told["metadata"]))  # noqa: S301

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        names = sorted({self._place(item).relative_path for item in plan.items})
        found = self._read(lambda: self._files.sizes([f"{self._checkpoint.uri}/{name}" for name in names]))
        for name, size in zip(names, found, strict=True):
            if size != self._digests[name].size:
                raise DamagedError(f"{name} has {size:,} bytes of {self._digests[name].size:,}")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self.has_begun = True
        wanted: dict[tuple[str, int], list[ReadItem]] = defaultdict(list)
        places = {}
        for read in plan.items:
            place = self._place(read)
            key = place.relative_path, place.offset
            places[key] = place
            wanted[key].append(read)
        with ThreadPoolExecutor(NUM_READERS, "daskpytorch-shards") as pool:
            try:
                for together, data in self._read_ahead(pool, [places[key] for key in sorted(places)]):
                    for place in together.items:
                        start = place.offset - together.start
                        piece = data[start : start + place.length]
                        self._check(place, piece)
                        _put(piece, wanted[place.relative_path, place.offset], planner)
                        self._moved()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True

    def _place(self, item: ReadItem) -> _StorageInfo:
        place: _StorageInfo = self._metadata.storage_data[item.storage_index]
        return place

    def _check(self, place: _StorageInfo, data: bytes) -> None:
        if xxhash.xxh3_128_hexdigest(data) != self._digests[place.relative_path].items[place.offset]:
            raise DamagedError(
                f"{place.relative_path} is not what was written, in {place.length:,} bytes from {place.offset:,}"
            )

    def _whole(self, name: str, digest: str) -> bytes:
        data: bytes = self._read(lambda: self._files.cat_file(f"{self._checkpoint.uri}/{name}"))
        if hashlib.sha256(data).hexdigest() != digest:
            raise DamagedError(f"its {name} has changed since the save: has another program written to it?")
        return data

    def _read_ahead(self, pool: ThreadPoolExecutor, places: Sequence[_StorageInfo]) -> Iterator[tuple[_Range, bytes]]:
        """`places` are sorted by object and offset."""
        ahead: deque[tuple[_Range, list[Future[bytes]]]] = deque()
        size = 0
        for together in _ranges(places):
            while ahead and size + together.end - together.start > MAX_AHEAD:
                size -= ahead[0][0].end - ahead[0][0].start
                yield _joined(*ahead.popleft())
            starts = range(together.start, together.end, PIECE)
            pieces = [
                pool.submit(self._piece, together.part, start, min(start + PIECE, together.end)) for start in starts
            ]
            ahead.append((together, pieces))
            size += together.end - together.start
        while ahead:
            yield _joined(*ahead.popleft())

    def _piece(self, part: str, start: int, end: int) -> bytes:
        path = f"{self._checkpoint.uri}/{part}"
        data: bytes
        with contextlib.suppress(Exception):  # s3fs may succeed, or give the error
            if (quick := quick_files(self._files, path)) is not None:
                data = quick.cat_file(path, start=start, end=end)
                return data
        data = self._read(lambda: self._files.cat_file(path, start=start, end=end))
        return data

    def _read(self, ask: Callable[[], T]) -> T:
        try:
            return with_retries(ask, self._moved)
        except FileNotFoundError as error:
            raise DamagedError(f"a file of it is missing ({error})") from error
        except Exception as error:  # any error of a store's client
            raise OSError(f"{type(error).__name__}: {error}") from error


class Planner(DefaultLoadPlanner):
    """Unpickles with `weights_only=True`, which runs no code from the checkpoint."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """In paths, torch writes keys of all types as text."""
        state: Any = self.original_state_dict
        *above, last = self.mappings[read_item.dest_index.fqn]
        for part in above:
            state = state[_key(state, part)]
        state[_key(state, last)] = torch.load(value, map_location="cpu", weights_only=True)


def _ranges(places: Sequence[_StorageInfo]) -> Iterator[_Range]:
    together: _Range | None = None
    for place in places:
        if together is not None and not together.takes(place):
            yield together
            together = None
        together = together or _Range(part=place.relative_path)
        together.items.append(place)
    if together is not None:
        yield together


def _joined(together: _Range, pieces: Sequence[Future[bytes]]) -> tuple[_Range, bytes]:
    data = [piece.result() for piece in pieces]
    return together, data[0] if len(data) == 1 else b"".join(data)


def _put(data: bytes, reads: Sequence[ReadItem], planner: LoadPlanner) -> None:
    if reads[0].type is LoadItemType.BYTE_IO:
        planner.load_bytes(reads[0], io.BytesIO(data))
        return
    loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for read in reads:
        piece = loaded
        for dim, (start, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
            piece = piece.narrow(dim, start, length)
        target = planner.resolve_tensor(read)
        target.detach().copy_(piece)
        planner.commit_tensor(read, target)


def _key(container: Any, part: str | int) -> Any:
    if isinstance(container, list) or part in container:
        return part
    return next(key for key in container if str(key) == part)
