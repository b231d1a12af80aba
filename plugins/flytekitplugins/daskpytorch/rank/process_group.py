"""Forms the gang's process group in a rank, also where the user's code calls `init_process_group` itself.

Also reads the newest collectives of all groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from flytekitplugins.daskpytorch.process.system import allow_files
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.failure import DEFAULT_GROUP, MAX_COLLECTIVES, Collective, Recalled
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.placement import Place

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


OTHER_FILES = 512
ON_GPUS = "cpu:gloo,cuda:nccl"
"""Backends with `Gang(backend="nccl")`. Collectives of objects and asynchronous checkpoints need gloo."""


@dataclass
class Membership:
    place: Place
    job: Job
    take_device: Callable[[], torch.device | None] | None
    """Returns the device of GPU collectives. None once it was called."""
    listener: int | None = None
    on_formed: Callable[[], object] = bool  # does nothing
    pid: int = field(default_factory=os.getpid)
    num_groups: int = 0
    """Prefix of the next group's keys in the rendezvous store, where an earlier group's values would mislead."""
    is_in: bool = False

    def __post_init__(self) -> None:
        self.backend = ON_GPUS if self.job.backend == "nccl" else self.job.backend

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


def expect(membership: Membership) -> None:
    global _membership
    _membership = membership


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


def _heed(member: Membership, original: Callable[..., None], asked: Mapping[str, Any]) -> None:
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


def _enter(member: Membership, form: Callable[..., None], asked: Mapping[str, Any]) -> None:
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


def _check(member: Membership, backend: str | None, asked: Mapping[str, Any]) -> None:
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
    import torch
    from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    if job.store is None:
        return HashStore()
    host, port = job.store
    timeout, serves = timedelta(seconds=job.settings.start_timeout), listener is not None
    if serves:
        allow_files(world_size + OTHER_FILES)
    by_libuv = not serves or Version(torch.__version__) >= Version("2.8")  # pytorch#150215
    store = TCPStore(
        host, port, None, serves, timeout, wait_for_workers=False, master_listen_fd=listener, use_libuv=by_libuv
    )
    # A suspended rank of an older attempt may wake up and use the same port.
    return PrefixStore(f"{job.gang}/{job.attempt}", store)


_finish: Callable[[], object] = bool  # does nothing
_membership: Membership | None = None


# ---- Collectives, from torch's flight recorder


HOOK = 0x6461736B
"""Key of this module's abort hook in torch's GPU backend, whose own hooks have small numbers."""


def recall(*, is_over: bool = False) -> Recalled | None:
    try:
        groups = [name for group in torch_parts.groups() for name in _names_of(group)]
        recorded = list(_recorders(has_nccl=any("nccl" in group for group in groups)))
        calls = (entry for entries in recorded for entry in entries if not entry["is_p2p"])
        entries = [entry for entry in calls if _group_of(entry) in groups]
        entries.sort(key=lambda entry: entry["time_created_ns"])
        collectives = [_collective(entry) for entry in entries[-MAX_COLLECTIVES:]]
        has_forgotten = any(min(entry["record_id"] for entry in entries) for entries in recorded if entries)
        numbers = {} if has_forgotten else dict.fromkeys(groups, 0)
        numbers |= {_group_of(entry): entry["collective_seq_id"] for entry in entries}
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another version of torch
        return None
    return Recalled(groups=numbers, collectives=collectives, is_over=is_over)


def call_before_abort(report: Callable[[], None]) -> None:
    """Call `report` before an uncaught C++ exception aborts the process.

    gloo aborts a rank that receives a tensor of an unexpected shape, NCCL's watchdog one whose collective has timed
    out. Both throw in threads of C++: Python cannot report the cause later. Call this after each default process group
    that forms, whose GPU backend then gets its hook.
    """
    global _handler
    rank = os.getpid()

    def report_of_rank() -> None:
        if os.getpid() == rank:  # not a DataLoader's worker, which inherits the handler
            report()

    _hook_aborts(report_of_rank)
    if _set_terminate is None or _handler is not None:
        return

    def handler() -> None:
        try:
            report_of_rank()
        finally:
            previous()  # prints the exception, and aborts

    _handler = _HANDLER(handler)  # ctypes keeps no reference
    previous = _set_terminate(_handler)


def _hook_aborts(report: Callable[[], None]) -> None:
    """Torch 2.15's `nccl2` throws no exception before it aborts."""
    with contextlib.suppress(AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # another torch
        for group in torch_parts.groups():
            backend = torch_parts.backend_on(group, "cuda")
            if getattr(backend, "supports_abort_hooks", False):
                backend.register_abort_hook(HOOK, report)


def _found() -> Callable[[object], Callable[[], None]] | None:
    try:
        found = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (AttributeError, OSError):
        return None
    found.restype, found.argtypes = _HANDLER, [_HANDLER]
    return found


_HANDLER = ctypes.CFUNCTYPE(None)
_handler: object = None
_set_terminate = _found()


def _names_of(group: Any) -> list[str]:
    return [_name(group.group_name, group.group_desc, backend) for backend in torch_parts.names_of_backends(group)]


def _group_of(entry: Mapping[str, Any]) -> str:
    name, described = entry["process_group"]
    return _name(name, described, entry["profiling_name"].partition(":")[0])


def _name(name: str, described: str, backend: str) -> str:
    backend = "nccl" if backend in torch_parts.NCCL_BACKENDS else backend
    if described == "default_pg":
        return f"{DEFAULT_GROUP} ({backend})"
    return f"group {name} ({backend})" if described == "undefined" else f"group {name} ({described}, {backend})"


def _recorders(*, has_nccl: bool) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield each recorder's newest entries. A full recorder forgets the entries with the smallest `record_id`."""
    for records in torch_parts.flight_records(has_nccl=has_nccl):
        yield pickle.loads(records).get("entries", ())  # noqa: S301 - by our own torch


def _collective(entry: Mapping[str, Any]) -> Collective:
    return Collective(
        group=_group_of(entry),
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"].rpartition(":")[2],
        inputs=[tuple(sizes) for sizes in entry["input_sizes"]],
        outputs=[tuple(sizes) for sizes in entry["output_sizes"]],
        dtypes=entry["input_dtypes"] or entry["output_dtypes"],
        is_done=bool(entry["retired"]) or entry["state"] == "completed",
        frames=[f'File "{at["filename"]}", line {at["line"]} in {at["name"]}' for at in entry["frames"]],
    )
