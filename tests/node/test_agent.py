"""An agent carries out the driver's orders. The agent and its ranks are real, and the test plays the driver."""

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle
import pytest

from ear import listening
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.node import agent
from flytekitplugins.daskpytorch.node.ranks import MAX_LINE, LineSplitter
from flytekitplugins.daskpytorch.protocol import code, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import Sharding
from flytekitplugins.daskpytorch.protocol.failure import Recalled
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.function import pack_call
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Leave, Question, Ready, Returned
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.rank import usage
from flytekitplugins.daskpytorch.settings import Gang
from processes import fork_server, ranks_of, until

Wanted = TypeVar("Wanted")


def meet() -> str:
    """What the ranks run."""
    return "trained"


def log_three_times() -> None:
    for step in range(3):
        current_rank().log({"loss": 1.0}, step=step)
    wait_for_ever()


def wait_for_ever() -> None:
    threading.Event().wait()


def abort_as_nccls_watchdog_does() -> None:
    sys.stderr.write("Process group watchdog thread terminated with exception: NCCL error: remote process exited\n")
    for _ in range(100):
        sys.stderr.write("frame #0: <unknown function>\n")
    sys.stderr.flush()
    os.abort()


class Driver:
    """Hears the agent, and gives it orders."""

    def __init__(self) -> None:
        self.token = os.urandom(32)
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.received = ReceivedResults()
        self.listener = listening(self.token, self.calls, state=self)
        self.connection: Connection | None = None
        self.node: Node | None = None
        self.unheard: deque[Any] = deque()

    def next(self, wanted: type[Wanted]) -> Wanted:
        """The next message or report of a kind."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            while self.unheard:
                if isinstance(each := self.unheard.popleft(), wanted):
                    return each
            with contextlib.suppress(queue.Empty):
                self.calls.get(timeout=0.02)()
            while self.listener.beats:
                self.note_beat(*self.listener.beats.popitem())
        pytest.fail(f"no {wanted.__name__} within a minute")

    def hear_beat(self) -> None:
        """Wait for the agent's next heartbeat; keep what comes before it."""
        assert self.connection is not None
        self.listener.beats.clear()
        until(lambda: self.listener.beats, "a heartbeat")
        while not self.calls.empty():
            self.calls.get()()

    # ---- as the gang's state

    def hear(self, connection: Connection, message: messages.FromAgent) -> None:
        self.unheard.append(message)
        if isinstance(message, messages.Hello):
            self.connection, self.node = connection, message.node

    def hear_of_rank(self, connection: Connection, rank: int, said: Sequence[Any]) -> None:
        self.unheard.extend(said)

    def note_beat(self, connection: Connection, beat: messages.Beat) -> None:
        if connection is self.connection and beat.num_moves:
            self.unheard.append(beat.num_moves)

    def note_end(self, connection: Connection) -> None:
        if connection is self.connection:
            raise EOFError("the agent has gone")

    # ---- to the agent

    def send(self, message: messages.ToAgent) -> None:
        assert self.connection is not None
        self.connection.send(message)

    def start(
        self, function: Callable[[], object] = meet, sources: code.Code | None = None, hang_timeout: float | None = None
    ) -> None:
        """Have the only rank started."""
        assert self.node is not None
        [[place]] = place_ranks([self.node], 1)
        self.send(messages.Start(job(function, hang_timeout), sources or code.pack_code(), [place]))


def job(function: Callable[[], object], hang_timeout: float | None = None) -> Job:
    return Job(
        sharding=Sharding(base="", nonce=""),
        gang="g",
        attempt=0,
        call=pack_call(function, (), {}),
        backend="gloo",
        settings=Gang(start_timeout=60.0, hang_timeout=hang_timeout),
    )


@pytest.fixture
def driver() -> Iterator[Driver]:
    """One whose agent has come; it ends with the test."""
    made = Driver()
    order = AgentOrder(worker="w", driver=made.listener.address, token=made.token)
    serving = threading.Thread(target=agent.run, args=(order,))
    serving.start()
    try:
        made.next(messages.Hello)
        yield made
    finally:
        if serving.is_alive():
            made.send(messages.Close())
        serving.join()
        made.listener.close()
    until(lambda: not ranks_of(fork_server()), "its rank to end")  # which the next test could take for its own


def test_rank_0_has_the_time_that_its_trackers_need_and_not_that_of_the_others(driver: Driver, tmp_path: Path) -> None:
    def stand_still() -> None:
        (tmp_path / "stands").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    driver.start(stand_still)
    until((tmp_path / "stands").exists, "rank 0")
    driver.send(messages.Stop(grace=0.1, main_grace=600.0))
    time.sleep(1.0)
    assert len(ranks_of(fork_server())) == 1


def test_ctrl_c_in_a_rank_whose_function_has_returned_does_not_fail_the_rank(driver: Driver, tmp_path: Path) -> None:
    def end_as_program() -> None:
        def interrupt(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        usage.of_exchange = interrupt  # before the rank has told that the function has returned
        atexit.register(os.system, f"grep SigIgn /proc/self/status > {tmp_path}/child")
        sys.exit(0)

    driver.start(end_as_program)
    driver.next(Returned)
    [rank] = ranks_of(fork_server())
    rank.send_signal(signal.SIGINT)
    driver.send(messages.Tell(Leave()))
    assert driver.next(messages.Exited).exitcode == 0
    ignored = int((tmp_path / "child").read_text().split()[1], 16)
    assert not ignored & 1 << signal.SIGINT - 1


def test_a_restart_after_a_change_runs_the_code_that_the_gang_began_with(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> tuple[str, str]:
        import changes_later  # type: ignore[import-not-found]

        return changes_later.TEXT, changes_later.__file__

    file = tmp_path / "changes_later.py"
    file.write_text("TEXT = 'before'")
    module = ModuleType("changes_later")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "changes_later", module)
    packed = code.pack_code()
    driver.start(look, packed)
    assert cloudpickle.loads(driver.next(Returned).value) == ("before", str(file))
    driver.send(messages.Tell(Leave()))
    driver.next(messages.Exited)
    file.write_text("TEXT = 'after'")
    driver.start(look, packed)
    text, path = cloudpickle.loads(driver.next(Returned).value)
    assert (text, path == str(file)) == ("before", False)


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
        ((b"one\n", b""), [["one"], []]),
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


# ---- Signs of life ---------------------------------------------------------------------------------------------------


def test_heartbeats_tell_of_the_ranks_signs_of_life_as_often_as_is_asked(driver: Driver) -> None:
    driver.start(log_three_times, hang_timeout=0.1)
    driver.next(Ready)
    while driver.next(dict) != {0: 3}:
        pass
    assert driver.next(dict) == {0: 3}  # though nothing has changed


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that send no heartbeat during a test."""
    monkeypatch.setattr(agent, "HEARTBEAT_INTERVAL", 600.0)


@pytest.mark.usefixtures("rare_heartbeats")
def test_a_report_waits_for_no_heartbeat(driver: Driver) -> None:
    driver.start(wait_for_ever)
    driver.next(Ready)


def test_what_nccls_watchdog_says_is_told_with_the_abort_however_long_the_stacks_after_it(driver: Driver) -> None:
    driver.start(abort_as_nccls_watchdog_does)
    exited = driver.next(messages.Exited)
    assert exited.exitcode == -signal.SIGABRT
    assert exited.watchdog.endswith("terminated with exception: NCCL error: remote process exited")
    assert "NCCL error" not in exited.log_tail


# ---- A rank that hangs -----------------------------------------------------------------------------------------------


def test_a_rank_that_is_signalled_by_hand_has_its_stack_in_its_log(driver: Driver) -> None:
    driver.start(wait_for_ever)
    driver.next(Ready)
    [rank] = ranks_of(fork_server())
    while not any(isinstance(said, messages.Lines) and "in wait_for_ever" in str(said) for said in driver.unheard):
        rank.send_signal(signal.SIGQUIT)  # again: it was on its way there, or another thread was given the signal
        driver.hear_beat()


def test_a_rank_answers_with_its_stacks_and_writes_them_to_its_log(driver: Driver) -> None:
    driver.start(wait_for_ever)
    driver.next(Ready)
    driver.send(messages.Tell(Ask(Question.STACKS, 1)))
    while "wait_for_ever" not in (located := driver.next(Answer).value).stacks:  # it is on its way there
        driver.send(messages.Tell(Ask(Question.STACKS, 1)))
    assert "in follow" in located.stacks  # of the thread that answers, too
    group = "the default group (gloo)"
    driver.send(messages.Tell(Ask(Question.COLLECTIVES, 2)))
    assert driver.next(Answer).value == Recalled(groups={group: 0}, collectives=[])
    driver.send(messages.Tell(Ask(Question.STACKS, 3, True)))
    tail = ""
    while "wait_for_ever" not in tail:
        tail += "\n".join(driver.next(messages.Lines).lines)
    driver.send(messages.Tell(Ask(Question.STACKS, 4)))
    assert driver.next(Answer).value.stacks.count("wait_for_ever") == 1  # what was written before has gone
    driver.send(messages.Stop(grace=0.5, main_grace=0.5))
    driver.next(messages.Exited)
