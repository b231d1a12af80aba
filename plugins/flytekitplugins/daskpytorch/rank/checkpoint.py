"""Saves and loads a rank's checkpoints: copied at once, written in the background. Runs in a rank.

whole    rank 0 --file--> the driver's checkpoints --file--> every rank of the next attempt    (`link.Transfers`)
sharded  each rank --shards--> storage --> the ranks of the next attempt                       (`sharded`)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import Checkpoint, current_rank
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, HashedStream, Written
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Question
from flytekitplugins.daskpytorch.rank.link import UNWRITTEN, GangLink
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints, copy_of, gathered, text_of
from flytekitplugins.daskpytorch.records import SavedCheckpoint, numbers

if TYPE_CHECKING:
    import torch


class RankCheckpoint(Checkpoint):
    loaded: SavedCheckpoint | None = None

    def __init__(self, job: Job, rank: int, link: GangLink) -> None:
        self._job = job
        self._is_main = rank == 0
        self._link = link
        self._transfers = link.transfers
        self.folder = link.transfers.scratch
        self._worker = Worker(name="checkpoint")
        self.sharded = ShardedCheckpoints(job.sharding, job.attempt, rank, self._worker, link.send, link.progress.move)
        if self._is_main:
            self._transfers.tidy()

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Copy rank 0's state and write it in the background, once the previous one is written."""
        entry = CheckpointEntry(attempt=self._job.attempt, step=int(step), metrics=numbers(metrics))
        self._link.progress.reach(entry.step, anew=True)
        if not self._is_main:
            return
        with self._link.saving(entry.step):
            self.flush()
            self._worker.submit(functools.partial(self._write, copy_of(state), entry))

    def save_sharded(self, state: dict[str, Any], step: int, metrics: Mapping[str, Any] | None = None) -> None:
        step, plain = int(step), numbers(metrics)
        self._link.progress.reach(step, anew=True)
        with self._link.saving(step):
            self.sharded.save(state, step, plain)

    def load(self, *, best: bool = False, step: int | None = None) -> Any | None:
        is_start = not best and step is None
        entry = self._job.checkpoint if is_start else self._chosen("load", best, step)
        self.loaded = entry.saved(self._job.storage) if entry is not None else None
        if entry is None:
            return None
        state = read_checkpoint(self._transfers.fetch(entry))
        if is_start:
            self._link.progress.reach(entry.step, anew=True)
        return state

    def load_sharded(self, state: dict[str, Any], *, best: bool = False, step: int | None = None) -> int | None:
        if not best and step is None:
            start = self.sharded.load(state)
            if start is not None:
                self._link.progress.reach(start, anew=True)
            return start
        entry = self._chosen("load_sharded", best, step)
        self.loaded = entry.saved(None) if entry is not None else None
        return self.sharded.load(state, entry) if entry is not None else None

    def list(self) -> Sequence[SavedCheckpoint]:
        return self._link.kept

    def flush(self, timeout: float | None = None) -> None:
        self.sharded.flush(timeout)

    def _write(self, state: Any, entry: CheckpointEntry) -> None:
        failure = None
        try:
            entry = write_checkpoint(self._transfers.folder, state, entry)
            self._transfers.deliver(entry)
        except BaseException as error:  # mostly a full disk: the user is told, and the training goes on
            failure = text_of(error)
        self._link.send(Written(entry, failure))

    def _chosen(self, method: str, best: bool, step: int | None) -> CheckpointEntry | None:
        """Wait until the driver has chosen the best checkpoint, or that of a step.

        Each rank asks. The n-th requests of all ranks get the same checkpoint, which the driver chooses for rank 0.
        """
        settings = self._job.settings
        if best and (settings.keep.metric is None or step is not None):
            raise ValueError(
                f"checkpoint.{method}(best=True, step={step}): best=True takes no step, and needs "
                f"Gang(keep=Keep(best=1, metric=...)). The gang's metric is {settings.keep.metric!r}"
            )
        self._link.progress.move()
        self.flush()
        step = None if step is None else int(step)
        what = "the best checkpoint" if step is None else f"the checkpoint of step {step}"
        answer = self._link.ask(Question.CHECKPOINT, (method == "load_sharded", step))
        limit = settings.start_timeout + (self._job.patience if step is None else 0.0)
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


def write_checkpoint(folder: Path, state: Any, entry: CheckpointEntry) -> CheckpointEntry:
    """Return the entry with size and digest. The file gets its final name once it is complete."""
    import torch

    unfinished = folder / f"{UNWRITTEN}{entry.attempt}-{entry.step}"
    try:
        with unfinished.open("wb") as file:
            stream: Any = HashedStream(file.write)
            torch.save(state, stream)
        written = replace(entry, size=stream.size, digest=stream.digest.hexdigest())
        unfinished.rename(folder / written.name)
    finally:
        unfinished.unlink(missing_ok=True)
    return written


def read_checkpoint(path: Path) -> Any:
    import torch

    # mmap: the ranks of a node share the file's pages. A tensor that a rank writes to gets its own pages.
    # weights_only=False: the state may have any object of the user's. The file comes from this gang's own ranks.
    # Between two attempts of a task, the file is in Flyte's storage, whose writers are trusted with code and
    # inputs, too.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


# ---- Files that a library writes, as a checkpoint of the gang


def keep_files(folder: Path, step: int, own: Iterable[str] = (), metrics: Mapping[str, Any] | None = None) -> None:
    """Save the files in rank 0's folder, and each rank's `own` of the same path, as the newest checkpoint.

    Rank 0's folder may lack `own` files of ranks on other machines. Only rank 0's metrics count.
    """
    rank = current_rank()
    owned = gathered({name: _read(folder / name) for name in own if (folder / name).is_file()})
    paths = filter(Path.is_file, folder.rglob("*")) if rank.is_main else ()
    files = {str(path.relative_to(folder)): _read(path) for path in paths}
    state = {"files": {name: data for part in (files, *owned) for name, data in part.items()}}
    rank.checkpoint.save(state, step, metrics)


class KeptFiles:
    """Files of the checkpoint that this attempt starts from. All ranks of a worker share one copy."""

    _own: TemporaryDirectory[str] | None = None

    @functools.cached_property
    def folder(self) -> Path | None:
        """All ranks must ask for the folder. None on a start without a checkpoint, and after `remove`."""
        rank = current_rank()
        if rank.local_rank == 0 and (state := rank.checkpoint.load()) is not None:
            # The agent removes its folder with these files even after a kill of this rank.
            self._own = TemporaryDirectory(prefix="kept-", dir=getattr(rank.checkpoint, "folder", None))
            _write(Path(self._own.name), state)
        folders: list[str | None] = gathered(None if self._own is None else self._own.name)
        first = folders[rank.rank - rank.local_rank]
        return Path(first) if first is not None else None

    def remove(self) -> None:
        """Call after all ranks of the worker have read the files."""
        self.folder = None
        if self._own is not None:
            self._own.cleanup()


def _write(folder: Path, state: Any) -> None:
    if not isinstance(state, dict) or set(state) != {"files"}:
        loaded = current_rank().checkpoint.loaded
        of_step = f"of step {loaded.step} " if loaded is not None else ""
        raise ValueError(
            f"the gang starts from a checkpoint {of_step}that the program has saved by checkpoint.save, and not by "
            "this callback. Save by only one of the two. To start afresh, delete the checkpoint, or give Gang(key=...) "
            "another key."
        )
    for name, data in state["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data.numpy().tofile(path)


def _read(path: Path) -> torch.Tensor:
    """Return a file's content as uint8, since `bytes` may take twice their size in a pickle."""
    import numpy as np
    import torch

    return torch.from_numpy(np.fromfile(path, dtype=np.uint8))
