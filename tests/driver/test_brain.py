"""The driver's decisions are right for any order of events. Agents, ranks and the clock are simulated."""

from __future__ import annotations

import functools
import inspect
import re
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flytekitplugins.daskpytorch import Evaluate
from flytekitplugins.daskpytorch.driver import brain
from flytekitplugins.daskpytorch.driver.agents import MAX_SILENCE, Agents
from flytekitplugins.daskpytorch.errors import (
    GangCancelledError,
    GangError,
    GangHungError,
    GangStartError,
    NoDebuggerError,
    PreemptedError,
    WorkerLostError,
)
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Written
from flytekitplugins.daskpytorch.protocol.failure import Collective, Failure, Recalled
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.settings import Keep
from simulated_gang import Agent, OwnError, PeerLostError, Watcher, World, is_own, raised

W1, W2, W3 = (f"tcp://10.0.0.{i}:1" for i in (1, 2, 3))
REASON = "the task was told to end"
MakeWorld = Callable[..., World]


@pytest.fixture
def world_of(tmp_path: Path) -> MakeWorld:
    """Makes a gang whose workers have just been asked."""

    def make(num_workers: int = 2, **how: Any) -> World:
        return World(tmp_path, num_workers, **how)

    return make


@pytest.fixture
def gang_of(world_of: MakeWorld) -> MakeWorld:
    """Makes a gang whose ranks have met."""

    def make(num_workers: int = 2, **how: Any) -> World:
        world = world_of(num_workers, **how)
        world.form()
        return world

    return make


def start_again(world: World) -> None:
    """The gang settles after a failure, and starts with the workers that are there."""
    world.obey_all()
    world.wait(1.0)
    world.form()


def let_pass(world: World, seconds: int, at_once: int = 1) -> None:
    """Let time go by, in which all that are asked answer, and ranks give no sign of life by themselves."""
    for _ in range(seconds // at_once):
        world.wait(float(at_once))
        world.obey_all()


def shrunk(world: World, *lost: str) -> Agent:
    """A gang that has lost all workers but the first, and trains on with that, whose agent it returns."""
    world.form()
    world.train()
    for worker in lost or (W2,):
        world.kill_worker(worker)
    start_again(world)
    assert len(world.starts) == 2
    assert len(world.starts[1].places) == 1
    return world.agent(W1)


# ---- Growing --------------------------------------------------------------------------------------------------------


def test_gang_grows_by_the_one_newcomer_right_after_a_checkpoint_and_at_no_other_time(world_of: MakeWorld) -> None:
    world = world_of(3, min_workers=1)
    shrunk(world, W2, W3)
    world.train()
    world.join(world.new_worker())
    world.wait(60.0)
    assert "more workers have come" not in world.watcher.reasons
    world.train()
    start_again(world)
    assert world.watcher.reasons.count("more workers have come") == 1
    assert sum(len(agent.ranks) for agent in world.connected()) == 2


def test_newcomer_that_is_taken_away_again_does_not_stop_the_smaller_gang(world_of: MakeWorld) -> None:
    world = world_of(3, min_workers=1)
    shrunk(world, W2, W3)
    newcomer = world.join(world.new_worker())
    world.say(newcomer, messages.Leaving())
    assert any(isinstance(order, messages.Close) for order in newcomer.orders)  # and nobody waits for its ranks
    assert not any("was told to end" in note for note in world.watcher.notes)
    world.train(3)
    world.obey_all()
    assert len(world.starts) == 2
    world.finish()
    assert world.results == [0]


def test_whole_gang_has_nothing_to_say_at_its_end(world_of: MakeWorld) -> None:
    world = world_of(min_workers=1)
    world.finish()
    assert (world.results, world.watcher.notes) == ([0, 1], [])


# ---- Errors of the function -----------------------------------------------------------------------------------------


def fail_and_settle(world: World, error: Exception) -> None:
    world.fail(world.agent(W2), 1, error)
    world.obey_all()
    world.wait(1.0)


def errors_at_one_place(*texts: str) -> list[Exception]:
    errors: list[Exception] = []
    for text in texts:
        with pytest.raises(OwnError) as caught:
            raise OwnError(text)
        errors.append(caught.value)
    return errors


@pytest.mark.parametrize(
    ("num_steps", "errors", "told"),
    [
        (0, [OwnError("bad batch")], "no checkpoint had been saved since the start"),
        (1, [OwnError("bad batch"), OSError("bad disk")], "no checkpoint had been saved since the start"),
        (1, [ImportError("no such")], "another attempt would end in the same way"),
        (1, [NoDebuggerError("nobody is there")], "another attempt would end in the same way"),
        (1, errors_at_one_place("at 12:01:33", "at 12:02:57"), "the same error came at the same step twice"),
    ],
)
def test_an_error_after_a_checkpoint_starts_the_gang_again_unless_it_would_come_again(
    gang_of: MakeWorld, num_steps: int, errors: list[Exception], told: str
) -> None:
    world = gang_of()
    world.train(num_steps)
    for error in errors:
        world.form()
        fail_and_settle(world, error)
    assert type(raised(world)) is type(errors[-1])
    assert f"Not started again, because {told}" in str(raised(world).__cause__)
    assert len(world.starts) == len(errors)
    if len(errors) > 1:  # the restart has a traceback, and a reason
        shown = [note for note in world.watcher.notes if str(errors[0]) in note]
        assert ["raised\n" in note for note in shown] == [True, False]


def test_a_checkpoint_that_is_on_its_way_counts(gang_of: MakeWorld) -> None:
    world = gang_of()
    world.step(world.agent(W1))
    world.fail(world.agent(W2), 1, OwnError("bad batch"))
    world.upload(world.agent(W1))  # rank 0 was told to end, and first writes what it has saved
    world.obey_all()
    start_again(world)
    assert len(world.starts) == 2


@pytest.mark.parametrize("is_missed", [False, True])
def test_end_of_a_rank_that_has_delivered_counts_only_if_another_misses_it(
    gang_of: MakeWorld, *, is_missed: bool
) -> None:
    world = gang_of(max_restarts=0)
    world.deliver(world.agent(W1))
    world.leave(world.agent(W1), 0, -signal.SIGSEGV)
    if is_missed:
        world.fail(world.agent(W2), 1, PeerLostError("Connection reset by peer"))
    world.finish()
    assert world.results == (None if is_missed else [0, 1])
    assert not is_missed or "rank 0 of 2 failed" in str(raised(world))


def test_losses_that_come_together_cost_one_start(gang_of: MakeWorld) -> None:
    world = gang_of(3, min_workers=1)
    world.kill_worker(W2)
    world.obey_all()
    world.wait(0.8 * brain.SETTLE_TIME)
    assert len(world.starts) == 1
    world.kill_worker(W3)
    world.wait(0.3 * brain.SETTLE_TIME)
    world.form()
    assert [len(start.places) for start in world.starts[1:]] == [1]


def test_ranks_meet_where_rank_0_is(gang_of: MakeWorld) -> None:
    world = gang_of(min_workers=1)
    world.kill_worker(W1)
    start_again(world)
    assert [start.job.store for start in world.starts] == [(W1, 1), None]  # who is alone has nobody to meet
    world = gang_of(3, min_workers=2)
    world.kill_worker(W1)
    start_again(world)
    assert [start.job.store for start in world.starts] == [(W1, 1), (W2, 1)]


# ---- Being told to end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("happens", ["a rank fails", "a worker is lost"])
@pytest.mark.parametrize("is_request_last", [False, True])
def test_request_to_end_survives_whatever_else_happens(
    world_of: MakeWorld, happens: str, *, is_request_last: bool
) -> None:
    world = world_of(min_workers=1)
    world.form()
    world.train()
    acts: list[Callable[[], None]] = [lambda: world.feed(world.state.request_stop, REASON)]
    if happens == "a rank fails":
        acts.append(lambda: world.fail(world.agent(W2), 1, OwnError("bad batch")))
    else:
        acts.append(lambda: world.kill_worker(W2))
    for act in reversed(acts) if is_request_last else acts:
        act()
    world.finish()
    error = raised(world)
    assert isinstance(error, PreemptedError)
    assert REASON in str(error)
    assert ("while it was failing" in str(error)) is (happens == "a rank fails")  # the request explains a lost worker
    assert len(world.starts) == 1
    assert f"the newest checkpoint (step {world.committed}) is deleted" in str(error)


@pytest.mark.parametrize("order", ["scheduler first", "worker first"])
def test_a_lost_scheduler_is_the_cause_whoever_hears_of_it_first(gang_of: MakeWorld, order: str) -> None:
    world = gang_of()
    world.train()
    if order == "scheduler first":
        world.cluster.is_there = False
    world.say(world.agent(W2), messages.Leaving())
    world.cluster.is_there = False
    for _ in range(30):  # seconds; the ranks never ask `should_stop`
        world.obey_all()
        world.wait(1.0)
    error = raised(world)
    assert isinstance(error, PreemptedError)
    assert error.cause == "the Dask scheduler was lost"


def test_error_that_ends_the_gang_anyway_comes_before_a_request(gang_of: MakeWorld) -> None:
    world = gang_of(max_restarts=0)
    world.feed(world.state.request_stop, REASON)
    world.fail(world.agent(W2), 1, OwnError("bad batch"))
    world.finish()
    assert is_own(raised(world))


@pytest.mark.parametrize(("heeds", "seconds"), [(True, 40.0), (False, 10.0)])
def test_ranks_have_the_grace_period_or_a_quarter_if_none_asks(
    gang_of: MakeWorld, *, heeds: bool, seconds: float
) -> None:
    world = gang_of(grace_period=40.0)
    world.heeds = heeds
    world.train()
    agent = world.agent(W1)
    world.feed(world.state.request_stop, REASON)
    for each in world.connected():
        world.report(each, next(iter(each.ranks)), messages.Answer(1, (1 if heeds else 0, False)))
    world.wait(seconds - 1.0)
    assert not any(isinstance(order, messages.Stop) for order in agent.orders)
    world.wait(2.0)
    assert any(isinstance(order, messages.Stop) for order in agent.orders)


# ---- Checkpoints ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_whose_file_is_gone_is_said_and_the_one_before_is_taken(gang_of: MakeWorld) -> None:
    world = gang_of()
    world.train()
    [kept] = world.checkpoints.entries()
    world.report(world.agent(W1), 0, Written(replace(kept, step=2)))
    assert sum("checkpoint of step 2 was not kept (FileNotFoundError" in note for note in world.watcher.notes) == 1
    assert world.checkpoints.newest() == kept


# ---- Sharded checkpoints --------------------------------------------------------------------------------------------


def folders(world: World) -> list[str]:
    """Those of all sharded checkpoints that lie in storage, without the gang's nonce."""
    found = (world.folder / "shards").glob("step-*/*")
    return sorted(f"{path.parent.name}/{path.name.rpartition('-')[0]}" for path in found)


def test_shards_count_once_all_ranks_have_written_them(gang_of: MakeWorld) -> None:
    world = gang_of()
    world.write_shards(world.agent(W1))
    world.obey_all()
    assert world.watcher.kept_steps == []
    world.write_shards(world.agent(W2))
    world.obey_all()
    assert world.watcher.kept_steps == [100]
    [newest] = world.checkpoints.sharded
    assert (newest.step, newest.size) == (100, 10)
    assert world.complaints == []


def test_shards_that_one_rank_cannot_write_are_given_up(gang_of: MakeWorld) -> None:
    world = gang_of()
    world.write_shards(world.agent(W2), fails=True)
    world.write_shards(world.agent(W1))
    world.work()
    world.obey_all()
    assert "step 100 was not kept (PermissionError: no rights (rank 1))" in world.watcher.notes[-1]
    assert folders(world) == []
    world.save_shards()
    assert folders(world) == ["step-101/0-1"]


def test_shards_of_an_older_attempt_are_refused(gang_of: MakeWorld) -> None:
    world = gang_of()
    for rank in (0, 1):
        world.write_shard(0, rank, 0)
    late = world.shards(0, 0)
    world.fail(world.agent(W1), 0, RuntimeError("Connection reset by peer"))
    world.kill_worker(W2)
    world.new_worker()
    start_again(world)
    assert len(world.starts) == 2
    world.report(world.agent(W1), 0, late)  # by the same agent, or another at its place
    assert world.checkpoints.sharded == []
    world.save_shards()
    assert folders(world) == ["step-100/1-0"]


@pytest.mark.parametrize("is_program", [False, True])
def test_grace_period_ends_threads_that_outlive_the_ranks_functions_which_a_program_has_not_finished(
    gang_of: MakeWorld, *, is_program: bool
) -> None:
    world = gang_of(grace_period=10.0)
    assert world.state.attempt is not None
    world.state.attempt.is_program = is_program
    for worker in (W1, W2):
        world.deliver(world.agent(worker))
    for agent in world.connected():
        agent.orders.clear()  # `Leave`: their threads go on
    world.feed(world.state.request_stop, REASON)
    world.wait(10.0)
    world.obey_all()
    if is_program:
        assert isinstance(raised(world), PreemptedError)
    else:
        assert world.results == [0, 1]


# ---- Agents ---------------------------------------------------------------------------------------------------------


def test_all_ranks_stop_at_the_foremost_ranks_call(gang_of: MakeWorld) -> None:
    world = gang_of()
    world.feed(world.state.request_stop, REASON)
    for worker, rank, num_calls, told in ((W1, 0, 5, []), (W2, 1, 3, [messages.Release(5)])):
        world.report(world.agent(worker), rank, messages.Answer(1, (num_calls, False)))
        orders = [getattr(order, "order", None) for order in world.agent(W1).orders]
        assert [order for order in orders if isinstance(order, messages.Release)] == told


def test_failure_of_an_agent_is_no_error_of_the_function(gang_of: MakeWorld) -> None:
    world = gang_of(max_restarts=1)
    for _ in range(2):
        agent = world.agent(W2)
        world.say(agent, messages.Broken("Traceback ...\nOSError: a full disk"))
        world.lose(agent)
        start_again(world)
    error = raised(world)
    assert isinstance(error, WorkerLostError)
    assert "the agent that watches it failed: OSError: a full disk" in str(error)
    assert "Traceback of its agent:\nTraceback ..." in str(error)


def test_suspended_worker_that_comes_back_is_used_again(gang_of: MakeWorld) -> None:
    world = gang_of(start_timeout=600.0)
    world.train()
    world.agent(W2).is_suspended = True
    world.wait(MAX_SILENCE + 3)
    world.obey_all()
    world.wait(60.0)
    assert len(world.starts) == 1  # all workers are needed
    world.form()  # ... and the suspended one has come to life
    assert len(world.starts) == 2
    world.finish()
    assert world.results == [0, 1]


@pytest.mark.parametrize(
    ("num_workers", "told"),
    [(1, "waiting until this node can start the ranks"), (2, "0 of 2 workers are here, waiting for the others")],
)
def test_gang_that_waits_says_for_what_and_one_of_this_node_names_no_workers(
    world_of: MakeWorld, num_workers: int, told: str
) -> None:
    """The user of `dispatch.run(None)` or `SpawnDDP` has asked for no workers."""
    world = world_of(num_workers, start_timeout=30.0)
    world.wait(15.0)
    assert [told in note for note in world.watcher.notes] == [True]
    world.wait(16.0)
    assert "They may be busy with other tasks" in str(raised(world))


def test_workers_with_another_torch_are_refused(world_of: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulated_gang.local_versions", lambda: {"torch": "0.0.1"})
    world = world_of()
    world.join_all()
    assert "has torch 0.0.1, this process" in str(raised(world))


def test_ranks_that_never_ask_to_stop_end_at_once_where_somebody_waits(gang_of: MakeWorld) -> None:
    world = gang_of(grace_period=600.0)
    world.feed(functools.partial(world.state.request_stop, "Ctrl-C", is_awaited=True))
    world.obey_all()
    world.wait(1.0)
    world.obey_all()
    assert "was ended: Ctrl-C; " in str(raised(world))


def test_driver_that_stood_still_reads_what_has_come_before_a_deadline_is_over(world_of: MakeWorld) -> None:
    world = world_of(start_timeout=30.0, max_restarts=1, may_stand_still=True)
    world.join_all()
    world.clock.now += 100.0
    world.obey_all()
    for worker in (W1, W2):
        world.ready(world.agent(worker))
    world.train()
    world.fail(world.agent(W1), 0, OwnError("at step 3"))
    world.clock.now += 100.0  # the ranks have been told to end, and have ended
    world.feed()
    world.obey_all()
    world.wait(5.0)
    world.form()
    world.finish()
    assert world.results == [0, 1]
    assert len(world.starts) == 2
    assert len(world.agents) == 2  # no agent was given up


def test_ranks_that_do_not_meet_in_time_are_named_though_they_come_at_last(world_of: MakeWorld) -> None:
    world = world_of(start_timeout=30.0)
    world.join_all()
    world.obey_all()
    world.ready(world.agent(W1))
    world.wait(31.0)
    world.ready(world.agent(W2))
    world.obey_all()
    error = raised(world)
    assert isinstance(error, GangStartError)
    assert error.rank == 1
    assert "1 of 2 ranks met within 30 s; missing: 1." in str(error)


FEW = {"num_wanted": 4, "num_least": 2, "expected": (), "refused": ()}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"num_here": 3, "expected": [W1], "is_first": True, "is_late": True}, "start"),
        ({"num_here": 1, "refused": [W1, W2, W3], "is_first": True}, "refuse"),
        ({"num_here": 1, "refused": [W1, W2, W3]}, "wait"),
    ],
)
def test_an_attempt_starts_waits_or_is_refused(facts: dict[str, Any], expected: str) -> None:
    times = {name: facts.pop(name, False) for name in ("is_first", "is_settled", "is_late")}
    num_here = facts.pop("num_here")
    agents: Any = SimpleNamespace(**{**FEW, "num_nodes": num_here, **facts})
    assert Agents.verdict(agents, **times) == expected


# ---- Hanging --------------------------------------------------------------------------------------------------------


def locate(world: World, worker: str, rank: int, stacks: str, num_moves: int = 4) -> None:
    """A rank answers the newest questions: where it is, and its collectives."""
    newest = world.brain._attempt._num_asked
    for number, value in ((newest - 1, messages.Located(stacks, num_moves)), (newest, world.recalled.get(rank))):
        world.report(world.agent(worker), rank, messages.Answer(number, value))


LOOK = [messages.Question.STACKS, messages.Question.COLLECTIVES]


def test_gang_that_moves_again_while_it_is_asked_goes_on(gang_of: MakeWorld) -> None:
    world = gang_of(hang_timeout=10.0)
    for agent in world.connected():
        world.beat(agent, dict.fromkeys(agent.ranks, 1))
    world.wait(9.9)
    world.wait(0.2)
    world.beat(world.agent(W1), {0: 2})
    world.beat(world.agent(W2), {1: 2})
    world.obey_all()
    world.wait(5.0)
    assert len(world.starts) == 1
    assert not world.is_over
    let_pass(world, 8)
    world.form()
    assert len(world.starts) == 2
    assert "hangs" in world.watcher.reasons[0]


def test_heartbeats_count_for_the_ranks_of_their_agent_alone(gang_of: MakeWorld) -> None:
    world = gang_of(hang_timeout=10.0, max_restarts=0)
    for moves in range(1, 12):
        world.beat(world.agent(W1), {0: moves, 1: moves})  # of which the second is another agent's
        world.wait(1.0)
        world.obey_all()
    let_pass(world, 3)
    assert isinstance(raised(world), GangHungError)


def test_silence_before_the_ranks_have_met_does_not_count(world_of: MakeWorld) -> None:
    world = world_of(hang_timeout=10.0, max_restarts=0)
    world.join_all()
    world.obey_all()
    world.wait(20.0)
    for agent in world.connected():
        world.ready(agent)
    world.wait(9.0)
    assert not world.agent(W1).orders
    let_pass(world, 3)
    assert isinstance(raised(world), GangHungError)


def test_ranks_that_have_moved_say_so_with_their_answer(gang_of: MakeWorld) -> None:
    world = gang_of(hang_timeout=10.0, max_restarts=0)
    for worker, rank in ((W1, 0), (W2, 1)):
        world.beat(world.agent(worker), {rank: 3})
    world.wait(10.0)
    for worker, rank in ((W1, 0), (W2, 1)):
        locate(world, worker, rank, "busy")
    world.wait(9.0)
    assert not any(isinstance(order, messages.Stop) for order in world.agent(W1).orders)
    world.wait(1.0)
    for worker, rank in ((W1, 0), (W2, 1)):
        locate(world, worker, rank, "still busy")
    assert isinstance(world.agent(W1).orders.pop(), messages.Stop)


def test_newest_step_of_a_rank_comes_from_logs_and_checkpoints(gang_of: MakeWorld) -> None:
    world = gang_of()
    written = Written(CheckpointEntry(attempt=0, step=5, size=1, digest="0" * 64))
    for rank, agent, report in (
        (0, W1, LogRecord(rank=0, step=3, num_steps=None, time=0.0, metrics={})),
        (1, W2, LogRecord(rank=1, step=4, num_steps=None, time=0.0, metrics={})),
        (0, W1, written),
    ):
        world.report(world.agent(agent), rank, report)
    assert world.brain._attempt.steps == {0: 5, 1: 4}


def recalled(*numbers: int, is_done: bool = True, backend: str = "gloo", is_over: bool = False) -> Recalled:
    """All-reduces of one group, of which only the last may be waiting."""
    group = f"the default group ({backend})"
    collectives = [
        Collective(
            group=group, number=number, operation="all_reduce", inputs=[(4,)], outputs=[(4,)], dtypes=["Float"],
            is_done=is_done or number < max(numbers), frames=['File "/code/train.py", line 12 in train'],
        )
        for number in numbers
    ]  # fmt: skip
    return Recalled(groups={group: max(numbers, default=0)}, collectives=collectives, is_over=is_over)


def test_log_of_a_rank_that_returned_too_early_and_ended_well_is_in_the_hangs_error(gang_of: MakeWorld) -> None:
    world = gang_of(hang_timeout=10.0, max_restarts=0)
    world.recalled = {0: recalled(1, 2, is_done=False), 1: recalled(1)}
    world.deliver(world.agent(W2))
    world.wait(10.0)
    for rank, worker in ((0, W1), (1, W2)):
        locate(world, worker, rank, "stack", num_moves=-1)
    world.leave(world.agent(W2), 1, 0, log_tail="its last line")
    world.obey_all()
    error = raised(world)
    assert isinstance(error, GangHungError)
    assert (error.rank, error.log_tail) == (1, "its last line")


def test_failed_collective_is_explained_by_what_the_other_ranks_say(gang_of: MakeWorld) -> None:
    world = gang_of(max_restarts=0)
    world.recalled = {0: recalled(1, 2), 1: recalled(1)}
    world.fail(world.agent(W1), 0, RuntimeError("gloo: timed out waiting 1800000ms for recv"))
    assert not world.agent(W2).orders  # the loss of a worker, which reads alike, is soon known
    world.wait(0.4, beats=False)
    assert [order.order.question for order in world.agent(W2).orders] == LOOK  # type: ignore[attr-defined]
    world.obey_all()
    assert not world.is_over
    world.wait(0.4, beats=False)
    world.obey_all()
    error = raised(world)
    assert "timed out" in str(error)
    assert "rank 1 has not called collective 2 of the default group (gloo)" in str(error.__cause__)
    assert "  rank 0: all_reduce of Float [4], waiting" in str(error.__cause__)


def test_rank_that_aborts_in_a_collective_is_explained_as_soon_as_the_others_have_answered(gang_of: MakeWorld) -> None:
    world = gang_of(num_workers=3, max_restarts=0)
    world.recalled = {1: recalled(1, 2, is_done=False), 2: recalled(1)}
    world.leave(world.agent(W1), 0, -signal.SIGABRT)
    assert [order.order.question for order in world.agent(W2).orders] == LOOK  # type: ignore[attr-defined]
    world.obey_all()  # they answer
    assert isinstance(world.agent(W2).orders[-1], messages.Stop)
    world.obey_all()
    assert "rank 2 has not called collective 2 of the default group (gloo)" in str(raised(world))


def test_failed_ranks_answer_does_not_displace_the_collectives_of_its_failure(gang_of: MakeWorld) -> None:
    world = gang_of(num_workers=2, max_restarts=0)
    world.recalled = {1: recalled(1)}
    world.report(world.agent(W1), 0, recalled(1, 2, is_done=False))
    world.leave(world.agent(W1), 0, -signal.SIGABRT)
    failure = Failure.of(RuntimeError("gloo: Connection reset by peer"), world.clock())
    world.report(world.agent(W2), 1, replace(failure, recalled=recalled(1)))
    world.recalled = {}
    locate(world, W2, 1, "stack", -1)
    world.leave(world.agent(W2), 1, 1)
    world.obey_all()
    assert "rank 1 has not called collective 2 of the default group (gloo)" in str(raised(world))


WATCHDOG = "[PG ID 0 Rank 0] Process group watchdog thread terminated with exception: NCCL error: remote process exited"


@pytest.mark.parametrize("is_abort_first", [False, True])
def test_worker_is_lost_though_nccls_watchdog_aborts_the_rank_of_another(
    gang_of: MakeWorld, is_abort_first: bool
) -> None:
    world = gang_of(max_restarts=0)
    happen = [
        lambda: world.kill_worker(W2),
        lambda: world.leave(world.agent(W1), 0, -signal.SIGABRT, watchdog=WATCHDOG),
    ]
    for each in reversed(happen) if is_abort_first else happen:
        each()
        world.wait(0.2, beats=False)
    world.obey_all()
    world.wait(1.0)
    error = raised(world)
    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.cause) == (1, "its worker was lost")


def test_abort_by_nccls_watchdog_that_nothing_explains_is_a_loss_of_infrastructure(world_of: MakeWorld) -> None:
    world = world_of(max_restarts=2)
    for _ in range(2):  # an error of the function would not be tried a third time
        world.form()
        world.leave(world.agent(W1), 0, -signal.SIGABRT, watchdog=WATCHDOG)
        let_pass(world, 2)
    world.finish()
    assert world.results == [0, 1]
    told = "ended by signal 6, SIGABRT of torch's NCCL watchdog"
    assert [told in reason for reason in world.watcher.reasons] == [True, True]


# ---- GPUs that fail -------------------------------------------------------------------------------------------------

ECC = "CUDA error: uncorrectable ECC error encountered"


def on_gpus(world: World, *gpus: tuple[str, ...]) -> World:
    """Give the workers these GPUs, and form the gang."""
    world.gpus = {f"tcp://10.0.0.{number}:1": uuids for number, uuids in enumerate(gpus, start=1)}
    world.form()
    return world


def end_by_gpu(world: World, worker: str, rank: int) -> None:
    """A GPU fails under a rank; the gang settles, and starts again with what is there."""
    world.fail(world.agent(worker), rank, RuntimeError(ECC))
    world.obey_all()
    for _ in range(2):  # a worker that is there may be asked first
        world.wait(1.0)
        world.form()


def gpus_of(world: World) -> dict[str, list[str]]:
    """The GPUs of each worker's ranks, by their names there."""
    return {agent.worker: [place.gpu or "none" for place in agent.places] for agent in world.connected() if agent.ranks}


def test_worker_whose_gpu_has_failed_is_left_out_where_another_worker_is_there(world_of: MakeWorld) -> None:
    world = world_of(max_restarts=1)
    on_gpus(world, ("GPU-a",), ("GPU-b",))
    world.gpus[world.new_worker()] = ("GPU-c",)
    end_by_gpu(world, W1, 0)
    assert gpus_of(world) == {W2: ["0"], W3: ["0"]}
    world.finish()
    assert world.results == [0, 1]


def test_gpu_that_has_failed_is_tried_again_where_no_other_is_there_and_costs_a_restart(world_of: MakeWorld) -> None:
    world = on_gpus(world_of(max_restarts=1), ("GPU-a",), ("GPU-b",))
    end_by_gpu(world, W2, 1)
    assert gpus_of(world) == {W1: ["0"], W2: ["0"]}
    assert [event.kind for event in world.watcher.events if isinstance(event, journal.Restarted)] == ["lost"]
    end_by_gpu(world, W2, 1)
    error = raised(world)
    assert isinstance(error, WorkerLostError)
    assert error.cause == f"GPU 0 (UUID GPU-b) of host {W2} failed: {ECC}"
    assert "max_restarts=1 is used up by losses of infrastructure" in str(error)


def test_gpu_is_the_cause_though_its_rank_is_aborted_by_nccls_watchdog(world_of: MakeWorld) -> None:
    world = on_gpus(world_of(max_restarts=0), ("GPU-a",), ("GPU-b",))
    world.leave(world.agent(W1), 0, -signal.SIGABRT, watchdog=WATCHDOG)
    said = f"Process group watchdog thread terminated with exception: {ECC}"
    world.leave(world.agent(W2), 1, -signal.SIGABRT, log_tail=f"step 3\n{said}\nSearch for `cudaErrorECC'\n")
    world.obey_all()
    world.wait(1.0)
    error = raised(world)
    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.cause) == (1, f"GPU 0 (UUID GPU-b) of host {W2} failed: {said}")


# ---- Hanging, by `auto` ---------------------------------------------------------------------------------------------


def formed(world: World) -> World:
    world.form()
    for agent in world.connected():
        world.beat(agent, dict.fromkeys(agent.ranks, 0))
    return world


ALL_WAIT = {0: recalled(1, 2, is_done=False), 1: recalled(1, is_done=False)}
ONE_WAITS = {0: recalled(1, 2, is_done=False), 1: recalled(1)}


@pytest.mark.parametrize(
    ("recalls", "has_returned", "told"),
    [
        (ALL_WAIT, False, "hang_timeout='auto'"),
        ({}, False, None),
        pytest.param({0: recalled(1), 1: recalled(1)}, False, None, id="nobody waits"),
        pytest.param(ONE_WAITS, False, None, id="rank 1 may be at work"),
        pytest.param(ONE_WAITS, True, "rank 1 .*its function has returned", id="rank 0 waits in vain"),
        pytest.param({0: recalled(1), 1: recalled(1)}, True, None, id="the last rank at work"),
    ],
)
def test_ranks_that_all_wait_hang_after_five_minutes_and_others_do_not(
    world_of: MakeWorld, recalls: dict[int, Recalled], has_returned: bool, told: str | None
) -> None:
    world = formed(world_of(max_restarts=0))
    world.recalled = recalls
    if has_returned:
        world.deliver(world.agent(W2))
    let_pass(world, 300, at_once=10)
    assert not world.is_over
    let_pass(world, 60 if told is not None else 5 * 3600, at_once=10)
    assert world.is_over is (told is not None)
    assert told is None or (isinstance(world.error, GangHungError) and re.search(told, str(world.error)))


@pytest.mark.parametrize("what", ["a rank moves", "they wait in another collective", "hang_timeout=None"])
def test_ranks_that_wait_but_not_for_ever_do_not_hang(world_of: MakeWorld, what: str) -> None:
    world = formed(world_of(max_restarts=0, hang_timeout=None if what == "hang_timeout=None" else "auto"))
    for number in range(1, 60):
        newest = number if what == "they wait in another collective" else 1
        world.recalled = {rank: recalled(newest, is_done=False) for rank in (0, 1)}
        let_pass(world, 30, at_once=10)
        if what == "a rank moves":
            world.beat(world.agent(W2), {1: number})
    assert not world.is_over


def test_silence_is_allowed_ten_times_as_long_as_the_slowest_before_it(world_of: MakeWorld) -> None:
    world = formed(world_of(max_restarts=0))
    let_pass(world, 100, at_once=10)
    world.beat(world.agent(W1), {0: 1})
    world.recalled = {0: recalled(1, is_done=False), 1: recalled(1, is_done=False)}
    let_pass(world, 1000, at_once=10)
    assert not world.is_over
    let_pass(world, 120, at_once=10)  # there is a second look
    assert isinstance(raised(world), GangHungError)


# ---- Waiting for a rank that has returned ---------------------------------------------------------------------------

WAITS = recalled(1, 2, is_done=False, backend="nccl")
LEFT = recalled(1, backend="nccl", is_over=True)


def one_returned(world: World, recalls: dict[int, Recalled]) -> World:
    """Rank 1 of a gang on two GPUs returns."""
    on_gpus(world, ("GPU-a",), ("GPU-b",)).recalled = recalls
    world.deliver(world.agent(W2))
    return world


def test_rank_that_waits_in_nccl_for_one_that_has_returned_ends_the_gang(world_of: MakeWorld) -> None:
    world = one_returned(world_of(hang_timeout=None), {0: WAITS, 1: LEFT})
    let_pass(world, 30)
    error = raised(world)
    assert isinstance(error, GangError)
    assert (error.rank, error.kind) == (0, "desync")
    assert error.cause == (
        "rank 1 returned; rank 0 was still in all_reduce of Float [4] at train.py:12, "
        "collective 2 of the default group (nccl)"
    )
    assert len(world.starts) == 1  # such an error is certain to come again


def test_rank_that_waits_late_for_one_that_has_returned_is_found(world_of: MakeWorld) -> None:
    world = one_returned(world_of(hang_timeout=None), {0: recalled(1, backend="nccl"), 1: LEFT})
    let_pass(world, 1200)
    world.recalled[0] = WAITS
    let_pass(world, 60)
    assert "rank 1 returned; rank 0 was still in" in str(raised(world))


@pytest.mark.parametrize(
    "recalls",
    [
        pytest.param({0: WAITS}, id="the record of the other is unknown"),
        pytest.param({0: WAITS, 1: replace(LEFT, is_over=False)}, id="its threads go on"),
        pytest.param({0: WAITS, 1: replace(LEFT, groups={})}, id="its group is gone, or its recorder has forgotten"),
        pytest.param({0: WAITS, 1: recalled(1, 2, backend="nccl", is_over=True)}, id="it has made the call"),
        pytest.param({0: recalled(1, 2, is_done=False), 1: recalled(1, is_over=True)}, id="not in NCCL"),
        pytest.param({0: recalled(1, 2, backend="nccl"), 1: LEFT}, id="the call has ended"),
    ],
)
def test_nothing_is_said_of_a_returned_rank_without_a_proof(world_of: MakeWorld, recalls: dict[int, Recalled]) -> None:
    world = one_returned(world_of(hang_timeout=None), recalls)
    let_pass(world, 600)
    assert not world.is_over


def test_wait_for_a_returned_rank_must_last_for_two_looks(world_of: MakeWorld) -> None:
    world = one_returned(world_of(hang_timeout=None), {})
    for number in range(2, 40):
        world.recalled = {0: recalled(number, is_done=False, backend="nccl"), 1: LEFT}
        let_pass(world, 5)
        world.recalled = {0: recalled(number, backend="nccl"), 1: LEFT}
        let_pass(world, 5)
    assert not world.is_over


# ---- The best checkpoints -------------------------------------------------------------------------------------------

BEST = Keep(last=1, best=1, metric="loss")
THE_BEST = False, None
"""The question for the best whole checkpoint."""


def arrive(world: World) -> list[int]:
    """All checkpoints that the agents are asked for arrive, one after the other; their steps."""
    steps = []
    world.obey_all()
    while senders := [agent for agent in world.connected() if agent.uploads]:
        steps.append(senders[0].uploads[0].step)
        world.upload(senders[0])
        world.obey_all()
    return steps


def test_the_best_is_kept_beside_the_newest(gang_of: MakeWorld) -> None:
    world = gang_of(keep=BEST)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.8)):
        world.save(world.agent(W1), step, loss=loss)
    assert arrive(world) == [1, 2, 3, 4]
    assert [file.step for file in world.checkpoints.entries()] == [2, 4]
    assert world.agent(W1).kept == world.agent(W2).kept == [2, 4]
    assert [[kept.step for kept in told] for told in world.watcher.checkpoints] == [[1], [2], [2, 3], [2, 4]]


def test_a_metric_that_counts_and_that_no_checkpoint_has_is_told_once(gang_of: MakeWorld) -> None:
    world = gang_of(keep=BEST)
    for step in (1, 2):
        world.save(world.agent(W1), step, accuracy=0.5)
        arrive(world)
    (told,) = [note for note in world.watcher.notes if "no checkpoint was saved with that metric so far" in note]
    assert "Keep(best=1, metric='loss'): " in told
    assert "they have: accuracy" in told


def step_of(answer: messages.Answer) -> int | None:
    return None if answer.value is None else answer.value.step


def test_other_ranks_get_what_rank_0_got_at_the_same_call(gang_of: MakeWorld) -> None:
    world = gang_of(keep=BEST)
    world.save(world.agent(W1), 1, loss=0.5)
    arrive(world)
    world.report(world.agent(W2), 1, messages.Ask(messages.Question.CHECKPOINT, 1, THE_BEST))
    world.obey_all()
    assert world.agent(W2).answers == []  # rank 0 may save a better one before it asks
    world.report(world.agent(W1), 0, messages.Ask(messages.Question.CHECKPOINT, 1, THE_BEST))
    world.obey_all()
    world.save(world.agent(W1), 2, loss=0.1)
    arrive(world)
    world.report(world.agent(W1), 0, messages.Ask(messages.Question.CHECKPOINT, 2, THE_BEST))
    world.obey_all()
    world.report(world.agent(W2), 1, messages.Ask(messages.Question.CHECKPOINT, 2, THE_BEST))
    world.obey_all()
    for worker in (W1, W2):
        answers = world.agent(worker).answers
        assert [(each.number, step_of(each)) for each in answers] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    ("is_sharded", "step", "found"),
    [
        *((False, step, found) for step, found in ((2, 2), (1, 1), (7, None), (None, 1))),
        *((True, step, found) for step, found in ((None, 101), (103, 103), (102, None))),
    ],
)
def test_a_checkpoint_is_had_as_the_best_or_by_its_step(
    gang_of: MakeWorld, *, is_sharded: bool, step: int | None, found: int | None
) -> None:
    world = gang_of(keep=BEST)
    for saved, loss in ((1, 0.1), (2, 0.9)):
        world.save(world.agent(W1), saved, loss=loss)
        arrive(world)
    for _ in range(4):
        world.save_shards()
    world.report(world.agent(W1), 0, messages.Ask(messages.Question.CHECKPOINT, 1, (is_sharded, step)))
    world.obey_all()
    assert [*map(step_of, world.agent(W1).answers)] == [found]
    assert [kept.step for kept in world.watcher.checkpoints[-1]] == world.agent(W2).kept == [1, 2, 101, 103]


# ---- Any order ------------------------------------------------------------------------------------------------------


def happening(method: Callable[..., None]) -> Callable[..., None]:
    """A rule: this happens to the gang, or another one begins where it has ended."""

    @functools.wraps(method)
    def apply(self: AnyOrder, data: st.DataObject) -> None:
        if self.world.is_over:
            self.the_gang_has_ended_well()
            self.begin(data.draw(SETTINGS), forms=True)
        method(self, self.world, data)

    parameters = inspect.signature(apply).parameters
    apply.__signature__ = inspect.Signature([parameters["self"], parameters["data"]])  # type: ignore[attr-defined]
    return rule(data=st.data())(apply)


def an_agent(world: World, data: st.DataObject) -> Agent | None:
    """One that is connected."""
    return data.draw(st.sampled_from(world.connected())) if world.connected() else None


SETTINGS = st.fixed_dictionaries(
    {
        "num_workers": st.sampled_from([1, 2, 2, 3]),
        "ranks_per_worker": st.sampled_from([1, 1, 2]),
        "min_workers": st.sampled_from([1, 1, None]),
        "max_restarts": st.sampled_from([0, 1, 5, 5]),
        "hang_timeout": st.sampled_from([None, 20.0, "auto"]),
        "heeds": st.booleans(),
        "keep": st.sampled_from(
            [Keep(), Keep(last=1, best=2, metric="loss"), Keep(last=1, best=1, metric="held_out", mode="max")]
        ),
        "evaluate": st.sampled_from([None, Evaluate(print), Evaluate(print, every=2, timeout=20.0)]),
    }
)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens, in whatever order: the gang ends, blames rightly, and resumes from what it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: list[tempfile.TemporaryDirectory[str]] = []

    @initialize(how=SETTINGS, forms=st.sampled_from([True, True, True, False]))
    def the_first_gang_begins(self, how: dict[str, Any], *, forms: bool) -> None:
        self.begin(how, forms=forms)

    def begin(self, how: dict[str, Any], *, forms: bool) -> None:
        how = dict(how)
        self.folders.append(tempfile.TemporaryDirectory())
        heeds = how.pop("heeds")
        self.world = World(Path(self.folders[-1].name), **how, start_timeout=60.0)
        self.world.heeds = heeds
        self.must_end = False
        self.num_starts = 0
        self.own_failures: set[tuple[int, int]] = set()
        if forms:
            self.world.form()
            self.world.train()

    # ---- agents

    @happening
    def agents_that_were_asked_come(self, world: World, data: st.DataObject) -> None:
        if ready := sorted(world.cluster.asked.keys() & world.cluster.here):
            world.join(data.draw(st.sampled_from(ready)))

    @happening
    def an_agent_dials_in_again(self, world: World, data: st.DataObject) -> None:
        if agent := an_agent(world, data):
            world.join(agent.worker)

    @happening
    def everybody_comes_and_meets(self, world: World, data: st.DataObject) -> None:
        world.form()

    @happening
    def an_agent_cannot_be_started(self, world: World, data: st.DataObject) -> None:
        if world.cluster.asked:
            worker = data.draw(st.sampled_from(sorted(world.cluster.asked)))
            world.cluster.asked.pop(worker)(worker, WorkerLostError("the worker was lost before"))
            world.feed()

    @happening
    def an_agent_ends(self, world: World, data: st.DataObject) -> None:
        if agent := an_agent(world, data):
            how = data.draw(st.sampled_from(["lost", "broken", "leaving", "suspended or not", "with its worker"]))
            event(f"an agent: {how}")
            match how:
                case "broken":
                    world.say(agent, messages.Broken("OSError: a full disk"))
                    world.lose(agent)
                case "lost":
                    world.lose(agent)
                case "leaving":
                    world.say(agent, messages.Leaving())
                case "suspended or not":
                    agent.is_suspended = not agent.is_suspended
                case "with its worker":
                    world.kill_worker(agent.worker)

    @happening
    def a_newcomer_joins(self, world: World, data: st.DataObject) -> None:
        if len(world.cluster.here) < 4:
            world.new_worker()
            world.wait(1.0)
            world.join_all()

    @happening
    def a_smaller_gang_is_to_grow(self, world: World, data: st.DataObject) -> None:
        if len(world.connected()) > 1 and world.settings.min_workers:
            world.kill_worker(world.connected()[-1].worker)
            start_again(world)
            world.new_worker()
            world.wait(2.0)
            world.join_all()
            world.train()

    @happening
    def a_worker_comes_back(self, world: World, data: st.DataObject) -> None:
        if world.agents:
            world.cluster.here.add(data.draw(st.sampled_from(world.agents)).worker)

    @happening
    def an_agent_obeys(self, world: World, data: st.DataObject) -> None:
        if agent := an_agent(world, data):
            world.obey(agent)

    @happening
    def all_agents_obey(self, world: World, data: st.DataObject) -> None:
        world.obey_all()

    # ---- ranks

    @happening
    def all_train(self, world: World, data: st.DataObject) -> None:
        world.train()

    @happening
    def ranks_do_something(self, world: World, data: st.DataObject) -> None:
        if agent := an_agent(world, data):
            data.draw(st.sampled_from([world.ready, world.step, world.step, world.deliver]))(agent)

    @happening
    def a_rank_raises(self, world: World, data: st.DataObject) -> None:
        agent = an_agent(world, data)
        if agent and (rank := next((each for each in agent.ranks.values() if not each.has_delivered), None)):
            error = data.draw(st.sampled_from([OwnError("bad batch"), PeerLostError("Connection reset by peer")]))
            if isinstance(error, OwnError):
                self.own_failures.add((agent.attempt or 0, rank.rank))
            world.fail(agent, rank.rank, error)

    @happening
    def a_rank_ends(self, world: World, data: st.DataObject) -> None:
        if (agent := an_agent(world, data)) and agent.ranks:
            world.leave(agent, next(iter(agent.ranks)), data.draw(st.sampled_from([0, 3, -9, -11, -15])))

    @happening
    def an_upload_ends(self, world: World, data: st.DataObject) -> None:
        if uploading := [agent for agent in world.connected() if agent.uploads]:
            world.upload(uploading[0], fails=data.draw(st.sampled_from([False, False, False, True])))

    @happening
    def ranks_write_shards(self, world: World, data: st.DataObject) -> None:
        if agent := an_agent(world, data):
            world.write_shards(agent, fails=data.draw(st.sampled_from([False, False, False, True])))

    @happening
    def all_write_shards(self, world: World, data: st.DataObject) -> None:
        for agent in world.connected():
            world.write_shards(agent)

    @happening
    def shards_are_saved(self, world: World, data: st.DataObject) -> None:
        world.save_shards()

    @happening
    def storage_is_written_to(self, world: World, data: st.DataObject) -> None:
        world.work()

    # ---- evaluations

    @happening
    def an_evaluation_ends(self, world: World, data: st.DataObject) -> None:
        world.end_evaluation(data.draw(st.sampled_from([None, None, OwnError("bad data"), WorkerLostError("lost")])))

    @happening
    def workers_for_evaluations_go_or_come(self, world: World, data: st.DataObject) -> None:
        world.cluster.can_evaluate = not world.cluster.can_evaluate

    # ---- the rest of the world

    @happening
    def time_goes_by(self, world: World, data: st.DataObject) -> None:
        seconds = data.draw(st.sampled_from([0.05, 0.3, 1.0, 5.0, 30.0]))
        world.wait(seconds, beats=data.draw(st.booleans()))

    @happening
    def the_scheduler_goes_or_comes(self, world: World, data: st.DataObject) -> None:
        world.cluster.is_there = not world.cluster.is_there

    @happening
    def somebody_wants_an_end(self, world: World, data: st.DataObject) -> None:
        self.must_end, self.num_starts = True, len(world.watcher.reasons)
        if data.draw(st.sampled_from([True, True, False])):
            world.feed(world.state.request_stop, REASON)
        else:
            world.feed(world.state.cancel)

    # ---- what always holds

    @invariant()
    def nobody_is_told_what_is_not_for_it(self) -> None:
        """Nor does a attempt start from anything but the newest checkpoint that was kept."""
        assert self.world.complaints == []

    @invariant()
    def a_request_to_end_is_not_forgotten(self) -> None:
        assert not self.must_end or len(self.world.watcher.reasons) == self.num_starts

    @invariant()
    def every_agent_is_known_that_is_there(self) -> None:
        """So that it can be let go."""
        if not self.world.is_over:
            known = {id(peer.connection) for peer in self.world.register.peers.values()}
            assert all(id(agent) in known for agent in self.world.connected())

    @invariant()
    def growing_is_announced_once_for_each_newcomer(self) -> None:
        assert self.world.watcher.reasons.count("more workers have come") <= len(self.world.agents)

    @invariant()
    def what_is_committed_is_whole_and_stays(self) -> None:
        for entry in self.world.checkpoints.sharded:
            attempt, number, _ = Path(entry.uri).name.split("-")
            parts = {f"__{rank}_0.distcp" for rank in self.world.written[int(attempt), int(number)]}
            assert {path.name for path in Path(entry.uri).iterdir()} == parts

    @invariant()
    def a_checkpoint_stays_while_it_is_evaluated_and_is_evaluated_once(self) -> None:
        if (running := self.world.evaluating) is not None:
            assert running.path.is_file()
        entries = [evaluation.entry.name for evaluation in self.world.evaluations]
        assert len(set(entries)) == len(entries)

    @invariant()
    def no_budget_is_exceeded(self) -> None:
        failures = [reason for reason in self.world.watcher.reasons if reason != "more workers have come"]
        assert len(failures) <= 2 * self.world.settings.max_restarts

    def the_gang_has_ended_well(self) -> None:
        self.world.finish()
        self.nobody_is_told_what_is_not_for_it()
        self.a_request_to_end_is_not_forgotten()
        assert self.world.is_over, "the gang does not end"
        event(f"ended: {type(self.world.error).__name__}")
        for reason in self.world.watcher.reasons:
            event(f"went on: {'more workers have come' if reason.startswith('more') else 'after a failure'}")
        self.the_evaluations_are_right(self.world)
        self.the_blame_is_right(self.world)

    def the_evaluations_are_right(self, world: World) -> None:
        done = [each for each in world.evaluations if each.has_ended.is_set() and each.error is None]
        event(f"evaluated: {len(done)}")
        metrics = [(each.entry.step, each.metrics) for each in done]
        assert world.watcher.evaluated == metrics[: len(world.watcher.evaluated)]
        if world.error is None and world.state.stop_request is None:
            assert world.evaluating is None, "the end has not waited"
            assert len(world.watcher.evaluated) == len(done)
        for kept in world.saving.vault.saved():
            assert kept.metrics.get("held_out", kept.step % 100) == kept.step % 100
        world.evaluator.end()

    def the_blame_is_right(self, world: World) -> None:
        error = world.error
        if error is None:
            assert world.results is not None
            event(f"sharded checkpoints: {len(world.written)}")
            assert world.results == list(range(len(world.results)))
            return
        if not isinstance(error, (GangError, GangCancelledError, OwnError, PeerLostError)):
            raise error
        if isinstance(error, (GangStartError, GangCancelledError)):
            return
        last = len(world.watcher.reasons)
        failed = {rank for attempt, rank in self.own_failures if attempt == last}
        if isinstance(error, OwnError):
            assert isinstance(error.__cause__, GangError)
            assert error.__cause__.rank in failed
        elif isinstance(error, PreemptedError):
            assert self.must_end or "was told to end" in str(error) or "scheduler was lost" in str(error)
            assert not failed or is_own(error.__cause__)
        elif failed:
            assert isinstance(error, WorkerLostError)  # it could not start again after its last failure
            assert f"rank {min(failed)}" in str(error) or "OwnError" in str(error), str(error)

    def teardown(self) -> None:
        self.the_gang_has_ended_well()
        for folder in self.folders:
            folder.cleanup()


LIMITS = settings(
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    report_multiple_bugs=False,
    database=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)


class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(LIMITS, max_examples=120)


@pytest.mark.slow
class TestAnyOrderForLong(AnyOrder.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(LIMITS, max_examples=600)


# ---- Observers in rank 0


@pytest.mark.parametrize("has_part", [True, False])
def test_rank_0_has_longer_to_close_what_its_observers_hold_and_longest_at_the_end(
    world_of: MakeWorld, monkeypatch: pytest.MonkeyPatch, has_part: bool
) -> None:
    monkeypatch.setattr(Watcher, "for_rank", lambda _: list if has_part else None)
    world = world_of(max_restarts=1)
    graces = []
    for step in (1, 2):
        world.form()
        assert bool(world.starts[-1].job.observers) is has_part
        world.train()
        main, agent = world.connected()
        world.fail(agent, 1, OwnError(f"at step {step}"))
        world.wait(1.0)
        stops = [order for order in main.orders if isinstance(order, messages.Stop)]
        graces += [(stop.main_grace, stop.grace) for stop in stops]
        world.obey_all()
    assert graces == ([(1.5, 1.5), (11.5, 1.5)] if has_part else [(1.5, 1.5)] * 2)
