"""What a retraining decides by the registry: where the challenger starts, and whether it becomes the champion.

Runs in ordinary tasks, each of which may run again after it was killed anywhere: then it finds what it has done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.model_card import Comparison, ModelCard
from tasks.registry import ChampionChangedError, DamagedFileError, Promotion, Registry

logger = logging.getLogger(__name__)

STATE, NAMES = "model_state.pt", "names.json"
"""The files of a version."""
CHAMPION, SCRATCH = "champion", "scratch"
"""What a challenger may start from."""


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The model in use."""

    promotion: Promotion
    card: ModelCard
    names: set[str]
    """What it was trained on and judged by."""

    @property
    def version(self) -> str:
        """In the registry."""
        return self.promotion.version


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the challenger is to be the champion."""

    promotes: bool
    why: str


def find_champion(registry: Registry, folder: Path) -> Champion | None:
    """The champion; None if no model has been promoted yet. The folder is for its list of names."""
    promotion = registry.champion()
    if promotion is None:
        return None
    names = json.loads(registry.fetch(promotion.version, NAMES, folder).read_text())
    return Champion(promotion=promotion, card=ModelCard.from_dict(registry.card(promotion.version)), names=set(names))


def find_trained(registry: Registry, fingerprint: str, hp: Mapping[str, Any], start_from: str) -> ModelCard | None:
    """The newest model since the champion that was trained as asked for on the same names; None if there is none.

    Where it started a training of today is to start, too: then it is the same training, which Flyte's cache has. From
    the champion itself it would be another one every day, though nothing has changed.
    """
    cards = (card for _, card in _since_the_champion(registry))
    return next((card for card in cards if card.has_recipe(fingerprint, hp, start_from)), None)


def add(registry: Registry, files: Mapping[str, Path], card: ModelCard) -> str:
    """Have the model in the registry, once; returns its version."""
    for version, other in _since_the_champion(registry):
        same_recipe = other.has_recipe(card.data.fingerprint, card.hp, card.start_from)
        if same_recipe and other.state_sha256 == card.state_sha256:
            return version
    return registry.add(files, card.as_dict())


def judge(registry: Registry, version: str, comparison: Comparison, margin: float) -> Verdict:
    """Decide whether the version is good enough to be the champion."""
    history = registry.history()
    if history and history[-1].version == version:
        return Verdict(promotes=False, why="it is the champion itself: nothing has changed")
    if before := [promotion for promotion in history if promotion.version == version]:
        return Verdict(
            promotes=False,
            why=f"promotion {before[-1].number} made it the champion once, and it was replaced; promote it by hand if "
            "that is wanted again",
        )
    if not math.isfinite(comparison.loss):
        return Verdict(promotes=False, why=f"its loss is {comparison.loss}; train with a lower learning rate")
    gain = comparison.gain
    if gain is None:
        return Verdict(promotes=True, why="there was no champion")
    compared = (
        f"{comparison.loss:.4f} nats per character, the champion's {comparison.champion_loss:.4f}: "
        f"{abs(gain):.4f} {'better' if gain >= 0 else 'worse'}"
    )
    if gain > margin:
        return Verdict(promotes=True, why=f"{compared}, more than the margin of {margin}")
    return Verdict(promotes=False, why=f"{compared}, and it must be better by more than {margin}")


def promote(registry: Registry, version: str, why: str, *, instead_of: int) -> str:
    """Make the version the champion, unless another one was made it since; returns what has happened, in words.

    Args:
        registry: Has the version.
        version: The challenger.
        why: Goes into the registry's history.
        instead_of: The number of the promotion that the challenger was compared with; 0 if there was none.
    """
    compared = next((promotion for promotion in registry.history() if promotion.number == instead_of), None)
    try:
        champion = registry.promote(version, instead_of=compared, reason=why)
    except ChampionChangedError as error:
        return f"not promoted: {error}"
    return f"promoted: {champion.reason} (promotion {champion.number})"


def sha256(path: str | Path) -> str:
    """Of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _since_the_champion(registry: Registry) -> Iterator[tuple[str, ModelCard]]:
    """The champion and what came after it, newest first: older ones are of no use, and may be many.

    Nor is what cannot be read, which must not keep others from being trained.
    """
    champion, versions = registry.champion(), registry.versions()
    first = versions.index(champion.version) if champion is not None else 0
    for version in reversed(versions[first:]):
        try:
            card = ModelCard.from_dict(registry.card(version))
        except (DamagedFileError, ValueError) as error:
            logger.warning("version %s is passed over: %s", version, error)
            continue
        yield version, card
