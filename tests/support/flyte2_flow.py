"""A flow of Flyte 2 whose tasks containers run, in tests, and what happens to them; the result is always the same."""

import time
from pathlib import Path

import flyte
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flyteplugins.daskpytorch import DaskDDP, Gang, current_rank

STEPS = 4

on_dask = flyte.TaskEnvironment("on_dask", plugin_config=DaskDDP(gang=Gang(max_restarts=0)))


@on_dask.task(retries=2)
def train_sharded(folder: str) -> tuple[list[int], float]:
    """Each rank keeps its part of the state."""
    rank = current_rank()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    value = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
    state = {"value": value, "steps": torch.zeros(STEPS, dtype=torch.bool)}
    last = rank.checkpoint.load_sharded(state)
    for step in range(0 if last is None else last + 1, STEPS):
        value.mul_(0.5).add_(_total(folder, step))
        state["steps"][step] = True
        rank.checkpoint.save_sharded(state, step)
        rank.checkpoint.flush()
        dist.barrier()
    [final] = set(value.full_tensor().tolist())
    return state["steps"].nonzero().flatten().tolist(), final


def _total(folder: str, step: int) -> float:
    """What all ranks have of a step, unless something happens to rank 1."""
    rank = current_rank().rank
    if rank == 1 and (order := Path(folder, f"fault-{step}")).exists():
        fault = order.read_text()
        order.unlink()
        if fault == "raise":
            raise KeyError("not yet")
        order.with_name("waiting").touch()  # for what the test does
        time.sleep(600)
    total = torch.tensor([float((step + 1) * (rank + 1))])
    dist.all_reduce(total)
    return float(total)


def expected() -> float:
    """The value that an undisturbed run returns."""
    value = 0.0
    for step in range(STEPS):
        value = 0.5 * value + 3.0 * (step + 1)
    return value
