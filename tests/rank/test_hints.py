"""Hints come for likely mistakes, and only for these."""

import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from flytekitplugins.daskpytorch.protocol.messages import Noted
from flytekitplugins.daskpytorch.rank.usage import Ledger, of_exchange, of_loss, watched, watching_samplers
from flytekitplugins.daskpytorch.records import LogRecord


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
    assert (of_exchange(num_collectives, world_size, has_trained=True) is not None) is is_told
    assert of_exchange(num_collectives, world_size, has_trained=False) is None


@pytest.fixture
def told() -> Iterator[list[Noted]]:
    hints: list[Noted] = []
    ledger = Ledger()
    with watched(ledger), watching_samplers(ledger, hints.append):
        yield hints


def loader(*, shuffle: bool = True) -> DataLoader[int]:
    samples = range(10)
    sampler = DistributedSampler(samples, num_replicas=2, rank=0, shuffle=shuffle)  # type: ignore[arg-type, var-annotated]
    return DataLoader(samples, batch_size=2, sampler=sampler)  # type: ignore[arg-type]


def epoch(batches: Iterable[int], *, trains: bool = True) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in batches:
        model(torch.ones(1)).sum().backward()
        if trains:
            optimizer.step()


def test_two_epochs_of_training_in_one_order_are_told(told: list[Noted]) -> None:
    forgotten = loader()
    next(iter(forgotten))  # a look at a batch
    epoch(forgotten)
    assert told == []
    epoch(forgotten)
    assert "with epoch 0" in told[0].text


def test_a_sampler_draws_its_order_at_the_same_time_as_without_hints(told: list[Noted]) -> None:
    sampler = loader().sampler
    order = list(sampler)
    begun = iter(sampler)
    sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert list(begun) == order
    assert list(sampler) != order
    assert told == []


def test_looks_evaluations_and_loaders_that_are_told_their_epochs_are_not(told: list[Noted]) -> None:
    looked_at, evaluated, plain, used = loader(), loader(), loader(shuffle=False), loader()
    for number in (0, 1, 1):  # the last for a second try
        used.sampler.set_epoch(number)  # type: ignore[attr-defined]
        epoch(used)
        epoch(evaluated, trains=False)
        epoch(plain)
    next(iter(looked_at))
    epoch(looked_at)
    assert told == []


def test_training_without_a_sampler_is_not_told_of_the_sampler_that_its_evaluations_use(told: list[Noted]) -> None:
    evaluated = loader()
    for _ in range(3):
        epoch(range(4))
        epoch(evaluated, trains=False)
    assert told == []
