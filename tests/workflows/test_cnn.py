"""The network for digits: its evaluation alone and in a real gang of three ranks.

`test_char_lstm.py` holds that a gang of several ranks trains like one rank, and `test_transfer.py` that it resumes bit
for bit.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses

from gangs import run_ranks
from tasks import cnn
from tasks.cnn import CNN, evaluate
from tasks.digits import DigitSet, small_digits

pytestmark = pytest.mark.usefixtures("one_thread")

DIGITS = small_digits(seed=0)
NUM_TEST = len(DIGITS.test)


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return values of `_run_cases` from each rank of a gang of three."""
    return run_ranks(_run_cases, 3, tmp_path_factory.mktemp("gang"))


def _run_cases(_: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"untrained": evaluate(_untrained(), DIGITS.test, batch_size=100)}
    found["few"] = evaluate(_untrained(), _first(2), batch_size=1)
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        group = cnn._group("gloo")
    found["other_group"] = evaluate(_untrained(), DIGITS.test, batch_size=100, group=group)
    return found


def _untrained() -> CNN:
    torch.manual_seed(0)
    return CNN()


def _first(count: int) -> DigitSet:
    return DigitSet(images=DIGITS.test.images[:count], labels=DIGITS.test.labels[:count])


# Evaluation


def test_alone_and_in_a_gang_every_image_counts_once(gang: list[dict[str, Any]]) -> None:
    logits = _untrained()(DIGITS.test.images)
    of_ranks = [rank[group] for rank in gang for group in ("untrained", "other_group")]
    for found in (evaluate(_untrained(), DIGITS.test, batch_size=100), *of_ranks):
        assert found.num_images == NUM_TEST
        assert found.loss == pytest.approx(F.cross_entropy(logits, DIGITS.test.labels).item(), rel=1e-5)
        assert found.accuracy == (logits.argmax(dim=1) == DIGITS.test.labels).double().mean().item()
        assert torch.equal(found.guesses, logits.argmax(dim=1))
        torch.testing.assert_close(found.scores, logits.softmax(dim=1))
    assert [rank["few"].num_images for rank in gang] == [2] * 3  # one rank has none
