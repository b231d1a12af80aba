"""What every connection between driver and agents carries: frames, each behind its size in eight bytes.

A frame is a pickled message, an agent's heartbeat or, while the two prove themselves to each other, a few bytes of a
fixed number. Only the bytes of a checkpoint follow their announcement as they are.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE = struct.Struct("!Q")
READ_SIZE = 1 << 16
"""Bytes to take from one peer before another has its turn."""


class Frames:
    """Takes a stream apart, in whatever pieces it comes."""

    def __init__(self, only: int | None = None) -> None:
        self._buffer = bytearray()
        self.only = only
        """The size that a frame must have; None: any."""

    @property
    def wanted(self) -> int:
        """Bytes to take next so as to leave alone what follows the frame."""
        return min((self._end() or SIZE.size) - len(self._buffer), READ_SIZE)

    def take(self, data: bytes) -> Iterator[bytes]:
        """Add what has come; the frames that have become whole.

        Raises:
            EOFError: Nothing has come: this is the end.
            ConnectionRefusedError: A frame is not of the size that it must have.
        """
        if not data:
            raise EOFError
        self._buffer += data
        while (end := self._end()) is not None and len(self._buffer) >= end:
            with memoryview(self._buffer)[SIZE.size : end] as whole:
                frame = bytes(whole)
            del self._buffer[:end]
            yield frame

    def _end(self) -> int | None:
        """Where the first frame ends, once that is known."""
        if len(self._buffer) < SIZE.size:
            return None
        (size,) = SIZE.unpack_from(self._buffer)
        if self.only not in (None, size):
            raise ConnectionRefusedError(f"{size} bytes were announced instead of {self.only}")
        return SIZE.size + int(size)


class Connection:
    """One end of a connection that both have proved themselves on. One thread may send, and one receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.heard_at = time.monotonic()
        """When anything last came, on the monotonic clock."""

    def fileno(self) -> int:
        """For `select` and its like; nothing that has come is kept here."""
        return self._sock.fileno()

    @property
    def own_address(self) -> str:
        """The address of this side."""
        return str(self._sock.getsockname()[0])

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            OSError: The peer has gone.
        """
        self.send_frame(pickle.dumps(message))

    def recv(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: The peer has ended the connection.
            OSError: It broke.
        """
        return pickle.loads(self.recv_frame())  # noqa: S301 - from our own gang: the peer has proved it

    def send_frame(self, frame: bytes) -> None:
        """Send bytes as one frame."""
        self._sock.sendall(SIZE.pack(len(frame)) + frame)

    def recv_frame(self, only: int | None = None, deadline: float | None = None) -> bytes:
        """Wait for the next frame; not after a deadline on the monotonic clock."""
        frames = Frames(only)
        while True:
            if deadline is not None:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            for frame in frames.take(self.read(frames.wanted)):
                return frame

    def send_file(self, path: Path) -> None:
        """Send what is in a file, without a frame."""
        with path.open("rb") as file:
            self._sock.sendfile(file)

    def read(self, size: int) -> bytes:
        """Some bytes, as soon as there are any; none at the end."""
        data = self._sock.recv(size)
        self.heard_at = time.monotonic()
        return data

    def hang_up(self) -> None:
        """End it for both sides; a thread that reads from it wakes up, which it would not if it were closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give its file back."""
        self._sock.close()


def watch_peer(sock: socket.socket) -> None:
    """Have the kernel notice that the other host has gone: in 10 s if nothing is being sent to that host, else in 60 s.

    The kernel ends a connection after `TCP_USER_TIMEOUT` also where the other host answers, but its process has stood
    still and its buffers are full. A driver may stand still for half a minute, in a live migration or a call in C.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
