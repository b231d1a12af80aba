"""One fetches what is large for all agents of a machine: whoever is first, also when that one fails or ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flytekitplugins.daskpytorch.node import neighbours
from flytekitplugins.daskpytorch.node.neighbours import Shared, fetched_once
from flytekitplugins.daskpytorch.protocol.shared_memory import Address, SharedMemory


class Agents:
    """Some, on one machine that is not the driver's."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.original = Address(f"daskpytorch-{uuid.uuid4().hex}", 1, 1, ((0, 3),))
        self.num_fetches = 0
        self.may_fetch = threading.Event()
        self.may_fetch.set()
        self.is_fetching = threading.Event()
        self._stack = stack

    def fetch(self) -> SharedMemory:
        self.num_fetches += 1
        self.is_fetching.set()
        self.may_fetch.wait()
        memory = SharedMemory()
        memory.add(b"abc")
        return memory

    def get(self) -> Shared:
        shared = fetched_once(self.original, self.fetch)
        self._stack.callback(shared.close)
        return shared


@pytest.fixture
def agents() -> Iterator[Agents]:
    with contextlib.ExitStack() as stack:
        yield Agents(stack)


def content(shared: Shared) -> bytes:
    [memory] = shared.memory.address.mapped()
    return bytes(memory)


def inode(shared: Shared) -> int:
    return os.fstat(shared.memory.address.descriptor).st_ino


def test_agents_that_ask_at_once_have_one_copy(agents: Agents) -> None:
    agents.may_fetch.clear()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(agents.get) for _ in range(4)]
        agents.is_fetching.wait()
        agents.may_fetch.set()
        shared = [each.result() for each in asked]
    assert {content(each) for each in shared} == {b"abc"}
    assert len({inode(each) for each in shared}) == 1
    assert agents.num_fetches == 1
    assert all(each.memory.address.is_here for each in shared)


def test_the_copy_outlives_the_agent_that_fetched_it_and_who_comes_then_fetches_it_anew(agents: Agents) -> None:
    first, second = agents.get(), agents.get()
    first.close()
    assert content(second) == b"abc"
    assert (content(agents.get()), agents.num_fetches) == (b"abc", 2)


def test_where_the_first_fails_the_next_one_fetches_it(agents: Agents) -> None:
    def fail() -> SharedMemory:
        raise EOFError("the driver has gone")

    with pytest.raises(EOFError):
        fetched_once(agents.original, fail)
    assert (content(agents.get()), agents.num_fetches) == (b"abc", 1)


@pytest.mark.parametrize("kind", ["a stranger", "suspended", "silent"])
def test_who_has_the_name_and_gives_nothing_is_not_waited_for_without_end(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(neighbours, "PATIENCE", 0.2)
    monkeypatch.setattr(neighbours, "ANSWER_TIME", 0.1)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{agents.original.name}")
        if kind != "silent":
            other.listen()
        if kind == "a stranger":
            monkeypatch.setattr(neighbours, "_is_ours", lambda _: False)
        assert (content(agents.get()), agents.num_fetches) == (b"abc", 1)


def test_a_stranger_gets_nothing(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    agents.get()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{agents.original.name}")
        data, files, _, _ = socket.recv_fds(stranger, 1, 1)
    assert (data, files) == (b"", [])
