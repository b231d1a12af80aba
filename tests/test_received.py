"""The driver receives return values complete or not at all, of the newest attempt, and each part once."""

from __future__ import annotations

import os
import pickle
import signal
import threading

import pytest

from flytekitplugins.daskpytorch.driver.futures import GangFuture
from flytekitplugins.daskpytorch.driver.received import ReceivedResults, ResultBuffer
from flytekitplugins.daskpytorch.protocol.payload import PIECE_SIZE, Piece, cut, pieces_of_returned

BIG = 3 * PIECE_SIZE


def returned(value: object) -> list[Piece]:
    """Return what a rank on another machine sends before its report."""
    return list(pieces_of_returned([pickle.dumps(value)], None))


def add(received: ReceivedResults, rank: int, pieces: list[Piece]) -> None:
    for piece in pieces:
        received.add(received.keep(rank, piece))


def num_kept(received: ReceivedResults) -> int:
    """Pieces on disk."""
    return received._buffer._num_in_file


def test_a_dropped_piece_is_an_error_and_not_empty() -> None:
    buffer = ResultBuffer()
    piece = buffer.put(b"weights")
    assert buffer.get(piece) == b"weights"
    buffer.drop([piece])
    with pytest.raises(ValueError, match="dropped"):
        buffer.get(piece)


def test_each_rank_gets_its_own_and_nothing_is_kept_afterwards() -> None:
    received, data = ReceivedResults(), [os.urandom(BIG) for _ in range(2)]
    for pieces in zip(*map(returned, data), strict=True):  # the ranks' pieces mix
        for rank, piece in enumerate(pieces):
            add(received, rank, [piece])
    assert received.is_empty  # nobody's submission
    assert [received.load_returned(rank, None) for rank in (1, 0)] == [data[1], data[0]]
    assert received.load_returned(2, pickle.dumps(b"small")) == b"small"
    assert num_kept(received) == 0


def test_what_an_older_attempt_returned_does_not_count() -> None:
    received, submission = ReceivedResults(), list(cut("a", b"x" * BIG))
    files: list[tuple[int, str, bytes]] = []
    add(received, 0, returned(b"o" * BIG))  # whole; another rank failed then
    add(received, 1, returned(b"o" * BIG))
    add(received, 2, returned(b"o" * BIG)[:2])  # cut short
    add(received, 0, returned(b"n" * BIG))
    add(received, 2, submission)
    add(received, 2, returned(b"n" * BIG))
    assert received.load_returned(0, None) == b"n" * BIG
    assert received.load_returned(1, pickle.dumps(b"of the newest attempt")) == b"of the newest attempt"
    assert received.load_returned(2, None) == b"n" * BIG
    received.write_files(lambda *written: files.append((*written[:2], b"".join(written[2]))))
    assert files == [(2, "a", b"x" * BIG)]
    received.drop_returned()
    assert num_kept(received) == 0


def test_signal_that_another_thread_was_given_is_heard_by_who_waits() -> None:
    future = GangFuture(ReceivedResults())
    before = signal.signal(signal.SIGUSR1, lambda *_: future.set_result("heard"))
    other = threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    try:
        other.start()
        assert future.result() == "heard"
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join()


def test_waiting_has_the_limits_that_are_asked_for() -> None:
    future = GangFuture(ReceivedResults())
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            wait(0.01)
    error = TimeoutError("the gang's own")
    future.set_exception(error)
    assert future.exception() is error
    with pytest.raises(TimeoutError, match="the gang's own"):
        future.result(10)
