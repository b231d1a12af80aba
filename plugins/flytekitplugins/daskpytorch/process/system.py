"""The system around a process: Linux, limits of open files, process names, optional features, start variables."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from flytekitplugins.daskpytorch.errors import GangStartError

MAX_FILES = 1 << 16
"""Open files that a driver requests. Many systems begin with 1,024."""

_logger = logging.getLogger(__name__)


def runs_gangs() -> bool:
    return sys.platform == "linux"


def running_kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def check_system() -> None:
    if not runs_gangs():
        raise GangStartError(
            f"gangs run on Linux, and this is {platform.system()}: ranks are watched by what only Linux has (abstract "
            "and packet sockets, signals at a parent's end, pidfds). Train here in one rank, in this process, with "
            "DASKPYTORCH_DEBUG=1 or Gang(debug=True); or run it in a Linux container, or on a cluster, for which tasks "
            "can be registered from here."
        )


@contextlib.contextmanager
def optional(what: str) -> Iterator[None]:
    """Only log an error of an optional step, such as a speed-up or a display."""
    try:
        yield
    except Exception as error:  # an unknown version of torch, kernel or container may raise any exception
        _logger.warning(
            "%s failed, and is left out: %s: %s. This version of torch, the kernel or the container may be unknown to "
            "the package",
            what,
            type(error).__name__,
            error,
        )


def show_as(name: str) -> None:
    """Set this process's name in `top`, `htop` and `ps -o comm`. Linux keeps the first 15 bytes."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/comm").write_text(name)


def allow_files(wanted: int) -> int:
    """Raise the limit of open files to `wanted`, or as far as the system allows. Return the new limit."""
    import resource  # missing on Windows, where `check_system` must run

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def path_here() -> list[str]:
    return [str(entry) for entry in sys.path if entry]


def kill_session(pid: int, signum: int) -> None:
    """Signal all processes of a session, whose leader may not have begun it yet."""
    for kill, target in ((os.killpg, pid), (os.kill, pid)):  # os.kill reaches ranks before setsid
        try:
            kill(target, signum)
        except ProcessLookupError:
            continue
        return


# ---- Environment variables: those read once, as a process starts or imports torch or NumPy, and those that nannies set
#
# A forked rank gets these variables too late. The tables have what a fork server reads before it forks, as seen by
# traces of `getenv` and `os.environ` (torch 2.15, 2026-11-26). NCCL, gloo and CUDA read their variables later, in the
# rank.

READ_EARLY = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_TUNABLES", "LC_ALL", "LC_CTYPE", "LANG"),  # before any Python code runs
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_DTRACE", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_DISTRIBUTED_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_USE_RTLD_GLOBAL", "TORCH_CUDA_SANITIZER"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_", "TORCH_LINALG_PREFER_", "TORCH_CUSTOM_TERMINATE"),
    *("TORCH_COMPILE_", "TORCH_FAKE_TENSOR_", "TORCHEXPORT_", "TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_"),
    *("AOT_INDUCTOR_", "PYTORCH_JIT", "PYTORCH_API_USAGE_STDERR", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("PYTORCH_HIP_ALLOC_CONF", "OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "ONEDNN_", "DNNL_", "KINETO_USE_DAEMON"),
    *("OPENBLAS_", "NPY_"),
)
"""Prefixes of variables that Python, its loader, the C library, torch or NumPy reads as it starts or is imported."""
SET_LATER = (
    "PYTHONBREAKPOINT",
    "PYTHONPATH",  # `sys.path` has its folders
    "PYTHONUNBUFFERED",  # the output of ranks is flushed with each line in any case
    "LD_LIBRARY_PATH",  # OpenCV sets it at its import, for child programs
    "OMP_NUM_THREADS",  # a rank calls `torch.set_num_threads`, which also sets the threads of MKL
    "MKL_NUM_THREADS",
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets this variable and the next one at its import
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it at its first compilation
)
"""Variables with such a prefix that need no fresh interpreter."""
NANNYS_MARK = "MALLOC_TRIM_THRESHOLD_"
NANNYS_SETTINGS = {NANNYS_MARK: "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables that a Dask nanny sets for its worker, except for values of its own environment, with Dask's defaults up to
distributed 2026.8."""


def needs_fresh_interpreter(started: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return True if a fork of this process, started with `started`, would get some of its variables too late."""
    by_nanny = {name for name, value in NANNYS_SETTINGS.items() if name not in wanted and started.get(name) == value}
    users = {name: value for name, value in started.items() if name not in by_nanny}
    early = {name for name in {*users, *wanted} if name.startswith(READ_EARLY)}.difference(SET_LATER)
    return any(_part_read_early(name, users) != _part_read_early(name, wanted) for name in early)


def _part_read_early(name: str, environment: Mapping[str, str]) -> str | None:
    value = environment.get(name)
    if value is not None and name.endswith("_ALLOC_CONF"):  # the first allocation reads the other options
        backend = re.search(r"backend:[^,]*", value)
        return backend.group() if backend is not None else None
    return value


def without_nannys(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out variables that a Dask nanny has set, also in its own process, such as a program with a `LocalCluster`.

    A variable with the nanny's own value counts as the nanny's: `Gang(environment=...)` sets it all the same.
    """
    if NANNYS_MARK not in environment:
        return dict(environment)
    return {name: value for name, value in environment.items() if value != NANNYS_SETTINGS.get(name)}
