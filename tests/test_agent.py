"""What an agent makes of its ranks' output, and what its threads do when their gang has ended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import forkserver
from flytekitplugins.daskpytorch.agent import MAX_LINE, _Agent, _Lines
from flytekitplugins.daskpytorch.checkpoint import CheckpointFile
from flytekitplugins.daskpytorch.messages import AgentOrder


def lines_of(*pieces: bytes) -> list[list[str]]:
    lines = _Lines()
    return [lines.feed(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"one\ntwo\n",), [["one", "two"]]),
        ((b"on", b"e\ntw", b"o\n"), [[], ["one"], ["two"]]),
        ((b"10%\r20%\r", b"\n30%\r\n"), [["10%", "20%"], ["30%"]]),
        ((b"\n\n  \nx\n",), [["x"]]),
        ((b"the end", b""), [[], ["the end"]]),
        ((b"one\n", b""), [["one"], []]),
        ((b"caf\xc3", b"\xa9\n"), [[], ["caf\u00e9"]]),
        ((b"bad \xff\n", b"\xc3", b""), [["bad \ufffd"], [], ["\ufffd"]]),
    ],
)
def test_lines_of_a_stream(pieces: tuple[bytes, ...], lines: list[list[str]]) -> None:
    assert lines_of(*pieces) == lines


def test_a_line_without_an_end_goes_on_in_pieces_and_nothing_more_of_it_is_held() -> None:
    lines = _Lines()
    passed_on = [line for _ in range(100) for line in lines.feed(b"x" * 50_000)]
    assert 5_000_000 - MAX_LINE < sum(map(len, passed_on)) <= 5_000_000
    assert max(map(len, passed_on)) <= MAX_LINE
    assert "".join([*passed_on, *lines.feed(b"y\n")]) == "x" * 5_000_000 + "y"


def test_transfers_say_nothing_once_the_folder_has_gone_with_its_gang(tmp_path: Path) -> None:
    order = AgentOrder(worker="w", num_ranks=1, driver=("127.0.0.1", 1), token=b"")  # nobody is there
    file = CheckpointFile(generation=0, step=1, size=1, digest="0" * 64)
    with contextlib.ExitStack() as stack:
        stack.callback(forkserver.shutdown)
        agent = stack.enter_context(contextlib.closing(_Agent(order, tmp_path / "gone", None, None, "spawn")))
        agent._bring(file)
        agent._upload(file)


def test_files_that_go_while_old_ones_are_looked_for_are_nothing(tmp_path: Path) -> None:
    order = AgentOrder(worker="w", num_ranks=1, driver=("127.0.0.1", 1), token=b"")
    (tmp_path / "step-1.pt").symlink_to(tmp_path / "gone")  # found, and not there to be asked for its time
    with contextlib.ExitStack() as stack:
        stack.callback(forkserver.shutdown)
        agent = stack.enter_context(contextlib.closing(_Agent(order, tmp_path, None, None, "spawn")))
        agent._upload(CheckpointFile(generation=0, step=1, size=1, digest="0" * 64))
