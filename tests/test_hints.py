"""What a rank finds worth a hint, and what not."""

from __future__ import annotations

import math
from multiprocessing import Pipe
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.protocol.reports import Hint, unpack
from flytekitplugins.daskpytorch.rank.hints import of_exchange, of_loss, watch_samplers
from flytekitplugins.daskpytorch.rank.main import _Link
from flytekitplugins.daskpytorch.rank.records import INTERVAL


def record(**metrics: object) -> LogRecord:
    return LogRecord(rank=0, step=7, num_steps=None, time=0.0, metrics=metrics)


@pytest.mark.parametrize(("name", "value"), [("loss", math.nan), ("val_loss", math.inf), ("Loss/train", -math.inf)])
def test_loss_that_is_no_number_is_told(name: str, value: float) -> None:
    hint = of_loss(record(**{"accuracy": 0.5, name: value}))
    assert hint is not None
    assert f"{name}={value} at step 7" in hint.text


@pytest.mark.parametrize("metrics", [{}, {"loss": 1e30}, {"accuracy": math.nan}, {"loss": "nan"}, {"loss": 3}])
def test_other_values_and_other_metrics_are_not(metrics: dict[str, object]) -> None:
    assert of_loss(record(**metrics)) is None


@pytest.mark.parametrize(
    ("num_collectives", "world_size", "is_told"), [(0, 2, True), (1, 2, False), (0, 1, False), (None, 2, False)]
)
def test_ranks_that_have_called_no_collective_are_told(
    num_collectives: int | None, world_size: int, *, is_told: bool
) -> None:
    assert (of_exchange(num_collectives, world_size) is not None) is is_told


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Hint]:
    hints: list[Hint] = []
    monkeypatch.setattr(DistributedSampler, "__iter__", DistributedSampler.__iter__)  # to be put back
    watch_samplers(hints.append)
    return hints


def sampler(*, shuffle: bool = True) -> DistributedSampler[int]:
    return DistributedSampler(range(10), num_replicas=2, rank=0, shuffle=shuffle)  # type: ignore[arg-type]


def test_shuffling_sampler_that_keeps_its_epoch_is_told(told: list[Hint]) -> None:
    forgotten = sampler()
    first, second = list(forgotten), list(forgotten)
    assert first == second
    assert ["with epoch 0" in hint.text for hint in told] == [True]


def test_sampler_that_is_used_as_it_should_be_is_not(told: list[Hint]) -> None:
    used, plain = sampler(), sampler(shuffle=False)
    for epoch in range(3):
        used.set_epoch(epoch)
        assert len(list(used)) == len(list(plain)) == 5
    assert list(sampler()) == list(sampler())  # others, of the same epoch
    assert told == []


def test_each_kind_is_reported_once_however_often_it_is_seen(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        link = _Link(ours, 0, tmp_path, INTERVAL)
        for step in range(20):  # a loss stays no number
            link.records.add(LogRecord(rank=0, step=step, num_steps=None, time=0.0, metrics={"loss": math.nan}))
            link.hint(of_exchange(0, 2))
            link.hint(None)
            link.send_records()
        said = []
        while theirs.poll():
            said += [report.kind for report in unpack(theirs.recv_bytes()) if isinstance(report, Hint)]
    assert said == ["loss", "exchange"]
