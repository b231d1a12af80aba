"""A rank that enters collectives later than all others is named, and noise, evaluations and pipelines name none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed import Client
from torch import distributed as dist

import fake_gpus
from flytekitplugins.daskpytorch import Gang, Observer, dispatch
from flytekitplugins.daskpytorch.driver.slow_rank import LINK, SlowRankWatch
from flytekitplugins.daskpytorch.protocol.reports import Entered
from flytekitplugins.daskpytorch.rank import flight_recorder, nvml
from flytekitplugins.daskpytorch.rank.entries import Entries
from flytekitplugins.daskpytorch.rank.usage import Ledger

pytestmark = pytest.mark.timeout(300)
STEP = 0.1
NUM_RANKS = 3
Lateness = Callable[[int, int, random.Random], float]
"""Seconds by which a rank enters a step's collective after the earliest: of rank, step and chance."""


def reports_of(
    lateness: Lateness, num_windows: int = 5, *, clocks: Mapping[int, float] | None = None, buckets: int = 1
) -> Iterable[tuple[int, Entered, float]]:
    """Yield rank, report and time of arrival of each report: of 0.1 s a step, and ten seconds a window."""
    chance = random.Random(1)
    for window in range(1, num_windows + 1):
        for rank in range(NUM_RANKS):
            clock = (clocks or {}).get(rank, 0.0)
            times: dict[int, float] = {}
            for step in range(100 * window - 32 // buckets, 100 * window):
                at = step * STEP + lateness(rank, step, chance)
                times |= {buckets * step + bucket: at + clock + bucket / 1000 for bucket in range(buckets)}
            report = Entered(
                window=window,
                time=10.0 * window + clock,
                times=times,
                is_partial=False,
                num_steps=100 * window,
                data=1.0,
                line="train.py:7 (train)",
            )
            yield rank, report, 10.0 * window + chance.uniform(0.001, 0.01)


def told(
    reports: Iterable[tuple[int, Entered, float]], hosts: str = "aaa", gpus: Mapping[int, str] | None = None
) -> list[str]:
    watch = SlowRankWatch(dict(enumerate(hosts)), gpus)
    return [found[1] for rank, report, at in reports if (found := watch.hear(rank, report, at)) is not None]


def slow(seconds: float) -> Lateness:
    """Rank 1 is late at each step; all ranks are late by chance."""
    return lambda rank, _, chance: (seconds if rank == 1 else 0.0) + chance.uniform(0.0, 0.003)


@pytest.mark.parametrize("buckets", [1, 3])
def test_the_slow_rank_is_named_with_what_the_gang_waits_and_where_it_is(buckets: int) -> None:
    first, *_ = told(reports_of(slow(0.03), buckets=buckets))
    assert first.startswith("rank 1 (a) is slow: it enters collectives ")
    _, late, share = (int(word) for word in first.split() if word.isdigit())
    assert 27 <= late <= 31
    assert 25 <= share <= 36
    assert first.endswith(f"Its main thread was mostly at train.py:7 (train). {LINK}.")


def test_it_is_named_once_three_windows_after_the_first_agree() -> None:
    assert not told(reports_of(slow(0.03), num_windows=3))
    assert len(told(reports_of(slow(0.03), num_windows=4))) == 1


def test_clocks_of_several_hosts_are_allowed_for() -> None:
    clocks = {0: 0.0, 1: -3.0, 2: 5.0}
    [text, *_] = told(reports_of(slow(0.05), clocks=clocks, num_windows=6), hosts="abc")
    assert text.startswith("rank 1 (b)")
    assert not told(reports_of(slow(0.0), clocks=clocks, num_windows=6), hosts="abc")


def test_a_clock_that_is_set_names_nobody() -> None:
    """After two windows, host c's clock is set back by 60 ms."""

    def reports() -> Iterable[tuple[int, Entered, float]]:
        for rank, report, at in reports_of(slow(0.0), num_windows=10):
            off = 0.06 if rank == 2 and report.window <= 2 else 0.0
            times = {number: entered + off for number, entered in report.times.items()}
            yield rank, replace(report, time=report.time + off, times=times), at

    assert not told(reports(), hosts="abc")


def test_delays_of_messages_name_nobody() -> None:
    chance = random.Random(2)
    reports = ((rank, report, at + chance.uniform(0.0, 0.1)) for rank, report, at in reports_of(slow(0.0), 200))
    assert not told(reports, hosts="abc")


@pytest.mark.parametrize(
    ("why", "lateness"),
    [
        ("each is late by chance", lambda _rank, _step, chance: chance.expovariate(100.0)),
        ("the last rank changes", lambda rank, step, _: 0.05 if step % NUM_RANKS == rank else 0.0),
        ("rank 0 evaluates after 50 steps", lambda rank, step, _: 9.0 if rank == 0 and step % 50 == 0 else 0.0),
        ("too little to be felt", slow(0.004)),
        ("less than a tenth of the time", slow(0.008)),
        ("two are slow", lambda rank, _, chance: 0.0 if rank == 0 else 0.05 + chance.uniform(0.0, 0.001)),
    ],
)
def test_nobody_is_named(why: str, lateness: Lateness) -> None:
    assert not told(reports_of(lateness, num_windows=10)), why


@pytest.mark.parametrize("change", [{"is_partial": True}, {"num_steps": 0}, {"times": {}}])
def test_pipelines_evaluations_and_waits_name_nobody(change: dict[str, object]) -> None:
    assert not told((rank, replace(report, **change), at) for rank, report, at in reports_of(slow(0.03)))


def test_the_data_loader_is_the_cause_if_the_rank_waits_for_it() -> None:
    waiting = ((rank, replace(each, data=0.4 * each.time), at) for rank, each, at in reports_of(slow(0.03)))
    [text, *_] = told(waiting)
    assert "It waits for its data loader 40 % of its time." in text
    assert "network" not in text


def on_gpus(clocks: Mapping[int, int | None], degrees: Mapping[int, int | None]) -> str:
    """Hint about rank 1, whose GPU is the second of its host."""
    reports = (
        (rank, replace(report, gpu_clock=clocks[rank], gpu_temperature=degrees[rank]), at)
        for rank, report, at in reports_of(slow(0.03))
    )
    return told(reports, gpus={0: "0", 1: "1", 2: "0"})[0]


def test_a_gpu_is_named_with_its_clock_and_temperature_if_they_differ() -> None:
    text = on_gpus({0: 1980, 1: 1005, 2: 1965}, {0: 60, 1: 91, 2: 62})
    assert text.startswith("rank 1 (a, GPU 1) is slow")
    assert text.endswith(
        "Its GPU runs at 1005 MHz, the others' at 1965 MHz or more. Its GPU is at 91 °C, the others' at 62 °C or less."
    )


@pytest.mark.parametrize(
    ("clocks", "degrees"),
    [
        ({0: 1980, 1: 1900, 2: 1965}, {0: 60, 1: 65, 2: 62}),
        ({0: 1980, 1: 1005, 2: 990}, {0: 60, 1: 91, 2: 90}),
        ({0: 1980, 1: 1005, 2: None}, {0: 60, 1: 91, 2: None}),
        ({0: 1980, 1: None, 2: 1965}, {0: 60, 1: None, 2: 62}),
    ],
)
def test_a_gpu_like_the_others_or_unknown_is_no_cause(
    clocks: Mapping[int, int | None], degrees: Mapping[int, int | None]
) -> None:
    assert "Its GPU" not in on_gpus(clocks, degrees)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_rank_reports_clock_and_temperature_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool
) -> None:
    """Torch's CUDA, the recorder and NVML are simulated."""
    monkeypatch.setattr(nvml, "LIBRARY", str(fake_gpus.build(tmp_path)))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "gpus"))
    fake_gpus.describe(tmp_path / "gpus", {"GPU-1": {"is": 1, "clock": 1005, "degrees": 91}})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_cuda)
    monkeypatch.setattr(flight_recorder, "entered", lambda: ({1: 0.0}, False))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    reports: list[Entered] = []
    Entries(Ledger(), reports.append, "1").look()
    [report] = reports
    assert (report.gpu_clock, report.gpu_temperature) == ((1005, 91) if has_cuda else (None, None))


def recorded() -> tuple[dict[int, float], bool, float]:
    """What the flight recorder has of three collectives."""
    began_at = time.time()
    for _ in range(3):
        dist.all_reduce(torch.zeros(1))
    found = flight_recorder.entered()
    assert found is not None
    return *found, began_at


def test_ranks_read_the_times_of_their_newest_collectives(client: Client) -> None:
    (times, is_partial, began_at), (others, _, _) = dispatch.run(client, recorded).result()
    assert not is_partial
    assert times.keys() == others.keys()
    assert len(times) >= 3
    assert sum(began_at <= at <= time.time() for at in times.values()) == 3


def train(guilty: int, how: str) -> None:
    """Train for 60 s. One rank is slow in its backward, in its data, or since its core is busy."""
    from flytekitplugins.daskpytorch import current_rank

    is_guilty = current_rank().rank == guilty

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if is_guilty and how == "backward":
                time.sleep(0.03)
            return gradient

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if is_guilty and how == "data" and index % 8 == 0:
                time.sleep(0.03)
            return torch.randn(64)

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends_at, stop = time.time() + 60, torch.zeros(1)
    for batch in torch.utils.data.DataLoader(Data(), batch_size=8):
        optimizer.zero_grad()
        Slow.apply(model(batch)).square().mean().backward()
        optimizer.step()
        stop.fill_(time.time() > ends_at)
        dist.all_reduce(stop)
        if stop:
            break


@pytest.mark.slow
@pytest.mark.parametrize(("guilty", "how", "cause"), [(1, "backward", "(backward)"), (0, "data", "its data loader")])
def test_a_slow_rank_of_a_real_gang_is_named(client: Client, tmp_path: Path, guilty: int, how: str, cause: str) -> None:
    notes = tmp_path / "notes"

    class Notes(Observer):
        def noted(self, text: str) -> None:
            with notes.open("a") as file:
                file.write(f"{text}\n")

    dispatch.run(client, train, guilty, how, gang=Gang(observers=(Notes,))).result()
    [hint] = [line for line in notes.read_text().splitlines() if "is slow" in line]
    assert f"rank {guilty} (" in hint
    assert cause in hint
