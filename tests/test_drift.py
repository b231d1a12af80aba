"""A retraining refuses new names whose distribution has changed too much."""

from __future__ import annotations

import math

import pytest

from tasks.drift import Limits, character_counts, check, drift
from tasks.embedded_names import EMBEDDED_NAMES
from tasks.model_card import DataFacts
from tasks.names import clean_names

NAMES = list(EMBEDDED_NAMES)


def facts(names: list[str]) -> DataFacts:
    return DataFacts(
        source="before",
        day="2026-01-01",
        fingerprint="",
        num_names=len(names),
        num_distinct=len(set(names)),
        num_new=0,
        drift=None,
        characters=character_counts(names),
    )


def test_drift_is_a_distance_from_0_to_1() -> None:
    assert drift({"a": 2, "b": 4}, {"a": 1, "b": 2}) == 0
    assert drift({"a": 1}, {"b": 3}) == 1
    # Against the mean of both, in bits: a half of 1 log2 (1 / 0.75), and a half of what {a: 0.5, b: 0.5} has.
    expected = math.sqrt((math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5 * math.log2(2)) / 2)
    assert drift({"a": 8}, {"a": 1, "b": 1}) == pytest.approx(expected)
    assert drift({"a": 1, "b": 1}, {"a": 8}) == pytest.approx(expected)


def test_names_like_those_before_pass() -> None:
    check(clean_names(NAMES, source="x"), Limits(), None)
    check(clean_names(NAMES, source="x"), Limits(), facts(NAMES[::2]))
    check(clean_names(NAMES[::2], source="x"), Limits(), facts(NAMES[1::2]))


@pytest.mark.parametrize(
    ("names", "limits", "before", "problem"),
    [
        (NAMES[:499], Limits(), None, "499 usable names, fewer than min_names=500"),
        (NAMES[:900], Limits(), NAMES, "900 names where the champion had 1,981, fewer than min_growth=0.5 times"),
        (NAMES + ["Ω"] * 221 + [""] * 5, Limits(), None, r"10\.2% of the 2,207 entries .*5 empty, 221 with characters"),
        (NAMES[:100] * 20, Limits(), None, r"95\.0% of the names are repetitions, more than max_repeated=0\.9"),
        ([name[0] * 5 for name in NAMES], Limits(max_repeated=1), NAMES, r"moved by 0\.\d+ .* max_drift=0\.15"),
    ],
)
def test_other_names_are_refused(names: list[str], limits: Limits, before: list[str] | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refusal:
        check(clean_names(names, source="s3://bucket/names.csv"), limits, facts(before) if before else None)
    assert str(refusal.value).startswith("the names from s3://bucket/names.csv are not trained on: ")
    assert ";" not in str(refusal.value).partition(". The champion stays.")[0]  # nothing else is wrong with them


def test_one_error_names_all_problems() -> None:
    names = ["qq"] * 99 + ["Ω"]
    limits = Limits(min_names=100, max_dropped=0, max_repeated=0.5, max_drift=0.1)
    with pytest.raises(ValueError, match=r"min_names.*max_dropped.*max_repeated.*min_growth.*max_drift"):
        check(clean_names(names, source="x"), limits, facts(NAMES))
