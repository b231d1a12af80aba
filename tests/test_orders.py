"""What a rank's environment holds."""

from __future__ import annotations

from typing import Any

from flytekitplugins.daskpytorch.protocol.orders import Job, environment
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks

NODE = Node(worker="w", host="h", num_cores=8, gpus=(), gpu_names=(), interface="lo", versions={})


def variables(base: dict[str, str], **given: Any) -> dict[str, str]:
    job = Job(
        gang="g",
        attempt=0,
        call=b"",
        pass_local_rank=False,
        backend="gloo",
        store=None,
        timeout=1.0,
        checkpoint=None,
        pulse=None,
        **given,
    )
    [[place, _]] = place_ranks([NODE], 2)
    return environment(base, place, job, None)


def test_a_rank_has_its_share_of_the_cores_whatever_dask_gives_its_workers() -> None:
    assert variables({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "4"


def test_threads_that_the_task_asks_for_win() -> None:
    found = variables({"OMP_NUM_THREADS": "1"}, environment={"OMP_NUM_THREADS": "3", "RANK": "9"})
    assert (found["OMP_NUM_THREADS"], found["RANK"]) == ("3", "0")
