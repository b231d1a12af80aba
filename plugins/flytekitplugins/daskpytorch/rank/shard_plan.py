"""Divides a sharded state among ranks for a save, and copies each rank's part. Runs in all ranks together."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _DistWrapper

from flytekitplugins.daskpytorch.protocol.torch_metadata import state_of
from flytekitplugins.daskpytorch.rank.host_copies import HostCopies
from flytekitplugins.daskpytorch.rank.tensor_kinds import check_savable

UNCHANGEABLE = (bool, int, float, str, type(None))
"""Types of values saved without copy or check. `torch.load(weights_only=True)` reads them."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Copy of one item of a plan."""

    item: WriteItem
    size: int
    """Approximate size, in bytes. 0 for other values than tensors."""
    write: Callable[[IO[bytes]], object]
    """Writes the copy to a file, in the format of torch's own writers."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Copy of this rank's part of a state, which later training steps do not change."""

    number: int
    step: int
    metrics: Mapping[str, float]
    pieces: Sequence[Piece]
    state: str | None
    """Keys of the whole state with shapes, dtypes and chunks, as JSON. None on ranks other than 0."""
    drop: Callable[[], None] = field(repr=False)
    """Frees the copy's memory for the next save. Call after the copy is written or given up."""


class SavePlans:
    """Plans a state's saves after each change of structure, and copies the rank's part for each save.

    Two copies exist at most: for the save in flight and for the waiting save.
    """

    def __init__(self) -> None:
        self._planner = DefaultSavePlanner()
        self._values: dict[str, Callable[[IO[bytes]], object]] = {}
        self._looked_at: SavePlan | None = None
        self._agreed: SavePlan | None = None
        """This rank's local plan at the last division of the work. None: not divided."""
        self._own: Sequence[WriteItem] = ()
        self._state: str | None = None
        self._copies: list[HostCopies] = []
        """Host memory of finished saves, for reuse."""

    def look_at(self, state: Mapping[str, Any]) -> bool:
        """Take the state of the next save.

        Returns:
            True for a new structure of the state, on which ranks have to `agree` first.

        Raises:
            TypeError: Loading would fail for a value of the state.
            ValueError: Two keys of the state become equal once nested keys are joined.
        """
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(as_dicts(state))
        check_savable(self._planner.state_dict)
        self._looked_at = local = self._planner.create_local_plan()
        kinds = ((item, self._planner.lookup_object(item.index)) for item in local.items if _is_value(item))
        self._values = {item.index.fqn: _frozen(item.index.fqn, value) for item, value in kinds}
        return local != self._agreed

    def agree(self) -> None:
        """Divide the state among the ranks, as rank 0 decides. One rank writes a value that several ranks have.

        Raises:
            ValueError: The ranks' shards do not make up the whole state.
        """
        self._agreed = None  # until the division is done
        ranks: Any = _DistWrapper(None, distributed.is_initialized(), 0)
        try:
            plan = ranks.reduce_scatter("plan", lambda: self._looked_at, self._divide)
        except CheckpointException as error:  # not derived from Exception
            raise ValueError(
                f"the ranks' shards do not make up one whole state; do all ranks pass the same state? {error}"
            ) from None
        self._agreed, self._own, self._copies = self._looked_at, plan.items, []

    def stage(self, number: int, step: int, metrics: Mapping[str, float]) -> Staged:
        """Copy this rank's part of the state. Tensors go to the host memory of an earlier save, if any is free."""
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
