"""What one gang is asked to do. Made by whoever starts it, read by the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.driver.upload import StoragePaths
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.flyte_settings import FlyteSettings
from flytekitplugins.daskpytorch.protocol.observer import Shape
from flytekitplugins.daskpytorch.rank.wandb import RunSettings
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
    flyte: FlyteSettings | None = None
    tracking: Callable[[Shape], RunSettings] | None = None
    storage: StoragePaths | None = None
    """Where the checkpoints of other attempts are; None outside a Flyte backend."""
    code: Code | None = None
    """The project's sources, where they are packed already."""
    key: str = ""
    """Names it among the gangs of its task, alike in every attempt; empty where there is only one."""
    keep: object = field(default=None, repr=False, compare=False)
    """What the call was made of: what Dask holds for it, it holds for as long as the driver has this."""
