"""Writes a rank's shards straight to storage, with digests. Runs in a rank.

state --torch's planner--> items --torch.save--> objects in storage: S3 through obstore, else fsspec

A checkpoint's folder has torch's layout, which plain `torch.distributed.checkpoint.load` reads: `__RANK_NUMBER.distcp`
and `.metadata`. `digests.json` has the sizes of the objects and the digests of their items, and the gang's manifest has
the digest of `digests.json`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.nn.parameter import is_lazy
from torch.serialization import get_safe_globals

from flytekitplugins.daskpytorch.process.worker import pause
from flytekitplugins.daskpytorch.protocol.checkpoints import DIGESTS, METADATA
from flytekitplugins.daskpytorch.rank.quick_s3 import quick_files

NUM_WRITERS = 2
"""With four, saves of two ranks on the host of their S3 server took 1.5 times as long."""
SMALL_PART, LARGE_PART = 16 << 20, 256 << 20
"""Minimum bytes of a rank's objects, for two and for more of them."""
CHUNK = 8 << 20
"""Bytes per `write` call on a file in storage, which keeps them until they are sent."""
RETRY_AFTER = (0.5, 1.0, 2.0, 4.0, 8.0)
META = (
    "is a tensor on the meta device, which holds no values. Give it values first: module.to_empty(device=...), then "
    "its initialisation or load_state_dict"
)
ADVICE = (
    "Put the plain tensors that it is made of in its place, or allow its class on all ranks: "
    "torch.serialization.add_safe_globals"
)
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
T = TypeVar("T")


@dataclass(frozen=True)
class Digests:
    """XXH3 digests (128 bits) of the items, by offset in bytes."""

    size: int
    items: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class _Written(WriteResult):
    """A rank's digests, which travel to rank 0 beside the results that torch asks for."""

    digests: dict[str, Digests]


class ShardWriter(StorageWriter):
    def __init__(self, files: Any, folder: str, *, moved: Callable[[], None]) -> None:
        self._files = files
        self._folder = folder
        self._moved = moved
        self._lock = threading.Lock()
        self._has_complained = False
        self.has_written = False
        """All items of this rank are in storage. Other ranks may still write theirs."""
        self.size = 0
        """Bytes of all ranks' objects. Set on rank 0 by `finish`, as `digest` is."""
        self.digest = ""
        """SHA-256 of `digests.json`."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        shares = {f"__{plan.storage_data}_{number}.distcp": share for number, share in enumerate(_divided(plan.items))}
        with ThreadPoolExecutor(NUM_WRITERS, "daskpytorch-shards") as pool:
            writing = [pool.submit(self._write_with_retries, name, share, planner) for name, share in shares.items()]
        parts = [each.result() for each in writing]
        digests = dict(zip(shares, (digests for _, digests in parts), strict=True))
        results = [result for results, _ in parts for result in results]
        self.has_written = True
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        for result in results[:1]:
            results[0] = _Written(result.index, result.size_in_bytes, result.storage_data, digests=digests)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata and the digests, on rank 0, once all ranks have written their items."""
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_meta = StorageMeta()
        content = pickle.dumps(metadata)
        written = [result.digests for each in results for result in each if isinstance(result, _Written)]
        objects = {name: digests for each in written for name, digests in each.items()}
        told = {
            "metadata": hashlib.sha256(content).hexdigest(),
            "objects": {name: {"size": of.size, "items": of.items} for name, of in objects.items()},
        }
        digests = json.dumps(told).encode()
        for name, data in ((METADATA, content), (DIGESTS, digests)):
            with_retries(functools.partial(self._put, name, data), self._moved, self._complain)
        self.size = sum(of.size for of in objects.values())
        self.digest = hashlib.sha256(digests).hexdigest()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True

    def _put(self, name: str, data: bytes) -> None:
        with self._open(self._files, f"{self._folder}/{name}") as file:
            file.write(data)

    def _write_with_retries(
        self, name: str, share: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[list[WriteResult], Digests]:
        with contextlib.suppress(Exception):  # s3fs may succeed, or give the error
            if (quick := quick_files(self._files, self._folder)) is not None:
                return self._write(name, share, planner, quick)
        return with_retries(lambda: self._write(name, share, planner, self._files), self._moved, self._complain)

    def _write(
        self, name: str, share: Sequence[WriteItem], planner: SavePlanner, files: Any
    ) -> tuple[list[WriteResult], Digests]:
        path, results, digests = f"{self._folder}/{name}", [], {}
        try:
            with self._open(files, path) as file:
                stream = _Stream(file)
                for item in share:
                    start, stream.digest = stream.position, xxhash.xxh3_128()
                    _save(planner.resolve_data(item), stream)
                    digests[start] = stream.digest.hexdigest()
                    length = stream.position - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                    self._moved()
        except BaseException:
            with contextlib.suppress(Exception):  # an unfinished object would fill the disk
                self._files.rm_file(path)
            raise
        return results, Digests(stream.position, digests)

    def _open(self, files: Any, path: str) -> Any:
        try:
            return files.open(path, "wb")
        except FileNotFoundError:  # a storage with folders
            files.makedirs(self._folder, exist_ok=True)
            return files.open(path, "wb")

    def _complain(self, error: Exception) -> None:
        with self._lock:
            if not self._has_complained:
                print(
                    f"the shards could not be written to {self._folder} ({type(error).__name__}: {error}); trying "
                    "again, while the training goes on",
                    file=sys.stderr,
                )
            self._has_complained = True


class _Stream:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.position = 0
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            self.digest.update(chunk)
            self._file.write(bytes(chunk))  # obstore reads the copy later, when torch may have reused `data`
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """The file in storage is flushed when it is closed."""


def _save(data: torch.Tensor | io.BytesIO, stream: Any) -> None:
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        is_view = data.untyped_storage().nbytes() != data.nbytes  # `torch.save` would write all of the storage
        torch.save(data.clone() if is_view else data, stream)


def _divided(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    sizes = {item.index: _size(item) for item in items}
    size = sum(sizes.values())
    num_parts = max(1, min(NUM_WRITERS, size // SMALL_PART), size // LARGE_PART)
    largest_first = sorted(items, key=lambda item: sizes[item.index], reverse=True)
    return [share for number in range(num_parts) if (share := largest_first[number::num_parts])]


def _size(item: WriteItem) -> int:
    about = item.tensor_data
    return 0 if about is None else about.chunk.sizes.numel() * about.properties.dtype.itemsize


def with_retries(
    act: Callable[[], T], moved: Callable[[], object], complain: Callable[[Exception], object] = lambda _: None
) -> T:
    """Call a function until it succeeds, with pauses, but raise `FileNotFoundError` at once.

    `complain` gets each error but the last. `moved` is called while the rank waits for storage.
    """
    for wait in RETRY_AFTER:
        try:
            return act()
        except FileNotFoundError:
            raise
        except Exception as error:  # any error of a store's client
            complain(error)
            pause(wait, moved)
    return act()


# ---- States


def copied_to_host(value: Any, before: Any = None) -> Any:
    """Return a copy of a state in host memory, which later training steps leave unchanged.

    Torch's own stagers are not used: that of torch 2.6 does not copy tensors on the CPU.

    Args:
        value: The state, or a part of it.
        before: Copy of an earlier state, whose memory the new copy may use.
    """
    if isinstance(value, dict):
        old = before if isinstance(before, dict) else {}
        return {key: copied_to_host(each, old.get(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        olds = before if isinstance(before, list | tuple) and len(before) == len(value) else [None] * len(value)
        return type(value)([copied_to_host(each, old) for each, old in zip(value, olds, strict=True)])
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    with torch.no_grad():
        return _copied_tensor(value.detach(), before)


def _copied_tensor(tensor: torch.Tensor, before: Any) -> torch.Tensor:
    if type(before) is type(tensor) and not hasattr(tensor, "local_shards") and _outline(before) == _outline(tensor):
        _local(before).copy_(_local(tensor))
        return before
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _outline(tensor: Any) -> tuple[Any, ...]:
    spread = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    return tensor.dtype, tensor.shape, _local(tensor).shape, *spread


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_savable(state: dict[str, Any]) -> None:
    """Raise `TypeError` for a value that `torch.load(weights_only=True)` does not read.

    Raises `ValueError` if two keys become equal when nested keys are joined by dots.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    for key, value in planner.state_dict.items():
        for tensor in _tensors(value):
            if (reason := _strange(tensor)) is not None:
                raise TypeError(f"{key} of the state to be saved {reason}.")
        if not isinstance(value, torch.Tensor) and not _is_plain(value):
            raise TypeError(
                f"{key} of the state to be saved is a {type(value).__name__}, which torch.load(weights_only=True) does "
                "not read. Save tensors and plain data: numbers, text, lists, dictionaries."
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    if hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
        return [shard.tensor for shard in value.local_shards()]
    if hasattr(value, "to_local"):  # a DTensor
        with torch.no_grad():
            return [value.to_local()]
    return [value] if isinstance(value, torch.Tensor) else []


def _is_plain(value: Any) -> bool:
    if isinstance(value, bool | int | float | str | None):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # any error of pickling a user's object
        return False
    return True


def _strange(tensor: torch.Tensor) -> str | None:
    reasons = {
        "belongs to a lazy module and has no shape yet. Call the module once before": is_lazy(tensor),
        META: tensor.is_meta,
        "is a nested tensor. Put the list value.unbind() in its place": tensor.is_nested,
        f"is a tensor of layout {tensor.layout}. Put value.to_dense() in its place": tensor.layout is not torch.strided,
        "is a quantized tensor. Put value.int_repr() in its place, and the scale and zero point beside it": (
            tensor.is_quantized
        ),
    }
    if found := next((reason for reason, applies in reasons.items() if applies), None):
        return found
    kind = type(tensor)
    if kind not in PLAIN and kind not in get_safe_globals() and not _is_copied_as_plain(tensor):
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does not read. {ADVICE}"
        )
    return None


def _is_copied_as_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's copy is a plain tensor, as for the unfinished result of a functional collective."""
    try:
        return type(torch.empty_like(tensor)) in PLAIN
    except Exception:  # a tensor class of another library may raise any error
        return False
