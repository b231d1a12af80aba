"""A retraining promotes or rejects its new model correctly, in a registry in a local folder."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import challenger
from tasks.challenger import NAMES, STATE
from tasks.drift import Limits, character_counts, check, drift
from tasks.embedded_names import EMBEDDED_NAMES
from tasks.model_card import Comparison, DataFacts, ModelCard, git_version, plugin_version
from tasks.names import clean_names
from tasks.registry import Registry

COMPARISON = Comparison(
    loss=2.0, accuracy=0.3, champion_loss=2.1, champion_accuracy=0.2, bigram_loss=2.5, num_held_out=100
)
CARD = ModelCard(
    data=DataFacts(
        source="names.csv",
        day="2026-01-01",
        fingerprint="one",
        num_names=2,
        num_distinct=2,
        num_new=2,
        drift=None,
        characters={"a": 1},
    ),
    hp={"epochs": 1},
    start_from="champion",
    start="",
    champion="",
    comparison=COMPARISON,
    held_out=0.1,
    state_sha256="one",
    plugin_version=plugin_version(),
    git_version=git_version(),
    registered_version="",
    execution="local",
    wandb_url="",
)
OTHER = replace(CARD, data=replace(CARD.data, fingerprint="other"), state_sha256="other", start="one")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(str(tmp_path / "registry"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / STATE).write_bytes(b"weights")
    (tmp_path / NAMES).write_text(json.dumps(["bella", "max"]))
    return {name: tmp_path / name for name in (STATE, NAMES)}


def promoted(registry: Registry, version: str) -> str:
    champion = registry.champion()
    return challenger.promote(registry, version, "why not", instead_of=champion.number if champion else 0)


def test_a_card_is_read_as_it_was_written_and_by_an_older_release(registry: Registry, files: dict[str, Path]) -> None:
    version = registry.add(files, {**CARD.as_dict(), "news": 1, "data": {**CARD.as_dict()["data"], "news": 2}})
    assert ModelCard.from_dict(registry.card(version)) == CARD
    with pytest.raises(ValueError, match=r"no model card of workflows/retrain\.py"):
        ModelCard.from_dict({"state": "new"})
    assert all(text in CARD.html() for text in ("names.csv", "epochs", "plugin version"))


def test_a_damaged_version_keeps_nobody_from_training(
    registry: Registry, files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, strange = challenger.add(registry, files, OTHER), registry.add(files, {"made by": "hand"})
    (tmp_path / "registry" / "versions" / damaged / "card.json").write_text("{}")
    version = challenger.add(registry, files, CARD)
    assert challenger.add(registry, files, CARD) == version
    assert all(f"{name} is passed over: " in caplog.text for name in (damaged, strange))


def test_an_unchanged_day_starts_where_its_model_started(registry: Registry, files: dict[str, Path]) -> None:
    assert challenger.find_trained(registry, "one", {"epochs": 1}, "champion") is None
    one = challenger.add(registry, files, CARD)
    promoted(registry, one)
    other = challenger.add(registry, files, OTHER)  # whether or not it is promoted
    assert challenger.find_trained(registry, "one", {"epochs": 1}, "champion") == CARD
    assert challenger.find_trained(registry, "other", {"epochs": 1}, "champion") == OTHER
    assert challenger.find_trained(registry, "other", {"epochs": 2}, "champion") is None
    assert challenger.find_trained(registry, "other", {"epochs": 1}, "scratch") is None
    promoted(registry, other)
    assert challenger.find_trained(registry, "one", {"epochs": 1}, "champion") is None  # older than the champion


def test_who_is_better_by_the_margin_is_promoted(registry: Registry, files: dict[str, Path]) -> None:
    one = challenger.add(registry, files, CARD)
    first = replace(COMPARISON, champion_loss=None, champion_accuracy=None)
    assert challenger.judge(registry, one, first, margin=0.5).promotes
    assert not challenger.judge(registry, one, replace(first, loss=float("nan")), margin=0.5).promotes
    promoted(registry, one)
    other = challenger.add(registry, files, OTHER)
    assert challenger.judge(registry, other, COMPARISON, margin=0.09).promotes
    verdict = challenger.judge(registry, other, COMPARISON, margin=0.11)
    assert not verdict.promotes
    assert "2.0000 nats per character, the champion's 2.1000: 0.1000 better, and it must be better by" in verdict.why
    assert not challenger.judge(registry, other, replace(COMPARISON, loss=2.1), margin=0).promotes
    assert not challenger.judge(registry, other, replace(COMPARISON, loss=float("nan")), margin=0).promotes


# ---- Names whose distribution has changed too much


GIVEN = list(EMBEDDED_NAMES)


def facts(names: list[str]) -> DataFacts:
    return replace(CARD.data, num_names=len(names), characters=character_counts(names))


def test_drift_is_a_distance_from_0_to_1() -> None:
    assert drift({"a": 2, "b": 4}, {"a": 1, "b": 2}) == 0
    assert drift({"a": 1}, {"b": 3}) == 1
    # Against the mean of both, in bits: a half of 1 log2 (1 / 0.75), and a half of what {a: 0.5, b: 0.5} has.
    expected = math.sqrt((math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5 * math.log2(2)) / 2)
    assert drift({"a": 8}, {"a": 1, "b": 1}) == pytest.approx(expected)
    assert drift({"a": 1, "b": 1}, {"a": 8}) == pytest.approx(expected)


def test_names_like_those_before_pass() -> None:
    check(clean_names(GIVEN, source="x"), Limits(), None)
    check(clean_names(GIVEN, source="x"), Limits(), facts(GIVEN[::2]))
    check(clean_names(GIVEN[::2], source="x"), Limits(), facts(GIVEN[1::2]))
