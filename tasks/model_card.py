"""Model cards: the origin, the data and the quality of a model's weights. Runs in ordinary tasks."""

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
    """Facts about the names on which a model was trained and evaluated."""

    source: str
    """URI of the file, or `the embedded list`."""
    day: str
    """Day of the names, in the form 2026-01-31."""
    fingerprint: str
    """SHA-256 of the sorted names. The order in the source has no effect."""
    num_names: int
    num_distinct: int
    num_new: int
    """Number of different names that the champion of that day did not have."""
    drift: float | None
    """Distance of the characters from those of that champion's names. None if no champion existed."""
    characters: dict[str, int]
    """Number of occurrences of each character in the names."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Losses of challenger and champion on the same held-out names, in nats per character."""

    loss: float
    accuracy: float
    champion_loss: float | None
    """Loss of the champion. None if no champion existed."""
    champion_accuracy: float | None
    bigram_loss: float
    """Loss of a model that knows only the previous character."""
    num_held_out: int
    """Number of different held-out names."""

    @property
    def gain(self) -> float | None:
        """Difference of the champion's loss and the challenger's. None if no champion existed."""
        return None if self.champion_loss is None else self.champion_loss - self.loss


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Description of a version of the model."""

    data: DataFacts
    hp: dict[str, Any]
    """Hyper-parameters: the fields of `Hyperparameters`."""
    start_from: str
    """Requested initial weights: `champion` or `scratch`."""
    start: str
    """Version whose weights the training started from. Empty: random weights."""
    champion: str
    """Champion in the comparison. Empty: no champion existed."""
    comparison: Comparison
    held_out: float
    """Fraction of the names on which neither this model, its ancestors nor that champion were trained."""
    state_sha256: str
    """SHA-256 of the file of weights."""
    plugin_version: str
    git_version: str
    """Output of `git describe` for the code, with `-dirty` after local changes. Empty if unknown."""
    registered_version: str
    """Version of the registered workflow in Flyte. Empty in a local run."""
    execution: str
    """Flyte's name of the execution."""
    wandb_url: str
    """Address of the training's run in Weights & Biases. Empty without a run."""

    @classmethod
    def from_dict(cls, card: Mapping[str, Any]) -> Self:
        """Read the output of `as_dict`, also of another release of this file.

        Raises:
            ValueError: The card lacks fields.
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
        """Return the card as a dict for JSON."""
        return dataclasses.asdict(self)

    def has_recipe(self, fingerprint: str, hp: Mapping[str, Any], start_from: str) -> bool:
        """Return True if the model was trained on the same names, with the same hyper-parameters and start."""
        return (self.data.fingerprint, self.hp, self.start_from) == (fingerprint, dict(hp), start_from)

    def html(self) -> str:
        """Return tables for a Deck."""
        made = {name: value for name, value in self.as_dict().items() if name not in ("data", "hp", "comparison")}
        data = {name: value for name, value in dataclasses.asdict(self.data).items() if name != "characters"}
        parts = {"Data": data, "Hyper-parameters": self.hp, "Made": made}
        return report.grid(*(report.card(title, _rows(values)) for title, values in parts.items()))


def plugin_version() -> str:
    """Return the version of the installed plugin. Empty if the plugin runs from sources."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(DISTRIBUTION)
    return ""


def git_version() -> str:
    """Return the version of this file's checkout, or the commit of the installed plugin. Empty if unknown."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, no checkout, or another user's checkout
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError):
        origin = json.loads(importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        return str(origin["vcs_info"]["commit_id"])
    return ""


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields. A newer release may have written more."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _rows(values: Mapping[str, Any]) -> str:
    return report.table(("", ""), [(name.replace("_", " "), _shown(value)) for name, value in values.items()])


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
