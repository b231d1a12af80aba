"""Decisions of a retraining: the challenger's initial weights, and its promotion.

Runs in ordinary tasks. A task that was killed runs again and finds its earlier results in the registry.
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
"""Names of a version's files."""
CHAMPION, SCRATCH = "champion", "scratch"
"""Choices for the challenger's initial weights."""


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The champion: the model in use."""

    promotion: Promotion
    card: ModelCard
    names: set[str]
    """Names on which the champion was trained and evaluated."""

    @property
    def version(self) -> str:
        """Id of the version in the registry."""
        return self.promotion.version


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Decision about the challenger's promotion, with its reason."""

    promotes: bool
    why: str


def find_champion(registry: Registry, folder: Path) -> Champion | None:
    """Return the champion, or None before the first promotion. The folder receives its list of names."""
    promotion = registry.champion()
    if promotion is None:
        return None
    names = json.loads(registry.fetch(promotion.version, NAMES, folder).read_text())
    return Champion(promotion=promotion, card=ModelCard.from_dict(registry.card(promotion.version)), names=set(names))


def find_trained(registry: Registry, fingerprint: str, hp: Mapping[str, Any], start_from: str) -> ModelCard | None:
    """Return the newest model since the champion with this recipe on the same names, or None.

    A training of today uses the same initial weights as that model, so Flyte's cache has its result. Initial weights
    from the champion would make a new training every day, even without changes.
    """
    cards = (card for _, card in _since_the_champion(registry))
    return next((card for card in cards if card.has_recipe(fingerprint, hp, start_from)), None)


def add(registry: Registry, files: Mapping[str, Path], card: ModelCard) -> str:
    """Add the model to the registry unless it has the same model already. Return the version."""
    for version, other in _since_the_champion(registry):
        same_recipe = other.has_recipe(card.data.fingerprint, card.hp, card.start_from)
        if same_recipe and other.state_sha256 == card.state_sha256:
            return version
    return registry.add(files, card.as_dict())


def judge(registry: Registry, version: str, comparison: Comparison, margin: float) -> Verdict:
    """Decide whether the version becomes the champion."""
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
    """Make the version the champion, unless another was promoted since. Return the result in words.

    Args:
        registry: The registry that contains the version.
        version: The challenger.
        why: Reason for the registry's history.
        instead_of: Number of the promotion of the compared champion. 0 if no champion existed.
    """
    compared = next((promotion for promotion in registry.history() if promotion.number == instead_of), None)
    try:
        champion = registry.promote(version, instead_of=compared, reason=why)
    except ChampionChangedError as error:
        return f"not promoted: {error}"
    return f"promoted: {champion.reason} (promotion {champion.number})"


def sha256(path: str | Path) -> str:
    """Return the SHA-256 checksum of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _since_the_champion(registry: Registry) -> Iterator[tuple[str, ModelCard]]:
    """Yield the champion and the later versions, newest first.

    Older versions have no use here, and may be many. Unreadable versions are skipped, so that they do not block other
    trainings.
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
