"""A flow of Flyte 2 whose tasks containers run, in tests, and what happens to them; the result is always the same."""

import os
import signal
import time
from pathlib import Path

import flyte
import torch
import torch.distributed as dist

from flyteplugins.daskpytorch import DaskDDP, Gang, SpawnDDP, current_rank

STEPS = 4

on_dask = flyte.TaskEnvironment("on_dask", plugin_config=DaskDDP(gang=Gang(max_restarts=0)))
on_one_node = flyte.TaskEnvironment("on_one_node", plugin_config=SpawnDDP(nproc=2))


@on_dask.task(report=True, retries=2)
def train(folder: str) -> tuple[list[int], float]:
    """Each step ends with a checkpoint; a file `fault-3` in the folder says what happens to rank 1 in the third."""
    rank = current_rank()
    state = rank.checkpoint.load() or {"steps": [], "value": 0.0}
    for step in range(len(state["steps"]), STEPS):
        if rank.rank == 1 and (order := Path(folder, f"fault-{step}")).exists():
            fault = order.read_text()
            order.unlink()
            print(f"rank 1 {fault}s")
            _fail(fault, order)
        total = torch.tensor([float((step + 1) * (rank.rank + 1))])
        dist.all_reduce(total)
        state = {"steps": [*state["steps"], step], "value": 0.5 * state["value"] + float(total)}
        rank.log({"value": state["value"]}, step=step)
        rank.checkpoint.save(state, step=step)
        rank.checkpoint.flush()
        dist.barrier()
    return state["steps"], state["value"]


train_here = on_one_node.task(retries=2)(train.func)


def _fail(fault: str, order: Path) -> None:
    if fault == "raise":
        raise KeyError("not yet")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    order.with_name("waiting").touch()  # for what the test does
    time.sleep(600)


def expected() -> float:
    """The value that an undisturbed run returns."""
    value = 0.0
    for step in range(STEPS):
        value = 0.5 * value + 3.0 * (step + 1)
    return value
