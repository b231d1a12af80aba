"""The Deck's tabs of inputs and outputs hide secrets, escape text, make tables, and read no file."""

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import numpy as np
import pandas as pd
import pytest
import torch
from flytekit import FlyteFile
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.interface import transform_function_to_interface
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, LiteralMap
from pydantic import BaseModel

from flytekitplugins.daskpytorch.flyte.deck import tab_of
from flytekitplugins.daskpytorch.flyte.rank import FlyteRank
from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.report.pieces import shared

SECRET = "hush"


@dataclass(frozen=True)
class Store:
    endpoint: str = "https://s3.example"
    secret: str = SECRET


class Login(BaseModel):
    user: str = "ann"
    password: str = SECRET


class Pair(NamedTuple):
    hf_token: str
    number: int


@dataclass(frozen=True)
class Run:
    lr: float = 0.125
    store: Store = Store()
    logins: list[Login] = field(default_factory=lambda: [Login(), Login()])
    pair: Pair = field(default_factory=lambda: Pair(SECRET, 7))
    arguments: Any = field(default_factory=lambda: argparse.Namespace(api_key=SECRET, epochs=9))


def shown(value: Any, type_: Any = None, literal: Literal | None = None) -> str:
    """What a tab has of one value named `value`."""
    page = tab_of({"value": value}, {"value": type_}, {"value": literal} if literal is not None else {})
    return page.replace(shared(), "")


def texts(html: str) -> list[str]:
    return [text for text in re.sub(r"<[^>]*>", "\n", html).split("\n") if text.strip()]


@pytest.mark.parametrize(
    "value",
    [
        Run(),
        [Run()],
        {"nested": {"storage_options": {"key": SECRET}}},
        {"X-Api-Key": SECRET},
        f"postgres://ann:{SECRET}@db.example/names",
        [f"https://bucket.example/a.pt?X-Amz-Signature={SECRET}&part=1"],
        pd.DataFrame({"name": ["Bello"], "access_key": [SECRET]}),
    ],
)
def test_secrets_are_hidden_at_every_depth_and_all_else_is_shown(value: Any) -> None:
    html = shown(value)
    assert SECRET not in html
    assert "(hidden)" in html
    assert SECRET not in tab_of({"api_key": SECRET, "token": [SECRET]}, {}, {})


def test_what_is_no_secret_stays() -> None:
    assert texts(shown(Run()))[5:] == [
        "name", "value",
        "lr", "0.125",
        "store", "name", "value", "endpoint", "https://s3.example", "secret", "(hidden)",
        "logins", "user", "password", "ann", "(hidden)", "ann", "(hidden)",
        "pair", "name", "value", "hf_token", "(hidden)", "number", "7",
        "arguments",
    ]  # fmt: skip
    run = without_secrets(Run())
    assert isinstance(run, Run)
    assert run.arguments == argparse.Namespace(api_key="(hidden)", epochs=9)
    assert Run().store.secret == SECRET  # what is given is left as it is


def test_inputs_are_no_live_html() -> None:
    html = shown({"<b>name</b>": "<script>alert(1)</script>" * 20})
    assert "<b>" not in html
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_long_values_are_tables_below_a_click() -> None:
    assert "<details" not in shown([1, 2, 3])
    assert "[1, 2, 3]" in shown([1, 2, 3])
    rows = shown([{"lr": 0.5, "loss": float(i)} for i in range(40)])
    assert "<summary>40 entries</summary>" in rows
    assert texts(rows)[6:10] == ["lr", "loss", "0.5", "0"]
    many = shown(list(range(100_000)))
    assert "and 99,500 more" in many
    assert len(many) < 50_000
    assert "<summary>3,000 characters</summary>" in shown("words " * 500)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3), "torch.float32 (2, 3), 24 bytes"),
        (np.zeros(4), "float64 (4,), 32 bytes"),
        (torch.nn.Linear(3, 2), "8 parameters"),
        (b"1234", "4 bytes"),
        (pd.DataFrame({"a": range(30)}), "30 rows, 1 columns"),
        (1234567, "1,234,567"),
    ],
)
def test_large_values_are_shown_by_their_size(value: Any, text: str) -> None:
    assert text in texts(shown(value))


def test_a_data_frame_without_rows_is_shown_by_its_columns() -> None:
    found = texts(shown(pd.DataFrame({"name": [], 7: []})))
    assert found[-3:] == ["0 rows, 2 columns", "name", "7"]


def test_a_file_is_its_address_and_is_not_downloaded(tmp_path: Path) -> None:
    def download() -> NoReturn:
        raise AssertionError("downloaded")

    file = FlyteFile(str(tmp_path / "here"), downloader=download)
    literal = TypeEngine.to_literal(
        FlyteContextManager.current_context(), 3, int, TypeEngine.to_literal_type(int)
    )  # not a file's: no address
    assert texts(shown(file, literal=literal))[3:] == ["value", "FlyteFile"]
    (tmp_path / "model.pt").write_bytes(b"weights")
    ctx = FlyteContextManager.current_context()
    made = TypeEngine.to_literal(
        ctx, str(tmp_path / "model.pt"), FlyteFile | None, TypeEngine.to_literal_type(FlyteFile | None)
    )
    assert str(made.scalar.union.value.scalar.blob.uri) in shown(file, literal=made)


class Result(NamedTuple):
    names: list[str]


def only_names() -> Result:
    return Result(names=["Bello"])


def test_a_single_named_output_is_shown_without_its_tuple() -> None:
    interface = transform_function_to_interface(only_names)
    rank = FlyteRank.of_current_task("flows.train", interface, LiteralMap({}), results="", shows_outputs=True)
    found = texts(rank.outputs(only_names()).tab.replace(shared(), ""))
    assert found[found.index("names") :] == ["names", "list", "[Bello]"]


class Loud:
    def to_html(self, value: Any) -> str:
        if value == "bad":
            raise ValueError("cannot be drawn")
        return f"<b>{value}</b>"


class Unwilling(dict[str, int]):
    def items(self) -> NoReturn:  # type: ignore[override]
        raise ValueError("not now")


def test_the_users_own_renderer_is_used_and_no_failure_of_one_ends_anything() -> None:
    assert "<b>loud</b>" in shown("loud", Annotated[str, Loud()])
    assert "ValueError: cannot be drawn" in shown("bad", Annotated[str, Loud()])
    assert "(hidden)" in shown({"value": Unwilling(a=1)})
