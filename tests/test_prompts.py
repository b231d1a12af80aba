"""One rank's debugger at a time has the terminal, in any order of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.driver.parts.debugger import KEPT_FOR, Prompts
from flytekitplugins.daskpytorch.errors import NoDebuggerError
from flytekitplugins.daskpytorch.protocol import debugging, messages, orders
from flytekitplugins.daskpytorch.protocol.reports import AtPrompt, LeftPrompt, Noted
from simulated_gang import World, raised


@pytest.fixture
def now() -> list[float]:
    return [10.0]


@pytest.fixture
def prompts(now: list[float]) -> Prompts:
    return Prompts(lambda: now[0])


def test_a_rank_that_steps_comes_before_those_that_wait(prompts: Prompts) -> None:
    prompts.ask(1)
    prompts.ask(0)
    assert prompts.turn() == 1
    prompts.leave(1, steps=True)
    assert prompts.turn() is None
    prompts.ask(1)
    assert prompts.turn() == 1


def test_a_rank_that_steps_and_does_not_come_back_may_wait_for_one_that_waits(
    prompts: Prompts, now: list[float]
) -> None:
    prompts.ask(1)
    prompts.ask(0)
    prompts.turn()
    prompts.leave(1, steps=True)
    assert prompts.due == now[0] + KEPT_FOR
    now[0] += KEPT_FOR
    assert prompts.turn() == 0
    prompts.ask(1)
    prompts.leave(0, steps=False)
    assert prompts.turn() == 1


def test_a_rank_that_steps_in_an_attached_terminal_keeps_no_other_from_the_drivers(prompts: Prompts) -> None:
    prompts.debugged.add(1)
    prompts.leave(1, steps=True)
    prompts.ask(0)
    assert prompts.turn() == 0
    assert prompts.debugged == {0, 1}


def test_a_rank_that_has_gone_holds_up_nobody(prompts: Prompts) -> None:
    for rank in (2, 1, 0):
        prompts.ask(rank)
    assert prompts.turn() == 2
    prompts.forget(1)
    prompts.forget(2)
    assert prompts.turn() == 0
    assert prompts.debugged == {0}


# ---- in a gang


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, hang_timeout=30.0)
    world.form()
    for agent in world.connected():
        agent.orders.clear()
        world.beat(agent, dict.fromkeys(agent.ranks, 1))
    return world


def told(world: World) -> list[object]:
    """What each agent was told since it was last asked."""
    return [order for agent in world.connected() for order in [*agent.orders] if not isinstance(order, messages.Dump)]


def stopped(world: World) -> bool:
    return any(isinstance(order, messages.Stop) for order in told(world))


def test_the_others_of_a_rank_at_its_prompt_are_not_hung(world: World) -> None:
    debugged = world.connected()[1]
    world.report(debugged, 1, AtPrompt())
    assert told(world) == 2 * [messages.Tell(orders.Prompt(1))]
    world.wait(1_000.0)
    assert not stopped(world)
    world.report(debugged, 1, LeftPrompt(steps=False))
    world.wait(29.0)
    assert not stopped(world)
    world.wait(10.0)
    assert stopped(world)


def test_a_rank_that_is_gone_from_its_prompt_ends_the_attempt_and_the_display_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(world.watcher, "debugging", told.append)
    debugged = world.connected()[1]
    world.report(debugged, 1, AtPrompt())
    world.leave(debugged, 1, -9)
    world.wait(1.0)
    assert stopped(world)
    assert told == [1, None]


def test_a_rank_that_waits_for_an_editor_is_never_hung(world: World) -> None:
    world.report(world.connected()[0], 0, Noted("waits for a debugger", is_debugged=True))
    world.wait(1_000.0)
    assert not stopped(world)
    assert any("rank 0 waits for a debugger" in note for note in world.watcher.notes)


def test_ranks_may_be_debugged_while_they_are_imported(tmp_path: Path) -> None:
    world = World(tmp_path, start_timeout=60.0)
    world.join_all()
    world.obey_all()
    debugged = world.connected()[0]
    world.report(debugged, 0, AtPrompt())
    world.wait(1_000.0)
    assert not stopped(world)
    world.report(debugged, 0, LeftPrompt(steps=False))
    world.wait(59.0)
    assert not stopped(world)
    world.wait(2.0)
    assert stopped(world)


def test_ctrl_c_is_for_the_rank_at_its_prompt(world: World) -> None:
    world.feed(world.debugger.interrupt)
    assert told(world) == []
    world.report(world.connected()[0], 0, AtPrompt())
    world.feed(world.debugger.interrupt)
    assert told(world)[-1] == messages.Tell(orders.Interrupt(0))


def test_a_call_of_a_debugger_that_nobody_can_talk_to_is_not_tried_again(world: World) -> None:
    agent = world.connected()[0]
    world.train()  # a checkpoint is kept, so that another error might be
    world.fail(agent, 0, NoDebuggerError("nobody is there"))
    world.finish()
    assert isinstance(raised(world), NoDebuggerError)
    assert len(world.starts) == 1


@pytest.mark.parametrize("text", ["5678", "1:", "0:1,2", "0:0", "0:70000", "0:1,0:2", "x"])
def test_what_is_no_rank_and_port_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(debugging.PORTS_VARIABLE, text)
    with pytest.raises(ValueError, match="DASKPYTORCH_DEBUGPY="):
        debugging.Debugging.here()
