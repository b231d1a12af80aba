"""What is large in a call, in memory that a node has once: filled by the driver or an agent, mapped by ranks.

It is a file without a folder (`memfd_create`), so that nothing is left of it however its processes end. It lives as
long as anybody has it open or mapped; others on the machine open it by the process that keeps it.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flytekitplugins.daskpytorch.protocol.framing import Connection

PIECE_SIZE = 1 << 20
"""Bytes to take from a connection at a time."""


@dataclass(frozen=True)
class Address:
    """Where it is, for as long as its keeper lives."""

    name: str
    """No other memory has it."""
    pid: int
    """The keeper's."""
    descriptor: int
    """There."""
    segments: tuple[tuple[int, int], ...]
    """What is in it, in order: start and size in bytes."""

    @property
    def path(self) -> Path:
        """The file, as other processes of the user's on the keeper's machine open it."""
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")

    @property
    def size(self) -> int:
        """Of the whole, in bytes."""
        return max((start + size for start, size in self.segments), default=0)

    @property
    def is_here(self) -> bool:
        """Whether it can be opened here; elsewhere a process of this number has other files, if there is one."""
        try:
            return str(self.path.readlink()).startswith(f"/memfd:{self.name} ")
        except OSError:
            return False

    def mapped(self) -> list[memoryview]:
        """What is in it. What is written there only this process sees, and takes memory for.

        Raises:
            OSError: It is not here.
        """
        with self.path.open("rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return [memory[start : start + size] for start, size in self.segments]


class SharedMemory:
    """The keeper's end. With this object it is gone, but for those who have mapped it."""

    def __init__(self) -> None:
        """Make an empty one.

        Raises:
            OSError: This process may open no more files.
        """
        self._file = os.fdopen(os.memfd_create(f"daskpytorch-{uuid.uuid4().hex}"), "wb")
        self._segments: list[tuple[int, int]] = []
        self._end = 0
        self.close = weakref.finalize(self, self._file.close)
        """Let go of it before this object goes."""

    @classmethod
    def received(cls, connection: Connection, original: Address) -> Self:
        """Another with what is in the original, whose keeper sends it.

        Raises:
            EOFError: The keeper went away.
            OSError: The connection broke, or there is no memory for it.
        """
        memory, left = cls(), original.size
        while left:
            if not (piece := connection.read(min(PIECE_SIZE, left))):
                raise EOFError(f"the call's large arguments ended with {left:,} of their bytes missing")
            memory._file.write(piece)
            left -= len(piece)
        memory._file.flush()
        memory._segments = list(original.segments)
        return memory

    def add(self, data: bytes | memoryview) -> None:
        """Copy some bytes to the end of it, to a page of their own."""
        start = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file.seek(start)
        self._file.write(data)
        self._file.flush()
        self._end = start + len(data)
        self._segments.append((start, len(data)))

    @property
    def address(self) -> Address:
        """Where all this is."""
        descriptor = self._file.fileno()
        link = Path(f"/proc/self/fd/{descriptor}").readlink()  # /memfd:NAME (deleted)
        name = str(link).removeprefix("/memfd:").removesuffix(" (deleted)")
        return Address(name, os.getpid(), descriptor, tuple(self._segments))
