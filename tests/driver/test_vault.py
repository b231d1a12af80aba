"""The next attempt finds the right checkpoints in storage, however the attempt before ended."""

from __future__ import annotations

import gc
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
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST, MAX_READ_ATTEMPTS, read
from flytekitplugins.daskpytorch.driver.vault import LANE, Vault
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from processes import until
from seaweed import WRITER, Weed

NUM_KEPT = Keep().last
PATIENCE = 300.0
"""Seconds that nothing here takes."""
BEST = Keep(last=1, best=2, metric="loss")
LOSSES = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.2, 5: math.nan, 6: None, 7: 0.8}
SHARDED = CheckpointEntry(attempt=0, step=9, folder="/shards", shards="step-9/0-0-ab", size=1, digest="d")


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
            if self.is_local and not entry["shards"] and not Path(named).exists():
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
        self.vaults.append(Vault(paths, self.keep, self.disk(), Worker(0.05)))
        return self.vaults[-1]

    def restored(self, number: int, previous: int) -> CheckpointEntry | None:
        return self.attempt(number, previous).restore()

    def save(self, checkpoints: Vault, step: int, loss: float | None = None) -> CheckpointEntry:
        """A rank has saved one."""
        file, data = checkpoint(step)
        (checkpoints._disk / file.name).write_bytes(data)
        file = replace(file, metrics={} if loss is None else {"loss": loss})
        checkpoints.add(file)
        return file

    def ran(self, number: int, *steps: int, **how: int) -> list[CheckpointEntry]:
        """An attempt that has kept checkpoints of these steps, and ended."""
        checkpoints, files = self.attempt(number, **how), []
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
    return f"step-{entry['step']}-{entry['digest'][:16]}.pt"


def checkpoint(step: int, attempt: int = 2) -> tuple[CheckpointEntry, bytes]:
    data = hashlib.shake_128(str(step).encode()).digest(5000)
    digest = hashlib.sha256(data).hexdigest()
    return CheckpointEntry(attempt=attempt, step=step, size=len(data), digest=digest), data


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
    assert named == {"format": 4, "checkpoints": [asdict(replace(file, metrics={"loss": 0.2}))]}
    assert sorted(path.name for path in task.stored(0).iterdir()) == [MANIFEST, file.name]
    assert store.calls == [file.name, MANIFEST]


def test_who_goes_on_in_the_same_folder_copies_nothing_twice_and_leaves_nothing_old(task: Task, store: Store) -> None:
    files = task.ran(0, 1, 2)
    store.calls.clear()
    checkpoints = task.attempt(0, previous=0)
    assert checkpoints.restore() == checkpoint(2, attempt=0)[0]
    assert checkpoints.flush(PATIENCE)
    assert store.calls == [MANIFEST, files[1].name, MANIFEST]  # read, and written
    newest = task.save(checkpoints, 3)
    assert checkpoints.flush(PATIENCE)
    assert sorted(path.name for path in task.stored(0).iterdir()) == sorted([MANIFEST, files[1].name, newest.name])


def test_same_checkpoint_again_is_listed_once(task: Task) -> None:
    task.ran(0, 1, 2, 1)
    assert task.listed(0) == [1, 2]


def test_newer_checkpoint_takes_the_place_of_one_that_waits_and_nobody_waits_for_storage(
    task: Task, store: Store
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


def test_storage_that_fails_is_tried_again(task: Task, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.num_failures = 2
    checkpoints = task.attempt(0)
    task.save(checkpoints, 5)
    until(lambda: len(store.calls) >= 4, "the manifest")
    assert checkpoints.flush(PATIENCE)
    assert task.listed(0) == [5]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert f"the checkpoint of step 5 could not be copied to {task.stored(0)}" in told[0]
    assert "(OSError: the storage is not in the mood); trying again in 0.05 s. The training goes on." in told[0]
    assert "trying again in 0.1 s" in told[1]


def test_manifest_that_fails_is_tried_again_and_flush_says_that_nothing_counts_yet(
    task: Task, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fails_always = MANIFEST
    checkpoints = task.attempt(0)
    task.save(checkpoints, 5)
    until(lambda: store.calls.count(MANIFEST) > 1, "the manifest to fail")
    assert not checkpoints.flush(0.1)
    assert not (task.stored(0) / MANIFEST).exists()
    store.fails_always = "nothing"
    assert checkpoints.flush(PATIENCE)
    assert task.listed(0) == [5]
    assert f"the list of checkpoints could not be written to {task.stored(0)} (OSError" in capsys.readouterr().err
    assert sum(name.startswith("step-5") for name in store.calls) == 1


# ---- Restoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["damaged", "truncated", "missing"])
def test_a_newest_that_is_not_whole_gives_way_to_the_one_before(
    task: Task, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [task.stored(0) / file.name for file in task.ran(0, 1, 2)]
    for file in files[::-1]:
        if how == "damaged":
            flip_a_byte(file)
        elif how == "truncated":
            file.unlink()
            file.write_bytes(b"torn")
        else:
            file.unlink()
        checkpoints = task.attempt(1, previous=0)
        assert checkpoints.restore() == (checkpoint(1, attempt=0)[0] if file == files[1] else None)
        assert checkpoints.flush(PATIENCE)
    assert "the previous attempt's checkpoint of step 2 is incomplete or damaged" in capsys.readouterr().err


def test_folder_that_was_never_written_is_a_fresh_start(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    assert task.restored(1, previous=0) is None
    task.stored(0).mkdir(parents=True)
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
        lambda _: b'{"format": 4, "checkpoints": 3}',
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
    assert not checkpoints.is_known


@pytest.mark.parametrize("num_failures", [MAX_READ_ATTEMPTS - 1, 1_000])
def test_storage_that_cannot_be_read_is_asked_again_and_then_gone_without(
    task: Task, store: Store, num_failures: int, capsys: pytest.CaptureFixture[str]
) -> None:
    task.ran(0, 1)
    store.num_failures = num_failures
    restored = task.restored(1, previous=0)
    store.num_failures = 0
    last = capsys.readouterr().err.splitlines()[-1]
    if num_failures < MAX_READ_ATTEMPTS:
        assert restored == checkpoint(1, attempt=0)[0]
    else:
        assert restored is None
        assert "(OSError: the storage is not in the mood); the training starts afresh" in last


# ---- From attempt to attempt, through storage -----------------------------------------------------------------------


def test_both_kinds_are_named_by_every_manifest(task: Task) -> None:
    checkpoints = first = task.attempt(0)
    first.worker.submit(lambda: first.name(SHARDED), lane=LANE)
    task.save(checkpoints, 1)
    assert checkpoints.flush(PATIENCE)
    for number in (0, 1):
        named = read(first._paths.files, str(task.stored(number)))  # type: ignore[union-attr]
        assert named is not None
        assert [(entry.step, entry.is_sharded) for entry in named] == [(1, False), (9, True)]
        assert named[1] == SHARDED
        checkpoints = task.attempt(number + 1, previous=number)
        checkpoints.restore()
        assert checkpoints.sharded == [SHARDED]
        assert checkpoints.flush(PATIENCE)


def test_the_best_are_copied_though_there_is_a_newer_one_each_time_that_one_has_been(
    task: Task, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.keep = BEST
    store.gate.clear()
    checkpoints = task.attempt(0)
    task.save(checkpoints, 1, 0.9)
    until(lambda: store.calls, "the operation")
    task.save(checkpoints, 2, 0.1)
    task.save(checkpoints, 3, 0.2)
    copied: list[int] = []

    def put(source: Path, path: str) -> None:
        Store.put(store, source, path)
        copied.append(int(path.rpartition("/")[2].split("-")[1]))
        if len(copied) < 8:
            task.save(checkpoints, 3 + len(copied), 0.9)

    monkeypatch.setattr(store, "put", put)
    store.gate.set()
    until(lambda: len(copied) >= 8, "all newer ones")
    assert copied[:4] == [2, 4, 3, 6]
    assert checkpoints.flush(PATIENCE)
    assert task.listed(0)[1:] == [3, 2]


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
    failed: list[object] = []

    def put(*how: object) -> None:
        failed.append(how)
        raise OSError("the storage takes nothing")

    monkeypatch.setattr(store, "put", put)
    checkpoints = task.attempt(1, previous=0)
    checkpoints.restore()
    until((task.stored(1) / MANIFEST).exists, "the manifest")
    until(lambda: failed, "a copy that fails")
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


# ---- A real object store --------------------------------------------------------------------------------------------


def test_storage_without_the_right_to_delete_keeps_all_and_is_no_failure(
    tmp_path: Path, weed: Weed, capsys: pytest.CaptureFixture[str]
) -> None:
    weed.make_bucket("kept")
    weed.forbid_deletes("kept")
    store = Store(S3FileSystem(key=WRITER.access, secret=WRITER.secret, endpoint_url=weed.endpoint))
    task = Task(tmp_path, store)
    task.base = "s3://kept/attempts"
    files = [file.name for file in task.ran(0, *range(1, NUM_KEPT + 4))]
    assert store.calls == [name for file in files for name in (file, MANIFEST)]  # once each
    assert sorted(store.below("s3://kept/attempts/0")) == sorted([MANIFEST, *files])
    said = capsys.readouterr().err  # garbage may have its say, too
    told = [line for line in said.splitlines() if "checkpoint" in line or "s3://" in line]
    assert len(told) == 1, said
    assert "older checkpoints cannot be removed from s3://kept/attempts/0 and stay there (" in told[0]
    end(task)


def end(task: Task) -> None:
    for vault in task.vaults:
        vault.worker.close()
    S3FileSystem.clear_instance_cache()
    gc.collect()  # its sessions complain when the interpreter ends


# ---- Files in a local folder


def _fail(*_: object) -> None:
    raise OSError("power cut")


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
