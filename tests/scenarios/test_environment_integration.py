"""Variables of `Gang(environment=...)` act in each rank as if they had been set before its Python started."""

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from distributed import Client

from flytekitplugins.daskpytorch import Gang, dispatch

EARLY = {
    "PYTHONHASHSEED": "3",
    "PYTORCH_JIT": "0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_LOGS": "+dynamo",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
LATE = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "DATA": "é\n=x",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "/usr/lib/of-mine:",
    "TMPDIR": "/var/tmp",
    "TZ": "Asia/Tokyo",
}


def is_forked() -> bool:
    """True if this rank is a fork, which has the command line of its fork server."""
    return (
        Path("/proc/self/cmdline").read_text().split("\0")[3]
        == Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[3]
    )


def effects(names: tuple[str, ...]) -> dict[str, Any]:
    """Return what these variables change in a rank of a formed gang."""
    import logging
    import sys

    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    message = ""
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        message = str(error)
    return {
        "world_size": total.item(),
        "is_forked": is_forked(),
        "hash": hash("abc"),
        "jit": torch.jit._state._enabled.enabled,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "debug": dist.get_debug_level().name,
        "log_level": logging.getLogger("torch._dynamo").level,
        "has_frames": "Exception raised from" in message,
        "threads": torch.get_num_threads(),
        "path": "/usr/lib/of-mine" in sys.path,
        "temporary": tempfile.gettempdir(),
        "hour": time.localtime(0).tm_hour,
        "variables": {name: os.environ.get(name) for name in names},
    }


def of_ranks(client: Client, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    return list(dispatch.run(client, effects, tuple(environment), gang=Gang(environment=environment)).result())


def test_variables_that_are_read_late_reach_forked_ranks(client: Client) -> None:
    for rank in of_ranks(client, LATE):
        assert (rank["world_size"], rank["is_forked"], rank["variables"]) == (2, True, LATE)
        assert (rank["threads"], rank["path"], rank["temporary"], rank["hour"]) == (1, True, "/var/tmp", 9)


def test_variables_that_are_read_early_reach_fresh_interpreters(client: Client) -> None:
    first, second = of_ranks(client, EARLY)
    assert first == second
    assert (first["world_size"], first["is_forked"], first["variables"]) == (2, False, EARLY)
    assert (first["jit"], first["tf32"], first["debug"]) == (False, True, "DETAIL")
    assert (first["log_level"], first["has_frames"]) == (10, True)
    for rank in of_ranks(client, {}):  # the next gang
        assert (rank["is_forked"], rank["debug"], rank["log_level"], rank["has_frames"]) == (True, "OFF", 0, False)
        assert rank["hash"] != first["hash"]
