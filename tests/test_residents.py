"""Workers that stay for many gangs: who is asked, who gets which order, what happens to those that go."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from flytekitplugins.daskpytorch.dask import resident
from flytekitplugins.daskpytorch.dask.residents import Residents
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.node import agent
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder
from processes import num_open_files, until

pytestmark = pytest.mark.timeout(60)


class Workers:
    """Workers that are threads of this process, and do nothing with their orders but keep them."""

    host = "127.0.0.1"
    num_wanted = 2
    workers: Sequence[str] = ["a", "b"]

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.threads: list[threading.Thread] = []
        self.refusal: Exception | None = None
        self.leaving, self.leave = os.pipe()

    def launch(self, orders: Sequence[AgentOrder], on_failure: Callable[[str, Exception], None]) -> None:
        for order in orders:
            self.asked.append(order.worker)
            if self.refusal is not None:
                on_failure(order.worker, self.refusal)
                continue
            self.threads.append(threading.Thread(target=self.stay, args=(order,), daemon=True))
            self.threads[-1].start()

    def stay(self, order: AgentOrder) -> None:
        with contextlib.suppress(ConnectionError):  # nobody listens any more
            resident.stay(order, self.leaving)

    def present(self) -> Sequence[str]:
        return self.workers

    def is_connected(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[tuple[str, bytes]]:
    """What the workers' agents were told: worker and token; an agent whose token says so fails."""
    done: queue.Queue[tuple[str, bytes]] = queue.Queue()

    def run(order: AgentOrder, leaving: int, data: object) -> None:
        done.put((order.worker, order.token))
        if order.token == b"bad":
            raise OSError("no space left")

    monkeypatch.setattr(agent, "run", run)
    return done


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def residents(workers: Workers) -> Iterator[Residents]:
    residents = Residents(workers)
    yield residents
    residents.close()
    until(lambda: not any(thread.is_alive() for thread in workers.threads), "the workers to leave")


def order(worker: str, token: bytes) -> AgentOrder:
    return AgentOrder(worker=worker, driver=("127.0.0.1", 1), num_ranks=1, token=token)


def nobody(worker: str, error: Exception) -> None:
    raise AssertionError(f"{worker}: {error}")


def test_a_worker_is_asked_once_and_gets_its_orders_one_after_the_other(
    workers: Workers, residents: Residents, done: queue.Queue[tuple[str, bytes]]
) -> None:
    residents.launch([order("a", b"0")], nobody)
    residents.launch([order("a", b"1"), order("b", b"1")], nobody)
    for token in (b"2", b"3"):
        residents.launch([order("a", token)], nobody)
    got = [done.get(timeout=20) for _ in range(5)]
    assert [token for worker, token in got if worker == "a"] == [b"0", b"1", b"2", b"3"]
    assert ("b", b"1") in got
    assert workers.asked == ["a", "b"]


def test_an_agent_that_fails_fails_its_own_gang_and_the_worker_stays(
    workers: Workers, residents: Residents, done: queue.Queue[tuple[str, bytes]]
) -> None:
    failures: queue.Queue[tuple[str, Exception]] = queue.Queue()
    residents.launch([order("a", b"bad")], lambda worker, error: failures.put((worker, error)))
    worker, error = failures.get(timeout=20)
    assert (worker, str(error)) == ("a", "OSError: no space left")
    residents.launch([order("a", b"good")], nobody)
    assert [done.get(timeout=20) for _ in range(2)] == [("a", b"bad"), ("a", b"good")]
    assert workers.asked == ["a"]


def test_a_worker_that_leaves_is_lost_to_its_gang_and_asked_again(
    workers: Workers, residents: Residents, done: queue.Queue[tuple[str, bytes]]
) -> None:
    failures: queue.Queue[tuple[str, Exception]] = queue.Queue()
    residents.launch([order("a", b"1")], lambda worker, error: failures.put((worker, error)))
    done.get(timeout=20)
    os.write(workers.leave, b".")  # the worker is told to close, while it waits for orders
    worker, error = failures.get(timeout=20)
    assert worker == "a"
    assert isinstance(error, WorkerLostError)
    os.read(workers.leaving, 1)
    residents.launch([order("a", b"2")], nobody)
    assert done.get(timeout=20) == ("a", b"2")
    assert workers.asked == ["a", "a"]


def test_a_worker_that_cannot_be_asked_is_refused_with_the_reason_and_may_be_asked_again(
    workers: Workers, residents: Residents, done: queue.Queue[tuple[str, bytes]]
) -> None:
    workers.refusal = ModuleNotFoundError("No module named 'flytekitplugins'")
    failures: list[tuple[str, Exception]] = []
    residents.launch([order("a", b"1")], lambda worker, error: failures.append((worker, error)))
    assert failures == [("a", workers.refusal)]
    workers.refusal = None
    residents.launch([order("a", b"2")], nobody)
    assert done.get(timeout=20) == ("a", b"2")


def test_a_worker_that_comes_after_the_end_is_sent_away(workers: Workers) -> None:
    residents = Residents(workers)
    late = residents._invitation("a")
    connection = agent.dial(late)  # before the end, as its word is not
    residents.close()
    with contextlib.suppress(OSError):
        connection.send(resident.Arrived("a"))
    with pytest.raises((EOFError, OSError)):
        connection.recv()
    connection.close()


def test_nothing_stays_when_all_are_let_go(done: queue.Queue[tuple[str, bytes]]) -> None:
    workers = Workers()  # whose pipe counts
    files, threads = num_open_files(), set(threading.enumerate())
    residents = Residents(workers)
    residents.launch([order("a", b"1")], nobody)
    assert done.get(timeout=20) == ("a", b"1")
    silent = agent.dial(residents._invitation("b"))
    residents.close()
    until(lambda: set(threading.enumerate()) <= threads, "the threads to end")
    silent.close()
    assert num_open_files() == files
