"""The driver proves real deadlocks, and takes nothing else for one. Agents, ranks and the clock are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flytekitplugins.daskpytorch.errors import GangHungError
from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES, Collective, Recalled
from flytekitplugins.daskpytorch.protocol.messages import Tell
from flytekitplugins.daskpytorch.protocol.orders import Locate
from flytekitplugins.daskpytorch.protocol.reports import Returned, Stands
from simulated_gang import World, raised

GROUP, OTHER = "the default group (gloo)", "group 1 (gloo)"
C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
USERS = 'File "/code/train.py", line 9 in train'
THREAD = "Thread 0x1 (most recent call first):\n"
AT_WORK = f"{THREAD}  {USERS}\n"
OURS = f'{THREAD}  File "/venv/lib/python3.11/site-packages/flytekitplugins/daskpytorch/rank/main.py", line 3 in main\n'
USERS_THREAD = f"{THREAD}  {USERS}\n\n"
TIMEOUT = 9.0
"""Seconds within which a deadlock is to end the gang."""


@pytest.fixture
def world_of(tmp_path: Path) -> Callable[..., World]:
    """Makes a gang whose ranks have met."""

    def make(num_workers: int = 2, **how: Any) -> World:
        world = World(tmp_path, num_workers, **how)
        world.form()
        for rank in range(num_workers):
            works(world, rank)
        return world

    return make


def within(operation: str, line: int = 7) -> str:
    return f'{THREAD}  File "{C10D}", line {line} in {operation}\n  {USERS}\n'


def calls(number: int, operation: str = "all_reduce", *, group: str = GROUP, is_done: bool = False) -> Collective:
    return Collective(
        group=group,
        number=number,
        operation=operation,
        inputs=[(4,)],
        outputs=[(4,)],
        dtypes=["Float"],
        is_done=is_done,
        frames=[f'File "{C10D}", line 5 in {operation}', USERS],
    )


def remembers(*collectives: Collective, world: World, groups: Sequence[str] = (GROUP, OTHER)) -> Recalled:
    members = tuple(range(world.cluster.num_wanted))
    newest = max((each.number for each in collectives if each.group == GROUP), default=0)
    of_groups = dict.fromkeys(groups, members)
    return Recalled(groups=groups, collectives=collectives, members=of_groups, newest_of_all=newest)


def works(world: World, rank: int) -> None:
    """Have a rank compute after one collective."""
    world.recalled[rank] = remembers(calls(1, is_done=True), world=world)
    world.stacks[rank] = AT_WORK


def waits(world: World, rank: int, collective: Collective) -> None:
    """Have a rank wait in a collective, as its recorder and its main thread say."""
    world.recalled[rank] = remembers(calls(1, is_done=True), collective, world=world)
    world.stacks[rank] = within(collective.operation)


def agent_of(world: World, rank: int) -> Any:
    return next(agent for agent in world.agents if rank in agent.ranks)


def stands(world: World, *ranks: int, is_still: bool = True) -> None:
    for rank in ranks:
        world.report(agent_of(world, rank), rank, Stands(is_still))


def returns(world: World, rank: int) -> None:
    world.stacks[rank] = OURS
    world.report(agent_of(world, rank), rank, Returned(rank))


def watch(world: World, seconds: float = 120.0) -> float:
    """Let time go by while the ranks answer what they are asked; the seconds until the gang was over."""
    began = world.clock()
    while world.clock() - began < seconds and not world.is_over:
        world.wait(0.5)
        world.obey_all()
    return float(world.clock() - began)


def test_rank_that_returns_while_others_wait_already_ends_the_gang(world_of: Callable[..., World]) -> None:
    world = world_of(3)
    for rank in (0, 2):
        waits(world, rank, calls(2))
    stands(world, 0, 1, 2)
    watch(world, 20.0)
    assert not world.is_over
    returns(world, 1)
    watch(world, 60.0)
    assert isinstance(raised(world), GangHungError)


@pytest.mark.parametrize("operation", ["recv", "send"])
def test_message_that_all_others_returned_without_is_a_deadlock(world_of: Callable[..., World], operation: str) -> None:
    world = world_of()
    world.stacks[0] = within(operation)
    returns(world, 1)
    stands(world, 0)
    assert watch(world) < TIMEOUT
    assert f"rank 1 returned while rank 0 waits in {operation}" in str(raised(world))


@pytest.mark.parametrize("is_known", [True, False])
def test_message_on_its_way_is_waited_for(world_of: Callable[..., World], *, is_known: bool) -> None:
    world = world_of()
    world.stacks[0] = within("recv")
    returns(world, 1)
    stands(world, 0)
    for num_bytes in range(60):
        world.num_bytes = num_bytes if is_known else None
        watch(world, 2.0)
    assert not world.is_over


def test_rank_that_tells_of_other_groups_only_may_have_called_the_collective(world_of: Callable[..., World]) -> None:
    world = world_of()
    waits(world, 0, calls(2))
    newest = [calls(number, group=OTHER, is_done=True) for number in range(1, MAX_COLLECTIVES + 1)]
    world.recalled[1] = remembers(*newest, world=world)
    returns(world, 1)
    stands(world, 0)
    watch(world, 100.0)
    assert not world.is_over


def test_collectives_that_cannot_meet_are_a_deadlock(world_of: Callable[..., World]) -> None:
    world = world_of()
    waits(world, 0, calls(2, "all_reduce"))
    waits(world, 1, calls(2, "broadcast"))
    stands(world, 0, 1)
    assert watch(world) < TIMEOUT
    assert "rank 1 called broadcast" in str(raised(world)) or "rank 0 called all_reduce" in str(raised(world))


def test_collective_that_every_rank_has_called_may_take_its_time(world_of: Callable[..., World]) -> None:
    world = world_of()
    waits(world, 0, calls(2))
    waits(world, 1, calls(2))
    stands(world, 0, 1)
    watch(world, 200.0)
    assert not world.is_over


def test_broadcast_may_end_without_a_rank_that_returned(world_of: Callable[..., World]) -> None:
    world = world_of(3)
    for rank in (0, 1):
        waits(world, rank, calls(2, "broadcast"))
    returns(world, 2)
    stands(world, 0, 1)
    watch(world, 200.0)
    assert not world.is_over


def _with_users_thread(world: World) -> None:
    world.stacks[0] = USERS_THREAD + world.stacks[0]


def _with_users_thread_in_the_rank_that_returned(world: World) -> None:
    world.stacks[1] = USERS_THREAD + world.stacks[1]


def _without_members(world: World) -> None:
    world.recalled[0] = replace(world.recalled[0], members={})


def _with_other_members(world: World) -> None:
    world.recalled[1] = replace(world.recalled[1], members={GROUP: (0,)})


def _waiting_for_a_later_work(world: World) -> None:
    world.stacks[0] = within("monitored_barrier")


def _moving(world: World) -> None:
    stands(world, 0, is_still=False)


@pytest.mark.parametrize(
    "change",
    [
        _with_users_thread,
        _with_users_thread_in_the_rank_that_returned,
        _without_members,
        _with_other_members,
        _waiting_for_a_later_work,
        _moving,
    ],
)
def test_missing_knowledge_of_a_rank_proves_no_deadlock(
    world_of: Callable[..., World], change: Callable[[World], None]
) -> None:
    world = world_of()
    waits(world, 0, calls(2))
    returns(world, 1)
    stands(world, 0)
    change(world)
    watch(world, 100.0)
    assert not world.is_over


def test_rank_that_does_not_answer_is_no_proof(world_of: Callable[..., World]) -> None:
    world = world_of()
    waits(world, 0, calls(2))
    returns(world, 1)
    agent_of(world, 0).is_suspended = True
    stands(world, 0)
    watch(world, 10.0)
    assert not world.is_over


def test_looks_that_see_another_collective_each_are_no_proof(world_of: Callable[..., World]) -> None:
    world = world_of()
    returns(world, 1)
    stands(world, 0)
    for number in range(2, 60):
        waits(world, 0, calls(number))
        watch(world, 2.0)
    assert not world.is_over


def test_answer_to_an_earlier_look_is_not_the_newest(world_of: Callable[..., World]) -> None:
    world = world_of()
    waits(world, 0, calls(2))
    returns(world, 1)
    stands(world, 0)
    world.wait(1.0)
    agent = agent_of(world, 0)
    assert Tell(Locate(1)) in agent.orders
    works(world, 0)
    world.obey_all()  # it was at work at the first look
    waits(world, 0, calls(2))
    world.wait(3.0)
    world.obey_all()
    assert not world.is_over  # one look alone has seen it wait
    assert watch(world) < TIMEOUT
