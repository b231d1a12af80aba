"""Keeps files that a library writes as a checkpoint of the gang. Runs in all ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import current_rank

if TYPE_CHECKING:
    import torch


def keep(folder: Path, step: int, own: Iterable[str] = (), metrics: Mapping[str, Any] | None = None) -> None:
    """Save the files in rank 0's folder, and each rank's `own` of the same path, as the newest checkpoint.

    Rank 0's folder may lack `own` files of ranks on other machines. Only rank 0's metrics count.
    """
    rank = current_rank()
    owned = gathered({name: _read(folder / name) for name in own if (folder / name).is_file()})
    files = {str(path.relative_to(folder)): _read(path) for path in _files_in(folder)} if rank.is_main else {}
    state = {"files": {name: data for part in (files, *owned) for name, data in part.items()}}
    rank.checkpoint.save(state, step, metrics)


class KeptFiles:
    """Files of the checkpoint that this attempt starts from. All ranks of a worker share one copy."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """None on a start without a checkpoint, and after `remove`."""
        self._own: TemporaryDirectory[str] | None = None
        rank = current_rank()
        if rank.local_rank == 0 and (state := rank.checkpoint.load()) is not None:
            # The agent removes its folder with these files even after a kill of this rank.
            self._own = TemporaryDirectory(prefix="kept-", dir=getattr(rank.checkpoint, "folder", None))
            _write(Path(self._own.name), state)
        folders: list[str | None] = gathered(None if self._own is None else self._own.name)
        first = folders[rank.rank - rank.local_rank]
        if first is not None:
            self.folder = Path(first)

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


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _read(path: Path) -> torch.Tensor:
    """Return a file's content as uint8, since `bytes` may take twice their size in a pickle."""
    import torch

    data = bytearray(path.read_bytes())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. Call on all ranks together."""
    from torch import distributed

    values = [value] * current_rank().world_size
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values
