"""Checkpoints are evaluated beside the training, once each, the newest first, and their metrics rank them, late or not.

`test_brain.py` has all orders of events.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch import DaskDDP, Evaluate, Gang, Keep, SpawnDDP, WorkerGroup, dispatch
from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.parts.evaluation import CLOSE_TIMEOUT, MAX_LACK, RETRY_INTERVAL
from flytekitplugins.daskpytorch.driver.request import names_of_evaluation
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.errors import GangError, WorkerLostError
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.function import arguments_of
from flytekitplugins.daskpytorch.protocol.function import evaluate as call_in_rank
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.messages import Ask, Leave, Question, Tell
from flytekitplugins.daskpytorch.records import LogRecord
from simulated_gang import Agent, World

W1, W2 = (f"tcp://10.0.0.{i}:1" for i in (1, 2))
BEST = Keep(last=1, best=1, metric="held_out", mode="min")  # the lowest step, in the simulation
MakeWorld = Callable[..., World]


def evaluate(target: float, rate: float = 0.1) -> dict[str, float]:
    """Stands for a user's function."""
    return {"held_out": target * rate}


@pytest.fixture
def world_of(tmp_path: Path) -> MakeWorld:
    """Makes a gang that trains, and whose checkpoints are evaluated."""

    def make(asked: Evaluate | None = None, **how: Any) -> World:
        world = World(tmp_path, **{"evaluate": asked or Evaluate(evaluate), "keep": BEST} | how)
        world.form()
        return world

    return make


def save(world: World, *steps: int) -> None:
    """Rank 0 saves these whole checkpoints, which arrive one after the other."""
    for step in steps:
        world.save(world.agent(W1), step)
        world.obey_all()
        world.upload_all(world.agent(W1))


def deliver(world: World) -> None:
    for agent in world.connected():
        world.deliver(agent)


def left(world: World) -> bool:
    """Return True if the ranks were told to leave."""
    return any(order == Tell(Leave()) for order in world.agent(W1).orders)


def steps(world: World) -> list[int]:
    """Return the steps of the checkpoints whose evaluations have begun."""
    return [each.entry.step for each in world.evaluations]


def kept(world: World) -> list[int]:
    return [saved.step for saved in world.saving.vault.saved()]


def files(world: World) -> list[int]:
    """The whole checkpoints on the driver's disk."""
    return sorted(int(path.name.split("-")[1]) for path in world.folder.glob("step-*.pt"))


# ---- In a gang


def test_metrics_arrive_under_the_checkpoints_step_and_rank_it_though_newer_ones_are_kept(world_of: MakeWorld) -> None:
    world = world_of()
    save(world, 1, 2, 3)
    assert (steps(world), kept(world)) == ([1], [1, 3])  # 2 has made room for 3
    world.end_evaluation()
    assert world.watcher.evaluated == [(1, {"held_out": 1.0})]
    save(world, 4, 5)
    world.end_evaluation()
    assert (steps(world), kept(world)) == ([1, 3, 5], [1, 5])  # 3 is judged, and no better
    assert files(world) == [1, 5]
    assert world.watcher.checkpoints[-1][0].metrics == {"held_out": 1.0}
    world.obey_all()
    assert world.agent(W1).kept == [1, 5]


def test_each_nth_is_due_and_one_that_is_saved_again_counts_once(world_of: MakeWorld) -> None:
    world = world_of(Evaluate(evaluate, every=3))
    for step in (1, 2, 2, 3, 3, 4, 5, 6, 7):
        save(world, step)
        world.end_evaluation()
    assert steps(world) == [3, 6]


def test_a_failure_costs_one_evaluation_and_is_blamed(world_of: MakeWorld) -> None:
    world = world_of()
    save(world, 1, 2)
    error = ValueError("no data")
    cause = "rank 0 of 1 failed on tcp://10.0.0.9:1 (host b): ValueError: no data"
    error.__cause__ = GangError(f"{cause}\n\nNot started again", rank_traceback='File "score.py", line 7')
    world.end_evaluation(error)
    assert steps(world) == [1]  # Dask's scheduler may still list a lost worker
    world.wait(RETRY_INTERVAL)
    world.end_evaluation(WorkerLostError("worker tcp://10.0.0.9:1 was lost"))
    assert steps(world) == [1, 2]
    assert kept(world) == [2]  # the failed one is held no more
    assert [saved.step for saved in world.watcher.checkpoints[-1]] == [2]
    [first, second] = [note for note in world.watcher.notes if "evaluation of the checkpoint" in note]
    assert first.endswith(f'step 1 failed, and the training goes on: {cause}\nFile "score.py", line 7')
    assert "step 2 failed, and the training goes on: worker tcp://10.0.0.9:1 was lost" in second
    assert world.watcher.reasons == []
    deliver(world)
    world.finish()
    assert world.results == [0, 1]


def told(agent: Agent) -> list[tuple[int, Any]]:
    """Return steps and metrics that rank 0 was told for its trackers."""
    orders = [order.order for order in agent.orders if isinstance(order, Tell)]
    return [(order.step, order.metrics) for order in orders if isinstance(order, LogRecord)]


def test_trackers_in_rank_0_get_the_metrics_after_a_restart_and_before_the_end(world_of: MakeWorld) -> None:
    world = world_of()
    world.state.observers.for_rank = lambda: [b"a tracker"]  # type: ignore[method-assign]
    save(world, 1)
    world.leave(world.agent(W2), 1, -9)
    world.obey_all()
    world.end_evaluation()
    world.wait(2.0)
    assert told(world.agent(W1)) == []  # no rank is there
    world.form()
    assert told(world.agent(W1)) == [(1, {"held_out": 1.0})]
    world.agent(W1).orders.clear()
    save(world, 2)
    deliver(world)
    assert not left(world)
    world.end_evaluation()
    assert told(world.agent(W1)) == [(2, {"held_out": 2.0})]
    assert left(world)


def test_the_end_waits_for_the_running_and_the_newest_each_no_longer_than_the_timeout(
    world_of: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(Evaluate(evaluate, timeout=30.0))
    save(world, 1, 2)
    world.wait(20.0)
    deliver(world)
    world.wait(15.0)
    assert steps(world) == [1]
    assert world.evaluations[0].is_cancelled  # after 30 s of its own
    world.end_evaluation()
    assert any("step 1 failed" in note and "longer than 30 s" in note for note in world.watcher.notes)
    world.wait(RETRY_INTERVAL)
    assert steps(world) == [1, 2]
    monkeypatch.setattr(world.evaluations[1], "end", lambda *_: None)  # its ranks do not end when they are cancelled
    world.wait(25.0)
    assert not world.evaluations[1].is_cancelled
    assert not left(world)
    world.wait(10.0)
    assert world.evaluations[1].is_cancelled
    assert not left(world)
    world.wait(CLOSE_TIMEOUT)  # although the evaluation's gang has not ended
    assert left(world)
    world.obey_all()
    assert world.results == [0, 1]
    assert "step 2 was given up" in world.watcher.notes[-1]


def test_without_a_worker_the_newest_waits_for_one_and_the_end_not_for_long(world_of: MakeWorld) -> None:
    world = world_of()
    world.cluster.can_evaluate = False
    save(world, 1, 2)
    assert steps(world) == []
    world.cluster.can_evaluate = True
    world.wait(3.0)
    assert steps(world) == [2]
    world.end_evaluation()
    world.cluster.can_evaluate = False
    save(world, 3)
    deliver(world)
    world.wait(MAX_LACK / 2)
    assert not left(world)
    world.wait(MAX_LACK)
    assert left(world)
    world.obey_all()
    assert "step 3 was given up: no worker was there for it" in world.watcher.notes[-1]


def test_the_best_is_loaded_once_all_are_judged(world_of: MakeWorld) -> None:
    world = world_of(hang_timeout=5.0)
    save(world, 1, 2)
    world.report(world.agent(W1), 0, Ask(Question.CHECKPOINT, 1, (False, None)))
    world.obey_all()
    world.wait(20.0)  # and nobody hangs
    world.obey_all()
    assert world.agent(W1).answers == []
    world.end_evaluation()
    world.obey_all()
    assert world.agent(W1).answers == []
    world.end_evaluation()
    world.obey_all()
    [answer] = world.agent(W1).answers
    assert answer.value.step == 1
    assert world.watcher.reasons == []


@pytest.mark.parametrize(
    ("end", "last"), [(lambda state: state.request_stop("the task was told to end"), 4), (GangState.cancel, 3)]
)
def test_sigterm_and_ctrl_c_end_the_evaluation_and_begin_no_other(world_of: MakeWorld, end: Any, last: int) -> None:
    world = world_of(keep=Keep(last=1))
    save(world, 1, 2, 3)
    world.feed(end, world.state)
    assert world.evaluations[0].is_cancelled
    assert files(world) == [1, 3]  # the ranks of the evaluation may still load the checkpoint
    world.end_evaluation()
    save(world, 4)  # nobody hears a rank after Ctrl-C
    assert steps(world) == [1]
    world.evaluator.end()
    assert files(world) == [last]


@pytest.mark.parametrize("has_arrived", [True, False])
def test_sigterm_ends_the_wait_for_a_checkpoints_evaluation(world_of: MakeWorld, has_arrived: bool) -> None:
    world = world_of()
    if has_arrived:
        save(world, 1)
    else:
        for agent in world.connected():
            world.write_shards(agent)
    deliver(world)
    assert not left(world)
    world.feed(world.state.request_stop, "the task was told to end")
    assert left(world)


def test_a_rank_that_waits_for_the_best_alone_counts_as_silent(world_of: MakeWorld) -> None:
    world = world_of(hang_timeout=5.0)
    world.report(world.agent(W2), 1, Ask(Question.CHECKPOINT, 1, (False, None)))
    world.wait(20.0)
    assert world.state.attempt is None or world.state.attempt.hang is not None


def test_a_training_without_checkpoints_is_told(world_of: MakeWorld) -> None:
    world = world_of()
    deliver(world)
    world.finish()
    assert "no checkpoint was kept, so none was evaluated" in world.watcher.notes[-1]


@pytest.fixture
def paths(tmp_path: Path) -> StoragePaths:
    return StoragePaths(files=Files(LocalFileSystem()), previous=None, own=str(tmp_path / "own"))


def named(paths: StoragePaths) -> list[CheckpointEntry]:
    """The checkpoints that the manifest in storage names."""
    found = manifest.read(paths.files, paths.own)
    assert found is not None
    return found


def test_a_sharded_checkpoint_gets_its_metrics_in_storage_and_stays_while_it_is_judged(
    world_of: MakeWorld, paths: StoragePaths
) -> None:
    world = world_of(keep=Keep(last=1), storage=paths)
    world.save_shards()
    [first] = named(paths)
    for _ in range(2):
        world.save_shards()
    assert len(named(paths)) == 2  # the last, and the one that is judged
    assert Path(first.uri, "__0_0.distcp").exists()
    for _ in range(2):
        world.end_evaluation()
    assert world.saving.vault.saved()[0].metrics["held_out"] == 2.0  # at once, for ranks that load the best
    world.work()
    assert [entry.is_evaluated for entry in named(paths)] == [True]
    world.save_shards()
    world.work()
    assert not Path(first.uri, "__0_0.distcp").exists()


# ---- The function


def test_the_function_gets_the_inputs_that_it_names() -> None:
    def train(data: str, *more: int, target: float, rate: float = 0.5, **rest: str) -> None:
        pass

    inputs = arguments_of(train, ("here", 1, 2), {"target": 3.0, "note": "x"})
    assert inputs == {"data": "here", "more": (1, 2), "target": 3.0, "rate": 0.5, "note": "x"}
    assert names_of_evaluation(evaluate, inputs, "train") == ["target", "rate"]
    assert names_of_evaluation(evaluate, ["target"], "train") == ["target"]
    assert call_in_rank(evaluate, ["target"], target=2.0, data="here") == {"held_out": 0.2}


@pytest.mark.parametrize("returned", [None, 0.5, {"held_out": "low"}, {1: 0.5}])
def test_what_is_no_metric_is_refused(returned: Any) -> None:
    with pytest.raises(TypeError, match=r"lambda.* returned \(.*\): must be"):
        call_in_rank(lambda: returned, [])
    assert call_in_rank(lambda: {"held_out": torch.tensor(0.5)}, []) == {"held_out": 0.5}


def test_bad_settings_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"function='x'.*workers=-1.*every=0.*timeout=0"):
        Evaluate("x", workers=-1, every=0, timeout=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Gang\(evaluate=<function.*must be None or an Evaluate"):
        Gang(evaluate=evaluate)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Gang\(evaluate\.workers=2\): must be less than workers, which is 2"):
        Gang(workers=2, evaluate=Evaluate(evaluate, workers=2))
    with pytest.raises(
        ValueError, match=r"min_workers=3\): must be at most workers less the 1 of evaluate, which is 2"
    ):
        Gang(workers=3, min_workers=3, evaluate=Evaluate(evaluate))
    with pytest.raises(
        ValueError, match=r"gang\.evaluate\.workers=2.*less than workers\.number_of_workers, which is 2"
    ):
        DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(evaluate=Evaluate(evaluate, workers=2)))
    with pytest.raises(ValueError, match=r"SpawnDDP\(gang\.evaluate=.*an Evaluate with workers=0"):
        SpawnDDP(gang=Gang(evaluate=Evaluate(evaluate)))


def train(target: float) -> None:
    """Stands for a training."""


def test_bad_calls_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"dispatch\.run\(gang\.evaluate=.*an Evaluate with workers=0"):
        dispatch.run(None, train, 1.0, gang=Gang(evaluate=Evaluate(evaluate)))
    with pytest.raises(ValueError, match=r"must have arguments that are inputs of train, by name\. goal is not: the"):
        dispatch.run(None, train, 1.0, gang=Gang(evaluate=Evaluate(other, workers=0)))
    with pytest.raises(
        ValueError, match=r"dispatch\.map\(gang\.evaluate=.*left out; evaluate a model in its own function"
    ):
        dispatch.map(None, train, [1.0], gang=Gang(evaluate=Evaluate(evaluate)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dispatch\.gang\(gang\.evaluate=.*left out; a call of the gang can"):
        dispatch.gang(None, gang=Gang(evaluate=Evaluate(evaluate, workers=0)))
    with pytest.raises(TypeError, match="is a coroutine function"):
        dispatch.run(None, train, 1.0, gang=Gang(evaluate=Evaluate(waits, workers=0)))


def other(goal: float) -> dict[str, float]:
    return {"held_out": goal}


async def waits() -> dict[str, float]:
    return {}
