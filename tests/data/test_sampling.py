"""Splits share no equal items between training and test."""

import math
import random
from typing import Any

import pytest

from flytekitplugins.daskpytorch.data.rank_loader import split_by_class

LABELS = [index % 7 for index in range(1_000)]


def test_every_class_gives_the_same_share() -> None:
    training, held_out = split_by_class(LABELS, 0.2, seed=3)
    assert sorted(training + held_out) == list(range(1_000))
    for label in range(7):
        num_held_out = sum(LABELS[index] == label for index in held_out)
        assert num_held_out == round(0.2 * LABELS.count(label))


def test_splits_depend_on_the_seed_alone() -> None:
    assert split_by_class(LABELS, seed=1) == split_by_class(LABELS, seed=1)
    assert split_by_class(LABELS, seed=1) != split_by_class(LABELS, seed=2)


def test_equal_contents_are_on_one_side() -> None:
    chance = random.Random(0)
    contents = [str(chance.randrange(300)) for _ in LABELS]  # also in several classes
    training, held_out = split_by_class(LABELS, 0.3, contents=contents)
    assert not {contents[index] for index in training} & {contents[index] for index in held_out}
    assert 0.2 < len(held_out) / len(LABELS) < 0.4


def test_new_items_move_few_others() -> None:
    contents = [f"content {index}" for index in range(1_000)]
    before, after = (set(split_by_class(LABELS[:count], contents=contents[:count])[1]) for count in (900, 1_000))
    assert len(before - after) < 10
    assert len({index for index in after - before if index < 900}) < 10


@pytest.mark.parametrize(
    "labels, held_out, seed, message",
    [
        ([], 0.2, 0, "the data set is empty"),
        *(([0, 1], wrong, 0, r"held_out=.*: must be a share above 0") for wrong in (1.0, "0.2", None, True, math.nan)),
        *(([0, 1], 0.5, wrong, r"seed=.*: must be a whole number of at most 63 bits") for wrong in (1.0, 2**63)),
        ([0, 1, 2], 0.2, 0, "leaves nothing to test on: the largest class has 1 items"),
    ],
)
def test_what_cannot_be_split_is_refused(labels: list[int], held_out: Any, seed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_class(labels, held_out, seed)
