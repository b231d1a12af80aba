"""Registries survive simultaneous retrainings, and failures of an S3 server. test_retrain_integration.py has kills."""

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fault_proxy import RESET, Answer, Fault, FaultProxy
from seaweed import Weed
from tasks.registry import ChampionChangedError, Registry

SUCCESS: Fault = lambda _: Answer(head=b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")  # noqa: E731
"""Whatever the server found."""


def conflict(_: Answer) -> Answer:
    body = b"<Error><Code>ConditionalRequestConflict</Code><Message>try again</Message></Error>"
    return Answer(head=b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n" % len(body), body=body)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where registries of a test are."""

    uri: str
    options: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    return Place(uri=str(tmp_path / "registries"))


@pytest.fixture
def bucket(weed: Weed) -> Place:
    weed.make_bucket("registries")
    return Place(uri=f"s3://registries/{uuid.uuid4().hex}", options=weed_options(weed))


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A folder with the states of two models."""
    folder = tmp_path / "states"
    folder.mkdir()
    for name in ("old", "new"):
        (folder / name).write_text(f"the {name} state")
    return folder


def weed_options(weed: Weed, **others: Any) -> dict[str, Any]:
    options = weed.options(**others)
    return {name: options[name] for name in ("key", "secret", "endpoint_url")}


def race(place: Place, states: Path, num_rounds: int) -> list[list[bool]]:
    """Two that promote at the same moment, again and again: for each, in which rounds it won."""
    together = threading.Barrier(2)

    def retrain_often(state: Path) -> list[bool]:
        registry = Registry(place.uri, place.options)
        return [retrains(registry, state) for _ in range(num_rounds)]

    def retrains(registry: Registry, state: Path) -> bool:
        champion = registry.champion()
        version = registry.add({"state.pt": state}, {"state": state.name})
        together.wait()
        try:
            registry.promote(version, instead_of=champion, reason=state.name)
        except ChampionChangedError:
            return False
        else:
            return True
        finally:
            together.wait()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(retrain_often, (states / "old", states / "new")))


def state_of(registry: Registry, version: str, folder: Path) -> str:
    """Which model a version is; fails unless all of it is there."""
    state = registry.card(version)["state"]
    assert registry.fetch(version, "state.pt", folder).read_text() == f"the {state} state"
    return str(state)


@pytest.mark.parametrize(("where", "num_rounds"), [("folder", 8), ("bucket", 4)])
def test_of_two_that_promote_at_once_one_wins_and_both_versions_are_kept(
    where: str, num_rounds: int, states: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(where)
    one, other = race(place, states, num_rounds)
    assert [won != lost for won, lost in zip(one, other, strict=True)] == [True] * num_rounds
    registry = Registry(place.uri, place.options)
    history = registry.history()
    assert [promotion.number for promotion in history] == list(range(1, num_rounds + 1))
    assert [promotion.previous for promotion in history] == [None, *(before.version for before in history[:-1])]
    assert [promotion.reason for promotion in history] == ["old" if won else "new" for won in one]
    kept = [state_of(registry, version, tmp_path / "fetched") for version in registry.versions()]
    assert sorted(kept) == ["new"] * num_rounds + ["old"] * num_rounds


@pytest.mark.parametrize(("fault", "num_requests"), [(RESET, 2), (conflict, 2)])
def test_a_promotion_whose_answer_is_lost_is_made_once(
    fault: Callable[[Answer], Answer], num_requests: int, weed: Weed, bucket: Place, states: Path, proxy: FaultProxy
) -> None:
    registry = Registry(bucket.uri, weed_options(weed, endpoint=proxy.endpoint))
    version = registry.add({"state.pt": states / "new"}, {"state": "new"})
    proxy.heal()
    proxy.fail(fault, key="promotions/00000001.json", times=1)
    promotion = registry.promote(version, instead_of=None, reason="the first")
    assert proxy.num_requests("promotions/00000001.json") > num_requests  # it was sent again, and then read
    assert Registry(bucket.uri, bucket.options).history() == [promotion]


def test_a_server_that_lets_two_create_one_object_is_refused(
    weed: Weed, bucket: Place, states: Path, proxy: FaultProxy
) -> None:
    proxy.fail(SUCCESS, key="/probes/")
    registry = Registry(bucket.uri, weed_options(weed, endpoint=proxy.endpoint))
    with pytest.raises(RuntimeError, match=r"let 5 of 5 create one object.*If-None-Match"):
        registry.add({"state.pt": states / "new"}, {})
    assert registry.versions() == []


def test_a_bucket_that_is_not_there_is_no_empty_registry(bucket: Place) -> None:
    registry = Registry("s3://no-such-bucket/models", bucket.options)
    for read in (registry.champion, registry.versions, registry.history):
        with pytest.raises(
            FileNotFoundError, match="the bucket of the registry s3://no-such-bucket/models does not exist"
        ):
            read()
