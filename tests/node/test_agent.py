"""An agent carries out the driver's orders, in real gangs on this machine."""

import atexit
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType

import pytest

from flytekitplugins.daskpytorch import Observer, RankObserver, current_rank
from flytekitplugins.daskpytorch.node.ranks import MAX_LINE, LineSplitter, Output, Rank
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.rank.usage import Ledger
from gangs import Notes, on_this_machine


class SlowTracker(RankObserver):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_end(self, exit_code: int, reason: str | None = None) -> None:
        time.sleep(3.0)
        (self._folder / "closed").touch()


class Tracker(Observer):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def for_rank(self) -> Callable[[], RankObserver]:
        return functools.partial(SlowTracker, self._folder)


def fail_on_rank_1() -> None:
    if current_rank().rank == 1:
        raise ValueError("bad data")
    threading.Event().wait()


def test_rank_0_has_the_time_that_its_trackers_need_and_not_that_of_the_others(tmp_path: Path) -> None:
    how = {"observers": [Tracker(tmp_path)], "max_restarts": 0, "grace_period": 20.0}
    assert isinstance(on_this_machine(fail_on_rank_1, **how).exception(), ValueError)
    assert (tmp_path / "closed").exists()


def end_as_program(folder: Path) -> None:
    def interrupt(*_: object) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    Ledger.close = interrupt  # type: ignore[method-assign] # before the rank has told that the function has returned
    atexit.register(interrupt)
    atexit.register(os.system, f"grep SigIgn /proc/self/status > {folder}/child")
    sys.exit(0)


def test_ctrl_c_in_a_rank_whose_function_has_returned_does_not_fail_the_rank(tmp_path: Path) -> None:
    assert on_this_machine(end_as_program, tmp_path, num_ranks=1, max_restarts=0).result() == [None]
    ignored = int((tmp_path / "child").read_text().split()[1], 16)
    assert not ignored & 1 << signal.SIGINT - 1


def look_twice(file: Path) -> tuple[str, str]:
    import changes_later  # type: ignore[import-not-found]

    if not current_rank().attempt.number:
        assert changes_later.__file__ == str(file)
        file.write_text("TEXT = 'after'")
        os.kill(os.getpid(), signal.SIGKILL)
    return changes_later.TEXT, changes_later.__file__


def test_a_restart_after_a_change_runs_the_code_that_the_gang_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "changes_later.py"
    file.write_text("TEXT = 'before'")
    module = ModuleType("changes_later")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "changes_later", module)
    [(text, path)] = on_this_machine(look_twice, file, num_ranks=1).result()
    assert (text, path == str(file)) == ("before", False)


def quit_by_hand() -> None:
    signal.raise_signal(signal.SIGQUIT)


def test_a_rank_that_is_signalled_by_hand_has_its_stack_in_its_log() -> None:
    on_this_machine(quit_by_hand, num_ranks=1, observers=[notes := Notes()]).result()
    assert notes.told("in quit_by_hand")


# ---- Output ----------------------------------------------------------------------------------------------------------


def lines_of(*pieces: bytes) -> list[list[str]]:
    lines = LineSplitter()
    return [lines.feed(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"one\ntwo\n",), [["one", "two"]]),
        ((b"on", b"e\ntw", b"o\n"), [[], ["one"], ["two"]]),
        ((b"10%\r20%\r", b"\n30%\r\n"), [["10%", "20%"], ["30%"]]),
        ((b"\n  \nx\n\n", b"\ny"), [["", "  ", "x", ""], [""]]),
        ((b"50%\r    \r", b"\n", b"\n"), [["50%"], [], [""]]),
        ((b"the end", b""), [[], ["the end"]]),
        ((b"caf\xc3", b"\xa9\n"), [[], ["caf\u00e9"]]),
        ((b"bad \xff\n", b"\xc3", b""), [["bad \ufffd"], [], ["\ufffd"]]),
    ],
)
def test_lines_of_a_stream(pieces: tuple[bytes, ...], lines: list[list[str]]) -> None:
    assert lines_of(*pieces) == lines


def test_a_line_without_an_end_is_sent_in_pieces_and_not_held() -> None:
    lines = LineSplitter()
    passed_on = [line for _ in range(100) for line in lines.feed(b"x" * 50_000)]
    assert 5_000_000 - MAX_LINE < sum(map(len, passed_on)) <= 5_000_000
    assert max(map(len, passed_on)) <= MAX_LINE
    assert "".join([*passed_on, *lines.feed(b"y\n")]) == "x" * 5_000_000 + "y"


def test_what_nccls_watchdog_says_is_kept_however_long_the_stacks_after_it() -> None:
    node = Node(worker="w", host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
    [[place]] = place_ranks([node], 1)
    rank = Rank(place=place, channel=Pipe()[0], output=Output(os.open(os.devnull, os.O_RDONLY)))
    said = "Process group watchdog thread terminated with exception: NCCL error: remote process exited"
    rank.note([said, *["frame #0: <unknown function>"] * 100])
    assert rank.watchdog == said
    assert "NCCL error" not in rank.log_tail
