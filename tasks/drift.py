"""Checks of new names: their number, cleanness and likeness to earlier names. Runs in ordinary tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flytekitplugins.daskpytorch import StrictInputs
from tasks.checks import is_between, is_whole, raise_if_wrong
from tasks.model_card import DataFacts
from tasks.names import NAME_CHARACTERS, CleanNames


@dataclass
class Limits(StrictInputs):
    """Limits that new names must keep."""

    min_names: int = 500
    """Minimum number of usable names. A smaller number means a failed export."""
    min_growth: float = 0.5
    """Minimum number of names, as a multiple of the number that the champion was trained on."""
    max_dropped: float = 0.1
    """Largest share of entries that are empty or have characters outside the alphabet, from 0 to 1."""
    max_repeated: float = 0.9
    """Largest share of repeated names, from 0 to 1. Some pets' names are common."""
    max_drift: float = 0.15
    """Largest distance of the characters from those of the champion's names, by `drift`, from 0 to 1."""

    def __post_init__(self) -> None:
        share = "a fraction from 0 to 1"
        checks = {
            "min_names": (is_whole(self.min_names, 1), "a whole number from 1 up"),
            "min_growth": (self.min_growth == 0 or is_between(self.min_growth, 0, math.inf), "a number from 0 up"),
            "max_dropped": (_is_share(self.max_dropped), share),
            "max_repeated": (_is_share(self.max_repeated), share),
            "max_drift": (_is_share(self.max_drift), share),
        }
        raise_if_wrong(self, checks)


def character_counts(names: Iterable[str]) -> dict[str, int]:
    """Return the number of occurrences of each character in the names."""
    return dict(sorted(Counter("".join(names)).items()))


def drift(characters: Mapping[str, int], before: Mapping[str, int]) -> float:
    """Return the Jensen-Shannon distance of two distributions of characters to base 2: 0 if equal, 1 if disjoint."""
    from scipy.spatial.distance import jensenshannon  # here because only the task `prepare` needs it

    alphabet = sorted(NAME_CHARACTERS)
    counts = [[some.get(character, 0) for character in alphabet] for some in (characters, before)]
    return float(jensenshannon(*counts, base=2))


def check(loaded: CleanNames, limits: Limits, before: DataFacts | None) -> None:
    """Check new names against the limits.

    Args:
        loaded: The new names.
        limits: The limits.
        before: Facts about the champion's names. None if no champion exists.

    Raises:
        ValueError: The names break limits. The message lists all broken limits with their values.
    """
    if problems := _problems(loaded, limits, before):
        raise ValueError(
            f"the names from {loaded.source} are not trained on: {'; '.join(problems)}. The champion stays. "
            "The likely cause is an export that broke off or has another content; see to it, or, if the names are as "
            "they should be, give wider limits."
        )


def _problems(loaded: CleanNames, limits: Limits, before: DataFacts | None) -> list[str]:
    num_names = len(loaded.names)
    num_dropped = loaded.num_empty + loaded.num_outside
    num_repeated = num_names - len(set(loaded.names))
    problems = []
    if num_names < limits.min_names:
        problems.append(f"{num_names:,} usable names, fewer than min_names={limits.min_names}")
    if num_dropped > limits.max_dropped * loaded.num_read:
        problems.append(
            f"{num_dropped / loaded.num_read:.1%} of the {loaded.num_read:,} entries are no names "
            f"({loaded.num_empty:,} empty, {loaded.num_outside:,} with characters outside the alphabet), more than "
            f"max_dropped={limits.max_dropped}"
        )
    if num_repeated > limits.max_repeated * num_names:
        problems.append(
            f"{num_repeated / num_names:.1%} of the names are repetitions, more than max_repeated={limits.max_repeated}"
        )
    if before is not None:
        problems += _problems_since(loaded, limits, before)
    return problems


def _problems_since(loaded: CleanNames, limits: Limits, before: DataFacts) -> list[str]:
    problems = []
    if len(loaded.names) < limits.min_growth * before.num_names:
        problems.append(
            f"{len(loaded.names):,} names where the champion had {before.num_names:,}, fewer than "
            f"min_growth={limits.min_growth} times as many"
        )
    if (moved := drift(character_counts(loaded.names), before.characters)) > limits.max_drift:
        problems.append(
            f"the characters have moved by {moved:.3f} (Jensen-Shannon distance) since the champion's names, more than "
            f"max_drift={limits.max_drift}"
        )
    return problems


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1
