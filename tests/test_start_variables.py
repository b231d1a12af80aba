"""Only variables that a forked rank would get too late cost a gang fresh interpreters."""

from __future__ import annotations

import os
import sys

import pytest
import torch  # noqa: F401 - as in a fork server

from flytekitplugins.daskpytorch.protocol import start_variables
from flytekitplugins.daskpytorch.protocol.start_variables import NANNYS_SETTINGS, needs_fresh_interpreter

EARLY = (
    *("PYTHONHASHSEED", "PYTHONMALLOC", "LD_PRELOAD", "MALLOC_ARENA_MAX", "TORCH_LOGS", "TORCH_TRACE", "PYTORCH_JIT"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "OMP_SCHEDULE", "OMP_PROC_BIND"),
    *("GOMP_CPU_AFFINITY", "MKL_VERBOSE", "OPENBLAS_NUM_THREADS", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
LATE = (
    *("DATA", "RANK", "NCCL_DEBUG", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_FR_BUFFER_SIZE", "GLOO_SOCKET_IFNAME"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("PYTHONPATH", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"),
)


@pytest.mark.parametrize(("name", "is_early"), [*((name, True) for name in EARLY), *((name, False) for name in LATE)])
def test_variables_that_are_read_early_need_fresh_interpreters(name: str, *, is_early: bool) -> None:
    given = {"HOME": "/", name: "3"}
    for started, wanted in (({"HOME": "/"}, given), (given, {"HOME": "/"}), ({name: "2"}, given)):
        assert needs_fresh_interpreter(started, wanted) is is_early
    assert not needs_fresh_interpreter(given, given | {"RANK": "1"})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_of_the_allocators_options_only_its_backend_is_read_early(name: str) -> None:
    segments = {name: "expandable_segments:True"}
    other = {name: "expandable_segments:True,backend:cudaMallocAsync"}
    assert not needs_fresh_interpreter({}, segments)
    assert needs_fresh_interpreter(segments, other)
    assert not needs_fresh_interpreter(other, {name: "backend:cudaMallocAsync"})


def test_variables_of_a_module_are_read_early_once_the_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    assert not needs_fresh_interpreter({}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    monkeypatch.setitem(sys.modules, "torch._inductor.config", os)
    assert needs_fresh_interpreter({}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    assert start_variables.changed({}, {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}, start_variables.read_so_far())


def test_what_a_nanny_has_set_costs_nothing_and_what_the_user_has_set_counts() -> None:
    assert not needs_fresh_interpreter(NANNYS_SETTINGS, {"OMP_NUM_THREADS": "4"})
    assert needs_fresh_interpreter({}, {"OPENBLAS_NUM_THREADS": "1"})
    assert needs_fresh_interpreter(NANNYS_SETTINGS, {"OPENBLAS_NUM_THREADS": "2"})
