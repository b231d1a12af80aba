"""Forms the gang's process group in a rank, also where the user's code calls `init_process_group` itself."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from flytekitplugins.daskpytorch.process.system import allow_files
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.placement import Place

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


OTHER_FILES = 512
ON_GPUS = "cpu:gloo,cuda:nccl"
"""Backends with `Gang(backend="nccl")`. Collectives of objects and asynchronous checkpoints need gloo."""


@dataclass
class _Membership:
    place: Place
    job: Job
    take_device: Callable[[], torch.device | None] | None
    """Returns the device of GPU collectives. None once it was called."""
    listener: int | None
    on_formed: Callable[[], object]
    backend: str
    pid: int = field(default_factory=os.getpid)
    num_groups: int = 0
    """Prefix of the next group's keys in the rendezvous store, where an earlier group's values would mislead."""
    is_in: bool = False

    @functools.cached_property
    def store(self) -> Store:
        return _store(self.job, self.listener, self.place.world_size)


def install() -> None:
    """Patch `torch.distributed.init_process_group`, so that the user's calls in a rank give the gang's process group.

    Must run before other modules import the function by name.
    """
    from torch import distributed

    distributed_c10d = distributed.distributed_c10d
    original = distributed_c10d.init_process_group
    if getattr(original, "knows_gangs", False):
        return

    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if _membership is None or _membership.pid != os.getpid():
            original(*args, **kwargs)
            return
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        _heed(_membership, original, given.arguments)

    init_process_group.knows_gangs = True  # type: ignore[attr-defined]
    distributed_c10d.init_process_group = init_process_group
    distributed.init_process_group = init_process_group
    _watch_destruction(distributed_c10d)


def before_destruction(finish: Callable[[], object]) -> None:
    global _finish
    _finish = finish


def _watch_destruction(distributed_c10d: Any) -> None:
    from torch import distributed

    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is distributed.group.WORLD:
            _finish()
        original(group)

    distributed_c10d.destroy_process_group = distributed.destroy_process_group = destroy_process_group


def expect(
    place: Place,
    job: Job,
    take_device: Callable[[], torch.device | None],
    listener: int | None = None,
    on_formed: Callable[[], object] = bool,  # does nothing
) -> None:
    global _membership
    backend = ON_GPUS if job.backend == "nccl" else job.backend
    _membership = _Membership(place, job, take_device, listener, on_formed, backend)


def meet() -> torch.device | None:
    """Take the rank's device, and serve the rendezvous store if this rank does. Form no process group."""
    member = _membership
    if member is None or member.take_device is None:
        return None
    take_device, member.take_device = member.take_device, None
    if member.listener is not None:
        _ = member.store
    return take_device()


def join() -> None:
    if _membership is not None and _membership.take_device is not None:
        from torch import distributed

        distributed.init_process_group(_membership.backend, device_id=meet())


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Hide the gang's process group while a program forms its own, as under torchrun."""
    from torch import distributed

    group = distributed.group.WORLD
    if group is None or _membership is None or _membership.pid != os.getpid():
        yield
        return
    distributed.group.WORLD = None
    try:
        yield
    finally:
        if not distributed.is_initialized() and group in torch_parts.groups():
            distributed.group.WORLD = group


def leave() -> None:
    from torch import distributed

    global _membership
    _membership = None
    if distributed.is_initialized():  # the function may have destroyed the group
        distributed.destroy_process_group()


def _heed(member: _Membership, original: Callable[..., None], asked: Mapping[str, Any]) -> None:
    """Give a call of `init_process_group` in a rank the gang's group, or the one of the user's rendezvous."""
    from torch import distributed

    if member.take_device is not None:
        join()  # a module of the user's calls the function at import
    if distributed.is_initialized() and member.is_in:
        _check(member, asked["backend"], asked)
        if asked["timeout"] is not None:
            torch_parts.set_timeout(asked["timeout"])
    elif asked["store"] is None and asked["init_method"] in (None, "env://"):
        _check(member, None, asked)
        _enter(member, original, asked)
    else:
        original(**asked)
        member.is_in = False
        member.on_formed()


def _enter(member: _Membership, form: Callable[..., None], asked: Mapping[str, Any]) -> None:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    backend = asked["backend"] or member.backend
    store = PrefixStore(str(member.num_groups), member.store)
    member.num_groups += 1
    place = {"world_size": member.place.world_size, "rank": member.place.rank, "store": store}
    own = member.job.debugging.patience(member.job.settings)  # None: the backend's
    timeout = own if asked["timeout"] is None else asked["timeout"]
    form(**{**asked, "backend": backend, "init_method": None, "timeout": timeout, **place})
    if backend == ON_GPUS:
        torch_parts.name_default_group("nccl")
    member.backend, member.is_in = backend, True
    member.on_formed()


def _check(member: _Membership, backend: str | None, asked: Mapping[str, Any]) -> None:
    place, world_size, rank = member.place, asked["world_size"], asked["rank"]
    differing = []
    if backend is not None and not _kinds(backend) <= _kinds(member.backend):
        differing.append(f"the backend is {member.backend}, not {backend}: see Gang(backend=...)")
    if world_size not in (-1, place.world_size):
        differing.append(f"there are {place.world_size} ranks, not {world_size}: see Gang(ranks_per_worker=...)")
    if rank not in (-1, place.rank):
        differing.append(f"this is rank {place.rank}, not {rank}: pass no rank, or that of the variable RANK")
    if differing:
        raise ValueError(f"init_process_group asks for another process group than the gang's: {'; '.join(differing)}")


def _kinds(backend: str) -> set[str]:
    return {part.rpartition(":")[2] for part in backend.lower().split(",")}


def _store(job: Job, listener: int | None, world_size: int) -> Store:
    from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    if job.store is None:
        return HashStore()
    host, port = job.store
    timeout, serves = timedelta(seconds=job.settings.start_timeout), listener is not None
    if serves:
        allow_files(world_size + OTHER_FILES)
    by_libuv = not serves or _takes_listener_by_libuv()
    store = TCPStore(
        host, port, None, serves, timeout, wait_for_workers=False, master_listen_fd=listener, use_libuv=by_libuv
    )
    # A suspended rank of an older attempt may wake up and use the same port.
    return PrefixStore(f"{job.gang}/{job.attempt}", store)


def _takes_listener_by_libuv() -> bool:
    """True for torch 2.8 or newer (pytorch#150215)."""
    import torch

    return Version(torch.__version__) >= Version("2.8")


def num_collectives() -> int:
    from torch import distributed

    try:
        return torch_parts.num_collectives(distributed.group.WORLD)
    except (AttributeError, RuntimeError, ValueError):
        return 0


def num_exchanges() -> int | None:
    try:
        groups = torch_parts.groups()
        return sum(map(torch_parts.num_collectives, groups)) if groups else None
    except (RuntimeError, ValueError):
        return None


_finish: Callable[[], object] = bool  # does nothing
_membership: _Membership | None = None
