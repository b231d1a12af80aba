"""Settings of torch that a program has made: read in the driver, and made again in each rank."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import psutil

FIRST_OWN_SEED = 1 << 32
"""Seeds that torch draws for itself have 53 random bits: one in two million is smaller. Users' seeds are smaller."""


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """The settings that differ from torch's defaults; None or False for the others."""

    default_dtype: str | None = None
    matmul_precision: str | None = None
    """Precision of float32 products, an argument of `torch.set_float32_matmul_precision`."""
    deterministic: bool = False
    warn_only: bool = False
    cudnn_deterministic: bool = False
    cudnn_benchmark: bool = False
    num_threads: int | None = None
    seed: int | None = None
    """Given to `torch.manual_seed`. Ranks do not take it; see `rank.hints`."""


def taken() -> TorchSettings:
    """Return this process's settings; the defaults if it has not imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):  # not imported, or being imported
        return TorchSettings()
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    seed = torch.initial_seed()
    return TorchSettings(
        default_dtype=dtype if dtype != "float32" else None,
        matmul_precision=_matmul_precision(torch),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        num_threads=_num_threads(torch),
        seed=seed if seed < FIRST_OWN_SEED else None,
    )


def enter(settings: TorchSettings) -> None:
    """Have this rank's torch set as the driver's was."""
    import torch

    if settings.default_dtype is not None:
        torch.set_default_dtype(getattr(torch, settings.default_dtype))
    if settings.matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.matmul_precision)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.warn_only)
    if settings.cudnn_deterministic:
        torch.backends.cudnn.deterministic = True
    if settings.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)


def _matmul_precision(torch: Any) -> str | None:
    try:
        precision = str(torch.get_float32_matmul_precision())
    except RuntimeError:  # set by torch 2.9's newer names, which it does not mix with this one
        return None
    return precision if precision != "highest" else None


def _num_threads(torch: Any) -> int | None:
    """Return the number of threads that the program has set; None where torch may have taken it from the machine."""
    defaults = {os.cpu_count(), len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False)}
    from_environment = {os.environ.get(name, "").partition(",")[0] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    number = int(torch.get_num_threads())
    return None if number in defaults or str(number) in from_environment else number
