"""Frames on the connections between driver and agents. Each frame begins with its size, in eight bytes.

A frame holds a pickled message, an agent's heartbeat, or a part of the handshake, whose size is fixed. Only files, such
as checkpoints, travel without frames, right after their announcement.
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
"""Maximum number of bytes of one read, so that all peers get their turn."""


class Frames:
    """Splits a stream of bytes into frames, whatever the sizes of the pieces that arrive."""

    def __init__(self, only: int | None = None) -> None:
        self._buffer = bytearray()
        self.only = only
        """Required size of a frame's content, in bytes. None allows any size."""

    @property
    def wanted(self) -> int:
        """Bytes to read next. A longer read could take bytes beyond this frame."""
        return min((self._end() or SIZE.size) - len(self._buffer), READ_SIZE)

    def take(self, data: bytes) -> Iterator[bytes]:
        """Add bytes that have arrived, and yield the frames that are complete now.

        Raises:
            EOFError: `data` is empty, as after the connection's end.
            ConnectionRefusedError: A frame's size is not the required one.
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
        """Return the first frame's end in the buffer. None before its size arrives."""
        if len(self._buffer) < SIZE.size:
            return None
        (size,) = SIZE.unpack_from(self._buffer)
        if self.only not in (None, size):
            raise ConnectionRefusedError(f"the caller announced a message of {size} bytes instead of {self.only}")
        return SIZE.size + int(size)


class Connection:
    """One end of a connection between driver and agent. One thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.heard_at = time.monotonic()
        """Time of the last received bytes, in seconds on the monotonic clock."""

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select` and `poll`. This object buffers no received bytes."""
        return self._sock.fileno()

    @property
    def own_address(self) -> str:
        """IP address of this end."""
        return str(self._sock.getsockname()[0])

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            OSError: The connection is broken.
        """
        self.send_frame(pickle.dumps(message))

    def recv(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: The peer has closed the connection.
            OSError: The connection is broken.
        """
        return pickle.loads(self.recv_frame())  # noqa: S301 - the peer has proved that it is of this gang

    def send_frame(self, frame: bytes) -> None:
        """Send bytes as one frame, with their size in front."""
        self._sock.sendall(SIZE.pack(len(frame)) + frame)

    def recv_frame(self, only: int | None = None, deadline: float | None = None) -> bytes:
        """Wait for the next frame.

        Args:
            only: Required size of the frame's content, in bytes. None allows any size.
            deadline: Latest time of the frame's end, on the monotonic clock. None waits without limit.

        Raises:
            ConnectionRefusedError: The frame's size is not the required one.
            EOFError: The peer has closed the connection.
            OSError: The connection is broken.
            TimeoutError: The deadline has passed.
        """
        frames = Frames(only)
        while True:
            if deadline is not None:
                self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            for frame in frames.take(self.read(frames.wanted)):
                return frame

    def send_file(self, path: Path) -> None:
        """Send a file's content, without a frame."""
        with path.open("rb") as file:
            self._sock.sendfile(file)

    def read(self, size: int) -> bytes:
        """Wait for bytes, and return at most `size`. Return none after the peer has closed the connection."""
        data = self._sock.recv(size)
        self.heard_at = time.monotonic()
        return data

    def hang_up(self) -> None:
        """Shut the connection down for both ends. A thread that reads wakes up, unlike after `close`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket's descriptor."""
        self._sock.close()


def watch_peer(sock: socket.socket) -> None:
    """Make the kernel detect the loss of the peer's host: in 10 s on an idle connection, else in 60 s.

    `TCP_USER_TIMEOUT` also ends a connection to a live host whose process does not read, once its buffers are full.
    60 s are enough for a driver that stands still for half a minute, in a live migration or a call in C.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
