"""A rank's side of sharded checkpoints: torch's own, written in the background. Runs in all ranks together.

save: copied to host memory --`torch.distributed.checkpoint.save` in a thread--> storage --rank 0 reports--> the driver
load: the newest undamaged checkpoint from which this attempt may start, straight from storage.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.process.worker import LOOK_INTERVAL, Worker, with_retries
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Sharding, Written, folder_name
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.torch_parts import sharded_classes
from flytekitplugins.daskpytorch.rank import process_group

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from flytekitplugins.daskpytorch.rank.shards import ShardReader, ShardWriter

PATIENCE = timedelta(days=7)
"""Timeout of collectives in which a rank waits for the slowest write to storage."""


@dataclass(eq=False)
class ShardedCheckpoints:
    _sharding: Sharding
    _attempt: int
    _rank: int
    _worker: Worker
    _report: Callable[[Written], None]
    _moved: Callable[[], None]
    """Called as a sign of life during a write or read, as a large state takes longer than a step."""
    _files: Any = None
    _num_saves: int = 0
    _writer: ShardWriter | None = None
    _world: ProcessGroup | None = None
    _group: ProcessGroup | None = None
    """Process group of the thread that saves, over gloo. None: one process without a group."""

    def __post_init__(self) -> None:
        self._has_seen_place = self._sharding.token is None or Path(self._sharding.token).exists()
        """A folder that was seen once, and is away for a while, does not end the training."""

    def save(self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        """Copy this rank's part of a state, and write it in the background, after the state before.

        Call on all ranks together: an error of one rank is raised on all.
        """
        number, self._num_saves = self._num_saves, self._num_saves + 1
        self.flush()
        staged, error = {}, None
        try:
            staged = self._staged(state)
        except Exception as failure:  # raised after the exchange: the other ranks wait for this rank's message
            error = failure
        heard = gathered((step, None if error is None else text_of(error)))
        if error is not None:
            raise error
        _check(heard)
        base, name = self._sharding.base, folder_name(self._attempt, self._sharding.nonce, step, number)
        entry = CheckpointEntry(attempt=self._attempt, step=step, metrics=metrics, folder=base, shards=name)
        self._worker.submit(functools.partial(self._write, staged, self._own_group(), entry))

    def load(self, state: dict[str, Any], chosen: CheckpointEntry | None = None) -> int | None:
        """Fill a state with a sharded checkpoint, by default the newest undamaged one. Call on all ranks together.

        Returns the step. Raises `OSError` if storage fails, `chosen` is damaged, or damaged checkpoints have changed
        the state, `ValueError` if the state does not fit.
        """
        from flytekitplugins.daskpytorch.rank.shards import ShardReader

        checkpoints, is_touched = self._sharding.start if chosen is None else (chosen,), False
        for checkpoint in checkpoints:
            files = current_execution().filesystem(checkpoint.uri)
            reader = ShardReader(files, checkpoint, moved=self._moved)
            failures = self._read(reader, state)
            is_touched |= reader.has_begun
            if not failures:
                return checkpoint.step
            rank = min(failures)
            self._heed(checkpoint, failures[rank], f"{text_of(failures[rank])} (rank {rank})")
        steps = ", ".join(str(each.step) for each in checkpoints)
        if is_touched or chosen is not None:
            changed = ", and reading them has changed the state" if is_touched else ""
            raise OSError(
                f"the sharded checkpoints of steps {steps} are damaged{changed}. Rank 0's log names the damaged files. "
                "Load another step of those in checkpoint.list(), or delete these checkpoints to start afresh."
            )
        if checkpoints:
            self._say(f"no sharded checkpoint is whole (steps {steps}); the training starts afresh")
        return None

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest save is written, a sharded one by all ranks."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._worker.flush(max(0.0, min(LOOK_INTERVAL, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            if self._writer is not None and self._writer.has_written:
                self._moved()  # else the ranks that wait for a slow one would count as hung

    def _staged(self, state: Mapping[str, Any]) -> dict[str, Any]:
        from torch.distributed.checkpoint.stateful import Stateful

        from flytekitplugins.daskpytorch.rank.shards import check_savable

        self._check_place()
        self._files = current_execution().filesystem(self._sharding.base)  # an error here reaches all ranks
        plain = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        staged: dict[str, Any] = copy_of(plain, takes_shards=True)
        check_savable(staged)
        return staged

    def _own_group(self) -> ProcessGroup | None:
        """All ranks together make a new group for each default group.

        Collectives of two threads in one group would meet in another order on each rank.
        """
        from torch import distributed

        world = distributed.group.WORLD
        if world is not self._world:
            self._world = world
            group: Any = None if world is None else distributed.new_group(backend="gloo", timeout=PATIENCE)
            self._group = group
            process_group.before_destruction(self.flush)
        return self._group

    def _check_place(self) -> None:
        from flytekitplugins.daskpytorch.rank.shards import RETRY_AFTER

        if not self._has_seen_place:
            # Retries in later attempts: earlier ranks may have seen it.
            with_retries(self._see_place, RETRY_AFTER if self._attempt else (), moved=self._moved, final=())

    def _see_place(self) -> None:
        if not Path(str(self._sharding.token)).exists():
            raise FileNotFoundError(
                f"rank {self._rank} does not see {self._sharding.base}, where the shards are kept: it is a folder of "
                "the driver's machine. Name a storage that all ranks reach: Gang(checkpoint_uri=...), with a shared "
                "folder or a URL such as s3://bucket/folder."
            )
        self._has_seen_place = True

    def _write(self, staged: dict[str, Any], group: ProcessGroup | None, entry: CheckpointEntry) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        from flytekitplugins.daskpytorch.rank.shards import ShardWriter

        self._writer = writer = ShardWriter(self._files, entry.uri, moved=self._moved)
        failure = None
        try:
            save(staged, storage_writer=writer, process_group=group)
        except BaseException as error:  # CheckpointException is no Exception
            failure = _told(error)
        self._writer = None
        if self._rank == 0:
            self._report(Written(replace(entry, size=writer.size, digest=writer.digest), failure))

    def _read(self, reader: ShardReader, state: dict[str, Any]) -> dict[int, BaseException]:
        """Return the ranks' errors, the same on all ranks."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from flytekitplugins.daskpytorch.rank.shards import Planner

        problem: Exception | None = None
        try:
            self._check_place()
            reader.open()
        except Exception as error:  # the other ranks wait for this rank's message
            problem = error
        failures = {rank: error for rank, error in enumerate(gathered(problem)) if error is not None}
        if not failures:
            try:
                load(state, storage_reader=reader, planner=Planner())
            except CheckpointException as error:
                failures = {rank: cause for rank, (cause, _) in error.failures.items()}
        return failures

    def _heed(self, checkpoint: CheckpointEntry, problem: BaseException, text: str) -> None:
        from flytekitplugins.daskpytorch.rank.shards import DamagedError

        where = f"the sharded checkpoint of step {checkpoint.step} at {checkpoint.uri}"
        if isinstance(problem, DamagedError):
            self._say(f"{where} is damaged: {text}")
        elif isinstance(problem, OSError):
            raise OSError(f"{where} cannot be read: {text}. Check the rank's access to storage") from problem
        else:
            raise ValueError(
                f"{where} does not fit the state that was to be filled: {text}. Make the state with the saved keys and "
                "shapes, or load another step"
            ) from problem

    def _say(self, text: str) -> None:
        if self._rank == 0:
            print(text, file=sys.stderr)


def _told(error: BaseException) -> str:
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    for rank, (cause, _) in sorted(failures.items()):
        return f"{text_of(cause)} (rank {rank})"
    return text_of(error)


def _check(heard: Sequence[tuple[int, str | None]]) -> None:
    for rank, (_, problem) in enumerate(heard):
        if problem is not None:
            raise RuntimeError(f"rank {rank} cannot save its part: {problem}")
    if len({step for step, _ in heard}) > 1:
        steps = ", ".join(f"rank {rank} step {step}" for rank, (step, _) in enumerate(heard))
        raise ValueError(f"save_sharded needs the same step on all ranks, but the ranks gave {steps}")


def text_of(error: BaseException) -> str:
    """Return the text of the error's `OSError`, if any: for a full disk, torch reports only a wrong file position."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return f"{type(cause or error).__name__}: {cause or error}"


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. Call on all ranks together."""
    from torch import distributed

    values = [value] * current_rank().world_size
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


# ---- Copies of states, whole and sharded


class _Copier(pickle.Pickler):
    """Copies a tensor once, even if it occurs repeatedly."""

    def __init__(self, file: IO[bytes], *, takes_shards: bool) -> None:
        import torch

        super().__init__(file, protocol=5)
        self._takes_shards = takes_shards
        self._tensor = torch.Tensor
        self._sharded = sharded_classes()
        self.copies: list[torch.Tensor] = []
        self.refused: torch.Tensor | None = None
        self._seen: dict[Any, tuple[Any, int]] = {}  # keeps originals alive, so that addresses stay unique

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, self._tensor):
            return None
        if isinstance(obj, self._sharded) and not self._takes_shards:
            self.refused = obj
            raise TypeError
        key = _place_of(obj)
        if key not in self._seen:
            self._seen[key] = (obj, len(self.copies))
            copy = _on_host(obj)
            self.copies.append(copy if self._takes_shards else _alike(copy, obj))
        return self._seen[key][1]


def copy_of(state: Any, *, takes_shards: bool = False) -> Any:
    """Return a copy of a state, in host memory, that later training steps leave unchanged.

    Torch's own stagers are not used: that of torch 2.6 does not copy tensors on the CPU.
    No inner class or function: their references would keep the copy alive until Python's cyclic garbage collector runs.
    """
    buffer = io.BytesIO()
    copier = _Copier(buffer, takes_shards=takes_shards)
    try:
        copier.dump(state)
        buffer.seek(0)
        restorer = pickle.Unpickler(buffer)  # noqa: S301 - our own bytes, written above
        restorer.persistent_load = copier.copies.__getitem__  # type: ignore[method-assign]
        return restorer.load()
    except Exception as error:
        if (found := copier.refused) is not None:
            raise TypeError(
                f"the state to be saved is sharded: it has a {type(found).__name__} of shape {tuple(found.shape)}, "
                "spread over the ranks, and of a state only rank 0's part is kept. Use checkpoint.save_sharded(state, "
                "step) and load_sharded(state), by which each rank keeps its own part, or gather the state before on "
                "all ranks."
            ) from None
        raise TypeError(
            f"the state to be saved cannot be pickled: {error}. Save tensors and plain data, such as state_dict() of "
            "the model and the optimizer, instead of the objects themselves."
        ) from error


def _place_of(tensor: torch.Tensor) -> object:
    """The key is equal for tied tensors, which have the same memory, shape and type."""
    try:
        where, layout = tensor.untyped_storage().data_ptr(), (tensor.storage_offset(), tensor.shape, tensor.stride())
    except (RuntimeError, NotImplementedError):  # sparse tensors, for example
        return id(tensor)
    if where == 0:  # tensors without elements
        return id(tensor)
    kind = (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
    return (where, *layout, *kind)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _alike(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)
