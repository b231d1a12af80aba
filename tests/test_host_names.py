"""Torch asks for no names of hosts: whether it does is seen at a name server of the tests' own."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.own_node import OwnNode

UNKNOWN = "127.53.53.53"
"""An address of this machine that no file knows by name."""


class ResolverState(ctypes.Structure):
    """The beginning of glibc's `__res_state`."""

    _fields_ = (
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("num_servers", ctypes.c_int),
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("address", ctypes.c_ubyte * 4),
    )


@contextlib.contextmanager
def name_server() -> Iterator[socket.socket]:
    """Who hears what this thread asks, and answers nothing."""
    libc = ctypes.CDLL(None)
    begin, find_state = libc["__res_init"], libc["__res_state"]
    find_state.restype = ctypes.POINTER(ResolverState)
    begin()
    state = find_state().contents
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.setblocking(False)
        state.retrans, state.retry, state.num_servers = 1, 1, 1
        state.family, state.port = socket.AF_INET, socket.htons(server.getsockname()[1])
        state.address[:] = socket.inet_aton("127.0.0.1")
        try:
            yield server
        finally:
            begin()


def num_asked(server: socket.socket) -> int:
    count = 0
    with contextlib.suppress(BlockingIOError):
        while server.recv(1024):
            count += 1
    return count


def meet_at(address: str) -> int:
    """How many questions torch asks in the thread that connects to a store of its own."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with name_server() as server:
        door = socket.create_server((address, 0))
        port, listener = door.getsockname()[1], door.detach()
        TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener)
        return num_asked(server)


def resolve() -> int:
    """How many questions the resolver asks for a name of the user's."""
    with name_server() as server:
        with contextlib.suppress(socket.gaierror):
            socket.gethostbyname("a-name.example")
        return num_asked(server)


def meet_and_resolve() -> tuple[int, int]:
    return meet_at(UNKNOWN), resolve()


@pytest.mark.skipif(Version(version("torch")) < Version("2.9"), reason="before 2.9 torch asks again after a failure")
def test_ranks_ask_for_no_names_but_the_users_own() -> None:
    request = request_for(meet_and_resolve, (), {}, Gang(ranks_per_worker=2, max_restarts=0))
    asked = GangFutures(Supervisor(request, OwnNode()), 2).result()
    assert [names for names, _ in asked] == [0, 0]
    assert all(own > 0 for _, own in asked)


def test_torch_by_itself_asks(tmp_path: Path) -> None:
    """What the test above rests on: it would hear of it."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_host_names as names; "
    command = [sys.executable, "-c", program + "print(names.meet_at(names.UNKNOWN))"]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert int(asked) > 0


ASK = """
import time, torch.distributed
from flytekitplugins.daskpytorch.rank import host_names
began = time.monotonic()
host_names.ask_for_none()
print(time.monotonic() - began < 60)
"""


def test_a_machine_without_a_loopback_keeps_nobody_waiting() -> None:
    """By default, torch's store waits for five minutes."""
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", ASK]
    if subprocess.run([*command[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("making a network namespace is not allowed here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "True\n", done.stderr
