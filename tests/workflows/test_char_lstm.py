"""The character model: its windows, its training alone and in a real gang of two ranks, and its sampled names.

`test_transfer.py` holds that such a training resumes bit for bit, whenever it was interrupted.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses

from flytekitplugins.daskpytorch.records import LogRecord
from gangs import logging_to, run_ranks
from tasks.char_lstm import (
    BLANK,
    NUM_SYMBOLS,
    STOP,
    CharLSTM,
    Hyperparameters,
    TrainingResult,
    bigram_loss,
    evaluate,
    sample_names,
    train,
    windows,
)
from tasks.embedded_names import EMBEDDED_NAMES
from tasks.names import ALPHABET

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINING = windows(EMBEDDED_NAMES[::4])
HELD_OUT = windows(EMBEDDED_NAMES[1::40])
FULL = TRAINING[TRAINING[:, 1] != BLANK][:20]
"""Windows without padding: hardly two begin alike."""

# Windows and the batch size per rank. With two ranks the batches of `uneven` give rank 0 a window more than rank 1, and
# `one_batch` is less than a batch.
CASES = {"uneven": (67, 8), "one_batch": (20, 50)}


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a gang of two brought back from `_run_cases`."""
    return run_ranks(_run_cases, 2, tmp_path_factory.mktemp("gang"))


def _run_cases(_: Path) -> dict[str, Any]:
    return {case: _train_case(*CASES[case]) for case in CASES}


def _train_case(num_windows: int, batch_size: int) -> tuple[TrainingResult, list[LogRecord]]:
    log: list[LogRecord] = []
    hp = Hyperparameters(epochs=3, batch_size=batch_size, learning_rate=1e-3, dropout=0, log_interval=1)
    with logging_to(log):
        return train(TRAINING[:num_windows], HELD_OUT, hp), log


def _losses(log: list[LogRecord]) -> list[float]:
    return [record.metrics["loss"] for record in log]


# The windows


def test_windows_end_at_each_character_and_the_stop() -> None:
    texts = ["".join(ALPHABET[index] for index in window) for window in windows(["max", "mr. bubbles"]).tolist()]
    assert texts[:4] == ["********m", "*******ma", "******max", "*****max+"]
    assert texts[-2:] == [". bubbles", " bubbles+"]
    assert len(texts) == len("max+mr. bubbles+")
    assert windows(["max"]).dtype == torch.uint8


# The model


@pytest.mark.parametrize("batch", [TRAINING[:200], FULL], ids=["many_alike", "few_alike"])
def test_forward_is_the_lstm(batch: torch.Tensor) -> None:
    """Computing equal prefixes once changes neither the logits nor the gradients."""
    model = CharLSTM(dropout=0).double()
    logits = model(batch[:, :8])
    expected = model.dense(model.lstm(F.one_hot(batch[:, :8].long(), NUM_SYMBOLS).double())[0])
    assert logits.shape == (len(batch), 8, 31)
    torch.testing.assert_close(logits, expected)
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), list(model.parameters())))


def test_evaluation_counts_every_window_once() -> None:
    model = CharLSTM().eval()
    repeated = torch.cat([HELD_OUT, HELD_OUT[:100], HELD_OUT[:1]])
    inputs, targets = repeated[:, :8], repeated[:, 1:].long()
    logits, counted = model(inputs), targets != BLANK
    evaluation = evaluate(model, repeated)
    assert evaluation.loss == pytest.approx(F.cross_entropy(logits[counted], targets[counted]).item(), rel=1e-5)
    assert evaluation.num_windows == len(repeated)
    correct = (logits.argmax(2) == targets)[counted]
    assert evaluation.accuracy == pytest.approx(correct.float().mean().item(), rel=1e-5)


def test_bigram_loss() -> None:
    found = windows(["ab"])  # holds the pairs *a three times, ab twice and b+ once
    expected = -(3 * math.log(4 / 34) + 2 * math.log(3 / 33) + math.log(2 / 32)) / 6
    assert bigram_loss(found, found) == pytest.approx(expected)
    assert bigram_loss(found, windows(["c"])) == pytest.approx(
        -(math.log(1 / 34) + math.log(1 / 34) + math.log(1 / 31)) / 3
    )
    with pytest.raises(ValueError, match="not 0 to train on and 3 to test on"):
        bigram_loss(found[:0], found)


# Training


def test_training_starts_from_given_weights() -> None:
    few = TRAINING[:64]
    start = train(few, HELD_OUT, Hyperparameters(epochs=3, batch_size=16)).state_dict
    hp = Hyperparameters(epochs=1, batch_size=64, learning_rate=1e-9, dropout=0.0)
    found = train(few, HELD_OUT, hp, start=start).epochs[0].held_out_loss
    assert found == pytest.approx(evaluate(CharLSTM.from_state_dict(start), HELD_OUT).loss, rel=1e-5)
    assert train(few, HELD_OUT, hp, start={}).epochs[0].held_out_loss != pytest.approx(found, rel=1e-2)


# Training in a gang


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_follow_one(gang: list[dict[str, Any]], case: str) -> None:
    """The first call also waits for the gang."""
    num_windows, batch_size = CASES[case]
    torch.testing.assert_close(gang[0][case][0].state_dict, gang[1][case][0].state_dict, rtol=0, atol=0)
    alone, log = _train_case(num_windows, 2 * batch_size)
    for rank in range(2):
        together, log_of_rank = gang[rank][case]
        assert _losses(log_of_rank) == pytest.approx(_losses(log), rel=1e-4)
        assert [record.step for record in log_of_rank] == [record.step for record in log]
        assert [metrics.samples_seen for metrics in together.epochs] == [num_windows] * 3
        for metrics, expected in zip(together.epochs, alone.epochs, strict=True):
            assert metrics.held_out_loss == pytest.approx(expected.held_out_loss, rel=1e-4)
            assert metrics.held_out_accuracy == pytest.approx(expected.held_out_accuracy, abs=0.01)
        assert together.state_dict.keys() == CharLSTM().state_dict().keys()
        torch.testing.assert_close(together.state_dict, alone.state_dict, rtol=0, atol=1e-4)


# Sampling


def test_sampled_names() -> None:
    """By a model that gives every position the same logits."""
    model = CharLSTM()
    with torch.no_grad():
        model.dense.weight.zero_()
        model.dense.bias.zero_()[[BLANK, STOP]] = 1.0
    names = sample_names(model, 40, exclude=[], seed=5)
    assert len(names) == len(set(names)) == 40
    assert all(sum(map(str.isalpha, name)) >= 2 and name == name.title() == name.strip() for name in names)
    assert set("".join(names).lower()) <= set(ALPHABET[2:])
    assert sample_names(model, 40, exclude=[], seed=5) == names
    assert sample_names(model, 40, exclude=[], seed=6) != names
