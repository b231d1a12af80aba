"""Sharded checkpoints of one rank: refused states, damage, and storage that fails at first."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.context import Progress
from flytekitplugins.daskpytorch.process import worker
from flytekitplugins.daskpytorch.protocol.checkpoints import METADATA, CheckpointEntry
from flytekitplugins.daskpytorch.rank import sharded, shards
from flytekitplugins.daskpytorch.rank.checkpoint import RankCheckpoint
from flytekitplugins.daskpytorch.rank.link import Transfers
from gangs import order_for
from sharded_rank import Rank


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "RETRY_AFTER", (0.0, 0.0))


def state(value: float = 0.0) -> dict[str, Any]:
    return {
        "weights": {"a": torch.full((3, 4), value), "b": torch.full((5,), value).to(torch.bfloat16)},
        "groups": [{"lr": value, "params": [0, 1]}],
        "empty": torch.zeros(0, 3),
        "by number": {0: {"count": int(value)}},  # torch has all keys as text
        "single": torch.tensor(value),
        "epoch": int(value),
    }


def assert_is(content: dict[str, Any], value: float) -> None:
    wanted = state(value)
    assert content["weights"]["a"].equal(wanted["weights"]["a"])
    assert content["weights"]["b"].equal(wanted["weights"]["b"])
    assert content["single"].equal(wanted["single"])
    assert content["groups"] == wanted["groups"]
    assert content["by number"] == wanted["by number"]
    assert content["epoch"] == wanted["epoch"]


def parts_of(entry: CheckpointEntry) -> list[Path]:
    return sorted(Path(entry.uri).glob("*.distcp"))


def test_a_state_comes_back_in_place_as_it_was_at_the_save(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for step in (1, 2):
        changing = state(float(step))
        rank.checkpoints.save(changing, step, {})
        changing["weights"]["a"].fill_(9.0)
        changing["groups"][0]["params"].append(9)
        entry = rank.commit()
        content = state()
        weights = content["weights"]["a"]
        assert Rank(tmp_path, [entry]).checkpoints.load(content) == step
        assert_is(content, float(step))
        assert content["weights"]["a"] is weights
        assert entry.size == sum(path.stat().st_size for path in parts_of(entry))


def test_objects_say_what_is_theirs_and_take_it(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + steps), momentum=0.9)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(2)
    entry = Rank(tmp_path).save({"model": model, "optimizer": optimizer}, 2)
    other, other_optimizer = trained(1)
    Rank(tmp_path, [entry]).checkpoints.load({"model": other, "optimizer": other_optimizer})
    assert other.weight.equal(model.weight)
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
    momentum = [each.state_dict()["state"][0]["momentum_buffer"] for each in (optimizer, other_optimizer)]
    assert momentum[0].equal(momentum[1])


def test_a_rank_writes_three_objects_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, all_three = shards.HashedStream, threading.Barrier(3)
    monkeypatch.setattr(shards, "HashedStream", lambda write: (all_three.wait(30.0), stream(write))[1])
    entry = Rank(tmp_path).save({str(number): torch.ones(3) for number in range(3)}, 1)
    assert len(parts_of(entry)) == 3


class Marked(torch.Tensor):
    """A class of the user's."""


def strange_values() -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):  # some of them are prototypes, or go
        return {
            "sparse": torch.eye(3).to_sparse(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "subclass": torch.ones(3).as_subclass(Marked),
            "path": Path("here"),
        }


@pytest.mark.parametrize("kind", sorted(strange_values()))
def test_a_value_that_could_not_be_read_again_is_refused_by_its_key_with_advice(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TypeError, match=r"^model\.w of the state to be saved is a \w+, .*Save dense tensors"):
        Rank(tmp_path).save({"model": {"w": strange_values()[kind]}}, 1)


@pytest.mark.parametrize("harm", ["removed", "shortened", "changed", "no metadata", "other metadata"])
def test_of_damaged_ones_that_before_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str) -> None:
    rank = Rank(tmp_path)
    entries = [rank.save(state(float(step)), step) for step in (1, 2)]
    do_harm(entries[1], harm)
    content = state()
    assert Rank(tmp_path, entries[::-1]).checkpoints.load(content) == 1
    assert_is(content, 1.0)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "step 2" in told
    assert "is damaged" in told


def do_harm(entry: CheckpointEntry, harm: str) -> None:
    part, metadata = parts_of(entry)[0], Path(entry.uri) / METADATA
    match harm:
        case "removed":
            part.unlink()
        case "shortened":
            part.write_bytes(part.read_bytes()[:-1])
        case "changed":
            data = bytearray(part.read_bytes())
            data[0] ^= 1
            part.write_bytes(data)
        case "no metadata":
            metadata.unlink()
        case "other metadata":
            metadata.write_bytes(b"no pickle")


@pytest.mark.parametrize("harm", ["removed", "shortened", "changed"])
def test_where_none_is_whole_the_start_is_fresh_or_an_error_if_the_state_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    entry = Rank(tmp_path).save(state(1.0), 1)
    do_harm(entry, harm)
    content = state()
    if harm == "changed":
        with pytest.raises(OSError, match="has changed the state"):
            Rank(tmp_path, [entry]).checkpoints.load(content)
        return
    assert Rank(tmp_path, [entry]).checkpoints.load(content) is None
    assert_is(content, 0.0)
    assert "the training starts afresh" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("more", torch.zeros(1), "Missing key in checkpoint state_dict: more"),
        ("empty", torch.zeros(6), r"torch.Size\(\[0, 3\]\).*torch.Size\(\[6\]\).*empty"),
    ],
)
def test_a_state_of_another_structure_is_refused_and_left_alone(
    tmp_path: Path, key: str, value: torch.Tensor, told: str
) -> None:
    entry = Rank(tmp_path).save(state(1.0), 1)
    other = {**state(), key: value}
    with pytest.raises(ValueError, match=f"does not fit the state that was to be filled: .*{told}"):
        Rank(tmp_path, [entry]).checkpoints.load(other)
    assert_is(other, 0.0)


@pytest.mark.parametrize("value", [1, torch.ones(2)])
def test_a_pickle_in_the_storage_is_not_run(tmp_path: Path, value: Any) -> None:
    """A writer of shards gives data and no code."""

    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harmed",))

    entry = Rank(tmp_path).save({"it": value}, 1)
    torch.save(Harmful(), parts_of(entry)[0])
    data = parts_of(entry)[0].read_bytes()
    metadata = pickle.loads((Path(entry.uri) / METADATA).read_bytes())
    [place] = metadata.storage_data.values()
    place.length, place.digest = len(data), xxhash.xxh3_128_hexdigest(data)
    (Path(entry.uri) / METADATA).write_bytes(pickle.dumps(metadata))
    forged = replace(entry, digest=hashlib.sha256(pickle.dumps(metadata)).hexdigest())
    with pytest.raises(ValueError, match="Weights only load failed"):
        Rank(tmp_path, [forged]).checkpoints.load({"it": value})
    assert not (tmp_path / "harmed").exists()


class Failing(LocalFileSystem):
    """A storage that fails so often before it works."""

    cachable = False

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.lock = threading.Lock()

    def _fail(self) -> None:
        with self.lock:
            self.num_failures -= 1
            if self.num_failures >= 0:
                raise PermissionError("the token has expired")

    def open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        file = super().open(path, mode, **how)
        if "w" in mode:
            write = file.write

            def failing(data: Any) -> int:
                write(data)
                self._fail()
                return len(data)

            file.write = failing
        return file

    def cat_file(self, *args: Any, **how: Any) -> Any:
        self._fail()
        return super().cat_file(*args, **how)


def on(files: LocalFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace(filesystem=lambda _: files)
    monkeypatch.setattr(sharded, "current_execution", lambda: there)


class Late(LocalFileSystem):
    """A storage whose file reads what it was given only when it is closed, as obstore's may."""

    @contextlib.contextmanager
    def open(self, path: str, mode: str = "rb", **how: Any) -> Iterator[Any]:
        given: list[Any] = []
        yield SimpleNamespace(write=given.append)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"".join(given))


def test_what_is_written_is_what_was_there_when_it_was_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        on(Late(), patch)
        entry = Rank(tmp_path).save(state(2.0), 1)
    content = state()
    assert Rank(tmp_path, [entry]).checkpoints.load(content) == 1
    assert_is(content, 2.0)


def test_storage_that_a_rank_cannot_open_is_an_error_at_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that failed later, in its thread, would leave the others in a collective."""
    there = SimpleNamespace(filesystem=mock.Mock(side_effect=PermissionError("no credentials")))
    monkeypatch.setattr(sharded, "current_execution", lambda: there)
    with pytest.raises(PermissionError, match="no credentials"):
        Rank(tmp_path).checkpoints.save(state(), 1, {})


def test_what_cannot_be_written_at_all_is_given_up_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Failing(1000)
    on(files, monkeypatch)
    rank = Rank(tmp_path)
    rank.checkpoints.save(state(1.0), 1, {})
    rank.checkpoints.flush()
    assert capsys.readouterr().err.count("trying again, while the training goes on") == 1
    told = "PermissionError: the token has expired (rank 0)"
    lost = rank.reports.pop()
    assert (lost.entry.step, lost.entry.digest, lost.failure) == (1, "", told)
    files.num_failures = 0
    assert rank.save(state(2.0), 2).step == 2


def test_a_storage_that_does_not_answer_is_asked_again_and_is_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Rank(tmp_path).save(state(2.0), 1)
    on(Failing(2), monkeypatch)
    assert Rank(tmp_path, [entry]).checkpoints.load(state()) == 1
    on(Failing(1000), monkeypatch)
    with pytest.raises(OSError, match=r"cannot be read: .*PermissionError: the token has expired"):
        Rank(tmp_path, [entry]).checkpoints.load(state())


def test_a_ranks_checkpoint_saves_names_the_step_and_waits_for_what_is_written(tmp_path: Path) -> None:
    rank, progress = Rank(tmp_path), Progress()

    def checkpoint(of: Rank) -> RankCheckpoint:
        order, saving = replace(order_for(), scratch=str(tmp_path)), lambda _: contextlib.nullcontext()
        link: Any = SimpleNamespace(progress=progress, saving=saving, send=None, transfers=Transfers(order))
        made = RankCheckpoint(order.job, 0, link)
        made.sharded = of.checkpoints
        return made

    first = checkpoint(rank)
    first.save_sharded(state(1.0), torch.tensor(5), metrics={"loss": torch.tensor(0.5)})  # type: ignore[arg-type, dict-item]
    first.flush()
    assert progress.step == 5
    entry = rank.commit()
    assert entry.metrics == {"loss": 0.5}
    progress.reach(9)
    assert checkpoint(Rank(tmp_path, [entry])).load_sharded(state()) == 5
    assert progress.step == 5


def test_a_rank_on_another_machine_says_how_to_reach_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path, token=str(tmp_path / "not here"))
    with pytest.raises(OSError, match=r"Gang\(checkpoint_uri=\.\.\.\)"):
        rank.checkpoints.save(state(), 1, {})
    entry = Rank(tmp_path).save(state(), 1)
    with pytest.raises(OSError, match=r"Gang\(checkpoint_uri=\.\.\.\)"):
        Rank(tmp_path, [entry], token=str(tmp_path / "not here")).checkpoints.load(state())


def test_a_rank_that_waits_for_storage_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "RETRY_AFTER", (0.2,) * 3)
    monkeypatch.setattr(worker, "LOOK_INTERVAL", 0.01)
    rank = Rank(tmp_path)
    rank.save(state(1.0), 1)
    alone = rank.num_moves
    on(Failing(1), monkeypatch)
    rank.save(state(2.0), 2)
    assert rank.num_moves - alone > 2 * alone  # that of the failed write, and more


def test_a_folder_that_is_away_for_a_while_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands in the folder's place: at a save, and when a later attempt loads."""
    monkeypatch.setattr(shards, "RETRY_AFTER", (0.1,) * 600)
    base, away = tmp_path / "kept", tmp_path / "away"
    base.mkdir()
    (base / "token").touch()

    @contextlib.contextmanager
    def absent() -> Iterator[None]:
        base.rename(away)
        base.touch()
        timer = threading.Timer(0.5, lambda: (base.unlink(), away.rename(base)))
        timer.start()
        yield
        timer.join()

    rank = Rank(base, token=str(base / "token"))
    with absent():
        entry = rank.save(state(1.0), 1)
    later = state()
    with absent():
        assert Rank(base, [entry], attempt=1, token=str(base / "token")).checkpoints.load(later) == 1
    assert_is(later, 1.0)
