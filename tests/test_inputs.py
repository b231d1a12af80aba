"""Dataclasses as inputs: what is misspelt or of the wrong type is said, not dropped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from flytekitplugins.daskpytorch import StrictInputs


@dataclass
class Settings(StrictInputs):
    """A user's hyper-parameters."""

    epochs: int = 3
    learning_rate: float = 0.1
    layers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}: must be 1 or more")


def test_what_is_given_is_taken_and_the_rest_has_its_default() -> None:
    assert Settings.from_json('{"learning_rate": 1, "layers": [4, 2]}') == Settings(learning_rate=1.0, layers=[4, 2])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epoch": 5}, r"Settings has no 'epoch' \(did you mean 'epochs'\?\)\. It has: epochs, learning_rate, layers"),
        ({"lr": 1, "zzz": 2}, "no 'lr'.* and no 'zzz'"),
        ({"epochs": "many"}, "epochs='many' is not a"),
        ({"epochs": 0}, "epochs=0: must be 1 or more"),
        ([1], r"given as a JSON object of epochs, .*; got \[1\]"),
    ],
)
def test_errors_name_the_key_and_the_value(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.from_json(json.dumps(given))


def test_flytes_own_way_between_nodes_still_works() -> None:
    ctx = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(ctx, Settings(epochs=7), Settings, TypeEngine.to_literal_type(Settings))
    assert TypeEngine.to_python_value(ctx, literal, Settings) == Settings(epochs=7)
