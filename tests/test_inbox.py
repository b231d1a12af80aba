"""What a gang's ranks have returned: whole or not at all, of the newest generation, and each piece only once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from flytekitplugins.daskpytorch.driver import spool
from flytekitplugins.daskpytorch.driver.futures import GangFuture
from flytekitplugins.daskpytorch.driver.received import Inbox
from flytekitplugins.daskpytorch.protocol.messages import Reported
from flytekitplugins.daskpytorch.protocol.result_frames import PIECE_SIZE, Writer, pack

BIG = 3 * PIECE_SIZE


def returned(data: bytes) -> list[bytes]:
    """A rank's reports, but for the last, which says that all is there."""
    reports: list[bytes] = []
    writer = Writer(reports.append)
    writer.write(data)
    assert writer.close() is None
    return reports


def add(inbox: Inbox, rank: int, reports: list[bytes]) -> None:
    for report in reports:
        inbox.add(inbox.keep(Reported(rank, report)))


def read(inbox: Inbox, rank: int, small: bytes | None = None) -> bytes:
    with inbox.open_returned(rank, small) as file:
        return file.read()


def num_kept(inbox: Inbox) -> tuple[int, int]:
    """Pieces on disk, bytes in memory."""
    return inbox._spool._num_in_file, inbox._spool._in_memory


def test_each_rank_gets_its_own_and_nothing_is_kept_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_IN_MEMORY", PIECE_SIZE)
    inbox, data = Inbox(), [os.urandom(BIG) for _ in range(2)]
    for reports in zip(*map(returned, data), strict=True):  # the ranks' pieces mix
        for rank, report in enumerate(reports):
            add(inbox, rank, [report])
    assert inbox.is_empty  # nobody's submission
    assert [read(inbox, rank) for rank in (1, 0)] == [data[1], data[0]]
    assert read(inbox, 2, b"small") == b"small"
    assert num_kept(inbox) == (0, 0)


def test_pieces_go_as_they_are_read() -> None:
    inbox = Inbox()
    add(inbox, 0, returned(b"x" * BIG))
    with inbox.open_returned(0, None) as file:
        before = num_kept(inbox)
        file.read(BIG - 1)
        assert sum(num_kept(inbox)) < sum(before)
        file.read(1)
    assert num_kept(inbox) == (0, 0)  # although the reader has not asked for the end


def test_what_an_older_generation_returned_does_not_count() -> None:
    inbox, submission = Inbox(), list(pack("", "a", b"x" * BIG))
    add(inbox, 0, returned(b"o" * BIG))  # whole; another rank failed then
    add(inbox, 1, returned(b"o" * BIG))
    add(inbox, 2, returned(b"o" * BIG)[:2])  # cut short
    add(inbox, 0, returned(b"n" * BIG))
    add(inbox, 2, submission)
    add(inbox, 2, returned(b"n" * BIG))
    assert read(inbox, 0) == b"n" * BIG
    assert read(inbox, 1, b"of the newest generation") == b"of the newest generation"
    assert read(inbox, 2) == b"n" * BIG
    [submitted] = inbox.claim(lambda _: True)
    assert b"".join(inbox.read(submitted)) == b"x" * BIG
    inbox.drop(submitted)
    inbox.drop_returned()
    assert num_kept(inbox) == (0, 0)


def test_signal_that_another_thread_was_given_is_heard_by_who_waits() -> None:
    future = GangFuture(Inbox())
    before = signal.signal(signal.SIGUSR1, lambda *_: future.set_result("heard"))
    other = threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    try:
        other.start()
        assert future.result() == "heard"
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join()


def test_waiting_has_the_limits_that_are_asked_for() -> None:
    future = GangFuture(Inbox())
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            wait(0.01)
    error = TimeoutError("the gang's own")
    future.set_exception(error)
    assert future.exception() is error
    with pytest.raises(TimeoutError, match="the gang's own"):
        future.result(10)
