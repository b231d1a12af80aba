"""Messages arrive complete, whatever pieces the network delivers, and without bytes of the next message."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.protocol.framing import MAX_PIECE, SIZE, Connection, watch_peer
from processes import ends

DATA = [b"", b"x", os.urandom(3 * MAX_PIECE), b"the end"]


def framed(data: bytes) -> bytes:
    return SIZE.pack(len(data)) + data


@pytest.fixture
def both() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = ends()
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


@pytest.mark.parametrize("step", [1 << 10, 1 << 20, 1 << 22])
def test_frames_come_whole_and_in_order_from_pieces_of_any_size(step: int, both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    stream = b"".join(map(framed, DATA))
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(
            lambda: [theirs._sock.sendall(stream[at : at + step]) for at in range(0, len(stream), step)]
        )
        assert [ours.recv_frame() for _ in DATA] == DATA
        sent.result()


@pytest.mark.parametrize("size", [0, 31, 33, 1 << 40])
def test_a_frame_of_another_size_than_the_expected_is_refused_before_it_has_come(
    size: int, both: tuple[Connection, Connection]
) -> None:
    ours, theirs = both
    theirs._sock.sendall(SIZE.pack(size))
    with pytest.raises(ConnectionRefusedError, match=f"a message of {size} bytes instead of 32"):
        ours.recv_frame(32)


def test_the_end_is_not_an_empty_frame(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    theirs.send_frame(b"")
    theirs.hang_up()
    assert ours.recv_frame() == b""
    with pytest.raises(EOFError):
        ours.recv_frame()


def test_a_file_follows_its_announcement_and_is_followed_by_messages(
    both: tuple[Connection, Connection], tmp_path: Path
) -> None:
    ours, theirs = both
    (tmp_path / "file").write_bytes(b"its bytes")
    theirs.send("announced")
    theirs.send_file(tmp_path / "file")
    theirs.send("afterwards")
    assert (ours.recv(), ours.read(9), ours.recv()) == ("announced", b"its bytes", "afterwards")


@pytest.mark.slow
def test_a_connection_outlives_a_process_that_stands_still_with_full_buffers() -> None:
    data = b"x" * (64 << 20)  # more than the kernel keeps
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as sender:
        theirs = Connection(socket.create_connection(server.getsockname()))
        ours = Connection(server.accept()[0])
        with contextlib.closing(ours), contextlib.closing(theirs):
            watch_peer(theirs._sock)
            sent = sender.submit(theirs.send_frame, data)
            time.sleep(12)  # more than the 10 s after which a silent host counts as gone
            assert not sent.done()
            assert ours.recv_frame() == data
            sent.result(timeout=60)


def test_bytes_that_trickle_in_do_not_put_off_a_deadline(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    theirs._sock.sendall(framed(b"x" * 32)[:-1])
    with pytest.raises(TimeoutError):
        ours.recv_frame(32, time.monotonic() + 0.05)
