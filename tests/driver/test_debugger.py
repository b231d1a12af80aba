"""Debugged ranks are not hung, and one at a time has the driver's terminal. Others cannot open a rank's debugger."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.parts import debugger as module
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.debugging import PORTS_VARIABLE, Debugging, RankFile, find_ranks, listen
from flytekitplugins.daskpytorch.protocol.messages import Debugged, Noted
from processes import until
from simulated_gang import World

STOPS = Debugged("stops at train.py:31 (step)", needs_terminal=True)


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, hang_timeout=30.0)
    world.form()
    for agent in world.connected():
        agent.orders.clear()
        world.beat(agent, dict.fromkeys(agent.ranks, 1))
    return world


def say(world: World, rank: int, report: Debugged | Noted) -> None:
    world.report(world.connected()[rank], rank, report)


def stopped(world: World) -> bool:
    return any(isinstance(order, messages.Stop) for agent in world.connected() for order in agent.orders)


def how_to_attach(world: World) -> list[str]:
    return [note for note in world.watcher.notes if "daskpytorch attach" in note]


def test_the_others_of_a_rank_at_its_prompt_are_not_hung(world: World) -> None:
    say(world, 1, STOPS)
    world.wait(1_000.0)
    assert not stopped(world)
    [note] = how_to_attach(world)
    assert note.startswith("train: rank 1 (tcp://10.0.0.2:1) stops at train.py:31 (step), and waits up to 300 s")
    assert note.endswith(": daskpytorch attach 1")
    say(world, 1, replace(STOPS, needs_terminal=False))
    assert how_to_attach(world) == [note]
    say(world, 1, Debugged())
    world.wait(29.0)
    assert not stopped(world)
    world.wait(10.0)
    assert stopped(world)


def test_ranks_may_be_debugged_while_they_are_imported(tmp_path: Path) -> None:
    world = World(tmp_path, start_timeout=60.0)
    world.join_all()
    world.obey_all()
    say(world, 0, STOPS)
    world.wait(1_000.0)
    assert not stopped(world)
    say(world, 0, Debugged())
    world.wait(59.0)
    assert not stopped(world)
    world.wait(2.0)
    assert stopped(world)


@pytest.mark.parametrize("text", ["5678", "1:", "0:1,2", "0:0", "0:70000", "0:1,0:2", "x"])
def test_what_is_no_rank_and_port_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PORTS_VARIABLE, text)
    with pytest.raises(ValueError, match="DASKPYTORCH_DEBUGPY="):
        Debugging.here()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Gang(), None),
        (Gang(attach_timeout=60), None),
        (Gang(on_error="hold", attach_timeout=60), timedelta(hours=1, seconds=60)),
    ],
)
def test_collectives_wait_longer_than_a_rank_is_held(settings: Gang, expected: timedelta | None) -> None:
    assert Debugging().patience(settings) == expected


# ---- The driver's terminal


class Desk:
    """The driver's terminal, and two ranks on its machine."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        """The ranks that had the terminal, as observers have heard."""
        self.leaves = [threading.Event(), threading.Event()]
        """For each rank, set once it gives the terminal back."""

    def talk(self, folder: Path, rank: int) -> bool:
        assert folder == self.folder
        assert self.leaves[rank].wait(60)
        return False

    def stop(self, rank: int) -> None:
        """A rank of this machine stops at a prompt, and waits for a terminal."""
        self.leaves[rank].clear()
        say(self.world, rank, replace(STOPS, folder=str(self.folder)))

    @property
    def shown(self) -> list[int | None]:
        return [event.rank for event in self.world.watcher.events if isinstance(event, journal.Prompted)]

    def is_shown(self, *ranks: int | None) -> None:
        """Wait until these ranks have had the terminal."""

        def is_reached() -> bool:
            self.world.feed()
            return self.shown == [*ranks]

        until(is_reached, lambda: str(self.shown))


@pytest.fixture
def desk(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk(world, tmp_path)
    monkeypatch.setattr(module, "has_terminal", lambda: True)
    monkeypatch.setattr(module, "talk", desk.talk)
    yield desk
    for leaves in desk.leaves:
        leaves.set()
    world.debugger.end()


def test_one_rank_after_the_other_has_the_terminal(desk: Desk) -> None:
    desk.stop(1)
    desk.is_shown(1)
    desk.stop(0)
    say(desk.world, 1, replace(STOPS, needs_terminal=False))  # after a step
    desk.leaves[1].set()
    desk.is_shown(1, None, 0)
    desk.stop(1)
    desk.leaves[0].set()
    desk.is_shown(1, None, 0, None, 1)
    assert not how_to_attach(desk.world)


@pytest.mark.parametrize("report", [Debugged(), replace(STOPS, needs_terminal=False), None])
def test_rank_that_needs_no_terminal_any_more_gets_none(desk: Desk, report: Debugged | None) -> None:
    desk.stop(1)
    desk.is_shown(1)
    desk.stop(0)
    if report is None:
        desk.world.leave(desk.world.connected()[0], 0, -9)
    else:
        say(desk.world, 0, report)  # a user has attached another terminal
    desk.leaves[1].set()
    desk.is_shown(1, None)


def test_held_rank_does_not_take_the_terminal(desk: Desk) -> None:
    say(desk.world, 1, STOPS)
    assert len(how_to_attach(desk.world)) == 1
    assert desk.shown == []


# ---- The agent's folder


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an agent with a rank."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("daskpytorch-") as folder, contextlib.closing(listen(folder, 1)):
        RankFile(gang="train-1", rank=1, pid=os.getpid(), prompt="stops").write(folder)
        yield folder


def is_closed(folder: Path) -> bool:
    with pytest.raises(OSError, match=r"not this user's alone|Not a directory|Too many levels"):
        listen(folder, 2)
    return not find_ranks()


def test_rank_is_found_until_it_has_ended(agents: Path) -> None:
    assert agents.stat().st_mode & 0o777 == 0o700
    [(folder, found)] = find_ranks()
    assert (folder, found.rank, found.prompt) == (agents, 1, "stops")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    replace(found, pid=ended.pid).write(agents)
    assert find_ranks() == []


def test_folder_that_others_can_open_is_passed_over(agents: Path) -> None:
    agents.chmod(0o777)
    assert is_closed(agents)


def test_link_to_another_folder_is_passed_over(agents: Path) -> None:
    elsewhere = agents.with_name("elsewhere")
    agents.rename(elsewhere)
    agents.symlink_to(elsewhere)
    assert is_closed(agents)
    agents.unlink()
    elsewhere.rename(agents)
