"""Writes a rank's shards straight to storage and reads them back, with digests. Runs in a rank.

save: state --torch's planner--> items --torch.save--> up to three objects for each rank
load: items --digests checked, torch.load--> tensors, in place. Any number of ranks may have written them.

A checkpoint's folder has torch's layout, which plain `torch.distributed.checkpoint.load` reads: `__RANK_NUMBER.distcp`
and `.metadata`. The digest of an item stands beside its place in `.metadata`, whose own digest is in the manifest.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from flytekitplugins.daskpytorch.process.worker import with_retries
from flytekitplugins.daskpytorch.protocol.checkpoints import METADATA, CheckpointEntry, HashedStream

NUM_READERS = 8
"""Items that are read at once. A request for one may take longer than its bytes."""
NUM_WRITERS = 3
"""Objects that a rank writes at once: most storages' clients send an object's parts one after another."""
BLOCK = 8 << 20
"""Bytes of a part, of which each object may hold several in memory. S3 takes 10,000 parts of an object, so 80 GB."""
RETRY_AFTER = (0.5, 1.0, 2.0, 4.0, 8.0)
T = TypeVar("T")


class DamagedError(Exception):
    """An object of a checkpoint is missing, or has a wrong size or digest."""


class ShardWriter(FileSystemWriter):
    """Writes one sharded checkpoint."""

    def __init__(self, files: Any, folder: str, *, moved: Callable[[], None]) -> None:
        super().__init__(folder)
        self._files = files
        self._folder = folder
        self._moved = moved
        self.has_written = False
        """All items of this rank are in storage. Other ranks may still write theirs."""
        self.size = 0
        """Bytes of all ranks' items. Set on rank 0 by `finish`, as `digest` is."""
        self.digest = ""
        """SHA-256 of `.metadata`."""
        self._has_told = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        def write(number: int) -> list[WriteResult]:
            part = replace(plan, items=plan.items[number::NUM_WRITERS])
            return self._retried(lambda: self._write(f"{plan.storage_data.prefix}{number}.distcp", part, planner))

        with ThreadPoolExecutor(NUM_WRITERS, "daskpytorch-shards") as pool:
            written = pool.map(write, range(min(NUM_WRITERS, len(plan.items))))
            results = [result for each in written for result in each]
        self.has_written = True
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata, on rank 0, once all ranks have written their items."""
        written = [result for each in results for result in each]
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = StorageMeta()
        content = pickle.dumps(metadata)
        self._retried(lambda: self._files.pipe_file(f"{self._folder}/{METADATA}", content))
        self.size = sum(result.size_in_bytes for result in written)
        self.digest = hashlib.sha256(content).hexdigest()

    def _retried(self, act: Callable[[], T]) -> T:
        return with_retries(act, RETRY_AFTER, self._tell, self._moved)

    def _tell(self, error: Exception) -> None:
        if not self._has_told:
            what = f"the shards could not be written to {self._folder} ({type(error).__name__}: {error})"
            print(f"{what}; trying again, while the training goes on", file=sys.stderr)
        self._has_told = True

    def _write(self, name: str, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results, start = [], 0
        with self._open(f"{self._folder}/{name}") as file:
            for item in plan.items:
                # A copy: a storage's file may read it later, when torch may have reused the memory.
                stream: Any = HashedStream(lambda data: file.write(bytes(data)))
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    torch.save(data, stream)
                place: Any = _StorageInfo(name, start, stream.size)
                place.digest = stream.digest.hexdigest()
                results.append(WriteResult(item.index, stream.size, place))
                start += stream.size
                self._moved()
        return results

    def _open(self, path: str) -> Any:
        try:
            return self._files.open(path, "wb", block_size=BLOCK)
        except FileNotFoundError:  # a storage with folders
            self._files.makedirs(self._folder, exist_ok=True)
            return self._files.open(path, "wb", block_size=BLOCK)


class ShardReader(FileSystemReader):
    """Reads one sharded checkpoint, and checks all digests.

    Raises `DamagedError`, or `OSError` if storage does not answer.
    """

    def __init__(self, files: Any, checkpoint: CheckpointEntry, *, moved: Callable[[], None]) -> None:
        super().__init__(checkpoint.uri)
        self._files = files
        self._checkpoint = checkpoint
        self._moved = moved
        self._metadata = Metadata({})
        self.has_begun = False
        """Tensors of the state may have been written to."""

    def open(self) -> None:
        content = self._read(METADATA, self._files.cat_file)
        if hashlib.sha256(content).hexdigest() != self._checkpoint.digest:
            raise DamagedError(f"its {METADATA} has changed since the save: has another program written to it?")
        self._metadata = pickle.loads(content)  # noqa: S301 - the gang's own rank 0 has written it

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Find missing and shortened objects before any tensor of the state is written to."""
        sizes: dict[str, int] = defaultdict(int)
        for place in self.storage_data.values():
            sizes[place.relative_path] = max(sizes[place.relative_path], place.offset + place.length)
        for name in {self._place(item).relative_path for item in plan.items}:
            if (found := self._read(name, self._files.size)) != sizes[name]:
                raise DamagedError(f"{name} has {found:,} bytes of {sizes[name]:,}")
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self.has_begun = True
        with ThreadPoolExecutor(NUM_READERS, "daskpytorch-shards") as pool:
            for start in range(0, len(plan.items), NUM_READERS):
                items = plan.items[start : start + NUM_READERS]
                for item, content in zip(items, pool.map(self._content, map(self._place, items)), strict=True):
                    self._fill(item, io.BytesIO(content), planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _fill(self, item: ReadItem, data: io.BytesIO, planner: LoadPlanner) -> None:
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, data)
        else:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(tensor)
            planner.commit_tensor(item, target)
        self._moved()

    def _place(self, item: ReadItem) -> Any:
        return self.storage_data[item.storage_index]

    def _content(self, place: Any) -> bytes:
        end = place.offset + place.length
        data: bytes = self._read(
            place.relative_path, functools.partial(self._files.cat_file, start=place.offset, end=end)
        )
        if xxhash.xxh3_128_hexdigest(data) != place.digest:
            raise DamagedError(
                f"{place.relative_path} is not what was written, in {place.length:,} bytes from {place.offset:,}"
            )
        return data

    def _read(self, name: str, ask: Callable[[str], T]) -> T:
        try:
            return with_retries(lambda: ask(f"{self._checkpoint.uri}/{name}"), RETRY_AFTER, moved=self._moved)
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


def _key(container: Any, part: str | int) -> Any:
    if isinstance(container, list) or part in container:
        return part
    return next(key for key in container if str(key) == part)


# ---- States


def check_savable(state: dict[str, Any]) -> None:
    """Raise `TypeError` for a value that torch would write, and not read again.

    Raises `ValueError` if two keys become equal when nested keys are joined by dots.

    Args:
        state: A copy of `sharded.copy_of`.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    for key, value in planner.state_dict.items():
        for part in _parts(value):
            if not _is_plain(part):
                raise TypeError(
                    f"{key} of the state to be saved is a {type(part).__name__}, which torch.load(weights_only=True) "
                    "does not read. Save dense tensors and plain data: numbers, text, lists, dictionaries. A class of "
                    "your own can be allowed on all ranks: torch.serialization.add_safe_globals"
                )


def _parts(value: Any) -> list[Any]:
    if hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if hasattr(value, "to_local") else value]  # a DTensor


def _is_plain(value: Any) -> bool:
    if isinstance(value, bool | int | float | str | None):
        return True
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and not value.is_nested and not value.is_quantized
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # any error of pickling a user's object
        return False
    return True
