"""`dispatch.map(storage=...)`: files of a sweep, their use by the next call, and errors about differences."""

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pytest
from distributed import Client

from flytekitplugins.daskpytorch import Gang, StoppedEarlyError, dispatch
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, digest_of
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.sweep.storage import ModelStorage, SweepStorage
from others import give_away

RECORDS = [LogRecord(rank=0, step=step, num_steps=None, time=0.0, metrics={"loss": 1.0 / step}) for step in (1, 2)]
STOPPED = StoppedEarlyError("experiment 1 of 2 was stopped early", epoch=1, metric="loss", value=0.5)


@dataclass(frozen=True)
class Experiment:
    lr: float
    tags: frozenset[str] = frozenset()


class Opaque:
    """Equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value


def train(experiment: object, data: object = None, hp: object = None) -> None:
    """Is never called."""


def other(experiment: object) -> None:
    """Nor is this one."""


@pytest.fixture(params=["folder", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def model_of(storage: SweepStorage, index: int, experiment: object) -> ModelStorage:
    return storage.model(index, lambda: {"experiment": experiment, "records": RECORDS})


def leave(storage: SweepStorage, experiments: list[Any], function: Callable[..., Any] = train) -> None:
    """One model for each, which has ended."""
    storage.open(function, experiments)
    for index, experiment in enumerate(experiments):
        model_of(storage, index, experiment).note_end(f"result {index}", None, pytest.fail)


def test_who_was_stopped_and_then_trained_on_for_a_while_has_the_later_records(tmp_path: Path) -> None:
    storage = SweepStorage(str(tmp_path), "grid")
    storage.model(0, lambda: {"experiment": 1, "records": RECORDS[:1]}).note_end(None, STOPPED, pytest.fail)
    model_of(storage, 0, 1).note_progress()
    kept = storage.open(train, [1])[0]
    assert kept.stopped is not None
    assert kept.records == RECORDS


def test_checkpoints_lie_beside_it_and_come_after_the_records(uri: str, tmp_path: Path) -> None:
    model = model_of(SweepStorage(uri, "grid"), 7, 1)
    path = tmp_path / "state.pt"
    path.write_bytes(b"a state")
    file = CheckpointEntry(attempt=1, step=5, size=7, digest=digest_of(path))
    vault = Vault(Gang(), model.paths, tmp_path)
    path.rename(tmp_path / file.name)
    vault.add(file)
    assert vault.flush(60)
    vault.worker.close()
    fs, folder = fsspec.url_to_fs(f"{uri}/grid/7")
    assert sorted(name.rpartition("/")[2] for name in fs.find(folder)) == sorted(["begun.pkl", MANIFEST, file.name])
    assert SweepStorage(uri, "grid").open(train, [])[7].records == RECORDS
    (tmp_path / "disk").mkdir()
    vault = Vault(Gang(), model.paths, tmp_path / "disk")
    found = vault.restore()
    assert found is not None
    assert vault.flush(60)
    vault.worker.close()
    assert (found.step, (tmp_path / "disk" / found.name).read_bytes()) == (5, b"a state")


@pytest.mark.usefixtures("s3")
def test_an_address_that_is_none_is_named_with_the_setting() -> None:
    told = (
        r"^dispatch\.map\(storage=\.\.\.\): s3://not-there/grid cannot be used \(FileNotFoundError: .*Check the address"
    )
    with pytest.raises(FileNotFoundError, match=told):
        SweepStorage("s3://not-there", "grid").open(train, [Experiment(0.1)])


def test_storage_that_fails_harms_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, said = SweepStorage(str(tmp_path), "grid"), []
    monkeypatch.setattr(storage.files, "write", Mock(side_effect=OSError("full")))
    model_of(storage, 1, 1).note_end("a result", None, said.append)
    assert said[-1].endswith("(OSError: full); a repeated call trains it again")


# ---- Is it the same call?


@pytest.mark.parametrize(
    ("kept", "given"),
    [
        ({"lr": 0.1, "n": 1}, {"n": 1, "lr": 0.1}),
        (Experiment(0.1, frozenset("abc")), Experiment(0.1, frozenset("cba"))),
        ({"x": float("nan")}, {"x": float("nan")}),
        ({"x": np.arange(3)}, {"x": np.arange(3)}),
        (Opaque("ab"), Opaque("ab")),
        (Opaque({"k": [1, 2]}), Opaque({"k": [1, 2]})),
        (len, len),
    ],
)
def test_equal_experiments_are_equal_however_they_compare(tmp_path: Path, kept: Any, given: Any) -> None:
    leave(SweepStorage(str(tmp_path), "grid"), [kept])
    assert list(SweepStorage(str(tmp_path), "grid").open(train, [given])) == [0]


@pytest.mark.parametrize(
    ("kept", "given", "said"),
    [
        ({"lr": 0.1, "n": 1}, {"lr": 0.2, "n": 1}, r"experiment 0: lr was 0\.1, and is 0\.2\. Experiments"),
        ({"lr": 0.1}, {"lr": 0.1, "n": 2}, r"experiment 0: n was not there, and is 2"),
        (Experiment(0.1), Experiment(0.3), r"experiment 0: lr was 0\.1, and is 0\.3"),
        ({"x": np.arange(3)}, {"x": np.arange(4)}, r"experiment 0: x was array\(\[0, 1, 2\]\), and is array"),
        (Opaque("ab"), Opaque("ac"), r"experiment 0: experiment was <"),
        ({"api_key": "one"}, {"api_key": "two"}, r"api_key was '\(hidden\)', and is '\(hidden\)'"),
    ],
)
def test_other_experiments_are_refused_and_told(tmp_path: Path, kept: Any, given: Any, said: str) -> None:
    leave(SweepStorage(str(tmp_path), "grid"), [kept])
    with pytest.raises(ValueError, match=said):
        SweepStorage(str(tmp_path), "grid").open(train, [given])


def test_only_what_has_begun_must_be_the_same(tmp_path: Path) -> None:
    leave(SweepStorage(str(tmp_path), "grid"), [1, 2])
    assert sorted(SweepStorage(str(tmp_path), "grid").open(train, [1, 2, 30, 40])) == [0, 1]
    assert sorted(SweepStorage(str(tmp_path), "grid").open(train, [1])) == [0, 1]


def test_another_function_is_refused_and_told(tmp_path: Path) -> None:
    leave(SweepStorage(str(tmp_path), "grid"), [1])
    with pytest.raises(ValueError, match=f"{tmp_path}/grid are of another call: the function was 'train'"):
        SweepStorage(str(tmp_path), "grid").open(other, [1])


def test_arguments_that_are_bound_to_the_function_belong_to_it(tmp_path: Path) -> None:
    many = list(range(100_000))
    leave(SweepStorage(str(tmp_path), "grid"), [1], functools.partial(train, hp={"epochs": 3}, data=many))
    same = functools.partial(functools.partial(train, data=many), hp={"epochs": 3})
    assert 0 in SweepStorage(str(tmp_path), "grid").open(same, [1])
    assert (tmp_path / "grid" / "call.pkl").stat().st_size < 1_000
    with pytest.raises(ValueError, match=r"argument hp was \{'epochs': 3\}, and is \{'epochs': 5\}"):
        SweepStorage(str(tmp_path), "grid").open(functools.partial(train, hp={"epochs": 5}), [1])


def test_what_cannot_be_unpickled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(SweepStorage(str(tmp_path), "grid"), [Opaque(1)])
    monkeypatch.delattr(f"{__name__}.Opaque")
    with pytest.raises(
        ValueError, match=r"grid/0/outcome\.pkl cannot be read \(AttributeError: .*does its class still exist"
    ):
        SweepStorage(str(tmp_path), "grid").open(train, [1])


# ---- What `map` refuses


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"storage": 5}, r"storage=5\): must be None, a folder or a URL"),
        ({"storage": ""}, r"storage=''\): must be"),
        ({"storage": "kept", "name": "a/b"}, r"name='a/b'\): must be None, up to 100"),
        ({"name": "grid"}, r"name='grid'\): must be None without storage"),
    ],
)
def test_a_place_that_is_none(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dispatch.map(Client.__new__(Client), train, [1], **arguments)


@pytest.mark.parametrize("who", ["owns", "can write to"])
@pytest.mark.parametrize("what", [".", "call.pkl", "0", "0/outcome.pkl"])
def test_what_another_user_may_have_written_is_not_read(tmp_path: Path, what: str, who: str) -> None:
    storage = SweepStorage(str(tmp_path), "sweep")
    storage.open(train, ["a"])
    storage.model(0, lambda: {"experiment": "a", "records": RECORDS}).note_end(1.0, None, print)
    give_away(tmp_path / "sweep" / what, who)
    with pytest.raises(PermissionError, match=str(tmp_path / "sweep" / what)):
        SweepStorage(str(tmp_path), "sweep").open(train, ["a"])
