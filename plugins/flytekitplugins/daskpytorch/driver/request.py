"""What one gang is asked to do. Made by whoever starts it, read by the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flytekitplugins.daskpytorch.protocol.code import Code, name_of, pack_call
from flytekitplugins.daskpytorch.protocol.host import StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import Gang

__all__ = ["Request", "named", "request_for"]


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


def request_for(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Gang,
    *,
    pass_local_rank: bool = False,
    code: Code | None = None,
) -> Request:
    """One gang's call of a function, ready to go, but for a name where its task has several."""
    return Request(
        name=name_of(function),
        call=pack_call(function, args, kwargs),
        ranks_per_worker=1 if settings.ranks_per_worker == "auto" else settings.ranks_per_worker,
        settings=settings,
        pass_local_rank=pass_local_rank,
        code=code,
        keep=(function, args, kwargs),
        observers=[make() for make in settings.observers],
    )


def named(request: Request, key: str) -> Request:
    """The same under a key, by which its checkpoints are found in the host's storage."""
    return replace(request, key=key, storage=current_execution().checkpoint_paths(key))
