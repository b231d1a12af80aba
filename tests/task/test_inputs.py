"""Dataclass inputs: a misspelt key or a value of the wrong type is an error, and never dropped."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from flytekitplugins.daskpytorch import StrictInputs
from flytekitplugins.daskpytorch.task.config import refuse_unknown


@dataclass
class Settings(StrictInputs):
    """A user's hyper-parameters."""

    epochs: int = 3
    learning_rate: float = 0.1
    layers: list[int] = field(default_factory=list)
    names: tuple[str, ...] = ()
    shuffle: bool = True
    optimizer: str = "adam"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}: must be 1 or more")


def test_what_is_given_is_taken_and_the_rest_has_its_default() -> None:
    assert Settings.from_json('{"learning_rate": 1, "layers": [4, 2]}') == Settings(learning_rate=1.0, layers=[4, 2])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"epoch": 5},
            r"Settings has no 'epoch' \(did you mean 'epochs'\?\)\. It has: epochs, learning_rate, layers, ",
        ),
        ({"lr": 1, "zzz": 2}, "no 'lr'.* and no 'zzz'"),
        ({"epochs": 1.9}, "epochs=1.9 is not a int"),
        ({"epochs": True}, "epochs=True is not a int"),
        ({"learning_rate": "0.1"}, "learning_rate='0.1' is not a float"),
        ({"layers": [4, 2.5]}, r"layers=\[4, 2.5\] is not a list\[int\]"),
        ({"layers": {}}, r"layers=\{\} is not a list\[int\]"),
        ({"names": "adam"}, r"names='adam' is not a tuple\[str, \.\.\.\]"),
        ({"shuffle": 1}, "shuffle=1 is not a bool"),
        ({"optimizer": 5}, "optimizer=5 is not a str"),
        ("x" * 100_000, r"='x{199}\.\.\. \(100002 characters\): must be a JSON object"),
        ({"epochs": 0}, "epochs=0: must be 1 or more"),
    ],
)
def test_errors_name_the_key_and_the_value(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.from_json(json.dumps(given))


def test_numbers_that_are_worth_the_same_are_taken() -> None:
    """Flyte's console and older backends have whole numbers as 3.0."""
    given = Settings.from_json('{"epochs": 3.0, "learning_rate": 1, "seed": null}')
    assert (given.epochs, type(given.epochs), type(given.learning_rate)) == (3, int, float)


def test_flytes_own_way_between_nodes_still_works() -> None:
    ctx = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(ctx, Settings(epochs=7), Settings, TypeEngine.to_literal_type(Settings))
    assert TypeEngine.to_python_value(ctx, literal, Settings) == Settings(epochs=7)


# ---- Dataclasses that know nothing of us ----------------------------------------------------------------------------


@dataclass
class Plain:
    """As flytekit takes it."""

    epochs: int = 3
    learning_rate: float = 0.1


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (["--hp", '{"epohcs": 1}'], Plain()),
        (['--hp={"epohcs": 1, "learning_rate": 1}'], Plain(learning_rate=1.0)),
    ],
)
def test_misspelt_key_of_a_plain_dataclass_is_refused(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], value: Plain
) -> None:
    monkeypatch.setattr(sys, "argv", ["pyflyte", "run", "train.py", "train", *typed])
    with pytest.raises(ValueError, match=r"^Plain has no 'epohcs' \(did you mean 'epochs'\?\). It has: epochs, learn"):
        refuse_unknown({"hp": value, "limit": 3})


@pytest.mark.parametrize(
    ("typed", "inputs"),
    [
        (["--hp", '{"epochs": 1}'], {"hp": Plain(epochs=1)}),
        (["--other", '{"epohcs": 1}'], {"hp": Plain()}),
        (["--hp", '{"epohcs": 1, "epochs": 7}'], {"hp": Plain(epochs=2)}),  # it came from elsewhere
        (["--hp", "settings.json"], {"hp": Plain()}),
        (["--hp", '{"epohcs": 1}'], {"hp": {"epohcs": 1}}),
        (["--hp"], {"hp": Plain()}),
    ],
)
def test_what_was_not_typed_for_the_input_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], inputs: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pyflyte", "run", "train.py", "train", *typed])
    refuse_unknown(inputs)
