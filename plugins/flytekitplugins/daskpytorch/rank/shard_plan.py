"""Which rank writes what of a sharded state, and the copy of it that is written. Runs in a rank, in all at once."""

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
"""Values that need neither be copied nor looked at: `torch.load(weights_only=True)` reads them."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One item of a plan, copied."""

    item: WriteItem
    size: int
    """In bytes, about."""
    write: Callable[[IO[bytes]], object]
    """As torch's own writers do."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What this rank is to write of a state: a copy, which later steps do not touch."""

    number: int
    step: int
    metrics: Mapping[str, float]
    pieces: Sequence[Piece]
    state: str | None
    """Of rank 0: what is in the whole."""
    drop: Callable[[], None] = field(repr=False)
    """To be called once it is not needed any more: its memory is the next one's."""


class SavePlans:
    """Plans a state's saves, anew when it has changed; and stages them, two at a time at most."""

    def __init__(self) -> None:
        self._planner = DefaultSavePlanner()
        self._values: dict[str, Callable[[IO[bytes]], object]] = {}
        self._looked_at: SavePlan | None = None
        self._agreed: SavePlan | None = None
        """What the ranks have divided the work by; this rank's."""
        self._own: Sequence[WriteItem] = ()
        self._state: str | None = None
        self._copies: list[HostCopies] = []
        """Of saves that have been written; their memory is not given back, since the next one needs as much."""

    def look_at(self, state: Mapping[str, Any]) -> bool:
        """Take a state to be saved; whether the ranks have to `agree` on it first.

        Raises:
            TypeError: There is something in it that could not be loaded again.
            ValueError: Two of its keys are the same once they are joined.
        """
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(as_dicts(state))
        check_savable(self._planner.state_dict)
        self._looked_at = local = self._planner.create_local_plan()
        kinds = ((item, self._planner.lookup_object(item.index)) for item in local.items if _is_value(item))
        self._values = {item.index.fqn: _frozen(item.index.fqn, value) for item, value in kinds}
        return local != self._agreed

    def agree(self) -> None:
        """Divide the work: rank 0 decides, and what several ranks have alike, one of them writes.

        Raises:
            ValueError: The ranks' shards do not make up the whole.
        """
        self._agreed = None  # until it is done
        ranks: Any = _DistWrapper(None, distributed.is_initialized(), 0)
        try:
            plan = ranks.reduce_scatter("plan", lambda: self._looked_at, self._divide)
        except CheckpointException as error:  # no Exception of Python's
            raise ValueError(f"the state's shards do not fit together: {error}") from None
        self._agreed, self._own, self._copies = self._looked_at, plan.items, []

    def stage(self, number: int, step: int, metrics: Mapping[str, float]) -> Staged:
        """Copy what this rank is to write; the tensors into memory of a save before where there is some."""
        items = [item for item in self._own if not _is_value(item)]
        tensors = [self._tensor(item) for item in items]
        copies = self._copies.pop() if self._copies else HostCopies(tensors)
        copies.fill(tensors)
        copied = [
            Piece(item=item, size=copy.nbytes, write=functools.partial(torch.save, copy))
            for item, copy in zip(items, copies.tensors, strict=True)
        ]
        values = [Piece(item=item, size=0, write=self._values[item.index.fqn]) for item in self._own if _is_value(item)]
        self._planner, self._values = DefaultSavePlanner(), {}  # the state itself may go
        return Staged(
            number=number,
            step=step,
            metrics=metrics,
            pieces=[*copied, *values],
            state=self._state,
            drop=functools.partial(self._copies.append, copies),  # of the list that stands for this plan
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
    """The state with what its objects say of themselves, as `torch.distributed.checkpoint` has it."""
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
    except Exception as error:  # whatever pickling a user's object raises
        raise TypeError(
            f"{key} of the state to be saved is a {type(value).__name__}, which torch.load(weights_only=True) does not "
            "read. Save tensors and plain data: numbers, text, lists, dictionaries."
        ) from error
    data = file.getvalue()
    return lambda to: to.write(data)
