"""A rank's way into its gang's process group, also where the user's own code says `init_process_group`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.process.system import allow_files
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.orders import Job
from flytekitplugins.daskpytorch.protocol.placement import Place

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


OTHER_FILES = 512
"""Files that a rank may have open besides the connections of others to its store; half of what many systems allow."""
ON_GPUS = "cpu:gloo,cuda:nccl"
"""What a gang with nccl has: without gloo it could exchange neither objects nor asynchronous checkpoints."""


@dataclass
class _Membership:
    """This process's place in its gang, and the groups that it has been in."""

    pid: int
    place: Place
    backend: str
    form: Callable[[], None] | None
    """Forms the gang's group; None once that has begun."""
    store: Store = field(init=False)
    num_groups: int = 0
    """Each has keys of its own in the store: what an earlier one has left there would mislead it."""
    is_in: bool = False
    """The default group, if there is one, is the gang's."""


def install() -> None:
    """Have `torch.distributed.init_process_group` know the gang; before anyone imports the function by its name."""
    from torch import distributed

    distributed_c10d = distributed.distributed_c10d
    original = distributed_c10d.init_process_group
    if getattr(original, "knows_gangs", False):
        return

    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Store | None = None,
        *others: Any,
        **more: Any,
    ) -> None:
        member = _membership
        if member is not None and member.pid == os.getpid() and member.form is not None:
            join()  # a module of the user's asks at its top, while it is imported
        if member is None or member.pid != os.getpid():
            original(backend, init_method, timeout, world_size, rank, store, *others, **more)
        elif distributed.is_initialized() and member.is_in:
            _check(member, backend, world_size, rank)
            if timeout is not None:
                torch_parts.set_timeout(timeout)
        elif store is None and init_method in (None, "env://"):
            _check(member, None, world_size, rank)
            _enter(member, original, backend, timeout, *others, **more)
        else:  # it brings a rendezvous of its own
            original(backend, init_method, timeout, world_size, rank, store, *others, **more)
            member.is_in = False

    init_process_group.knows_gangs = True  # type: ignore[attr-defined]
    distributed_c10d.init_process_group = init_process_group
    distributed.init_process_group = init_process_group
    _watch_monitored_barrier(distributed_c10d)


def _watch_monitored_barrier(distributed_c10d: Any) -> None:
    """Note its calls: torch 2.15 gives rank 0 more numbers for each than other ranks."""
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
        global _has_uneven_numbers
        _has_uneven_numbers = True
        return original(*args, **kwargs)

    from torch import distributed

    distributed_c10d.monitored_barrier = distributed.monitored_barrier = monitored_barrier


def are_numbers_comparable() -> bool:
    """Return True if all ranks give the same collective the same number, as far as this rank can tell.

    Not in a second default group, whose numbers begin anew, nor with remote procedure calls or torch's detailed
    debugging, which call collectives of their own.
    """
    from torch import distributed

    if _has_uneven_numbers or _membership is None or _membership.num_groups != 1 or not _membership.is_in:
        return False
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", bool)():
        return False
    return distributed.get_debug_level() != distributed.DebugLevel.DETAIL  # type: ignore[attr-defined]


def expect(place: Place, job: Job, take_device: Callable[[], torch.device | None], listener: int | None = None) -> None:
    """Prepare for the gang's process group, which `join` forms, or the user's first `init_process_group` before it.

    Args:
        place: This rank's.
        job: The gang's.
        take_device: Makes the rank's GPU the current one, and returns where the group's GPU collectives run, or None.
        listener: The socket on which this rank serves the store that all meet by; None where another does.
    """
    from torch import distributed

    def form() -> None:
        _check_recorder()
        device = take_device()
        member.store = _store(job, listener, place.world_size)
        distributed.init_process_group(backend, device_id=device, timeout=job.debugging.patience)

    global _membership
    backend = ON_GPUS if job.backend == "nccl" else job.backend
    member = _membership = _Membership(os.getpid(), place, backend, form)


def _check_recorder() -> None:
    """Check the variables of torch's flight recorder: for a bad value, torch 2.15 hangs or aborts in the first group.

    Raises:
        ValueError: Torch cannot read one of them.
    """
    for new, old, is_readable, wanted in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", _is_number, "a number of collectives, such as 64"),
        ("TORCH_FR_CPP_STACK", "TORCH_NCCL_TRACE_CPP_STACK", _is_truth_value, "1 or 0"),
    ):
        for name in (new, old):
            text = os.environ.get(name)
            if text is not None and not is_readable(text):
                raise ValueError(f"{name}={text!r}: must be {wanted}, for torch's flight recorder. Mend or unset it")


def _is_number(text: str) -> bool:
    """Return whether the text is an integer of 32 bits."""
    try:
        return -(1 << 31) <= int(text) < 1 << 31
    except ValueError:
        return False


def _is_truth_value(text: str) -> bool:
    return text.lower() in {"y", "yes", "t", "true", "1", "n", "no", "f", "false", "0"}


def join() -> None:
    """Form the process group, with the other ranks, unless that has been done."""
    if _membership is not None and _membership.form is not None:
        form, _membership.form = _membership.form, None
        form()


def leave() -> None:
    """Be no rank any more: what asks for a process group from now on gets an ordinary one."""
    from torch import distributed

    global _membership
    _membership = None
    if distributed.is_initialized():  # the function may have closed it
        distributed.destroy_process_group()


def _enter(
    member: _Membership,
    form: Callable[..., None],
    backend: str | None,
    timeout: timedelta | None,
    *others: Any,
    **more: Any,
) -> None:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    backend = backend or member.backend
    store = PrefixStore(str(member.num_groups), member.store)
    member.num_groups += 1
    form(backend, None, timeout, member.place.world_size, member.place.rank, store, *others, **more)
    if backend == ON_GPUS:
        torch_parts.name_default_group("nccl")
    member.backend, member.is_in = backend, True


def _check(member: _Membership, backend: str | None, world_size: int, rank: int) -> None:
    """Whether what is asked for is what is there.

    Raises:
        ValueError: It is not.
    """
    place = member.place
    differing = []
    if backend is not None and not _kinds(backend) <= _kinds(member.backend):
        differing.append(f"the backend is {member.backend}, not {backend}: see Gang(backend=...)")
    if world_size not in (-1, place.world_size):
        differing.append(f"there are {place.world_size} ranks, not {world_size}: see Gang(ranks_per_worker=...)")
    if rank not in (-1, place.rank):
        differing.append(f"this is rank {place.rank}, not {rank}: pass no rank, or that of the variable RANK")
    if differing:
        raise ValueError(
            "init_process_group asks for another process group than that of this rank's gang, which has been formed "
            f"before the function was called: {'; '.join(differing)}"
        )


def _kinds(backend: str) -> set[str]:
    """Of "cpu:gloo,cuda:nccl", gloo and nccl."""
    return {part.rpartition(":")[2] for part in backend.lower().split(",")}


def _store(job: Job, listener: int | None, world_size: int) -> Store:
    from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

    if job.store is None:
        return HashStore()
    host, port = job.store
    timeout, serves = timedelta(seconds=job.timeout), listener is not None
    if serves:
        allow_files(world_size + OTHER_FILES)
    by_libuv = not serves or _takes_listener_by_libuv()
    store = TCPStore(
        host, port, None, serves, timeout, wait_for_workers=False, master_listen_fd=listener, use_libuv=by_libuv
    )
    # An older attempt's rank, suspended and awake again, may still know the port.
    return PrefixStore(f"{job.gang}/{job.attempt}", store)


def _takes_listener_by_libuv() -> bool:
    """Before torch 2.8 its older server alone takes a socket: https://github.com/pytorch/pytorch/pull/150215."""
    import torch
    from packaging.version import Version

    return Version(torch.__version__) >= Version("2.8")


def nccl_variables() -> dict[str, str]:
    """Return the variables that NCCL reads; empty where the gang has no NCCL, or where the user formed a group anew."""
    if _membership is None or _membership.backend != ON_GPUS or _membership.num_groups > 1:
        return {}
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def num_collectives() -> int:
    """Return how many collectives the default group has had; 0 where the function has closed the group."""
    from torch import distributed

    try:
        return torch_parts.num_collectives(distributed.group.WORLD)
    except (AttributeError, RuntimeError, ValueError):
        return 0


def num_exchanges() -> int | None:
    """Return how many collectives all of this rank's groups have had; None where the function has closed them."""
    try:
        groups = torch_parts.groups()
        return sum(map(torch_parts.num_collectives, groups)) if groups else None
    except (RuntimeError, ValueError):
        return None


_has_uneven_numbers = False
_membership: _Membership | None = None
