"""A model for each key of a data frame, on a real cluster."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pd = pytest.importorskip("pandas")
dd = pytest.importorskip("dask.dataframe")

from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangError, Wandb, current_rank, dispatch
from flytekitplugins.daskpytorch.sweep.storage import SweepStorage
from processes import dask_cluster

FRAME = pd.DataFrame({"store": [*"abcd"] * 6, "item": [1, 2] * 12, "sales": range(24)})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with dask_cluster(tmp_path_factory.mktemp("cluster"), num_workers=1) as running, Client(running.address) as client:
        yield client


@dataclass
class Fit:
    """A model's class that only the script has, and not the workers."""

    total: int
    world_size: int
    type: str


def fit(store: str, rows: Any) -> Fit:
    """The whole group's sum. Store c fails."""
    if store == "c":
        raise LookupError(f"no model of {len(rows)} rows")
    return Fit(int(rows["sales"].sum()), current_rank().world_size, type(rows).__module__.partition(".")[0])


@pytest.mark.parametrize("is_dask", [False, True], ids=["pandas", "dask"])
def test_each_model_gets_its_keys_rows_and_a_failed_key_is_a_row(
    client: Client, is_dask: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    frame = dd.from_pandas(FRAME, npartitions=5) if is_dask else FRAME
    table = dispatch.map(client, fit, frame.groupby("store"), models_per_worker=2).to_frame()
    assert "fit: starting 2 ranks" in capfd.readouterr().err
    assert [*table] == ["store", "total", "world_size", "type", "error"]
    assert [*table["store"]] == [*"abcd"]
    totals = FRAME.groupby("store")["sales"].sum()
    good = table[table["store"] != "c"]
    assert [*good["total"]] == [totals[store] for store in ("a", "b", "d")]
    assert {*good["world_size"]} == {2}
    assert {*good["type"]} == {"pandas"}
    assert good["error"].isna().all()
    [error] = table["error"].dropna()
    assert error.startswith("LookupError: no model of 6 rows (")
    assert "test_keys_integration.py:" in error


def test_models_that_were_trained_before_a_rank_was_killed_are_not_trained_again(
    client: Client, tmp_path: Path
) -> None:
    def train(key: tuple[str, int], _: Any) -> int:
        begun = tmp_path / "begun"
        with begun.open("a") as file:
            file.write(f"{key}\n")
        if len(begun.read_text().splitlines()) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.51)  # longer than results wait
        return os.getpid()

    models = dispatch.map(client, train, FRAME.groupby(["store", "item"]), gang=Gang(max_restarts=1))
    table = models.to_frame(100)
    assert models.done()
    assert [*table] == ["store", "item", "result", "error"]
    assert len(table) == 4
    assert table["result"].nunique() == 2
    begun = (tmp_path / "begun").read_text().splitlines()
    assert len(begun) == 5
    assert begun[3] == begun[4]


def test_storage_keeps_the_models_of_keys_whose_rows_are_unchanged(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = SweepStorage.note_keys
    monkeypatch.setattr(SweepStorage, "note_keys", lambda *args: (time.sleep(0.5), note(*args)))  # a slow disk

    def train(key: str, rows: Any, scale: int = 1) -> int:
        with (tmp_path / "trained").open("a") as file:
            file.write(key)
        if key == "b" and len(rows) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if key == "c" and len(rows) == 6:
            raise LookupError("no model")
        time.sleep(0.51)  # longer than results wait
        return scale * int(rows["sales"].sum())

    def trained(frame: Any, **bound: int) -> tuple[str, Any]:
        (tmp_path / "trained").write_text("")
        how: Any = {"storage": str(tmp_path / "kept"), "name": "stores", "gang": Gang(max_restarts=0)}
        models = dispatch.map(client, partial(train, **bound), frame.groupby("store"), **how)
        try:
            table = models.to_frame(100)
        except GangError:
            table = None
        return "".join(sorted((tmp_path / "trained").read_text())), table

    first, table = trained(FRAME.sort_values("store", ascending=False))
    assert table is None  # the rank of b was killed, after a model or two of other keys
    assert "b" in first
    known = set(first) - {"b", "c"}
    again, _ = trained(FRAME)
    assert known.isdisjoint(again)
    known |= set(again) - {"b", "c"}
    changed = FRAME[~((FRAME["store"] == "b") & (FRAME["item"] == 2) & (FRAME["sales"] > 20))]
    changed = changed[changed["sales"] != 1]
    second, table = trained(changed.sample(frac=1, random_state=1))  # the order of rows does not count
    assert set(second) == {*"abcd"} - known
    totals = changed.groupby("store")["sales"].sum()
    assert [*table["result"].dropna()] == [totals[store] for store in ("a", "b", "d")]
    third, table = trained(changed)
    assert third == "c"  # which has failed
    assert [*table["result"].dropna()] == [totals[store] for store in ("a", "b", "d")]
    with pytest.raises(ValueError, match=r"the function's argument scale was not there, and is 2"):
        trained(changed, scale=2)


def count(_: Any, rows: Any) -> int:
    return len(rows)


def changed(_: Any, rows: Any) -> int:
    return -len(rows)


def test_a_changed_function_trains_all_keys_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "__qualname__", "count")
    for train, result in ((count, 6), (changed, -6)):
        models = dispatch.map(client, train, FRAME.groupby("store"), storage=str(tmp_path), name="stores")
        assert {*models.to_frame()["result"]} == {result}


def test_keys_of_several_types_are_rows_too(client: Client) -> None:
    frame = pd.DataFrame({"store": ["a", 1, 1], "sales": range(3)})
    table = dispatch.map(client, count, frame.groupby("store", sort=False)).to_frame()
    assert dict(zip(table["store"], table["result"], strict=True)) == {"a": 1, 1: 2}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (FRAME.groupby(FRAME["item"] // 2), "grouped by names of its columns"),
        (FRAME.groupby("store")["sales"], "a whole frame"),
        (FRAME.iloc[:0].groupby("store"), "the frame has no rows"),
        (dd.from_pandas(FRAME.iloc[:0], npartitions=1).groupby("store"), "the frame has no rows"),
    ],
)
def test_other_groups_are_refused(client: Client, rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch.map(client, fit, rows)


def test_arguments_for_experiments_are_refused_for_frames_and_the_other_way_round(client: Client) -> None:
    with pytest.raises(ValueError, match=r"wandb=.*workers=2"):
        dispatch.map(client, fit, FRAME.groupby("store"), wandb=Wandb(project="x"), workers=2)
    with pytest.raises(ValueError, match="models_per_worker"):
        dispatch.map(client, fit, [1], models_per_worker=2)
    with pytest.raises(TypeError, match="argument"):
        dispatch.map(client, print_one, FRAME.groupby("store"))


def print_one(_: Any) -> None:
    """Take no rows."""
