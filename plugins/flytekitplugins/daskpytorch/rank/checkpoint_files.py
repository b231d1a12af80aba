"""Files for other tools: checkpoints that a library writes, and exported weights. Runs in all ranks together."""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.protocol import host

if TYPE_CHECKING:
    import torch


INDEX = "model.safetensors.index.json"
MAX_FILE_SIZE = 5_000_000_000
"""Default for the maximum number of bytes of tensors in one safetensors file, as in Hugging Face's tools."""


def keep(folder: Path, step: int, own: Iterable[str] = (), metrics: Mapping[str, Any] | None = None) -> None:
    """Save the files in rank 0's folder as the newest checkpoint.

    Args:
        folder: The folder. All ranks use the same path, on one machine or several.
        step: Training step of the files.
        own: Names of files that this rank has written. Rank 0's folder may lack them, on another machine.
        metrics: Numbers or one-element tensors by name, which rate the checkpoint. Only those of rank 0 count.
    """
    rank = current_rank()
    owned = gathered({name: _read(folder / name) for name in own if (folder / name).is_file()})
    files = {str(path.relative_to(folder)): _read(path) for path in _files_in(folder)} if rank.is_main else {}
    state = {"files": {name: data for part in (files, *owned) for name, data in part.items()}}
    rank.checkpoint.save(state, step, metrics)


class KeptFiles:
    """Files of the checkpoint that this attempt of the gang starts from. All ranks of a worker share one copy."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """Folder with the checkpoint's files. None on a start without a checkpoint, and after `remove`."""
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
        """Remove the copy of the checkpoint's files. Call after all ranks of the worker have read the files."""
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
    """Return a file's content as a tensor of bytes (uint8). `bytes` may take twice their size in a pickle."""
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


# ---- Exported weights


def export_safetensors(
    state: Mapping[str, torch.Tensor], uri: str | os.PathLike[str] | None = None, *, max_file_size: int = MAX_FILE_SIZE
) -> str:
    """Write the tensors of a state, sharded or not, as safetensors for Transformers and other tools.

    All ranks call it, with the same names. The ranks take turns: one gathers a file's tensors and writes them straight
    to storage. A process holds at most one file's tensors and its own shards, and no tensor passes through the driver.
    A task returns the folder by reference: `return FlyteDirectory(folder, remote_directory=False)`.

    Args:
        state: Names and tensors, such as `get_model_state_dict(model)` of `torch.distributed.checkpoint.state_dict` or
            `model.state_dict()`. A `DTensor` is written whole. Any other tensor is written by the rank whose turn it
            is.
        uri: The folder, a path or an fsspec URL that all ranks reach. None: a new folder among the outputs of the Flyte
            task.
        max_file_size: Maximum number of bytes of tensors in a file. A single file is `model.safetensors`. Several files
            are numbered as in Hugging Face's tools, with `model.safetensors.index.json`, which is written last.

    Returns:
        The folder.

    Raises:
        TypeError: A value of the state is not a tensor.
        ValueError: The ranks have different names, or no folder is named outside a Flyte task.
        OSError: A file cannot be written. Raised on every rank.

    Examples:
        >>> import torch
        >>> from safetensors.torch import load_file
        >>> from flytekitplugins.daskpytorch import export_safetensors
        >>> model = torch.nn.Linear(2, 1)
        >>> export_safetensors(model.state_dict(), "exported")
        'exported'
        >>> sorted(load_file("exported/model.safetensors"))
        ['bias', 'weight']
    """
    _check(state)
    folder = _folder(uri)
    files = _split(state, max_file_size)
    for index, names in enumerate(files):
        _write_in_turn(index, {name: state[name] for name in names}, folder, _name(index, len(files)))
    if len(files) > 1:
        with _together():
            if current_rank().is_main:
                _write_index(state, files, folder)
    return folder


def _check(state: Mapping[str, object]) -> None:
    import torch

    if strangers := [
        f"{name} is a {type(value).__name__}" for name, value in state.items() if not torch.is_tensor(value)
    ]:
        raise TypeError(
            f"export_safetensors takes names and tensors; {strangers[0]}. Give it the model's own state alone, such as "
            "model.state_dict() or get_model_state_dict(model)."
        )
    names = gathered(list(state))
    for rank, others in enumerate(names):
        if differing := sorted(set(names[0]) ^ set(others)):
            raise ValueError(
                f"export_safetensors: ranks 0 and {rank} differ in {', '.join(differing[:5])}. Give tensors of the "
                "same names on all ranks"
            )


def _folder(uri: str | os.PathLike[str] | None) -> str:
    """Return the folder for exported weights that rank 0 was given or made. Call on all ranks together."""
    made: list[str | None] = gathered(os.fspath(uri) if uri is not None else host.current_execution().new_folder())
    if made[0] is None:
        raise ValueError("export_safetensors: outside a Flyte task, name the folder with uri=...")
    return made[0].rstrip("/")


def _split(state: Mapping[str, torch.Tensor], max_file_size: int) -> list[list[str]]:
    """Divide the tensors of a state among files. Return the names of each file's tensors, in the order of the state."""
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + num_bytes > max_file_size:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes
    return files


def _name(index: int, num_files: int) -> str:
    return "model.safetensors" if num_files == 1 else f"model-{index + 1:05}-of-{num_files:05}.safetensors"


def _whole(tensor: torch.Tensor, *, is_wanted: bool) -> torch.Tensor | None:
    """Return a copy of the whole tensor on the CPU, which shares no memory, as safetensors requires.

    Args:
        tensor: The tensor. For a `DTensor`, all ranks call this function together.
        is_wanted: False on ranks that do not write the tensor. These ranks get None.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
        return tensor.cpu().contiguous() if is_wanted else None
    return tensor.cpu().contiguous().clone() if is_wanted else None


def _write_in_turn(index: int, state: Mapping[str, torch.Tensor], folder: str, name: str) -> None:
    rank = current_rank()
    rank.progress.move()
    is_own_turn = index % rank.world_size == rank.rank
    wholes = {key: whole for key, value in state.items() if (whole := _whole(value, is_wanted=is_own_turn)) is not None}
    with _together():
        if is_own_turn:
            _write_file(wholes, folder, name)


def _write_file(tensors: dict[str, torch.Tensor], folder: str, name: str) -> None:
    from safetensors.torch import save_file

    with TemporaryDirectory(prefix="export-") as temporary:
        path = Path(temporary, name)
        save_file(tensors, path, metadata={"format": "pt"})
        _files_of(folder).put_file(str(path), posixpath.join(folder, name))


def _write_index(state: Mapping[str, torch.Tensor], files: list[list[str]], folder: str) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    places = {name: _name(index, len(files)) for index, names in enumerate(files) for name in names}
    content = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
    _files_of(folder).pipe_file(posixpath.join(folder, INDEX), content.encode())


def _files_of(folder: str) -> Any:
    files = host.current_execution().filesystem(folder)
    files.makedirs(folder, exist_ok=True)
    return files


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Run a `with` block on all ranks together. An exception on one rank becomes an `OSError` on all ranks."""
    reason: str | None = None
    try:
        yield
    except Exception as error:  # whatever a store's client raises
        reason = f"{type(error).__name__}: {error}"
    for rank, found in enumerate(gathered(reason)):
        if found is not None:
            raise OSError(f"export_safetensors: rank {rank} could not write its file: {found}")
