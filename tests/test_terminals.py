"""Terminals that attach to a gang see its ranks, and reach only the debugger of the rank that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import attach_command
from flytekitplugins.daskpytorch.driver.parts.debugger import MAX_TAIL
from flytekitplugins.daskpytorch.node import agent
from flytekitplugins.daskpytorch.protocol import attaching, messages
from flytekitplugins.daskpytorch.protocol.attaching import (
    Attach,
    Awaits,
    Detach,
    DriverContact,
    Left,
    Listing,
    Look,
    Shown,
    Typed,
)
from flytekitplugins.daskpytorch.protocol.reports import LeftPrompt
from simulated_gang import World

STACK = """Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 5 in wait

Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 7 in all_reduce
  File "/home/me/train.py", line 31 in step
  File "/home/me/train.py", line 9 in main
"""
ATTACH = Attach(1, (40, 120))


class Terminal:
    """A terminal's connection, as the driver has it."""

    def __init__(self) -> None:
        self.shown: list[object] = []
        self.reads = True
        self.is_hung_up = False

    def send(self, message: object) -> None:
        if not self.reads:
            raise BlockingIOError
        self.shown.append(message)

    def hang_up(self) -> None:
        self.is_hung_up = True

    def close(self) -> None:
        pass

    @property
    def listing(self) -> Listing:
        [found] = self.shown
        assert isinstance(found, Listing)
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, hang_timeout=30.0)
    world.form()
    world.stacks = {0: STACK, 1: STACK}
    told(world)
    for each in world.connected():
        world.beat(each, dict.fromkeys(each.ranks, 1))
    return world


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def say(world: World, terminal: Terminal, message: attaching.FromTerminal) -> None:
    world.feed(world.state.hear_caller, terminal, message)


def told(world: World) -> list[list[object]]:
    """The orders of each agent since the last call."""
    taken = [[order.order for order in each.orders if isinstance(order, messages.Tell)] for each in world.connected()]
    for each in world.connected():
        each.orders.clear()
    return taken


def stop_rank_1(world: World) -> None:
    world.report(world.connected()[1], 1, Awaits("stops at train.py:31 (step)", 300.0))


def test_list_does_not_wait_for_a_rank_that_is_silent(world: World, terminal: Terminal) -> None:
    say(world, terminal, Look())
    world.obey(world.connected()[0])
    assert terminal.shown == []
    world.wait(2.0)
    assert [place.state for place in terminal.listing.ranks] == ["runs", "does not answer"]


def test_gang_without_workers_says_so_instead_of_a_list(tmp_path: Path, terminal: Terminal) -> None:
    say(World(tmp_path), terminal, Look())
    table = attach_command._table(attach_command.Gang(DriverContact(("10.0.0.7", 5), b""), terminal.listing))
    assert table.splitlines()[1:] == ["the gang waits for its workers"]


def test_rank_that_waits_for_a_terminal_is_not_hung_and_says_how_to_attach(world: World) -> None:
    stop_rank_1(world)
    world.wait(1_000.0)
    assert not any(isinstance(order, messages.Stop) for each in world.connected() for order in each.orders)
    [note] = [note for note in world.watcher.notes if "attach" in note]
    assert note.startswith("train: rank 1 (tcp://10.0.0.2:1) stops at train.py:31 (step), and waits up to 300 s")
    assert note.endswith(": daskpytorch attach 1")
    world.report(world.connected()[1], 1, LeftPrompt(steps=False))
    world.wait(40.0)
    assert any(isinstance(order, messages.Stop) for each in world.connected() for order in each.orders)


def test_command_names_a_scheduler_that_is_on_another_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(world.cluster), "scheduler", "tcp://10.0.0.9:8786")
    assert world.debugger.command == "daskpytorch attach"
    monkeypatch.setattr(world.cluster, "host", "10.0.0.7")
    assert world.debugger.command == "daskpytorch attach --scheduler tcp://10.0.0.9:8786"


def test_terminal_gets_what_the_debugger_has_written_and_its_keys_go_to_that_agent(
    world: World, terminal: Terminal
) -> None:
    stop_rank_1(world)
    world.report(world.connected()[1], 1, Shown(b"x" * MAX_TAIL))
    world.report(world.connected()[1], 1, Shown(b"(Pdb) "))
    say(world, terminal, ATTACH)
    assert terminal.shown == [Shown(b"x" * (MAX_TAIL - 6) + b"(Pdb) ")]
    say(world, terminal, Typed(1, b"c\r"))
    assert told(world) == [[], [ATTACH, Typed(1, b"c\r")]]
    world.report(world.connected()[1], 1, Shown(b"\r\n"))
    world.report(world.connected()[1], 1, LeftPrompt(steps=False))
    assert terminal.shown[1:] == [Shown(b"\r\n"), Left()]
    world.feed(world.state.note_end, terminal)
    assert told(world) == [[], [Detach(1)]]


def test_step_neither_ends_the_prompt_nor_is_it_news(world: World, terminal: Terminal) -> None:
    stop_rank_1(world)
    say(world, terminal, ATTACH)
    world.report(world.connected()[1], 1, LeftPrompt(steps=True))
    world.report(world.connected()[1], 1, Awaits("stops at train.py:32 (step)", 300.0))
    world.report(world.connected()[1], 1, Shown(b"(Pdb) "))
    assert terminal.shown == [Shown(b""), Shown(b"(Pdb) ")]
    assert sum("attach" in note for note in world.watcher.notes) == 1
    say(world, another := Terminal(), Look())
    world.obey_all()
    assert another.listing.ranks[1].state == "stops at train.py:32 (step)"


def test_rank_of_the_next_attempt_learns_of_its_terminal(world: World, terminal: Terminal) -> None:
    stop_rank_1(world)
    say(world, terminal, ATTACH)
    world.train()
    world.leave(world.connected()[1], 1, -9)
    world.wait(5.0)
    assert terminal.shown[1:] == [Left()]
    world.obey_all()
    world.wait(5.0)
    world.form()
    told(world)
    stop_rank_1(world)
    assert told(world) == [[], [ATTACH]]
    assert sum("attach" in note for note in world.watcher.notes) == 1


def test_terminal_that_does_not_read_is_dropped_and_the_gang_goes_on(world: World, terminal: Terminal) -> None:
    stop_rank_1(world)
    say(world, terminal, ATTACH)
    terminal.reads = False
    world.report(world.connected()[1], 1, Shown(b"text"))
    assert terminal.is_hung_up
    assert not world.is_over


# ---- the driver's address


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_only_the_user_can_read_the_drivers_address(temporary: Path) -> None:
    contact = DriverContact(("10.0.0.1", 80), b"t" * 32)
    with agent.scratch_folder("daskpytorch-") as folder:
        attaching.leave_contact(folder, contact)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / attaching.FILE).stat().st_mode & 0o777 == 0o600
        assert attaching.find_contacts() == {contact}
    assert attaching.find_contacts() == set()
    assert "token" not in repr(contact)


def test_file_that_is_being_written_is_passed_over(temporary: Path) -> None:
    with agent.scratch_folder("daskpytorch-") as folder:
        (folder / attaching.FILE).touch()
        assert attaching.find_contacts() == set()


def test_folder_that_others_can_write_is_passed_over(temporary: Path) -> None:
    with agent.scratch_folder("daskpytorch-") as folder:
        attaching.leave_contact(folder, DriverContact(("10.0.0.1", 80), b"t" * 32))
        folder.chmod(0o777)
        assert attaching.find_contacts() == set()


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_links_are_passed_over(temporary: Path, *, is_folder: bool) -> None:
    (elsewhere := temporary / "elsewhere").mkdir(mode=0o700)
    attaching.leave_contact(elsewhere, DriverContact(("10.0.0.1", 80), b"t" * 32))
    linked = temporary / "daskpytorch-linked"
    if is_folder:
        linked.symlink_to(elsewhere)
    else:
        linked.mkdir(mode=0o700)
        (linked / attaching.FILE).symlink_to(elsewhere / attaching.FILE)
    assert attaching.find_contacts() == set()
