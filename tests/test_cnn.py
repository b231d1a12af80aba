"""The network for digits: its training, and its evaluation alone and in real gangs of one, two and three ranks.

`test_char_lstm.py` holds that a gang of several ranks trains like one rank, and `test_transfer.py` that it resumes bit
for bit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses

from flytekitplugins.daskpytorch.records import LogRecord
from gangs import logging_to, run_ranks
from tasks import cnn
from tasks.cnn import CNN, Hyperparameters, Recorded, TrainingResult, evaluate, train
from tasks.digits import Digits, DigitSet, small_digits

pytestmark = pytest.mark.usefixtures("one_thread")

DIGITS = small_digits(seed=0)
NUM_TRAINING, NUM_TEST = len(DIGITS.training), len(DIGITS.test)
SMALL = Digits(
    training=DigitSet(images=DIGITS.training.images[:100], labels=DIGITS.training.labels[:100]),
    test=DigitSet(images=DIGITS.test.images[:30], labels=DIGITS.test.labels[:30]),
    source="",
)
GANG_SIZES = (1, 2, 3)
NOTHING = Recorded()


@dataclass
class Trained:
    """What one training left."""

    result: TrainingResult | None
    log: list[LogRecord]

    @property
    def by_step(self) -> list[LogRecord]:
        return [record for record in self.log if "held_out_loss" not in record.metrics]

    @property
    def by_epoch(self) -> list[LogRecord]:
        return [record for record in self.log if "held_out_loss" in record.metrics]


def _train(digits: Digits, hp: Hyperparameters, recorded: Recorded = NOTHING) -> Trained:
    """Train in this process as it is, with a log."""
    trained = Trained(result=None, log=[])
    with logging_to(trained.log):
        trained.result = train(digits, hp, recorded)
    return trained


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """For each size of a gang, what each of its ranks brought back from `_run_cases`."""
    return {size: run_ranks(_run_cases, size, tmp_path_factory.mktemp(f"gang-{size}")) for size in GANG_SIZES}


def _run_cases(_: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"untrained": evaluate(_untrained(), DIGITS.test, batch_size=100)}
    found["few"] = evaluate(_untrained(), _first(2), batch_size=1)
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        group = cnn._group("gloo")
    found["group"] = group is not None
    found["other_group"] = evaluate(_untrained(), DIGITS.test, batch_size=100, group=group)
    return found


def _untrained() -> CNN:
    torch.manual_seed(0)
    return CNN()


def _first(count: int) -> DigitSet:
    return DigitSet(images=DIGITS.test.images[:count], labels=DIGITS.test.labels[:count])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="backend='nccl' needs a GPU, and rank 0 has none"):
        train(SMALL, Hyperparameters(backend="nccl"))


# Evaluation


def test_evaluation_counts_every_image_once() -> None:
    model = _untrained()
    logits = model(DIGITS.test.images)
    found = evaluate(model, DIGITS.test, batch_size=100)
    assert found.num_images == NUM_TEST
    assert found.loss == pytest.approx(F.cross_entropy(logits, DIGITS.test.labels).item(), rel=1e-5)
    assert found.accuracy == (logits.argmax(dim=1) == DIGITS.test.labels).double().mean().item()
    assert torch.equal(found.guesses, logits.argmax(dim=1))
    torch.testing.assert_close(found.scores, logits.softmax(dim=1))


@pytest.mark.parametrize("size", GANG_SIZES)
def test_a_gang_counts_every_image_once(gangs: dict[int, list[dict[str, Any]]], size: int) -> None:
    expected = evaluate(_untrained(), DIGITS.test, batch_size=100)
    for rank in gangs[size]:
        for found in (rank["untrained"], rank["other_group"]):
            assert found.num_images == NUM_TEST
            assert found.accuracy == expected.accuracy
            torch.testing.assert_close(found.scores, expected.scores)
        assert rank["few"].num_images == 2  # a gang of three leaves one rank without
        assert rank["group"] == (size > 1)


# Training


def test_training_alone() -> None:
    hp = Hyperparameters(epochs=2, batch_size=48, test_batch_size=100, log_interval=20)
    trained = _train(DIGITS, hp, Recorded(num_batches=2, num_images=3))
    assert trained.result is not None
    steps_per_epoch = math.ceil(NUM_TRAINING / 48)
    assert [record.step for record in trained.by_step] == list(range(20, 2 * steps_per_epoch + 1, 20))
    assert all(set(record.metrics) == {"epoch", "loss", "samples_per_second"} for record in trained.by_step)
    assert {record.num_steps for record in trained.log} == {2 * steps_per_epoch}

    first, last = trained.result.epochs
    assert [record.step for record in trained.by_epoch] == [steps_per_epoch, 2 * steps_per_epoch]
    assert [record.numbers for record in trained.by_epoch] == [asdict(first), asdict(last)]
    assert last.loss < first.loss < math.log(10)
    assert last.held_out_loss < first.held_out_loss < math.log(10)
    assert last.held_out_accuracy > 0.8

    evaluation = evaluate(CNN.from_state_dict(trained.result.state_dict), DIGITS.test, batch_size=100)
    assert evaluation.accuracy == last.held_out_accuracy
    assert trained.result.evaluation is not None
    assert torch.equal(trained.result.evaluation.scores, evaluation.scores)
    table = trained.by_epoch[-1].metrics["predictions"]
    assert [row[0] for row in table.data] == ["0_0", "1_0", "2_0", "0_1", "1_1", "2_1"]
    assert [row[2] for row in table.data] == evaluation.guesses[[0, 1, 2, 100, 101, 102]].tolist()


def test_no_table_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cnn, "predictions_table", mock.Mock(side_effect=OSError("no space left on device")))
    trained = _train(SMALL, Hyperparameters(epochs=1), Recorded(num_batches=1, num_images=1))
    assert "held_out_loss" in trained.by_epoch[0].metrics
    assert "no table of predictions: OSError: no space left on device" in caplog.text
