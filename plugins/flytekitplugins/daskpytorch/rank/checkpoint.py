"""Saves and loads a rank's checkpoints: copied at once, written atomically in the background. Runs in a rank.

rank 0 --file--> the driver's checkpoints --file--> every rank of the next attempt    (`transfers`)
"""

from __future__ import annotations

import functools
import io
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import Checkpoint
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, HashedFile, Written
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.protocol.messages import Question
from flytekitplugins.daskpytorch.protocol.torch_parts import sharded_classes
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints
from flytekitplugins.daskpytorch.rank.transfers import UNWRITTEN, Transfers
from flytekitplugins.daskpytorch.records import SavedCheckpoint, numbers

if TYPE_CHECKING:
    import torch

    from flytekitplugins.daskpytorch.rank.link import GangLink


class RankCheckpoint(Checkpoint):
    def __init__(self, order: RankOrder, link: GangLink) -> None:
        job = order.job
        self._link = link
        self.sharded = ShardedCheckpoints(
            job.sharding, attempt=job.attempt, rank=order.place.rank, report=link.send, moved=link.progress.move
        )
        self.folder = Path(order.scratch)
        self._transfers = Transfers(order, link.progress.move)
        self._attempt = job.attempt
        self._start = job.checkpoint
        self._is_main = order.place.rank == 0
        self._timeout = job.settings.start_timeout
        self._patience = job.patience
        self._storage = job.storage
        self._best_by = job.settings.keep.metric
        self._worker = Worker(name="checkpoint")
        if self._is_main:
            self._transfers.tidy()
        self._loaded: SavedCheckpoint | None = None

    @property
    def loaded(self) -> SavedCheckpoint | None:
        return self._loaded

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Copy rank 0's state and write it in the background, once the previous one is written."""
        step, plain = int(step), numbers(metrics)
        self._link.progress.reach(step, anew=True)
        if not self._is_main:
            return
        with self._link.saving(step):
            self.flush()
            self._worker.submit(functools.partial(self._write, copy_of(state), step, plain))

    def flush(self, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        self._worker.flush(timeout)
        self.sharded.flush(None if until is None else until - time.monotonic())

    def save_sharded(self, state: dict[str, Any], step: int, metrics: Mapping[str, Any] | None = None) -> None:
        step, plain = int(step), numbers(metrics)
        self._link.progress.reach(step, anew=True)
        with self._link.saving(step):
            self.sharded.save(state, step, plain)

    def load_sharded(self, state: dict[str, Any], *, best: bool = False, step: int | None = None) -> int | None:
        check_best("load_sharded", self._best_by, best, step)
        if not best and step is None:
            start = self.sharded.load(state)
            if start is not None:
                self._link.progress.reach(start, anew=True)
            return start
        chosen = self._await_choice(None if step is None else int(step), is_sharded=True)
        self._loaded = chosen.saved(None) if chosen is not None else None
        return self.sharded.load(state, chosen) if chosen is not None else None

    def load(self, *, best: bool = False, step: int | None = None) -> Any | None:
        check_best("load", self._best_by, best, step)
        if best or step is not None:
            file = self._await_choice(None if step is None else int(step), is_sharded=False)
        else:
            file = self._start
        self._loaded = file.saved(self._storage) if file is not None else None
        if file is None:
            return None
        state = read_checkpoint(self._transfers.fetch(file))
        if file is self._start:
            self._link.progress.reach(file.step, anew=True)
        return state

    def list(self) -> Sequence[SavedCheckpoint]:
        return self._link.kept

    def _write(self, state: Any, step: int, metrics: Mapping[str, float]) -> None:
        try:
            written = write_checkpoint(self._transfers.folder, self._attempt, state, step, metrics)
            self._transfers.deliver(written)
        except BaseException as error:  # mostly a full disk: the user is told, and the training goes on
            lost = CheckpointEntry(attempt=self._attempt, step=step)
            self._link.send(Written(lost, _reason(error)))
            return
        self._link.send(Written(written))

    def _await_choice(self, step: int | None, *, is_sharded: bool) -> CheckpointEntry | None:
        """Wait until the driver has chosen the best checkpoint, or that of a step.

        Each rank asks. The n-th requests of all ranks get the same checkpoint, which the driver chooses for rank 0.
        """
        self._link.progress.move()
        self.flush()
        what = "the best checkpoint" if step is None else f"the checkpoint of step {step}"
        answer = self._link.ask(Question.CHECKPOINT, (is_sharded, step))
        patience = self._patience if step is None else 0.0
        limit = self._timeout + patience
        try:
            chosen: CheckpointEntry | None = answer.result(limit).value
        except TimeoutError as error:
            raise TimeoutError(
                f"{what}, for which rank 0 has to ask, too, did not arrive within {limit:g} s. See the driver's log"
            ) from error
        if chosen is None and step is not None:
            steps = ", ".join(str(kept.step) for kept in self.list()) or "none"
            raise LookupError(
                f"step={step}: {what} is not kept. It was never saved, its write failed (see the log), Gang(keep=...) "
                "has removed it, or it is of the other kind (`load`, `load_sharded`). Steps of kept checkpoints: "
                f"{steps}"
            )
        return chosen


def write_checkpoint(
    folder: Path, attempt: int, state: Any, step: int, metrics: Mapping[str, float]
) -> CheckpointEntry:
    """The file gets its final name once it is complete."""
    import torch

    unfinished = folder / f"{UNWRITTEN}{attempt}-{step}"
    try:
        with HashedFile(io.FileIO(unfinished, "w")) as file:
            torch.save(state, file)
        written = CheckpointEntry(
            attempt=attempt,
            step=step,
            size=unfinished.stat().st_size,
            digest=file.digest.hexdigest(),
            metrics=metrics,
        )
        unfinished.rename(folder / written.name)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return written


def read_checkpoint(path: Path) -> Any:
    import torch

    # mmap: the ranks of a node share the file's pages. A tensor that a rank writes to gets its own pages.
    # weights_only=False: the state may have any object of the user's. The file comes from this gang's own ranks.
    # Between two attempts of a task, the file is in Flyte's storage, whose writers are trusted with code and
    # inputs, too.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def check_best(method: str, metric: str | None, best: bool, step: int | None) -> None:
    if best and (metric is None or step is not None):
        raise ValueError(
            f"checkpoint.{method}(best=True, step={step}): best=True takes no step, and needs "
            f"Gang(keep=Keep(best=1, metric=...)). The gang's metric is {metric!r}"
        )


class _Copier(pickle.Pickler):
    """Copies a tensor once, even if it occurs repeatedly."""

    def __init__(self, file: IO[bytes]) -> None:
        import torch

        super().__init__(file, protocol=5)
        self._tensor = torch.Tensor
        self._sharded = sharded_classes()
        self.copies: list[torch.Tensor] = []
        self._seen: dict[Any, tuple[Any, int]] = {}  # keeps originals alive, so that addresses stay unique

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, self._tensor):
            return None
        if isinstance(obj, self._sharded) or obj.is_meta:
            raise _RefusedError(obj)
        key = _place_of(obj)
        if key not in self._seen:
            self._seen[key] = (obj, len(self.copies))
            self.copies.append(_copy_tensor(obj))
        return self._seen[key][1]


class _Restorer(pickle.Unpickler):
    def __init__(self, file: IO[bytes], copies: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._copies = copies

    def persistent_load(self, pid: int) -> Any:
        return self._copies[pid]


class _RefusedError(Exception):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def copy_of(state: Any) -> Any:
    """Return a copy of a state, on the CPU, that later training steps leave unchanged.

    No inner class or function: their references would keep the copy alive until Python's cyclic garbage collector runs.
    """
    buffer = io.BytesIO()
    copier = _Copier(buffer)
    try:
        copier.dump(state)
        buffer.seek(0)
        return _Restorer(buffer, copier.copies).load()
    except _RefusedError as found:
        raise _refusal(found.tensor) from None
    except Exception as error:
        raise TypeError(
            f"the state to be saved cannot be pickled: {error}. Save tensors and plain data, such as state_dict() of "
            "the model and the optimizer, instead of the objects themselves."
        ) from error


def _refusal(tensor: torch.Tensor) -> TypeError:
    if not isinstance(tensor, sharded_classes()):
        return TypeError(
            f"the state to be saved has a tensor of shape {tuple(tensor.shape)} on the meta device, without values. "
            "Give it values first: module.to_empty(device=...), then its initialisation or load_state_dict."
        )
    return TypeError(
        f"the state to be saved is sharded: it has a {type(tensor).__name__} of shape {tuple(tensor.shape)}, spread "
        "over the ranks, and of a state only rank 0's part is kept. Use checkpoint.save_sharded(state, step) and "
        "load_sharded(state), by which each rank keeps its own part, or gather the state before on all ranks."
    )


def _place_of(tensor: torch.Tensor) -> object:
    """The key is equal for tied tensors, which have the same memory, shape and type."""
    try:
        where = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, for example
        return id(tensor)
    if where == 0:  # tensors without elements
        return id(tensor)
    kind = (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
    return (where, tensor.storage_offset(), tensor.shape, tensor.stride(), *kind)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    copy = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _reason(error: BaseException) -> str:
    """Return the text of the error's `OSError`, if any: for a full disk, torch reports only a wrong file position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return f"{type(cause).__name__}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"
