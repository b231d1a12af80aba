"""What is written down beside a model's weights: how it was made, of what, how good it is. Runs in ordinary tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flytekitplugins.daskpytorch import report

DISTRIBUTION = "flytekitplugins-daskpytorch"


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The names that a model was trained and judged on."""

    source: str
    """The file, or `the embedded list`."""
    day: str
    """For which they were read, as 2026-01-31."""
    fingerprint: str
    """The SHA-256 of the sorted names: alike for the same names in another order."""
    num_names: int
    num_distinct: int
    num_new: int
    """Different names that were not among those of the champion of that day."""
    drift: float | None
    """How far the characters moved since that champion's names; None if there was no champion."""
    characters: dict[str, int]
    """How often each is in the names."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The challenger and the champion of its day on the same held-out names; losses in nats per character."""

    loss: float
    accuracy: float
    champion_loss: float | None
    """None if there was no champion."""
    champion_accuracy: float | None
    bigram_loss: float
    """Of a model that knows only the character before."""
    num_held_out: int
    """How many different names."""

    @property
    def gain(self) -> float | None:
        """By how much the challenger is better than the champion."""
        return None if self.champion_loss is None else self.champion_loss - self.loss


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """All that is known of a version."""

    data: DataFacts
    hp: dict[str, Any]
    """The fields of `Hyperparameters`."""
    start_from: str
    """What was asked for: `champion` or `scratch`."""
    start: str
    """The version whose weights it started from; empty: random ones."""
    champion: str
    """The champion that it was compared with; empty: there was none."""
    comparison: Comparison
    held_out: float
    """The fraction of the names that neither it, nor those that it came from, nor that champion was trained on."""
    state_sha256: str
    """Of the file of weights."""
    plugin_version: str
    git_version: str
    """Of the code, as `git describe` says it, with `-dirty` if it was changed since; empty where it is not known."""
    registered_version: str
    """The version under which the workflow was registered with Flyte; empty in a local run."""
    execution: str
    """Flyte's name of the execution."""
    wandb_url: str
    """The training's run in Weights & Biases; empty if it is not there."""

    @classmethod
    def from_dict(cls, card: Mapping[str, Any]) -> Self:
        """Read what `as_dict` gave, also by another release of this file.

        Raises:
            ValueError: It is no such card.
        """
        try:
            data = DataFacts(**_known(DataFacts, card["data"]))
            comparison = Comparison(**_known(Comparison, card["comparison"]))
            return cls(**(_known(cls, card) | {"data": data, "comparison": comparison}))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a card with the keys {sorted(card)} is no model card of workflows/retrain.py ({error}). The likely "
                "cause is a version that something else added to the registry; give the workflow a registry of its own."
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def has_recipe(self, fingerprint: str, hp: Mapping[str, Any], start_from: str) -> bool:
        """Whether it was trained as asked for, on the same names."""
        return (self.data.fingerprint, self.hp, self.start_from) == (fingerprint, dict(hp), start_from)

    def html(self) -> str:
        """Tables of a Deck."""
        made = {name: value for name, value in self.as_dict().items() if name not in ("data", "hp", "comparison")}
        data = {name: value for name, value in dataclasses.asdict(self.data).items() if name != "characters"}
        parts = {"Data": data, "Hyper-parameters": self.hp, "Made": made}
        return report.grid(*(report.card(title, _rows(values)) for title, values in parts.items()))


def plugin_version() -> str:
    """Of the installed plugin; empty if it runs from sources that are not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(DISTRIBUTION)
    return ""


def git_version() -> str:
    """Of the checkout that this file is in, else of the commit that the plugin was installed from; empty if unknown."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, no checkout, or somebody else's
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError):
        origin = json.loads(importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])
    return ""


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields: a newer release may have written more."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _rows(values: Mapping[str, Any]) -> str:
    return report.table(("", ""), [(name.replace("_", " "), _shown(value)) for name, value in values.items()])


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
