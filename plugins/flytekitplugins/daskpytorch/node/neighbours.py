"""What is large in a call comes to a machine once, however many workers that has: the first agent hands it on.

The first is the one that takes a name in the kernel's list of sockets, from which the name goes with its process. What
the others get is the memory itself, an open file, which stays theirs when the first one ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from flytekitplugins.daskpytorch.protocol.shared_memory import Address, SharedMemory

PATIENCE = 600.0
"""Seconds for another agent to fetch it, after which this one does so itself."""
INTERVAL = 0.05
ANSWER_TIME = 5.0
"""Seconds for one that has it to hand it on: it may be suspended."""
CREDENTIALS = struct.Struct("3i")
"""Process, user, group; see unix(7)."""


class Shared:
    """The memory, and what other agents come to for it, if this one was the first."""

    def __init__(self, memory: SharedMemory, server: socket.socket | None = None) -> None:
        self.memory = memory
        self._server = server
        if server is not None:
            threading.Thread(target=self._hand_out, args=(server,), name="daskpytorch-large", daemon=True).start()

    def close(self) -> None:
        """Let go of it; those who have it keep it."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # close alone does not wake the thread
            self._server.close()
        self.memory.close()

    def _hand_out(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                caller, _ = server.accept()
                with caller, contextlib.suppress(OSError):
                    if _is_ours(caller):
                        socket.send_fds(caller, [b"!"], [self.memory.address.descriptor])


def fetched_once(original: Address, fetch: Callable[[], SharedMemory]) -> Shared:
    """Another agent's, which may still be fetching it, or what is fetched here, for others, too."""
    name, until = f"\0{original.name}", time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                server.bind(name)
            except OSError:  # another agent was first
                with contextlib.suppress(OSError):  # it is not done yet, or has just gone
                    return Shared(_handed(name, original))
                time.sleep(INTERVAL)
            else:
                memory = fetch()
                server.listen(socket.SOMAXCONN)
                stack.pop_all()
                return Shared(memory, server)
    return Shared(fetch())


def _handed(name: str, original: Address) -> SharedMemory:
    """Take it from another agent.

    Raises:
        OSError: That has nothing to give.
    """
    with socket.socket(socket.AF_UNIX) as giver:
        giver.settimeout(ANSWER_TIME)
        giver.connect(name)
        if not _is_ours(giver):
            raise PermissionError
        _, files, _, _ = socket.recv_fds(giver, 1, 1)
        if not files:
            raise ConnectionAbortedError
        return SharedMemory.kept(files[0], original)


def _is_ours(peer: socket.socket) -> bool:
    """Whether a process of the same user is at the other end: what it holds will be unpickled."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.getuid())
