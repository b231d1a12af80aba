"""The driver keeps undamaged checkpoints, and the next attempt finds them, however the attempt before ended."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch import Gang, GangStartError, Keep
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST, read
from flytekitplugins.daskpytorch.driver.storage import Shards, storage_of
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import METADATA, CheckpointEntry, digest_of, folder_name
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import Execution, StoragePaths
from others import give_away
from processes import until

NUM_KEPT = Keep().last
PATIENCE = 300.0
"""Seconds that nothing here takes."""
BEST = Keep(last=1, best=2, metric="loss")
LOSSES = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.2, 5: math.nan, 6: None, 7: 0.8}


class Store(Files):
    """Storage that may fail, be held up, and in which all that a manifest names must be, from before it is written."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        self.num_failures = 0
        self.fails_always = "nothing"
        """Start of the names that it never takes."""
        self.calls: list[str] = []
        """Names of the files that it was asked for."""
        self.gate = threading.Event()
        self.gate.set()
        self.missing: list[str] = []

    def put(self, source: Path, path: str) -> None:
        self._try(path, lambda: Files.put(self, source, path))

    def write(self, path: str, data: bytes) -> None:
        for entry in json.loads(data)["checkpoints"] if path.endswith(MANIFEST) else ():
            named = f"{entry['folder'] or path.rpartition('/')[0]}/{name_of(entry)}"
            if self.is_local and not Path(named).exists():
                self.missing.append(named)
        self._try(path, lambda: Files.write(self, path, data))

    def get(self, path: str, to: Path) -> None:
        self._try(path, lambda: Files.get(self, path, to))

    def read(self, path: str) -> bytes:
        return bytes(self._try(path, lambda: Files.read(self, path)))

    def _try(self, path: str, work: Callable[[], Any]) -> Any:
        self.calls.append(path.rpartition("/")[2])
        self.gate.wait()
        if self.calls[-1].startswith(self.fails_always):
            raise OSError("the storage never takes that")
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the storage is not in the mood")
        return work()


class Task:
    """The attempts of one task: each with a folder of its own in storage, and a fresh local disk."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self.store = store
        self.keep = Keep()
        self.base = str(folder / "store")
        self.vaults: list[Vault] = []

    def stored(self, number: int) -> Path:
        return self.folder / "store" / str(number)

    def disk(self) -> Path:
        """A driver's own."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def attempt(self, number: int, previous: int | None = None) -> Vault:
        before = None if previous is None else f"{self.base}/{previous}"
        paths = StoragePaths(files=self.store, previous=before, own=f"{self.base}/{number}")
        self.vaults.append(Vault(Gang(keep=self.keep), paths, self.disk(), lambda _: self.store.fs, Worker(0.05)))
        return self.vaults[-1]

    def write_shards(self, checkpoints: Vault, step: int, number: int = 0, attempt: int = 0) -> CheckpointEntry:
        """Two ranks have written a sharded checkpoint."""
        shards = folder_name(attempt, checkpoints.shards.nonce, step, number)
        for name in ("__0_0.distcp", "__1_0.distcp", METADATA):
            Files.write(self.store, f"{checkpoints.shards.base}/{shards}/{name}", b"shard")
        return CheckpointEntry(
            attempt=attempt, step=step, size=10, digest="d", folder=checkpoints.shards.base, shards=shards
        )

    def save_shards(self, checkpoints: Vault, *steps: int, attempt: int = 0) -> None:
        """Sharded checkpoints, each of which reaches the manifest."""
        for number, step in enumerate(steps):
            checkpoints.add(self.write_shards(checkpoints, step, number, attempt))
            assert checkpoints.flush(PATIENCE)

    def shards(self, number: int) -> list[str]:
        """Names of the saves in an attempt's folder: step, attempt and number."""
        return sorted(
            str(path.relative_to(self.stored(number))).rpartition("-")[0]
            for path in self.stored(number).glob("step-*/*")
        )

    def save(self, checkpoints: Vault, step: int, loss: float | None = None) -> CheckpointEntry:
        """A rank has saved one."""
        file, data = checkpoint(step)
        (checkpoints._disk / file.name).write_bytes(data)
        file = replace(file, metrics={} if loss is None else {"loss": loss})
        checkpoints.add(file)
        return file

    def went_on(self, number: int, previous: int) -> Vault:
        """An attempt that has begun."""
        checkpoints = self.attempt(number, previous)
        checkpoints.restore()
        checkpoints.begin()
        assert checkpoints.flush(PATIENCE)
        return checkpoints

    def ran(self, number: int, *steps: int) -> list[CheckpointEntry]:
        """An attempt that has kept checkpoints of these steps, and ended."""
        checkpoints, files = self.attempt(number), []
        for step in steps:
            files.append(self.save(checkpoints, step, LOSSES.get(step)))
            assert checkpoints.flush(PATIENCE)
        self.vaults[-1].worker.close()
        return files

    def listed(self, number: int) -> list[int]:
        """The steps in an attempt's manifest."""
        return [entry["step"] for entry in json.loads((self.stored(number) / MANIFEST).read_text())["checkpoints"]]


@pytest.fixture
def store() -> Store:
    return Store(LocalFileSystem())


@pytest.fixture
def task(tmp_path: Path, store: Store) -> Iterator[Task]:
    made = Task(tmp_path, store)
    yield made
    store.gate.set()
    for vault in made.vaults:
        vault.worker.close()
    assert store.missing == []


def name_of(entry: dict[str, Any]) -> str:
    return entry["shards"] or f"step-{entry['step']}-{entry['digest'][:16]}.pt"


def checkpoint(step: int) -> tuple[CheckpointEntry, bytes]:
    data = hashlib.shake_128(str(step).encode()).digest(5000)
    digest = xxhash.xxh3_128_hexdigest(data)
    return CheckpointEntry(attempt=2, step=step, size=len(data), digest=digest), data


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.unlink()  # the driver's disk has another file, as on another machine
    path.write_bytes(data)


# ---- Copying --------------------------------------------------------------------------------------------------------


def test_checkpoint_is_copied_before_a_manifest_that_names_it(task: Task, store: Store) -> None:
    [file] = task.ran(0, 4)
    assert (task.stored(0) / file.name).read_bytes() == checkpoint(4)[1]
    named = json.loads((task.stored(0) / MANIFEST).read_text())
    assert named == {"format": 5, "checkpoints": [asdict(file)]}
    assert sorted(path.name for path in task.stored(0).iterdir()) == [MANIFEST, file.name]
    assert store.calls == [file.name, MANIFEST]


def test_who_goes_on_in_the_same_folder_copies_nothing_twice_and_leaves_nothing_old(task: Task, store: Store) -> None:
    files = task.ran(0, 1, 2)
    store.calls.clear()
    checkpoints = task.attempt(0, previous=0)
    assert checkpoints.restore() == files[1]
    assert checkpoints.flush(PATIENCE)
    assert store.calls == [MANIFEST, files[1].name, MANIFEST]  # read, and written
    newest = task.save(checkpoints, 3)
    assert checkpoints.flush(PATIENCE)
    assert sorted(path.name for path in task.stored(0).iterdir()) == sorted([MANIFEST, files[1].name, newest.name])


def test_newer_checkpoint_takes_the_place_of_one_that_waits_and_nobody_waits_for_storage(
    task: Task, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.gate.clear()
    checkpoints = task.attempt(0)
    task.save(checkpoints, 1)  # would wait for ever
    until(lambda: store.calls, "the operation")
    for step in (2, 3, 4):
        task.save(checkpoints, step)
    assert not checkpoints.flush(0.1)
    store.gate.set()
    assert checkpoints.flush(PATIENCE)
    assert task.listed(0)[0] == 4
    assert not any(name.startswith(("step-2", "step-3")) for name in store.calls)
    assert capsys.readouterr().err == ""  # though the policy removed step 1 meanwhile


@pytest.mark.parametrize("what", ["step-5", MANIFEST])
def test_storage_that_fails_is_tried_again_and_costs_a_line(
    task: Task, store: Store, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fails_always = what
    checkpoints = task.attempt(0)
    task.save(checkpoints, 5)
    until(lambda: sum(name.startswith(what) for name in store.calls) > 2, "it to fail")
    assert not checkpoints.flush(0.1)
    assert not (task.stored(0) / MANIFEST).exists()
    store.fails_always = "nothing"
    assert checkpoints.flush(PATIENCE)
    assert task.listed(0) == [5]
    [line] = capsys.readouterr().err.splitlines()
    assert f"checkpoints could not be copied to {task.stored(0)} (OSError: the storage never takes that)" in line


# ---- Restoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_newest_that_is_not_whole_gives_way_to_the_one_before(
    task: Task, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [task.stored(0) / file.name for file in task.ran(0, 1, 2)]
    for file in files[::-1]:
        if how == "damaged":
            flip_a_byte(file)
        else:
            file.unlink()
        checkpoints = task.attempt(1, previous=0)
        assert checkpoints.restore() == (checkpoint(1)[0] if file == files[1] else None)
        assert checkpoints.flush(PATIENCE)
    assert "the previous attempt's checkpoint of step 2 is incomplete or damaged" in capsys.readouterr().err


def test_folder_that_was_never_written_is_a_fresh_start(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = task.attempt(1, previous=0)
    assert checkpoints.restore() is None
    assert checkpoints.newest() is None
    assert checkpoints.flush(PATIENCE)
    assert not task.stored(1).exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "torn",
    [
        lambda text: text[: len(text) // 2],
        lambda _: b"",
        lambda _: b"null",
        lambda _: b'{"format": 5, "checkpoints": 3}',
        lambda text: text.replace(b'"step"', b'"stop"'),
        lambda text: text.replace(b'"metrics": {', b'"metrics": 3, "x": {'),
        lambda text: text.replace(b"0.5", b'"low"'),
        lambda text: text.replace(b'"step"', b'"author": "a later version", "step"'),
    ],
)
def test_manifest_that_cannot_be_read_is_a_fresh_start(task: Task, torn: Callable[[bytes], bytes]) -> None:
    task.ran(0, 1)
    manifest = task.stored(0) / MANIFEST
    manifest.write_bytes(torn(manifest.read_bytes()))
    checkpoints = task.attempt(1, previous=0)
    assert checkpoints.restore() is None
    assert not checkpoints._is_known


@pytest.mark.parametrize("num_failures", [4, 1_000])
def test_storage_that_cannot_be_read_is_asked_again_and_then_gone_without(
    task: Task, store: Store, num_failures: int, capsys: pytest.CaptureFixture[str]
) -> None:
    task.ran(0, 1)
    store.num_failures = num_failures
    restored = task.attempt(1, previous=0).restore()
    store.num_failures = 0
    last = capsys.readouterr().err.splitlines()[-1]
    if num_failures == 4:
        assert restored == checkpoint(1)[0]
    else:
        assert restored is None
        assert "(OSError: the storage is not in the mood); the training starts afresh" in last


# ---- From attempt to attempt, through storage -----------------------------------------------------------------------


def test_both_kinds_are_named_by_every_manifest(task: Task) -> None:
    checkpoints = task.attempt(0)
    task.save_shards(checkpoints, 9)
    task.save(checkpoints, 1)
    assert checkpoints.flush(PATIENCE)
    sharded = checkpoints.sharded
    for number in (0, 1):
        named = read(task.store, str(task.stored(number)))
        assert named is not None
        assert [(entry.step, entry.is_sharded) for entry in named] == [(1, False), (9, True)]
        assert (named[1], named[1].folder) == (sharded[0], str(task.stored(0)))
        assert task.went_on(number + 1, previous=number).sharded == sharded


def test_the_best_are_copied_though_there_is_a_newer_one_each_time_that_one_has_been(
    task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.keep = BEST
    checkpoints, copied = task.attempt(0), list[int]()

    def put(source: Path, path: str) -> None:
        Store.put(store, source, path)
        copied.append(int(path.rpartition("/")[2].split("-")[1]))
        for step in range(2, 4) if copied == [1] else [3 + len(copied)] if len(copied) < 8 else []:
            task.save(checkpoints, step, 0.1 if step == 2 else 0.9)

    monkeypatch.setattr(store, "put", put)
    task.save(checkpoints, 1, 0.2)
    until(lambda: len(copied) >= 8, "all newer ones")
    assert copied[:2] == [1, 2]
    assert checkpoints.flush(PATIENCE)
    assert task.listed(0) == [copied[-1], 2, 1]


def test_the_best_survive_attempts_and_the_newest_is_gone_on_from(task: Task) -> None:
    task.keep = BEST
    task.ran(0, *LOSSES)
    for number in (1, 2):
        checkpoints = task.attempt(number, previous=number - 1)
        start = checkpoints.restore()
        assert start is not None
        assert (start.step, [file.step for file in checkpoints.entries()]) == (7, [2, 4, 7])
        assert [file.metrics["loss"] for file in checkpoints.entries()] == [0.1, 0.2, 0.8]
        assert checkpoints.flush(PATIENCE)
        shutil.rmtree(task.stored(number - 1))
    task.save(checkpoints, 8, 0.05)
    assert checkpoints.flush(PATIENCE)
    assert task.listed(2) == [8, 2]


def test_an_attempt_that_can_copy_nothing_passes_on_all_that_it_was_given(
    task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.keep = BEST
    task.ran(0, *LOSSES)
    put = mock.Mock(side_effect=OSError("the storage takes nothing"))
    monkeypatch.setattr(store, "put", put)
    checkpoints = task.attempt(1, previous=0)
    checkpoints.restore()
    until((task.stored(1) / MANIFEST).exists, "the manifest")
    until(lambda: put.called, "a copy that fails")
    checkpoints.worker.close()
    assert [path.name for path in task.stored(1).iterdir()] == [MANIFEST]
    checkpoints = task.attempt(2, previous=1)
    start = checkpoints.restore()
    assert start is not None
    assert (start.step, [file.step for file in checkpoints.entries()]) == (7, [2, 4, 7])


def test_a_best_one_that_is_damaged_in_storage_gives_way_to_others(task: Task) -> None:
    task.keep = BEST
    task.ran(0, *LOSSES)
    damaged = task.stored(0) / checkpoint(2)[0].name
    flip_a_byte(damaged)
    for number in (1, 0):  # another folder, and the same, from which it is removed
        checkpoints = task.attempt(number, previous=0)
        checkpoints.restore()
        assert [file.step for file in checkpoints.entries()] == [4, 7]
        task.save(checkpoints, 8, 0.6)
        assert checkpoints.flush(PATIENCE)
        assert task.listed(number) == [8, 4]
        assert damaged.exists() == (number == 1)


def test_flush_tells_whether_the_newest_arrived_though_a_best_one_did_not(task: Task, store: Store) -> None:
    task.keep, store.fails_always = BEST, "step-1-"
    checkpoints = task.attempt(0)
    task.save(checkpoints, 1, 0.1)
    assert not checkpoints.flush(0.2)
    task.save(checkpoints, 2, 0.9)
    until(lambda: checkpoints.flush(0.2), "the newest to arrive")
    assert task.listed(0) == [2]


# ---- On the driver's disk --------------------------------------------------------------------------------------------


def upload(checkpoints: Vault, step: int, data: bytes | None = None, attempt: int = 2) -> CheckpointEntry:
    """A checkpoint comes over a connection, in two pieces, perhaps not all of it."""
    file, whole = checkpoint(step)
    file = replace(file, attempt=attempt)
    data = whole if data is None else data

    def pieces(size: int, what: str) -> Iterator[bytes]:
        yield data[:10]
        if len(data) < size:
            raise EOFError(what)
        yield data[10:]

    connection: Any = SimpleNamespace(pieces=pieces)
    if (refusal := checkpoints.receive(connection, file)) is not None:
        raise ValueError(refusal)
    checkpoints.add(file)
    return file


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Vault]:
    """The vault of a gang without storage."""
    vault = Vault(Gang(keep=BEST), None, tmp_path)
    yield vault
    vault.worker.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_same_again_without_metrics_is_as_good_as_it_was(alone: Vault) -> None:
    for step, loss in ((1, 0.1), (1, None), (2, 0.2), (3, 0.3)):
        upload(alone, step)
        alone.add(replace(checkpoint(step)[0], metrics={} if loss is None else {"loss": loss}))
    assert [(file.step, file.metrics["loss"]) for file in alone.entries()] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert alone.choose(None, is_sharded=False) == checkpoint(1)[0]


def test_when_all_are_damaged_there_is_none_until_the_next_comes(alone: Vault, tmp_path: Path) -> None:
    for step in (1, 2):
        upload(alone, step)
    for path in tmp_path.iterdir():
        flip_a_byte(path)
    assert alone.newest() is None
    file = upload(alone, 2)  # the same bytes as the damaged one
    assert alone.newest() == file


def test_a_lent_file_stays_whatever_the_policy_removes_until_the_next_attempt(alone: Vault, tmp_path: Path) -> None:
    lent = upload(alone, 0)
    for _ in range(2):  # each rank may ask
        alone.lend(lent)
    for step in (1, 2):
        upload(alone, step)
    assert not alone.path_of(lent).exists()
    assert digest_of(alone.lent / lent.name) == lent.digest
    alone.take_back()
    assert names(tmp_path) == [file.name for file in alone.entries()]


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(("length", "reason"), [(100, None), (5000, "of step 1 was damaged during its transfer")])
def test_upload_that_is_not_whole_leaves_what_was_there(
    alone: Vault, tmp_path: Path, length: int, reason: str | None, *, is_there: bool
) -> None:
    before = upload(alone, 1) if is_there else None
    with pytest.raises((EOFError, ValueError), match=reason):
        upload(alone, 1, bytes(length))
    assert alone.newest() == before
    assert names(tmp_path) == ([before.name] if before is not None else [])


# ---- Shards ----------------------------------------------------------------------------------------------------------


def test_unfinished_shards_are_removed_once_their_save_attempt_or_driver_is_over(task: Task) -> None:
    mine = task.attempt(0)
    task.save_shards(mine, 9)
    failed = task.write_shards(mine, 10, 1)
    task.write_shards(mine, 11, 2)  # goes on meanwhile
    mine.shards.sweep_through(failed)
    assert mine.flush(PATIENCE)
    assert task.shards(0) == ["step-11/0-2", "step-9/0-0"]
    mine.fence(1)
    assert mine.flush(PATIENCE)
    assert task.shards(0) == ["step-9/0-0"]
    task.write_shards(mine, 12, attempt=1)
    mine.finish(PATIENCE)
    assert task.shards(0) == ["step-9/0-0"]
    task.write_shards(mine, 13, 1, attempt=1)  # by a driver that was killed
    assert [entry.step for entry in task.went_on(1, previous=0).sharded] == [9]
    assert task.shards(0) == ["step-9/0-0"]


def test_driver_that_lost_its_folder_removes_no_checkpoint_of_the_driver_that_took_over(task: Task) -> None:
    suspended = task.attempt(0)
    task.save_shards(suspended, 1)
    successor = task.went_on(0, previous=0)
    task.save_shards(successor, 2, 3)
    suspended.fence(9)  # the suspended driver wakes up
    assert suspended.flush(PATIENCE)
    assert task.listed(0) == [3, 2]
    assert task.shards(0) == ["step-2/0-0", "step-3/0-1"]


def test_who_keeps_less_drops_older_shards_with_the_first_save_only(task: Task) -> None:
    """Until then, the newest may be found damaged, and the ranks load an older one."""
    task.keep = Keep(last=3)
    task.save_shards(task.attempt(0), 10, 11, 12)
    task.keep = Keep(last=1)
    second = task.went_on(0, previous=0)
    second.hold([])  # as an evaluation's end does
    assert second.flush(PATIENCE)
    assert [entry.step for entry in second.sharded[::-1]] == task.listed(0) == [12, 11, 10]
    assert len(task.shards(0)) == 3
    task.save_shards(second, 13)
    assert [entry.step for entry in second.sharded[::-1]] == task.listed(0) == [13]
    assert task.shards(0) == ["step-13/0-0"]


@pytest.mark.parametrize("number", [0, 1])
def test_manifest_that_is_cut_off_costs_no_shards(task: Task, number: int) -> None:
    task.save_shards(task.attempt(0), 10)
    (task.stored(0) / MANIFEST).write_text("{")
    assert task.went_on(number, previous=0).sharded == []
    assert task.shards(0) == ["step-10/0-0"]


@pytest.mark.parametrize(
    ("content", "found"),
    [('{"checkpoints": []}', 1), ('{"format": 4, "checkpoints": []}', 4), ('{"format": 6, "all": []}', 6)],
)
def test_checkpoints_of_another_version_are_refused_and_stay(task: Task, content: str, found: int) -> None:
    task.save_shards(task.attempt(0), 10)
    (task.stored(0) / MANIFEST).write_text(content)
    with pytest.raises(GangStartError, match=rf"of format {found}, which another version .* reads format 5"):
        task.went_on(1, previous=0)
    assert task.shards(0) == ["step-10/0-0"]
    assert (task.stored(0) / MANIFEST).read_text() == content


def test_shards_that_a_manifest_may_name_are_not_removed(
    task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage took the manifest, but its answer was lost: whoever reads it finds what it names."""

    def write(path: str, data: bytes) -> None:
        Store.write(store, path, data)
        raise TimeoutError("no answer")

    mine = task.attempt(0)
    monkeypatch.setattr(store, "write", write)
    for number, step in enumerate((7, 8, 9)):
        mine.add(task.write_shards(mine, step, number))
        until(lambda step=step: (task.stored(0) / MANIFEST).exists() and step in task.listed(0), "the manifest")
    mine.fence(1)
    assert not mine.flush(0.2)
    assert len(task.shards(0)) == 3
    monkeypatch.undo()
    assert mine.flush(PATIENCE)
    assert task.listed(0) == [9, 8]
    assert task.shards(0) == ["step-8/0-1", "step-9/0-2"]


def test_what_the_user_keeps_beside_the_shards_stays(task: Task) -> None:
    first = task.attempt(0)
    task.save_shards(first, 1)
    [named] = [Path(entry.uri) for entry in first.sharded]
    mine = [named / "notes.txt", task.stored(0) / "step-9" / "0-1-final" / "model.safetensors"]
    mine[1].parent.mkdir(parents=True)
    for path in mine:
        path.write_text("mine")
    task.save_shards(first, 2, 3, 4)
    task.went_on(0, previous=0)
    assert all(path.exists() for path in mine)
    assert names(named) == ["notes.txt"]


# ---- Where they lie -------------------------------------------------------------------------------------------------


class InFlyte(Execution):
    """Has a folder for each attempt."""

    name = "a1b2"

    def __init__(self, attempt: str, previous: str | None = None) -> None:
        self.paths = StoragePaths(files=Files(LocalFileSystem()), previous=previous, own=f"/flyte/{attempt}/gang")

    def checkpoint_paths(self, key: str) -> StoragePaths | None:
        return self.paths


def place_of(execution: Execution, settings: Gang, scratch: Path) -> Shards:
    def opened(uri: str) -> Any:
        raise AssertionError("nobody asked for it")

    return Shards(settings, storage_of(execution, "train-1", settings), scratch, opened, Worker(), list)


def test_shards_lie_beside_the_other_checkpoints_or_in_a_folder_that_is_removed_with_the_driver(tmp_path: Path) -> None:
    place = place_of(Execution(), Gang(), tmp_path)
    assert place.token is not None
    assert Path(place.base).parent == place.token.parent == tmp_path
    place = place_of(InFlyte("n0-1", "file:///flyte/n0-0/gang"), Gang(), tmp_path)
    assert (place.base, place.previous) == ("/flyte/n0-1/gang", "/flyte/n0-0/gang")


def test_uri_in_a_flyte_task_holds_the_shards_of_each_attempt_apart(tmp_path: Path) -> None:
    attempts = [InFlyte("n0-0"), InFlyte("n0-1", "/flyte/n0-0/gang"), InFlyte("n1-0")]
    places = [place_of(each, Gang(checkpoint_uri="s3://bucket/shards/"), tmp_path) for each in attempts]
    assert [place.previous for place in places] == [None, places[0].base, None]
    assert [place.base.startswith("s3://bucket/shards/a1b2/") and place.token is None for place in places] == [True] * 3
    assert len({place.base for place in places}) == 3


def test_uri_outside_flyte_holds_all_of_each_gang_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in (str(tmp_path / "kept"), f"file://{tmp_path}/kept/", "kept"):
        place = place_of(Execution(), Gang(checkpoint_uri=uri), tmp_path)
        assert place.base == place.previous == str(tmp_path / "kept" / "train-1")
        assert place.token is not None
        assert str(place.token.parent) == place.base  # a folder that the ranks' machines may share


def test_folder_that_cannot_be_written_is_an_error_at_the_start_that_says_what_named_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = place_of(Execution(), Gang(checkpoint_uri=str(tmp_path / "file")), tmp_path)
    told = rf"^Gang\(checkpoint_uri=...\): {tmp_path}/file/train-1 cannot be used \(NotADirectoryError: .*Check"
    with pytest.raises(OSError, match=told):
        place.begin(follows=False)


@pytest.mark.parametrize("who", ["owns", "can write to"])
@pytest.mark.parametrize("what", [".", MANIFEST, "step-*.pt"])
def test_checkpoints_that_another_user_may_have_written_are_not_gone_on_from(
    tmp_path: Path, what: str, who: str
) -> None:
    settings = Gang(checkpoint_uri=str(tmp_path / "all"))
    before = os.umask(0)
    try:
        paths = storage_of(Execution(), "same", settings)
        assert paths is not None
        for name in (MANIFEST, "step-1-abc.pt"):
            paths.files.write(f"{paths.own}/{name}", b"weights")
    finally:
        os.umask(before)
    assert storage_of(Execution(), "same", settings) is not None
    [path] = [Path(paths.own)] if what == "." else Path(paths.own).glob(what)
    give_away(path, who)
    with pytest.raises(PermissionError, match=str(path)):
        storage_of(Execution(), "same", settings)


# ---- Files in a local folder


def _fail(*_: object) -> None:
    raise OSError("power cut")


def test_storage_without_the_right_to_delete_keeps_all_and_costs_a_line(
    task: Task, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalFileSystem, "rm_file", _fail)
    files = [file.name for file in task.ran(0, *range(1, NUM_KEPT + 4))]
    assert store.calls == [name for file in files for name in (file, MANIFEST)]  # once each
    assert names(task.stored(0)) == sorted([MANIFEST, *files])
    [line] = capsys.readouterr().err.splitlines()
    assert f"older checkpoints cannot be removed from {task.stored(0)} and stay there (" in line


def test_file_is_never_seen_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, path = Files(LocalFileSystem()), tmp_path / "manifest.json"
    files.write(str(path), b"before")
    monkeypatch.setattr(os, "fsync", _fail)
    with pytest.raises(OSError, match="power cut"):
        files.write(str(path), b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, source = Files(LocalFileSystem()), tmp_path / "source"
    source.write_bytes(b"weights")
    monkeypatch.setattr(os, "link", _fail)
    files.put(source, str(tmp_path / "kept" / "step-1.pt"))
    assert (tmp_path / "kept" / "step-1.pt").read_bytes() == b"weights"
