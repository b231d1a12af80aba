"""Access to private parts of torch. Only this file uses their names, which `docs/private_names.md` explains.

Runs in ranks, and raises `AttributeError` without the name. Torch is imported late, as a spawned rank sets its
environment variables first.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

NCCL_BACKENDS = ("nccl-legacy", "nccl2", "nccl-lazy")
"""Names of NCCL backends in torch's flight recorder.

In torch 2.15, the backend `nccl` is `nccl2`, unless the environment variable TORCH_DIST_USE_NCCL2 is 0.
"""
SHARDED = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.tensor", "DTensor"),  # FSDP2, tensor parallelism
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),  # FSDP1
)


def _world() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._world  # noqa: SLF001


def groups() -> list[Any]:
    return list(_world().pg_map)


def names_of_backends(group: Any) -> list[str]:
    from torch import distributed

    config = distributed.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    return list(dict.fromkeys(backend.rpartition(":")[2] for backend in config.split(",")))


def backend_on(group: Any, device: str) -> Any:
    import torch

    return group._get_backend(torch.device(device))  # noqa: SLF001


def name_default_group(backend: str) -> None:
    """Set the backend name that `get_backend` returns for the default group. CPU tensors still go through gloo.

    `new_group` then makes groups with the same backend, as under torchrun.
    """
    from torch import distributed

    known = _world().pg_map
    group = distributed.group.WORLD
    known[group] = (distributed.Backend(backend), known[group][1])


def set_timeout(timeout: timedelta) -> None:
    from torch import distributed

    if hasattr(distributed, "set_timeout"):
        distributed.set_timeout(timeout)
    else:  # before torch 2.15
        distributed.distributed_c10d._set_pg_timeout(timeout)  # noqa: SLF001


def flight_records(*, has_nccl: bool) -> Iterator[bytes]:
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    dump: Callable[..., bytes] = c10d._dump_fr_trace  # noqa: SLF001
    with _without_compiler():
        yield dump(True, True, False)
        if has_nccl:  # a rank without NCCL must not touch CUDA
            yield c10d._dump_nccl_trace(True, True, False)  # noqa: SLF001
            for backend in NCCL_BACKENDS[1:]:
                with contextlib.suppress(TypeError):  # before torch 2.15 this function has only gloo's recorder
                    yield dump(True, True, False, backend=backend)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep torch from importing the compiler, which dumps of flight records would do, slowly."""
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
    """Return the class whose `__next__` returns each batch of a `DataLoader`, which has no public name."""
    import torch
    from torch.utils.data import DataLoader

    # The iterator draws a seed from the generator: not from torch's own, whose next numbers are the user's.
    empty: Any = []
    kinds = type(iter(DataLoader(empty, generator=torch.Generator()))).__mro__
    return next(kind for kind in kinds if "__next__" in vars(kind))


# ---- Sharded objects


def sharded_classes() -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in SHARDED)
    return tuple(kind for kind in found if kind is not None)


# ---- Tensors' memory in pickles


def reduce_storage(storage: object, at_least: int) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Pickle a large storage in main memory without copies. None leaves it to torch's own pickling.

    Torch's own pickling copies each storage twice on each side. The unpickled storage cannot be resized.
    """
    import torch

    if isinstance(storage, torch.storage.TypedStorage):
        raw = _untyped(storage)
        return (_typed, (raw, storage.dtype)) if raw.device.type == "cpu" and raw.nbytes() >= at_least else None
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu" and storage.nbytes() >= at_least:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return _raw, (pickle.PickleBuffer(memory.numpy().data),)
    return None


def _typed(raw: torch.TypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return _of_type(_untyped(raw), dtype)


def _untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    return storage._untyped_storage  # noqa: SLF001 - torch warns about every other access


def _raw(memory: bytearray | memoryview) -> torch.TypedStorage:
    import torch

    tensor = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, device="cpu")
    return _of_type(tensor.untyped_storage(), torch.uint8)


def _of_type(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
