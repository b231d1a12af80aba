"""Divides a sharded state among ranks for a save, and copies each rank's part. Runs in all ranks together.

The copies go to host memory that the next save reuses. Copies from a GPU go to one page-locked block of just the needed
size. Torch's own allocator for page-locked memory rounds each tensor up to a power of two.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.nn.parameter import is_lazy
from torch.serialization import get_safe_globals

from flytekitplugins.daskpytorch.protocol.checkpoints import state_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

UNCHANGEABLE = (bool, int, float, str, type(None))
"""Types of values that are saved without a copy or a check: immutable, and read by `torch.load(weights_only=True)`."""

PAGE = 4096
ALIGNMENT = 64
"""Alignment of each tensor's copy in page-locked host memory, in bytes."""
META = (
    "is a tensor on the meta device, which holds no values. Give it values first: module.to_empty(device=...), then "
    "its initialisation or load_state_dict"
)
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Copy of a tensor's chunk, or of another value, that this rank saves."""

    item: WriteItem
    size: int
    """Approximate size of the tensor chunk's copy, in bytes. 0 for other values."""
    write: Callable[[IO[bytes]], object]
    """Function that writes the copy to a file, in the format of `torch.save`."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Copy of this rank's part of a state, which later training steps do not change."""

    number: int
    step: int
    metrics: Mapping[str, float]
    pieces: Sequence[Piece]
    state: str | None
    """Keys of the whole state, with the shape, dtype and chunks of each tensor, as JSON. None on ranks other than 0."""
    drop: Callable[[], None] = field(repr=False)
    """Function that frees the copy's memory for the next save. Call after the copy is written or given up."""


class SavePlans:
    """Decides which part of a state this rank saves, and copies that part for each save.

    The ranks divide the state again when its structure has changed. At most two copies exist: for the save in flight
    and for the waiting save.
    """

    def __init__(self) -> None:
        self._planner = DefaultSavePlanner()
        self._values: dict[str, Callable[[IO[bytes]], object]] = {}
        self._looked_at: SavePlan | None = None
        self._agreed: SavePlan | None = None
        """All items of this rank's state when the ranks last divided the state. None: the state is not divided."""
        self._own: Sequence[WriteItem] = ()
        self._state: str | None = None
        self._copies: list[HostCopies] = []
        """Host memory of finished saves, for use by later saves."""

    def look_at(self, state: Mapping[str, Any]) -> bool:
        """Take the state of the next save, and compare its structure with that of the save before.

        Returns:
            True if the structure is new, so that all ranks have to call `agree` before `stage`.

        Raises:
            TypeError: Loading would fail for a value of the state.
            ValueError: Two keys of the state become equal when the keys of nested dictionaries are joined by dots.
        """
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(as_dicts(state))
        check_savable(self._planner.state_dict)
        self._looked_at = local = self._planner.create_local_plan()
        kinds = ((item, self._planner.lookup_object(item.index)) for item in local.items if _is_value(item))
        self._values = {item.index.fqn: _frozen(item.index.fqn, value) for item, value in kinds}
        return local != self._agreed

    def agree(self) -> None:
        """Divide the state of the next save among the ranks, as rank 0 decides. Call on all ranks together.

        One rank saves a value that several ranks have.

        Raises:
            ValueError: The ranks' shards do not make up the whole state.
        """
        self._agreed = None  # until the division is done
        ranks: Any = _DistWrapper(None, distributed.is_initialized(), 0)
        try:
            plan = ranks.reduce_scatter("plan", lambda: self._looked_at, self._divide)
        except CheckpointException as error:  # not derived from Exception
            raise ValueError(
                f"the ranks' shards do not make up one whole state ({error}). Pass the same state on all ranks"
            ) from None
        self._agreed, self._own, self._copies = self._looked_at, plan.items, []

    def stage(self, number: int, step: int, metrics: Mapping[str, float]) -> Staged:
        """Copy this rank's part of the state that `look_at` took. Reuse the host memory of an earlier save, if free.

        Args:
            number: Number of the attempt's `save_sharded` call, from 0.
            step: Training step of the state.
            metrics: Metrics of the state by name.
        """
        items = [item for item in self._own if not _is_value(item)]
        tensors = [self._tensor(item) for item in items]
        copies = self._copies.pop() if self._copies else HostCopies(tensors)
        copies.fill(tensors)
        copied = [
            Piece(item=item, size=copy.nbytes, write=functools.partial(torch.save, copy))
            for item, copy in zip(items, copies.tensors, strict=True)
        ]
        values = [Piece(item=item, size=0, write=self._values[item.index.fqn]) for item in self._own if _is_value(item)]
        self._planner, self._values = DefaultSavePlanner(), {}  # releases the state
        return Staged(
            number=number,
            step=step,
            metrics=metrics,
            pieces=[*copied, *values],
            state=self._state,
            drop=functools.partial(self._copies.append, copies),  # the present plan's list
        )

    def _tensor(self, item: WriteItem) -> torch.Tensor:
        tensor = self._planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)  # noqa: S101 - the item says so
        return tensor.detach()

    def _divide(self, plans: list[SavePlan]) -> list[SavePlan]:
        divided, metadata = DefaultSavePlanner().create_global_plan(plans)
        self._state = state_of(metadata)
        return divided


def as_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with each `Stateful` object replaced by its `state_dict()`, as torch's own checkpoints do."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def _is_value(item: WriteItem) -> bool:
    return item.type is WriteItemType.BYTE_IO


def _frozen(key: str, value: Any) -> Callable[[IO[bytes]], object]:
    if type(value) in UNCHANGEABLE:
        return functools.partial(torch.save, value)
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # any error of pickling a user's object
        raise TypeError(
            f"{key} of the state to be saved is a {type(value).__name__}, which torch.load(weights_only=True) does not "
            "read. Save tensors and plain data: numbers, text, lists, dictionaries."
        ) from error
    data = file.getvalue()
    return lambda to: to.write(data)


# ---- Copies in host memory


class HostCopies:
    """Host memory for copies of tensors with given shapes, strides and dtypes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        locked = _page_locked([tensor for tensor in like if tensor.is_cuda])
        self.tensors = [next(locked) if tensor.is_cuda else torch.empty_like(tensor, device="cpu") for tensor in like]
        """The copies, in the order of the original tensors."""

    def fill(self, originals: Sequence[torch.Tensor]) -> None:
        """Copy these tensors to the host memory, and wait until their devices have finished."""
        for copy, original in zip(self.tensors, originals, strict=True):
            copy.copy_(original, non_blocking=True)
        for device in {tensor.device for tensor in originals if tensor.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)


def _page_locked(like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield an empty CPU tensor per GPU tensor, all in one block of memory, page-locked unless CUDA refuses to lock."""
    if not like:
        return
    starts, end = [], 0
    for tensor in like:
        starts.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end + PAGE, dtype=torch.uint8).numpy()  # numpy: each slice becomes a storage of its own
    first = -memory.ctypes.data % PAGE  # CUDA refuses to lock a page twice: the block shares no page
    _lock(memory, memory.ctypes.data + first, end, like[0].device)
    for tensor, start in zip(like, starts, strict=True):
        begin = first + start
        flat = torch.from_numpy(memory[begin : begin + tensor.nbytes]).view(tensor.dtype)
        yield flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _lock(memory: npt.NDArray[np.uint8], address: int, size: int, device: torch.device) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(address, size, 0)
    if int(error) == 0:
        weakref.finalize(memory.base, cudart.cudaHostUnregister, address).atexit = False
        return
    with contextlib.suppress(RuntimeError):  # CUDA reports the failed call again at the next kernel's start
        torch.ones(1, device=device)
    print(
        f"{size:,} bytes of memory for copies of GPU tensors could not be page-locked ({error}): each save_sharded "
        "holds the training up longer. Raise the container's memory limit, or save less.",
        file=sys.stderr,
    )


# ---- Tensors that a checkpoint cannot save or fill


class TensorKindError(TypeError):
    """A state has a tensor that a sharded checkpoint cannot save or fill. The message names a replacement."""


def check_savable(state: Mapping[str, Any]) -> None:
    """Check that a sharded checkpoint can save all tensors of a flattened state, also those inside a `DTensor`.

    Raises:
        TensorKindError: A later load could not read one of the tensors.
    """
    for key, tensor in _parts(state):
        if (reason := META if tensor.is_meta and not is_lazy(tensor) else _strange(tensor)) is not None:
            raise TensorKindError(f"{key} of the state to be saved {reason}.")


def check_fillable(state: Mapping[str, Any]) -> None:
    """Check that a sharded checkpoint can be loaded into all tensors of a flattened state.

    Raises:
        TensorKindError: A load cannot write to one of the tensors.
    """
    for key, tensor in _parts(state):
        if (reason := _strange(tensor) or _shared(tensor)) is not None:
            raise TensorKindError(f"{key} of the state to be loaded into {reason}.")


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the key of each tensor in a flattened state, with this rank's part of the tensor."""
    for key, value in state.items():
        parts: Iterable[torch.Tensor] = [value] if isinstance(value, torch.Tensor) else []
        if hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
            parts = [shard.tensor for shard in value.local_shards()]
        elif hasattr(value, "to_local"):  # a DTensor
            with torch.no_grad():
                parts = [value.to_local()]
        yield from ((key, part) for part in parts)


def _strange(tensor: torch.Tensor) -> str | None:
    if is_lazy(tensor):
        return "belongs to a lazy module and has no shape yet. Call the module once before"
    if tensor.is_nested:
        return "is a nested tensor. Put the list value.unbind() in its place"
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}. Put value.to_dense() in its place"
    if tensor.is_quantized:
        return "is a quantized tensor. Put value.int_repr() in its place, and the scale and zero point beside it"
    kind = type(tensor)
    if kind in PLAIN or kind in get_safe_globals() or _is_copied_as_plain(tensor):
        return None
    return (
        f"is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does not read. Put the plain "
        "tensors that it is made of in its place, or allow its class on all ranks: torch.serialization.add_safe_globals"
    )


def _is_copied_as_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's copy is a plain tensor, as for the unfinished result of a functional collective."""
    try:
        return type(torch.empty_like(tensor)) in PLAIN
    except Exception:  # a tensor class of another library may raise any error
        return False


def _shared(tensor: torch.Tensor) -> str | None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is an expanded tensor: its elements share one place in memory. Put value.clone() in its place"
    return None
