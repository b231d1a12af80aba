"""Real gangs evaluate checkpoints beside real trainings: on a worker of their own, or beside the ranks of a task."""

import functools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import Client

from flytekitplugins.daskpytorch import Evaluate, Gang, Keep, LogRecord, Shape, current_rank, dispatch
from flytekitplugins.daskpytorch.node import fork_client
from gangs import Notes
from processes import Cluster, dask_cluster, nothing_left_behind, until

NUM_STEPS = 8
KEEP = Keep(last=1, best=1, metric="distance", mode="min")


@pytest.fixture(scope="module", autouse=True)
def no_rank_left() -> Iterator[None]:
    with nothing_left_behind():
        yield
        fork_client.shutdown()


class Seen(Notes):
    """Keeps what a gang has told."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: set[str] = set()
        self.evaluated: list[LogRecord] = []

    def on_start(self, shape: Shape) -> None:
        self.workers.update(node.worker for node in shape.nodes)

    def on_log(self, record: LogRecord) -> None:
        if record.is_evaluation:
            self.evaluated.append(record)


# ---- A cluster, and sharded checkpoints


def is_kept(step: int) -> bool:
    return any(kept.step >= step for kept in current_rank().checkpoint.list())


def train(folder: str) -> tuple[int | None, float]:
    """Add up the steps."""
    rank, state = current_rank(), {"sum": torch.zeros(1)}
    for step in range(1, NUM_STEPS + 1):
        share = torch.ones(1)
        dist.all_reduce(share)
        state["sum"] += step * share / rank.world_size
        rank.checkpoint.save_sharded(state, step)
        rank.checkpoint.flush()
        until(functools.partial(is_kept, step), f"the checkpoint of step {step}")
        Path(folder, f"trained-{step}").touch()
    return rank.checkpoint.load_sharded(state, best=True), state["sum"].item()


def evaluate(folder: str) -> dict[str, float]:
    """The distance from step 4's sum. The first evaluation goes on until the training has."""
    state = {"sum": torch.zeros(1)}
    step = current_rank().checkpoint.load_sharded(state)
    assert current_rank().world_size == 1
    if step == 1:
        until(Path(folder, "trained-3").exists, "the training, which goes on meanwhile")
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
    best = min(evaluated, key=evaluated.__getitem__)
    assert results == [(best, best * (best + 1) / 2)] * 2
    assert futures.best_checkpoint is not None
    assert futures.best_checkpoint.step == best


# ---- Whole checkpoints, and a kill of either side's rank or the evaluation's worker at each moment


MOMENTS = ("begun", "waited for")
"""Moments of an evaluation: the training waits for the evaluation of its last checkpoint at its end."""


def train_until(folder: str, victim: str, moment: str) -> int:
    """Save three checkpoints, and return the best one's step. The third is saved after an evaluation's end."""
    checkpoint, marks = current_rank().checkpoint, Path(folder)
    first = (checkpoint.load() or {"step": 0})["step"]
    (marks / f"trains-{os.getpid()}").touch()
    for step in range(first + 1, 4):
        if step == 3:
            until((marks / "scored").exists, "an evaluation")
        checkpoint.save({"step": step}, step)
        checkpoint.flush()
        until(functools.partial(is_kept, step), f"the checkpoint of step {step}")
    (marks / "waits").touch()
    checkpoint.load(best=True)
    assert checkpoint.loaded is not None
    return checkpoint.loaded.step


def evaluate_until(folder: str, victim: str, moment: str) -> dict[str, float]:
    """The distance from step 1. At the moment, once, the victim is killed."""
    marks = Path(folder)

    def reach(reached: str) -> None:
        if reached != moment or (marks / "killed").exists():
            return
        (marks / "killed").touch()
        [training] = [int(mark.name.partition("-")[2]) for mark in marks.glob("trains-*")]
        pids = {"training": training, "rank": os.getpid(), "worker": worker_of_this_rank(marks)}
        os.kill(pids[victim], signal.SIGKILL)
        if victim == "training":
            until(lambda: len(list(marks.glob("trains-*"))) == 2, "the training, which starts again meanwhile")
        else:
            time.sleep(60.0)

    reach("begun")
    step = current_rank().checkpoint.load()["step"]
    if step == 3:
        until((marks / "waits").exists, "the training's last step")
        reach("waited for")
    (marks / "scored").touch()
    return {"distance": float(step - 1)}


def worker_of_this_rank(marks: Path) -> int:
    pids: dict[str, int] = json.loads((marks / "workers.json").read_text())
    return pids[current_rank().link.worker_data.worker]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with dask_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "training", "worker"])
def test_a_kill_at_any_moment_costs_one_evaluation_or_one_restart(
    cluster: Cluster, tmp_path: Path, victim: str
) -> None:
    for moment in MOMENTS:
        (marks := tmp_path / moment).mkdir()
        seen = Seen()
        observers = (lambda seen=seen: seen,)
        gang = Gang(keep=KEEP, evaluate=Evaluate(evaluate_until), observers=observers, backend="gloo")
        with Client(cluster.address) as client:
            client.wait_for_workers(2)
            (marks / "workers.json").write_text(json.dumps(client.run(os.getpid)))
            futures = dispatch.run(client, train_until, str(marks), victim, moment, gang=gang)
            [best] = futures.result(300.0)
        assert (marks / "killed").exists(), moment
        evaluated = {record.step: record.metrics["distance"] for record in futures.records if record.is_evaluation}
        assert best == min(evaluated), (moment, evaluated)
        assert evaluated == {step: step - 1.0 for step in evaluated}, moment
        failures = seen.told("failed, and the training goes on: .*" + ("SIGKILL" if victim == "rank" else ""))
        wanted = (0, 1) if victim == "training" else (1, 0)
        assert (len(failures), len(seen.told("starting again"))) == wanted, (moment, seen.texts)
        assert (3 in evaluated) == (victim == "training" or moment != "waited for"), moment


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
    seen, evaluate = Seen(), Evaluate(distance, workers=0)
    gang = Gang(keep=KEEP, evaluate=evaluate, observers=(lambda: seen,), checkpoint_uri=str(tmp_path), key="count")
    for num_steps in (2, 2, 3):
        assert dispatch.run(None, count, num_steps, gang=gang).result(100.0) == [1]
    assert [record.step for record in seen.evaluated] == [1, 2, 3]
