"""Private parts of torch: their names stand in this file alone, and in `rank/loaders.py` for the workers of loaders.

Runs in ranks. `docs/private_names.md` says what each name is for, and which versions have it. Where a torch lacks one,
the caller has the `AttributeError` of it. Torch is imported late: a spawned rank sets its variables before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

NCCL_BACKENDS = ("nccl-legacy", "nccl2", "nccl-lazy")
"""Names in records of what groups call nccl: torch 2.15's `nccl` is `nccl2`, unless TORCH_DIST_USE_NCCL2 is 0."""


def _world() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._world  # noqa: SLF001


def groups() -> list[Any]:
    """Return the process groups that this rank is in."""
    return list(_world().pg_map)


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a process group."""
    return tuple(sorted(_world().pg_group_ranks[group]))


def names_of_backends(group: Any) -> list[str]:
    """Return the names of a group's backends; `pg_map` has one of them, by which `process_group` calls the group."""
    config = _world().pg_backend_config[group]  # "cpu:gloo,cuda:nccl"
    return list(dict.fromkeys(backend.rpartition(":")[2] for backend in config.split(",")))


def devices_of(group: Any) -> list[torch.device]:
    """Return the types of device that a group has a backend for."""
    return list(group._device_types)  # noqa: SLF001


def backend_on(group: Any, device: torch.device | str) -> Any:
    """Return a group's backend for a type of device."""
    import torch

    return group._get_backend(torch.device(device))  # noqa: SLF001


def timeout_of(backend: Any) -> timedelta:
    """Return the timeout of a backend's collectives."""
    timeout: timedelta = backend.options._timeout  # noqa: SLF001
    return timeout


def num_collectives(group: Any) -> int:
    """Return how many collectives a group has had, those of DistributedDataParallel included."""
    return int(group._get_sequence_number_for_group())  # noqa: SLF001


def name_default_group(backend: str) -> None:
    """Have `get_backend` answer as after `init_process_group(backend)`; gloo stays there for tensors on the CPU.

    `new_group` makes its groups of the same backend then, as under torchrun.
    """
    from torch import distributed

    known = _world().pg_map
    group = distributed.group.WORLD
    known[group] = (distributed.Backend(backend), known[group][1])


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default group's collectives."""
    from torch import distributed

    if hasattr(distributed, "set_timeout"):
        distributed.set_timeout(timeout)
    else:  # before torch 2.15
        distributed.distributed_c10d._set_pg_timeout(timeout)  # noqa: SLF001


def flight_records(*, has_nccl: bool) -> Iterator[bytes]:
    """Yield what torch's flight recorders hold, pickled."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    dump: Callable[..., bytes] = c10d._dump_fr_trace  # noqa: SLF001
    with _without_compiler():
        yield dump(True, True, False)
        if has_nccl:  # else nothing touches CUDA
            yield c10d._dump_nccl_trace(True, True, False)  # noqa: SLF001
            for backend in NCCL_BACKENDS[1:]:
                with contextlib.suppress(TypeError):  # torch < 2.15 has the recorder of gloo alone here
                    yield dump(True, True, False, backend=backend)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Asked for stacks, torch looks for its compiler to map compiled code, and imports it, for seconds, to look."""
    import torch

    lazy: set[str] = getattr(torch, "_lazy_modules", set())
    is_lazy = "_inductor" in lazy
    lazy.discard("_inductor")
    try:
        yield
    finally:
        if is_lazy:
            lazy.add("_inductor")


def loader_iterator() -> Any:
    """Return the class whose `__next__` gives each batch of a `DataLoader`; nothing public is called for each."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter  # noqa: SLF001


def sampler_of(iterator: Any) -> Any:
    """Return the sampler of the loader to which an iterator belongs."""
    return getattr(iterator._index_sampler, "sampler", iterator._index_sampler)  # noqa: SLF001


def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the bytes of a storage; torch warns of every other way to them."""
    return storage._untyped_storage  # noqa: SLF001
