"""Makes a gang's request of a user's call. Runs in the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.protocol.code import Code, name_of, pack_call
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import Gang

__all__ = ["named", "request_for"]


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
