"""What one gang is asked to do. Made by whoever starts it, read by the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import Gang

__all__ = ["Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run, ready to go."""

    name: str
    call: bytes
    ranks_per_worker: int
    settings: Gang
    pass_local_rank: bool = False
    host: bytes | None = field(default=None, repr=False)
    """A pickled `RankHost`; None where the function is not that of a task."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The host's variables for the ranks; they may hold secrets."""
    observers: Sequence[Observer] = ()
    """Of this gang alone."""
    storage: StoragePaths | None = None
    """Where the checkpoints of other attempts are; None where there are no other attempts."""
    code: Code | None = None
    """The project's sources, where they are packed already."""
    key: str = ""
    """Names it among the gangs of its task, alike in every attempt; empty where there is only one."""
    keep: object = field(default=None, repr=False, compare=False)
    """What the call was made of: what Dask holds for it, it holds for as long as the driver has this."""
