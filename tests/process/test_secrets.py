"""Inputs on the training's page and in trackers: secrets are hidden at every depth."""

import argparse
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from flytekitplugins.daskpytorch.display.training import plain_inputs
from flytekitplugins.daskpytorch.process.streams import without_secrets

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


@pytest.mark.parametrize(
    "value",
    [
        Run(),
        [Run()],
        {"nested": {"storage_options": {"key": SECRET}}},
        {"X-Api-Key": SECRET},
        *({name: SECRET} for name in ("secret", "aws_secret_access_key", "access_key_id", "api_key", "wandb_api_key")),
        *({name: SECRET} for name in ("hf_token", "db_password")),
        f"postgres://ann:{SECRET}@db.example/names",
        [f"https://bucket.example/a.pt?X-Amz-Signature={SECRET}&part=1"],
    ],
)
def test_secrets_are_hidden_at_every_depth_and_all_else_is_shown(value: Any) -> None:
    shown = str(plain_inputs({"value": value}))
    assert SECRET not in shown
    assert "(hidden)" in shown
    assert SECRET not in str(plain_inputs({"api_key": SECRET, "token": [SECRET]}))


def test_what_is_no_secret_stays() -> None:
    run = without_secrets(Run())
    assert isinstance(run, Run)
    assert (run.lr, run.store, run.pair.number) == (0.125, Store(secret="(hidden)"), 7)
    assert [each.user for each in run.logins] == ["ann", "ann"]
    assert run.arguments == argparse.Namespace(api_key="(hidden)", epochs=9)
    assert Run().store.secret == SECRET  # what is given is left as it is


class Unwilling(dict[str, int]):
    def items(self) -> None:  # type: ignore[override]
        raise ValueError("not now")


def test_a_value_that_cannot_be_read_is_hidden() -> None:
    assert plain_inputs({"value": Unwilling(a=1)}) == {"value": "(hidden)"}
