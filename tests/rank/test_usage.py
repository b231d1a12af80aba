"""The ledger of a rank's time assigns each second to one use."""

import math
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import fake_gpus
from clock import Clock
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.rank import usage
from flytekitplugins.daskpytorch.rank.usage import Gauge, Ledger
from flytekitplugins.daskpytorch.records import RankUsage


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(clock)


def spent(seconds: dict[str, float]) -> dict[str, float]:
    return {part: value for part, value in seconds.items() if value}


def take(clock: Clock, seconds: float) -> None:
    clock.now += seconds


PARTS = ("data", "evaluation", "saving")


def happen(ledger: Ledger, clock: Clock, *acts: str | float) -> None:
    """Let seconds pass, steps and marks happen, and parts begin. `leave` ends the newest part."""
    entered = []
    for act in acts:
        if isinstance(act, float):
            clock.now += act
        elif act in PARTS:
            entered.append(ledger.spending(act))
            entered[-1].__enter__()
        elif act != "leave":
            getattr(ledger, act)()
        elif entered:
            entered.pop().__exit__(None, None, None)


@pytest.mark.parametrize(
    ("acts", "expected", "closed", "num_steps"),
    [
        # A step begins with its batch and ends with the optimizer. Before is the preparation of the model.
        ([3.0, *["data", 0.5, "leave", 2.0, "step"] * 2], {"preparing": 3.0, "data": 1.0, "stepping": 4.0}, {}, 2),
        ([3.0, "step", 2.0, "step"], {"preparing": 3.0, "stepping": 2.0}, {}, 2),  # without a loader
        ([3.0, "mark", 2.0, "mark", 1.0], None, {"preparing": 3.0, "stepping": 2.0, "waiting": 1.0}, 0),  # no optimizer
        (["step", "evaluation", 1.0, "data", 1.0, "leave", "step", 1.0, "leave"], {"evaluation": 3.0}, {}, 2),
        (["step", 2.0], {"stepping": 2.0}, {"waiting": 2.0}, 1),  # a step may be under way until the end
        ([2.0], {"preparing": 2.0}, {"stepping": 2.0}, 0),  # a function without steps is one
        (["step", "evaluation", 4.0], {"evaluation": 4.0}, {}, 1),  # a part that has not ended
    ],
)
def test_each_second_has_one_use(
    ledger: Ledger,
    clock: Clock,
    acts: list[str | float],
    expected: dict[str, float] | None,
    closed: dict[str, float],
    num_steps: int,
) -> None:
    happen(ledger, clock, *acts)
    assert expected is None or spent(ledger.seconds()) == expected
    assert not closed or spent(ledger.close()) == closed
    assert ledger.num_steps == num_steps


def test_what_other_threads_wait_for_holds_nobody_up(ledger: Ledger, clock: Clock) -> None:
    ledger.step()

    def prefetch() -> None:
        with ledger.spending("data"):
            take(clock, 1.0)

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    assert spent(ledger.seconds()) == {"stepping": 1.0}


@given(st.lists(st.sampled_from(["step", "mark", "data", "evaluation", "saving", "leave"]), max_size=30))
def test_all_parts_add_up_to_the_time_in_any_order(acts: list[str]) -> None:
    clock = Clock()
    ledger, began_at = Ledger(clock), clock.now
    happen(ledger, clock, *(part for number, act in enumerate(acts) for part in (2.0**-number, act)))
    for seconds in (ledger.seconds(), ledger.close()):
        assert math.isclose(math.fsum(seconds.values()), clock.now - began_at)
        assert all(value >= 0 for value in seconds.values())


class Slow(Dataset[int]):
    """Takes a second for each item."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index >= len(self):
            raise IndexError
        take(self._clock, 1.0)
        return index


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's end undo what a rank changes for good."""
    iterator = torch_parts.loader_iterator()
    monkeypatch.setattr(iterator, "__next__", iterator.__next__)


@pytest.mark.usefixtures("unwatched")
def test_torch_makes_the_entries_by_itself(ledger: Ledger, clock: Clock) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight])
    usage.watch(ledger)
    for _ in DataLoader(Slow(clock), batch_size=2):
        take(clock, 5.0)
        optimizer.step()
    assert spent(ledger.seconds()) == {"data": 4.0, "stepping": 10.0}


def test_the_last_that_a_gauge_says_is_of_all_steps(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL", 0.001)
    said: queue.SimpleQueue[RankUsage] = queue.SimpleQueue()
    with Gauge(0, ledger).reporting(2, said.put):
        said.get()
        ledger.num_steps = 7
    *_, last = [said.get() for _ in range(said.qsize())]
    assert last.num_steps == 7


@pytest.mark.timeout(60)
def test_a_gauge_that_hangs_does_not_keep_its_rank(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVML hangs with some broken GPUs."""
    monkeypatch.setattr(usage, "INTERVAL", 0.001)
    monkeypatch.setattr(usage, "END_TIMEOUT", 0.1)
    said: queue.SimpleQueue[RankUsage] = queue.SimpleQueue()
    hangs, may_go_on = threading.Event(), threading.Event()

    def send(read: RankUsage) -> None:
        said.put(read)
        hangs.set()
        may_go_on.wait()

    with Gauge(0, ledger).reporting(2, send):
        hangs.wait()
    assert said.qsize() == 1
    may_go_on.set()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"used": 50, "total": 80, "busy": 25}, (50, 0.25)),
        ({"used": 50, "total": 80}, (50, None)),
        ({}, (None, None)),
        ({"code": 15}, (None, None)),
    ],
)
def test_of_a_gpu_it_reads_off_what_there_is_to_know(
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answers: dict[str, int],
    expected: tuple[Any, Any],
) -> None:
    """Torch and NVML are simulated."""
    fake_gpus.install(tmp_path, monkeypatch, {"GPU-1": answers})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    read = Gauge(0, ledger, "1").read()
    assert (read.gpu_memory, read.gpu_utilization) == expected


@pytest.mark.usefixtures("unwatched")
def test_a_compilation_has_seconds_of_its_own() -> None:
    ledger = Ledger()
    model = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    usage.watch(ledger)
    ledger.step()
    model(torch.ones(1, 2))
    first = ledger.seconds()
    model(torch.ones(1, 2))
    ledger.step()
    with ledger.spending("evaluation"):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    seconds = ledger.seconds()
    assert 0 < seconds["compiling"] == first["compiling"]
    assert min(seconds["stepping"], seconds["evaluation"]) > 0
