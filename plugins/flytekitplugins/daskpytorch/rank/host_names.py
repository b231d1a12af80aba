"""Has torch not ask for the names of the hosts that it talks to. Runs in the fork server, and holds for all its ranks.

For its logs alone torch asks the domain name system for the name of every address that its rendezvous stores connect
to: once in each rank, and for each rank in the one that serves the store, one after the other. Where an answer is lost
the gang stands still for the five seconds after which glibc asks again. After the first failure torch, since 2.9, shows
addresses (https://github.com/pytorch/pytorch/issues/159007), so one is made here, which all forks inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

RETRY = 1
"""The index of `retry`, how often a name is asked for at most, among the integers that glibc's `__res_state` begins
with."""

TIMEOUT = timedelta(seconds=2)
"""Bounds the wait where there is no usable loopback; torch's own store waits for 300 s."""


def ask_for_none() -> None:
    """Have torch's first question fail, without asking anybody; where that is not possible it goes on asking."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with contextlib.suppress(AttributeError, OSError, RuntimeError), _no_resolver(), _muted():
        door = socket.create_server(("127.0.0.1", 0))
        port, listener = door.getsockname()[1], door.detach()
        # The other kind of server leaves its event loop's descriptors behind, in this process and all its forks.
        TCPStore("127.0.0.1", port, None, True, TIMEOUT, False, master_listen_fd=listener, use_libuv=False)


@contextlib.contextmanager
def _no_resolver() -> Iterator[None]:
    """This thread's questions for names that no file knows fail at once."""
    libc = ctypes.CDLL(None)
    libc["__res_init"]()  # otherwise it does so at the first question, and forgets what follows
    find_state = libc["__res_state"]
    find_state.restype = ctypes.POINTER(ctypes.c_int)
    state = find_state()
    before, state[RETRY] = state[RETRY], 0
    try:
        yield
    finally:
        state[RETRY] = before


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Torch warns of the failure, in C++."""
    before = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
