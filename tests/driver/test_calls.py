"""A gang that stays runs its calls in order, and ends only when it must, whatever happens. Agents are simulated."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flytekitplugins.daskpytorch.driver.parts.calls import Calls, Outcome, StayingCall
from flytekitplugins.daskpytorch.errors import (
    GangCancelledError,
    GangError,
    GangHungError,
    PreemptedError,
    WorkerLostError,
)
from flytekitplugins.daskpytorch.protocol.failure import Collective, Recalled
from flytekitplugins.daskpytorch.protocol.messages import Ask, Debugged, Tell
from flytekitplugins.daskpytorch.records import LogRecord
from simulated_gang import OwnError, PeerLostError, World, is_own, raised

W1, W2 = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


def remembers(number: int, *, is_done: bool = True) -> Recalled:
    """Return the record of a rank whose newest all-reduce has this number. 0: none yet."""
    group = "the default group (gloo)"
    newest = Collective(
        group=group, number=number, operation="all_reduce", inputs=[(4,)], outputs=[(4,)], dtypes=["Float"],
        is_done=is_done,
    )  # fmt: skip
    return Recalled(groups={group: number}, collectives=[newest] if number else [])


class Staying(World):
    """A staying gang of two ranks, and what came of its calls."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.of_gang = Calls()
        self.outcomes: dict[int, Outcome] = {}
        self.asked: list[StayingCall] = []
        self.logged: list[LogRecord] = []
        super().__init__(folder, 2, calls=self.of_gang, max_restarts=0, **how)
        self.of_gang.post = self.feed

    def begin(self) -> Staying:
        self.form()
        for rank in range(2):
            self.recalled[rank] = remembers(1)
        return self

    def ask(self) -> StayingCall:
        number = len(self.asked) + 1

        def settle(outcome: Outcome) -> None:
            assert number not in self.outcomes
            self.outcomes[number] = outcome

        call = StayingCall(number=number, name=f"f{number}", call=b"", log=self.logged.append, settle=settle)
        if self.of_gang.ask(call):
            self.asked.append(call)
        self.obey_all()
        return call

    def end(self, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.end_call(rank)
        self.obey_all()
        self.obey_all()  # after a failure, the ranks have told of their collectives

    def values(self, number: int) -> dict[int, Any]:
        return {rank: load() for rank, load in self.outcomes[number].values.items()}


@pytest.fixture
def world(tmp_path: Path) -> Staying:
    return Staying(tmp_path).begin()


def told(world: World, kind: type) -> list[Any]:
    """The orders of this kind that agents have not followed yet."""
    tells = [order.order for agent in world.agents for order in agent.orders if isinstance(order, Tell)]
    return [order for order in tells if isinstance(order, kind)]


# ---- Order


def test_calls_that_are_asked_for_before_the_ranks_have_met_wait_for_them(tmp_path: Path) -> None:
    world = Staying(tmp_path)
    world.ask()
    world.form()
    world.obey_all()
    assert world.begun == [(0, 1), (1, 1)]
    assert world.complaints == []


def test_a_kept_value_is_freed_after_the_calls_before_it(world: Staying) -> None:
    world.ask()
    world.ask()
    world.of_gang.forget(1)
    world.end()
    assert world.freed == []
    world.end()
    assert world.freed == [(0, 1), (1, 1)]


# ---- Failures that are the call's


def test_an_exception_is_its_calls_if_the_other_rank_returns(world: Staying) -> None:
    world.ask()
    world.ask()
    world.end_call(1, OwnError("no data"))
    world.wait(30.0)
    world.end(0)
    outcome = world.outcomes[1]
    assert outcome.cause == 1
    assert is_own(outcome.errors[1])
    assert "rank 1 of 2 failed" in str(outcome.errors[1].__cause__)
    assert list(outcome.values) == [0]
    assert sorted(world.begun[2:]) == [(0, 2), (1, 2)]
    world.end()
    assert world.values(2) == {0: (2, 0), 1: (2, 1)}


def test_messages_between_two_ranks_need_not_be_equal_in_all(world: Staying) -> None:
    """Only the numbers of collectives count, and only those that are known."""
    world.ask()
    world.recalled[0] = remembers(0)
    world.end_call(1, OwnError("no data"))
    world.end(0)
    assert world.outcomes[1].cause == 1


def test_the_rank_that_raised_first_is_to_blame(world: Staying) -> None:
    world.ask()
    world.end_call(1, OwnError("first"))
    world.wait(1.0)
    world.end_call(0, OwnError("second"))
    world.obey_all()
    assert world.outcomes[1].cause == 1
    assert {rank: str(error) for rank, error in world.outcomes[1].errors.items()} == {1: "first", 0: "second"}


def test_a_rank_that_works_on_after_anothers_exception_has_all_the_time_it_wants(world: Staying) -> None:
    world.ask()
    world.end_call(1, OwnError("no data"))
    for _ in range(100):
        world.wait(30.0)
        world.obey_all()
    assert not world.is_over
    world.end(0)
    assert world.outcomes[1].cause == 1


# ---- Failures that end the gang


def test_it_ends_when_nobody_has_moved_for_a_while_after_an_exception(world: Staying) -> None:
    world.ask()
    world.recalled[0] = remembers(2, is_done=False)
    world.end_call(1, OwnError("no data"))
    for _ in range(30):
        world.obey_all()
        world.wait(1.0)
    assert is_own(raised(world))


def test_an_exception_after_unequal_numbers_of_collectives_ends_the_gang(world: Staying) -> None:
    world.ask()
    for rank, number in ((1, 3), (0, 4)):
        world.recalled[rank] = remembers(number)
    world.end_call(1, OwnError("no data"))
    world.end(0)
    assert is_own(raised(world))
    assert any("rank 1 had entered 3 collectives" in note for note in world.watcher.notes), world.watcher.notes


def test_a_lost_peer_in_a_call_ends_the_gang_with_the_cause(world: Staying) -> None:
    world.ask()
    world.end_call(1, OwnError("no data"))
    world.end_call(0, PeerLostError("Connection closed by peer"))
    world.obey_all()
    world.wait(3.0)
    world.obey_all()
    assert is_own(raised(world))


@pytest.mark.parametrize("is_in_call", [False, True])
@pytest.mark.parametrize("has_raised", [False, True])
def test_a_lost_worker_ends_the_gang_without_a_restart(world: Staying, is_in_call: bool, has_raised: bool) -> None:
    if has_raised:  # in a call before, whose exception is no cause of the loss
        world.ask()
        world.end_call(1, OwnError("no data"))
        world.end(0)
    if is_in_call:
        world.ask()
    world.kill_worker(W2)
    world.wait(2.0)
    world.obey_all()
    assert isinstance(raised(world), WorkerLostError)
    assert len(world.outcomes) == int(has_raised)
    assert len(world.starts) == 1


def test_a_checkpoint_that_is_reported_after_its_call_is_no_step_of_the_next(world: Staying) -> None:
    world.ask()
    world.end()
    world.save(world.agent(W1), 7)
    world.ask()
    world.kill_worker(W1)
    world.wait(2.0)
    world.obey_all()
    error = raised(world)
    assert isinstance(error, WorkerLostError)
    assert error.step is None


def test_a_prompt_that_its_call_has_ended_excuses_no_other_rank(tmp_path: Path) -> None:
    world = Staying(tmp_path, hang_timeout=5.0).begin()
    world.ask()
    world.obey_all()
    world.report(world.agent(W2), 1, Debugged("stops"))
    world.end_call(1)
    for _ in range(10):
        world.wait(1.0)
        world.obey_all()
    assert isinstance(raised(world), GangHungError)


def test_an_idle_gang_is_asked_nothing_and_does_not_hang(tmp_path: Path) -> None:
    world = Staying(tmp_path, hang_timeout=5.0).begin()
    world.wait(3600.0)
    assert not world.is_over
    assert told(world, Ask) == []
    world.ask()
    world.wait(2.0)
    assert not world.is_over
    world.end()
    world.wait(3600.0)
    assert not world.is_over


def test_it_does_not_restart_for_more_workers(tmp_path: Path) -> None:
    world = Staying(tmp_path, min_workers=1)
    world.join(W1)
    world.cluster.asked.clear()
    world.cluster.here.discard(W2)
    world.register.expected.clear()
    world.wait(2.0)
    world.obey_all()
    world.ready(world.agent(W1))
    world.ask()
    world.join(world.new_worker())
    world.train()
    world.wait(5.0)
    world.obey_all()
    assert [start.job.attempt for start in world.starts] == [0]
    assert not world.is_over


# ---- Ctrl-C and cancel


def test_a_cancelled_call_that_waits_never_begins(world: Staying) -> None:
    world.ask()
    world.of_gang.cancel(world.ask().number)
    assert isinstance(world.outcomes[2].end, CancelledError)
    world.end()
    assert world.begun == [(0, 1), (1, 1)]
    assert world.values(1) == {0: (1, 0), 1: (1, 1)}
    assert not world.is_over


def test_a_cancelled_call_that_runs_ends_the_gang_and_all_calls(world: Staying) -> None:
    first, _ = world.ask(), world.ask()
    world.of_gang.cancel(first.number)
    world.obey_all()
    world.wait(2.0)
    error = raised(world)
    assert isinstance(error, GangCancelledError)
    world.of_gang.note_end(error)
    assert [outcome.end for outcome in world.outcomes.values()] == [error, error]
    assert not world.of_gang.ask(first)


def test_a_call_that_saves_a_checkpoint_after_ctrl_c_may_return(world: Staying) -> None:
    world.heeds = True
    world.ask()
    world.step(world.agent(W1))
    world.feed(functools.partial(world.state.request_stop, "Ctrl-C", is_awaited=True))
    world.obey_all()
    world.obey_all()
    assert isinstance(raised(world), PreemptedError)


def test_only_the_running_call_hears_what_a_rank_logs(world: Staying) -> None:
    record = LogRecord(rank=0, step=1, num_steps=None, time=0.0, metrics={})
    world.report(world.agent(W1), 0, record)
    world.ask()
    world.report(world.agent(W1), 0, record)
    assert world.logged == [record]


# ---- The end


@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_gang_that_is_told_to_end_begins_no_more_calls(world: Staying, is_in_call: bool) -> None:
    if is_in_call:
        world.ask()
        world.ask()
    world.feed(world.state.request_stop, "the task was told to end")
    world.obey_all()
    if is_in_call:
        world.end()
    world.wait(1.0)
    world.obey_all()
    assert isinstance(raised(world), PreemptedError)
    assert len(world.outcomes) == int(is_in_call)
    assert {number for _, number in world.begun} <= {1}


class AnyOrder(RuleBasedStateMachine):
    """Calls, failures, losses, cancelled calls and the end in any order."""

    is_closed = False

    @initialize()
    def begin(self) -> None:
        self.world = Staying(Path(tempfile.mkdtemp())).begin()

    def here(self, rank: int) -> bool:
        here = [each for agent in self.world.connected() for each in agent.ranks.values() if each.rank == rank]
        return bool(here) and here[0].call is not None

    @precondition(lambda self: not self.is_closed)
    @rule()
    def ask(self) -> None:
        self.world.ask()

    @rule(rank=st.integers(0, 1), kind=st.sampled_from([None, OwnError, PeerLostError, KeyboardInterrupt]))
    def end(self, rank: int, kind: Callable[..., Any] | None) -> None:
        if self.here(rank):
            self.world.end_call(rank, None if kind is None else kind("broken pipe"))

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def cancel_call(self, data: st.DataObject) -> None:
        self.world.of_gang.cancel(data.draw(st.sampled_from(self.world.asked)).number)

    @rule(worker=st.sampled_from([W1, W2]))
    def lose(self, worker: str) -> None:
        self.world.kill_worker(worker)

    @rule(cancels=st.booleans())
    def close(self, cancels: bool) -> None:
        self.is_closed = True
        self.world.of_gang.finish(cancels=cancels)

    @rule()
    def cancel(self) -> None:
        self.world.feed(self.world.state.cancel)

    @rule(seconds=st.sampled_from([0.5, 7.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def obey(self) -> None:
        self.world.obey_all()

    @invariant()
    def calls_begin_in_order_and_once(self) -> None:
        world = self.world
        assert world.complaints == []
        for rank in range(2):
            numbers = [number for each, number in world.begun if each == rank]
            assert numbers == sorted(set(numbers))
        assert len(world.starts) == 1

    def teardown(self) -> None:
        world = self.world
        for _ in range(50):
            world.obey_all()
            for rank in range(2):
                if not world.is_over and self.here(rank):
                    world.end_call(rank)
            if len(world.outcomes) == len(world.asked):
                world.of_gang.finish()
            world.wait(1.0)
        assert world.is_over
        if world.error is None:
            assert len(world.outcomes) == len(world.asked)
        else:
            assert isinstance(world.error, (GangError, GangCancelledError, OwnError, PeerLostError)), world.error


AnyOrder.TestCase.settings = settings(max_examples=100, stateful_step_count=20, suppress_health_check=list(HealthCheck))
TestAnyOrder = AnyOrder.TestCase
