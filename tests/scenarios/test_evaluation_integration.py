"""Real gangs evaluate checkpoints beside real trainings, on a worker of their own or on the training's."""

import functools
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import Client

from flytekitplugins.daskpytorch import Evaluate, Gang, Keep, Shape, current_rank, dispatch
from gangs import Notes
from processes import dask_cluster, until

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM_STEPS = 8
KEEP = Keep(last=1, best=1, metric="distance", mode="min")


class Seen(Notes):
    """Keeps what a gang has told."""

    def on_start(self, shape: Shape) -> None:
        self.workers = [node.worker for node in shape.nodes]


# ---- A cluster, and sharded checkpoints


def is_kept(step: int) -> bool:
    return any(kept.step >= step for kept in current_rank().checkpoint.list())


def train(folder: str) -> tuple[int | None, float]:
    """Add up the steps."""
    rank, state = current_rank(), {"sum": torch.zeros(1)}
    for step in range(1, NUM_STEPS + 1):
        if step == 5:
            until(Path(folder, "killed").exists, "the evaluation that is killed")
        share = torch.ones(1)
        dist.all_reduce(share)
        state["sum"] += step * share / rank.world_size
        rank.checkpoint.save_sharded(state, step)
        rank.checkpoint.flush()
        until(functools.partial(is_kept, step), f"the checkpoint of step {step}")
        Path(folder, f"trained-{step}").touch()
    return rank.checkpoint.load_sharded(state, best=True), state["sum"].item()


def evaluate(folder: str) -> dict[str, float]:
    """The distance from step 4's sum. The first evaluation goes on until the training has; the second is killed."""
    state = {"sum": torch.zeros(1)}
    step = current_rank().checkpoint.load_sharded(state)
    assert current_rank().world_size == 1
    if step == 1:
        until(Path(folder, "trained-3").exists, "the training, which goes on meanwhile")
    elif not (killed := Path(folder, "killed")).exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"distance": abs(state["sum"].item() - 10.0)}


def test_a_worker_of_their_own_evaluates_sharded_checkpoints_and_all_ranks_load_the_best(tmp_path: Path) -> None:
    seen, uri = Seen(), str(tmp_path / "kept")
    gang = Gang(keep=KEEP, evaluate=Evaluate(evaluate), observers=(lambda: seen,), checkpoint_uri=uri, backend="gloo")
    with dask_cluster(tmp_path, 3) as cluster, Client(cluster.address) as client:
        futures = dispatch.run(client, train, str(tmp_path), gang=gang)
        results = futures.result(300.0)
    assert len(seen.workers) == 2
    evaluated = {record.step: record.metrics["distance"] for record in futures.records if record.is_evaluation}
    assert {step: abs(step * (step + 1) / 2 - 10.0) for step in evaluated} == evaluated
    assert {1, NUM_STEPS} <= evaluated.keys()  # the end has waited
    assert len(seen.told("failed, and the training goes on: .*SIGKILL")) == 1
    assert not seen.told("starting again")
    best = min(evaluated, key=evaluated.__getitem__)
    assert results == [(best, best * (best + 1) / 2)] * 2
    assert futures.best_checkpoint is not None
    assert futures.best_checkpoint.step == best


# ---- A later call


def count(num_steps: int) -> int:
    rank = current_rank()
    first = (rank.checkpoint.load() or {"weight": 0})["weight"]
    for step in range(first + 1, num_steps + 1):
        rank.checkpoint.save({"weight": step}, step)
        rank.checkpoint.flush()
    rank.checkpoint.load(best=True)
    assert rank.checkpoint.loaded is not None
    return rank.checkpoint.loaded.step


def distance() -> dict[str, float]:
    return {"distance": abs(current_rank().checkpoint.load()["weight"] - 1.0)}


def test_a_later_call_evaluates_only_what_is_new(tmp_path: Path) -> None:
    gang = Gang(keep=KEEP, evaluate=Evaluate(distance, workers=0), checkpoint_uri=str(tmp_path), key="count")
    for num_steps, evaluated in ((2, [1, 2]), (2, []), (3, [3])):
        futures = dispatch.run(None, count, num_steps, gang=gang)
        assert futures.result(100.0) == [1]
        assert [record.step for record in futures.records if record.is_evaluation] == evaluated
