"""Checkpoints in storage: what the next attempt finds, however the attempt before it ended."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from s3fs import S3FileSystem

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver.checkpoints import Checkpoints
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from flytekitplugins.daskpytorch.driver.upload import MAX_READ_ATTEMPTS, StorageUpload
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from processes import until
from seaweed import WRITER, Weed

NUM_KEPT = Keep().last
PATIENCE = 300.0
"""Seconds that nothing here takes."""


class MoodyStore(FileAccessProvider):
    """Local storage that fails a number of times before it works, and can be held up."""

    def __init__(self, sandbox: Path) -> None:
        super().__init__(str(sandbox / "sandbox"), str(sandbox / "raw"))
        self.num_failures = 0
        self.fails_first = self.fails_always = ""
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def put_data(self, local_path: str, remote_path: str, **kwargs: Any) -> str:  # type: ignore[override]
        return str(self._try(remote_path, lambda: FileAccessProvider.put_data(self, local_path, remote_path, **kwargs)))

    def get_data(self, remote_path: str, local_path: str, **kwargs: Any) -> Any:  # type: ignore[override]
        return self._try(remote_path, lambda: FileAccessProvider.get_data(self, remote_path, local_path, **kwargs))

    def _try(self, remote_path: str, work: Callable[[], Any]) -> Any:
        self.calls.append(remote_path.rpartition("/")[2])
        self.gate.wait()
        if self.calls[-1] == self.fails_first:
            self.fails_first = ""
            raise OSError("the storage is not in the mood for it")
        if self.fails_always and self.calls[-1].startswith(self.fails_always):
            raise OSError("the storage never takes that")
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the storage is not in the mood")
        return work()

    def await_call(self) -> None:
        """Until the next operation has begun."""
        until(lambda: self.calls, "the operation")


class CountingStore(FileAccessProvider):
    """Any storage; counts what is written to it."""

    def __init__(self, sandbox: Path, raw: str) -> None:
        super().__init__(str(sandbox / "sandbox"), raw)
        self.written: list[str] = []

    def put_data(self, local_path: str, remote_path: str, **kwargs: Any) -> str:  # type: ignore[override]
        self.written.append(remote_path.rpartition("/")[2])
        return str(super().put_data(local_path, remote_path, **kwargs))


class StrictStore(FileAccessProvider):
    """Local storage in which whatever a manifest names is there, whole, from before it is written."""

    def __init__(self, sandbox: Path) -> None:
        super().__init__(str(sandbox / "sandbox"), str(sandbox / "raw"))
        self.missing: list[str] = []

    def put_data(self, local_path: str, remote_path: str, **kwargs: Any) -> str:  # type: ignore[override]
        if remote_path.endswith(MANIFEST):
            self._look(Path(local_path), Path(remote_path).parent)
        return str(super().put_data(local_path, remote_path, **kwargs))

    def get_filesystem_for_path(self, path: str = "", **kwargs: Any) -> Any:
        if (Path(path) / MANIFEST).exists():  # before something is removed there
            self._look(Path(path) / MANIFEST, Path(path))
        return super().get_filesystem_for_path(path, **kwargs)

    def _look(self, manifest: Path, folder: Path) -> None:
        for entry in json.loads(manifest.read_text())["checkpoints"]:
            name = f"step-{entry['step']}-{entry['digest'][:16]}.pt"
            if not Path(entry["folder"] or folder, name).exists():
                self.missing.append(name)


class Attempts:
    """The attempts of one task: each with a folder of its own in storage, and a fresh local disk."""

    def __init__(self, folder: Path, file_access: FileAccessProvider, keep: Keep | None = None) -> None:
        self.folder = folder
        self.file_access = file_access
        self.keeping = keep
        self.mirrors: list[StorageUpload] = []

    def store(self, number: int) -> Path:
        return self.folder / "store" / str(number)

    def disk(self, number: int) -> Path:
        (self.folder / "disk" / str(number)).mkdir(parents=True, exist_ok=True)
        return self.folder / "disk" / str(number)

    def storage(self, number: int, previous: int | None = None) -> StorageUpload:
        paths = StoragePaths(
            file_access=self.file_access,
            previous=None if previous is None else str(self.store(previous)),
            own=str(self.store(number)),
        )
        self.mirrors.append(StorageUpload(paths, self.keeping, retry_after=0.05))
        return self.mirrors[-1]

    def restored(self, number: int, previous: int | None) -> CheckpointFile | None:
        found = self.storage(number, previous).restore(self.disk(number))
        return found[-1] if found else None

    def attempt(self, number: int) -> Checkpoints:
        """An attempt's, after the one before, if there was one."""
        previous = number - 1 if number else None
        return Checkpoints(self.disk(number), self.storage(number, previous), self.keeping)

    def save(self, checkpoints: Checkpoints, number: int, step: int, loss: float | None) -> CheckpointFile:
        """One that a rank has saved with a loss."""
        file, data = checkpoint(step)
        (self.disk(number) / file.name).write_bytes(data)
        file = replace(file, metrics={} if loss is None else {"loss": loss})
        checkpoints.keep(file)
        return file

    def leave_all(self) -> None:
        """The first attempt has saved all of `LOSSES`, and ended."""
        checkpoints = self.attempt(0)
        for step, loss in LOSSES.items():
            self.save(checkpoints, 0, step, loss)
        assert checkpoints.flush(PATIENCE)
        checkpoints.close()

    def ran(self, number: int, *steps: int) -> list[CheckpointFile]:
        """An attempt that has kept checkpoints of these steps."""
        storage, files = self.storage(number), []
        for step in steps:
            files.append(self.keep(storage, number, step))
            assert storage.flush(PATIENCE)
        storage.close()
        return files

    def keep(self, storage: StorageUpload, number: int, step: int, attempt: int = 2) -> CheckpointFile:
        file, data = checkpoint(step, attempt)
        path = self.disk(number) / file.name
        path.write_bytes(data)
        storage.offer(file, path)
        return file

    def listed(self, number: int) -> list[int]:
        """The steps in an attempt's manifest."""
        return [entry["step"] for entry in json.loads((self.store(number) / MANIFEST).read_text())["checkpoints"]]


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    made = Attempts(tmp_path, FlyteContextManager.current_context().file_access)
    yield made
    for storage in made.mirrors:
        storage.close()


@pytest.fixture
def store(tmp_path: Path) -> MoodyStore:
    return MoodyStore(tmp_path)


@pytest.fixture
def moody(tmp_path: Path, store: MoodyStore) -> Iterator[Attempts]:
    made = Attempts(tmp_path, store)
    yield made
    store.gate.set()
    for storage in made.mirrors:
        storage.close()


def checkpoint(step: int, attempt: int = 2) -> tuple[CheckpointFile, bytes]:
    data = hashlib.shake_128(str(step).encode()).digest(5000)
    digest = hashlib.sha256(data).hexdigest()
    return CheckpointFile(attempt=attempt, step=step, size=len(data), digest=digest), data


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


# ---- Copying --------------------------------------------------------------------------------------------------------


def test_checkpoint_is_copied_with_a_manifest_that_names_it(attempts: Attempts) -> None:
    [file] = attempts.ran(0, 4)
    store = attempts.store(0)
    assert (store / file.name).read_bytes() == checkpoint(4)[1]
    assert json.loads((store / MANIFEST).read_text()) == {"checkpoints": [asdict(file)]}
    assert sorted(path.name for path in store.iterdir()) == [MANIFEST, file.name]


def test_manifest_is_written_last(moody: Attempts, store: MoodyStore) -> None:
    [file] = moody.ran(0, 4)
    assert store.calls == [file.name, MANIFEST]


def test_newest_come_first_and_older_ones_are_removed_from_storage(attempts: Attempts) -> None:
    files = attempts.ran(0, *range(1, NUM_KEPT + 3))
    kept = files[: -NUM_KEPT - 1 : -1]
    assert attempts.listed(0) == [file.step for file in kept]
    names = sorted(path.name for path in attempts.store(0).iterdir())
    assert names == sorted([MANIFEST, *(file.name for file in kept)])


def test_nothing_but_checkpoints_stays_on_the_disk(attempts: Attempts) -> None:
    [file] = attempts.ran(0, 1)
    assert [path.name for path in attempts.disk(0).iterdir()] == [file.name]


def test_who_goes_on_in_the_same_folder_copies_nothing_twice_and_leaves_nothing_old(tmp_path: Path) -> None:
    store = CountingStore(tmp_path, str(tmp_path / "raw"))
    attempts = Attempts(tmp_path, store)
    files = attempts.ran(0, 1, 2)
    store.written.clear()
    storage = attempts.storage(0, previous=0)
    [found] = storage.restore(attempts.disk(1))
    assert found.step == 2
    storage.offer(found, attempts.disk(1) / found.name)  # as `Checkpoints` does
    assert storage.flush(PATIENCE)
    assert store.written == [MANIFEST]
    newest = attempts.keep(storage, 1, 3)
    assert storage.flush(PATIENCE)
    storage.close()
    names = sorted(path.name for path in attempts.store(0).iterdir())
    assert names == sorted([MANIFEST, files[1].name, newest.name])


def test_same_checkpoint_again_is_listed_once(attempts: Attempts) -> None:
    attempts.ran(0, 1, 2, 1)
    assert attempts.listed(0) == [1, 2]


def test_offer_does_not_wait(moody: Attempts, store: MoodyStore) -> None:
    store.gate.clear()
    storage = moody.storage(0)
    moody.keep(storage, 0, 1)  # would wait for ever
    assert not storage.flush(0.1)
    store.gate.set()
    assert storage.flush(PATIENCE)
    assert moody.listed(0) == [1]


def test_newer_checkpoint_takes_the_place_of_one_that_waits(moody: Attempts, store: MoodyStore) -> None:
    store.gate.clear()
    storage = moody.storage(0)
    moody.keep(storage, 0, 1)
    store.await_call()
    for step in (2, 3, 4):
        moody.keep(storage, 0, step)
    store.gate.set()
    assert storage.flush(PATIENCE)
    assert moody.listed(0) == [4, 1]
    assert not any(name.startswith(("step-2", "step-3")) for name in store.calls)


def test_storage_that_fails_is_tried_again(
    moody: Attempts, store: MoodyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.num_failures = 2
    storage = moody.storage(0)
    moody.keep(storage, 0, 5)
    assert storage.flush(PATIENCE)
    assert moody.listed(0) == [5]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "the checkpoint of step 5 could not be copied" in told[0]
    assert "(OSError: the storage is not in the mood); trying again in 0.05 s. The training goes on." in told[0]
    assert "trying again in 0.1 s" in told[1]


def test_manifest_that_fails_is_tried_again(moody: Attempts, store: MoodyStore) -> None:
    storage = moody.storage(0)
    store.gate.clear()
    moody.keep(storage, 0, 5)
    store.await_call()
    fail_next = store.calls

    class FailManifest(list[str]):
        def append(self, name: str) -> None:
            super().append(name)
            if self.count(MANIFEST) == 1 and name == MANIFEST:
                store.num_failures = 1

    store.calls = FailManifest(fail_next)
    store.gate.set()
    assert storage.flush(PATIENCE)
    assert store.calls.count(MANIFEST) == 2
    assert moody.listed(0) == [5]


def test_flush_tells_that_it_did_not_arrive(moody: Attempts, store: MoodyStore) -> None:
    store.num_failures = 1_000
    storage = moody.storage(0)
    assert storage.flush(0.0)  # nothing to copy yet
    moody.keep(storage, 0, 5)
    assert not storage.flush(0.3)
    assert not moody.store(0).exists()


def test_newer_checkpoint_is_copied_once_storage_works_again(moody: Attempts, store: MoodyStore) -> None:
    store.num_failures = 3
    storage = moody.storage(0)
    moody.keep(storage, 0, 5)
    store.await_call()
    moody.keep(storage, 0, 6)
    assert storage.flush(PATIENCE)
    assert moody.listed(0)[0] == 6


def test_checkpoint_that_has_gone_meanwhile_is_not_tried_again(attempts: Attempts) -> None:
    storage = attempts.storage(0)
    storage.offer(checkpoint(1)[0], attempts.disk(0) / "gone.pt")
    assert storage.flush(PATIENCE)
    assert not (attempts.store(0) / MANIFEST).exists()
    attempts.keep(storage, 0, 2)
    assert storage.flush(PATIENCE)
    assert attempts.listed(0) == [2]


@pytest.mark.parametrize("num_failures", [0, 1_000])
def test_close_ends_the_thread(moody: Attempts, store: MoodyStore, num_failures: int) -> None:
    before = set(threading.enumerate())
    storage = moody.storage(0)
    [thread] = set(threading.enumerate()) - before
    store.num_failures = num_failures
    moody.keep(storage, 0, 1)
    store.await_call()
    storage.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


# ---- Restoring ------------------------------------------------------------------------------------------------------


def test_newest_of_the_attempt_before_is_restored(attempts: Attempts) -> None:
    attempts.ran(0, 1, 2, 3)
    restored = attempts.restored(1, previous=0)
    assert restored == checkpoint(3, attempt=0)[0]
    assert (attempts.disk(1) / restored.name).read_bytes() == checkpoint(3)[1]


def test_damaged_newest_gives_way_to_the_one_before(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    files = attempts.ran(0, 1, 2)
    flip_a_byte(attempts.store(0) / files[1].name)
    assert attempts.restored(1, previous=0) == checkpoint(1, attempt=0)[0]
    assert "the previous attempt's checkpoint of step 2 is not whole" in capsys.readouterr().err


def test_truncated_newest_gives_way_to_the_one_before(attempts: Attempts) -> None:
    files = attempts.ran(0, 1, 2)
    with (attempts.store(0) / files[1].name).open("r+b") as file:
        file.truncate(10)
    assert attempts.restored(1, previous=0) == checkpoint(1, attempt=0)[0]


def test_missing_newest_gives_way_to_the_one_before(attempts: Attempts) -> None:
    files = attempts.ran(0, 1, 2)
    (attempts.store(0) / files[1].name).unlink()
    assert attempts.restored(1, previous=0) == checkpoint(1, attempt=0)[0]


def test_nothing_is_restored_when_none_is_whole(attempts: Attempts) -> None:
    for file in attempts.ran(0, 1, 2):
        flip_a_byte(attempts.store(0) / file.name)
    assert attempts.restored(1, previous=0) is None


def test_first_attempt_has_nothing_to_restore(attempts: Attempts) -> None:
    assert attempts.restored(0, previous=None) is None


def test_folder_that_was_never_written_is_a_fresh_start(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    assert attempts.restored(1, previous=0) is None
    attempts.store(0).mkdir(parents=True)
    assert attempts.restored(1, previous=0) is None
    assert capsys.readouterr().err == ""


def test_checkpoint_without_manifest_does_not_count(attempts: Attempts) -> None:
    attempts.ran(0, 1)
    (attempts.store(0) / MANIFEST).unlink()
    assert attempts.restored(1, previous=0) is None


@pytest.mark.parametrize(
    "torn",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[]",
        lambda _: "null",
        lambda _: '{"checkpoints": 3}',
        lambda _: '{"something": "else"}',
        lambda text: text.replace('"step"', '"stop"'),
        lambda text: text.replace('"metrics": {}', '"metrics": 3'),
        lambda text: text.replace('"metrics": {}', '"metrics": {"loss": "low"}'),
        lambda text: text.replace('"step"', '"author": "a later version", "step"'),
    ],
)
def test_manifest_that_cannot_be_read_is_a_fresh_start(attempts: Attempts, torn: Callable[[str], str]) -> None:
    attempts.ran(0, 1)
    manifest = attempts.store(0) / MANIFEST
    manifest.write_text(torn(manifest.read_text()))
    assert attempts.restored(1, previous=0) is None


def test_manifest_that_is_not_text_is_a_fresh_start(attempts: Attempts) -> None:
    attempts.ran(0, 1)
    (attempts.store(0) / MANIFEST).write_bytes(b"\xff\x00\xfe")
    assert attempts.restored(1, previous=0) is None


def test_storage_that_cannot_be_read_at_first_is_asked_again(moody: Attempts, store: MoodyStore) -> None:
    moody.ran(0, 1)
    store.num_failures = MAX_READ_ATTEMPTS - 1
    assert moody.restored(1, previous=0) == checkpoint(1, attempt=0)[0]


def test_storage_that_cannot_be_read_at_all_is_a_fresh_start_with_a_word_about_it(
    moody: Attempts, store: MoodyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    moody.ran(0, 1)
    store.num_failures = 1_000
    assert moody.restored(1, previous=0) is None
    last = capsys.readouterr().err.splitlines()[-1]
    assert "(OSError: the storage is not in the mood); the training starts afresh" in last


# ---- From attempt to attempt, through storage -----------------------------------------------------------------------


def test_restored_checkpoint_is_carried_forward_at_once(attempts: Attempts) -> None:
    attempts.ran(0, 7)
    for number in (1, 2):  # attempts that save nothing themselves
        checkpoints = Checkpoints(attempts.disk(number), attempts.storage(number, previous=number - 1))
        restored = checkpoints.restore()
        assert restored == checkpoint(7, attempt=0)[0]
        assert checkpoints.newest() == restored
        assert checkpoints.flush(PATIENCE)
        checkpoints.close()
        shutil.rmtree(attempts.store(number - 1))
    assert attempts.listed(2) == [7]


def test_what_was_restored_backs_up_the_first_checkpoint_of_the_next_attempt(attempts: Attempts) -> None:
    attempts.ran(0, 7)
    storage = attempts.storage(1, previous=0)
    checkpoints = Checkpoints(attempts.disk(1), storage)
    checkpoints.restore()
    assert checkpoints.flush(PATIENCE)
    attempts.keep(storage, 1, 8)
    assert checkpoints.flush(PATIENCE)
    assert attempts.listed(1) == [8, 7]


def test_vault_that_finds_nothing_carries_nothing(attempts: Attempts) -> None:
    checkpoints = Checkpoints(attempts.disk(1), attempts.storage(1, previous=0))
    assert checkpoints.restore() is None
    assert checkpoints.newest() is None
    assert checkpoints.flush(PATIENCE)
    assert not attempts.store(1).exists()


def test_restored_checkpoint_counts_as_older_than_any_attempt(attempts: Attempts) -> None:
    attempts.ran(0, 7)
    checkpoints = Checkpoints(attempts.disk(1), attempts.storage(1, previous=0))
    checkpoints.restore()
    checkpoints.fence(0)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.attempt == 0


# ---- The best -------------------------------------------------------------------------------------------------------

BEST = Keep(last=1, best=2, metric="loss")
LOSSES = {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.2, 5: math.nan, 6: None, 7: 0.8}


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Attempts]:
    store = StrictStore(tmp_path)
    made = Attempts(tmp_path, store, BEST)
    yield made
    for storage in made.mirrors:
        storage.close()
    assert store.missing == []


def test_the_best_stay_in_storage_beside_the_last_with_their_metrics(strict: Attempts) -> None:
    checkpoints = strict.attempt(0)
    for step, loss in LOSSES.items():
        file = strict.save(checkpoints, 0, step, loss)
        assert checkpoints.flush(PATIENCE)
        assert strict.listed(0)[0] == step
    checkpoints.close()
    assert strict.listed(0) == [7, 4, 2]
    names = [path.name for path in strict.store(0).iterdir()]
    assert sorted(names) == sorted([MANIFEST, *(checkpoint(step)[0].name for step in (7, 4, 2))])
    assert checkpoints.saved()[-1].place == f"{strict.store(0)}/{file.name}"
    entries = json.loads((strict.store(0) / MANIFEST).read_text())["checkpoints"]
    assert [entry["metrics"] for entry in entries] == [{"loss": 0.8}, {"loss": 0.2}, {"loss": 0.1}]


def test_the_best_are_copied_though_newer_ones_have_come_meanwhile(moody: Attempts, store: MoodyStore) -> None:
    moody.keeping = BEST
    store.gate.clear()
    checkpoints = moody.attempt(0)
    moody.save(checkpoints, 0, 1, LOSSES[1])
    store.await_call()
    for step, loss in list(LOSSES.items())[1:]:
        moody.save(checkpoints, 0, step, loss)
    store.gate.set()
    assert checkpoints.flush(PATIENCE)
    assert moody.listed(0) == [7, 4, 2]
    assert sorted(name.split("-")[1] for name in store.calls if name != MANIFEST) == ["1", "2", "4", "7"]


def test_the_best_are_copied_though_there_is_a_newer_one_each_time_that_one_has_been(
    moody: Attempts, store: MoodyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    moody.keeping = BEST
    store.gate.clear()
    checkpoints = moody.attempt(0)
    moody.save(checkpoints, 0, 1, 0.9)
    store.await_call()
    moody.save(checkpoints, 0, 2, 0.1)
    moody.save(checkpoints, 0, 3, 0.2)
    copied: list[int] = []

    def put_data(local_path: str, remote_path: str, **kwargs: Any) -> str:
        done = MoodyStore.put_data(store, local_path, remote_path, **kwargs)
        if not remote_path.endswith(MANIFEST):
            copied.append(int(remote_path.rpartition("/")[2].split("-")[1]))
            if len(copied) < 8:
                moody.save(checkpoints, 0, 3 + len(copied), 0.9)
        return done

    monkeypatch.setattr(store, "put_data", put_data)
    store.gate.set()
    until(lambda: len(copied) >= 8, "all newer ones")
    assert copied[:4] == [2, 4, 3, 6]


def test_the_best_survive_attempts_and_the_newest_is_gone_on_from(strict: Attempts) -> None:
    strict.leave_all()
    for number in (1, 2):
        checkpoints = strict.attempt(number)
        start = checkpoints.restore()
        assert start is not None
        assert (start.step, [file.step for file in checkpoints.entries()]) == (7, [2, 4, 7])
        assert [file.metrics["loss"] for file in checkpoints.entries()] == [0.1, 0.2, 0.8]
        assert checkpoints.flush(PATIENCE)
        checkpoints.close()
        shutil.rmtree(strict.store(number - 1))
    checkpoints = strict.attempt(3)
    checkpoints.restore()
    strict.save(checkpoints, 3, 8, 0.05)
    assert checkpoints.flush(PATIENCE)
    assert strict.listed(3) == [8, 2]
    best = checkpoints.find(None)
    assert best is not None
    assert best.step == 8


def test_an_attempt_that_can_copy_nothing_passes_on_all_that_it_was_given(moody: Attempts, store: MoodyStore) -> None:
    moody.keeping = BEST
    moody.leave_all()
    put, FileAccessProvider.put_data = FileAccessProvider.put_data, no_room_but_for_manifests
    try:
        checkpoints = moody.attempt(1)
        store.fails_first = MANIFEST
        checkpoints.restore()
        until((moody.store(1) / MANIFEST).exists, "the manifest")
        checkpoints.close()
    finally:
        FileAccessProvider.put_data = put  # type: ignore[method-assign]
    assert [path.name for path in moody.store(1).iterdir()] == [MANIFEST]
    checkpoints = moody.attempt(2)
    start = checkpoints.restore()
    assert start is not None
    assert (start.step, [file.step for file in checkpoints.entries()]) == (7, [2, 4, 7])


def test_a_best_one_that_is_damaged_in_storage_gives_way_to_others(strict: Attempts) -> None:
    strict.leave_all()
    flip_a_byte(strict.store(0) / checkpoint(2)[0].name)
    checkpoints = strict.attempt(1)
    checkpoints.restore()
    assert [file.step for file in checkpoints.entries()] == [4, 7]
    strict.save(checkpoints, 1, 8, 0.6)
    assert checkpoints.flush(PATIENCE)
    assert strict.listed(1) == [8, 4]


def test_flush_tells_whether_the_newest_arrived_though_a_best_one_did_not(moody: Attempts, store: MoodyStore) -> None:
    moody.keeping, store.fails_always = BEST, "step-1-"
    checkpoints = moody.attempt(0)
    moody.save(checkpoints, 0, 1, 0.1)
    assert not checkpoints.flush(0.2)
    moody.save(checkpoints, 0, 2, 0.9)
    assert checkpoints.flush(1.0)
    assert moody.listed(0) == [2]


def test_whoever_else_writes_the_manifest_first_names_what_the_attempt_was_given(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.ran(0, 1, 2)
    monkeypatch.setattr(StorageUpload, "_work", lambda _: None)  # as slow as can be
    storage = attempts.storage(1, previous=0)
    storage.restore(attempts.disk(1))
    storage.manifest.write(sharded=[])
    assert attempts.listed(1) == [2, 1]


def test_what_an_earlier_attempt_has_in_its_folder_is_left_there(
    attempts: Attempts, capsys: pytest.CaptureFixture[str]
) -> None:
    files = attempts.ran(0, 1, 2)
    checkpoints = attempts.attempt(1)
    checkpoints.restore()
    assert checkpoints.flush(PATIENCE)
    assert attempts.listed(1) == [2, 1]
    attempts.save(checkpoints, 1, 3, None)
    assert checkpoints.flush(PATIENCE)
    checkpoints.close()
    assert attempts.listed(1) == [3, 2]
    assert all((attempts.store(0) / file.name).exists() for file in files)
    assert capsys.readouterr().err == ""


def test_a_manifest_from_before_metrics_is_read(attempts: Attempts) -> None:
    attempts.ran(0, 1)
    manifest = attempts.store(0) / MANIFEST
    [entry] = json.loads(manifest.read_text())["checkpoints"]
    old = {name: entry[name] for name in ("attempt", "step", "size", "digest")}
    manifest.write_text(json.dumps({"checkpoints": [old]}))
    restored = attempts.restored(1, previous=0)
    assert restored == checkpoint(1, attempt=0)[0]
    assert restored.metrics == {}


def test_who_goes_on_in_the_same_folder_with_less_to_keep_removes_the_others(strict: Attempts) -> None:
    strict.leave_all()
    strict.keeping = Keep(last=1)
    checkpoints = Checkpoints(strict.disk(1), strict.storage(0, previous=0), strict.keeping)
    checkpoints.restore()
    assert checkpoints.flush(PATIENCE)
    until(lambda: len(list(strict.store(0).iterdir())) == 2, "the removal")
    assert strict.listed(0) == [7]


def test_the_newest_stays_the_newest_while_what_was_left_is_taken_over(
    moody: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may end at any moment of it, and the manifest has what is known then."""
    moody.keeping = BEST
    moody.leave_all()
    newest: list[int] = []

    def watched(act: Callable[..., None]) -> Callable[..., None]:
        def watch(upload: StorageUpload, *args: Any) -> None:
            act(upload, *args)
            newest.append(upload._listed()[0].step)

        return watch

    monkeypatch.setattr(StorageUpload, "offer", watched(StorageUpload.offer))
    monkeypatch.setattr(StorageUpload, "supply", watched(StorageUpload.supply))
    checkpoints = moody.attempt(1)
    checkpoints.restore()
    assert set(newest) == {7}


def no_room_but_for_manifests(_: FileAccessProvider, local_path: str, remote_path: str, **kwargs: Any) -> str:
    if not remote_path.endswith(MANIFEST):
        raise OSError("no space left")
    Path(remote_path).parent.mkdir(parents=True, exist_ok=True)
    return str(shutil.copyfile(local_path, remote_path))


# ---- A real object store --------------------------------------------------------------------------------------------


def test_checkpoints_pass_through_s3(tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    file_access = FileAccessProvider(str(tmp_path / "sandbox"), f"s3://{s3['bucket']}/raw")
    base = f"s3://{s3['bucket']}/{tmp_path.name}"
    attempts = Attempts(tmp_path, file_access)
    first = StorageUpload(
        StoragePaths(file_access=file_access, previous=f"{base}/none", own=f"{base}/0"), retry_after=0.05
    )
    assert first.restore(attempts.disk(0)) == []
    for step in range(1, NUM_KEPT + 2):
        attempts.keep(first, 0, step)
        assert first.flush(PATIENCE)
    first.close()
    second = StorageUpload(
        StoragePaths(file_access=file_access, previous=f"{base}/0", own=f"{base}/1"), retry_after=0.05
    )
    assert second.restore(attempts.disk(1)) == [checkpoint(NUM_KEPT + 1, attempt=0)[0]]
    assert second.flush(PATIENCE)
    second.close()
    names = [path.rpartition("/")[2] for path in file_access.get_filesystem_for_path(base).ls(f"{base}/0")]
    assert sorted(names) == sorted([MANIFEST, *(checkpoint(step)[0].name for step in range(2, NUM_KEPT + 2))])
    del file_access, attempts, first, second
    S3FileSystem.clear_instance_cache()
    gc.collect()  # its sessions complain when the interpreter ends


def test_storage_without_the_right_to_delete_keeps_all_and_is_no_failure(
    tmp_path: Path, weed: Weed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weed.make_bucket("kept")
    weed.forbid_deletes("kept")
    keys = {"ENDPOINT": weed.endpoint, "ACCESS_KEY_ID": WRITER.access, "SECRET_ACCESS_KEY": WRITER.secret}
    for name, value in [*weed.env(WRITER).items(), *((f"FLYTE_AWS_{key}", value) for key, value in keys.items())]:
        monkeypatch.setenv(name, value)
    file_access = CountingStore(tmp_path, "s3://kept/raw")
    attempts = Attempts(tmp_path, file_access)
    storage = StorageUpload(StoragePaths(file_access=file_access, previous=None, own="s3://kept/0"), retry_after=0.05)
    steps = range(1, NUM_KEPT + 4)
    for step in steps:
        attempts.keep(storage, 0, step)
        assert storage.flush(PATIENCE)
    storage.close()
    files = [checkpoint(step)[0].name for step in steps]
    assert file_access.written == [name for file in files for name in (file, MANIFEST)]  # once each
    filesystem = file_access.get_filesystem_for_path("s3://kept/0")
    assert sorted(path.rpartition("/")[2] for path in filesystem.ls("s3://kept/0")) == sorted([MANIFEST, *files])
    said = capsys.readouterr().err  # garbage may have its say, too
    told = [line for line in said.splitlines() if "checkpoint" in line or "s3://" in line]
    assert len(told) == 1, said
    assert "older checkpoints cannot be removed from s3://kept/0 and stay there (" in told[0]
    assert "could not be copied" not in said
    del file_access, attempts, storage, filesystem
    S3FileSystem.clear_instance_cache()
    gc.collect()  # its sessions complain when the interpreter ends
