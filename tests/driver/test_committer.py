"""Sharded checkpoints in storage: commits, removals, and the checkpoint from which the next gang starts."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

import processes
from flytekitplugins.daskpytorch.driver import committer, manifest
from flytekitplugins.daskpytorch.driver.committer import LANE, Committed, Committer
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from flytekitplugins.daskpytorch.driver.storage import storage_of
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import (
    METADATA,
    CheckpointEntry,
    folder_name,
)
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import Execution, StoragePaths
from flytekitplugins.daskpytorch.settings import Gang, Keep
from others import give_away
from processes import run_program

PATIENCE = 300.0
"""Seconds that nothing here takes."""


@dataclass
class Driver:
    """What a gang's driver has for its checkpoints, and two ranks that write theirs as they should."""

    uri: str
    """Of the gang, which keeps everything there."""
    previous: str | None = None
    """Where the attempt before has kept everything; None: in the same place."""
    options: dict[str, Any] = field(default_factory=dict)
    keep: Keep = field(default_factory=Keep)
    heard: list[Committed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fs = fsspec.core.url_to_fs(self.uri, **self.options)[0]
        files = Files(self.fs)
        self.uri = files.path(self.uri)
        paths = StoragePaths(files=files, previous=self.previous or self.uri, own=self.uri)
        self.vault = Vault(paths, self.keep, Path("/nowhere"), Worker(0.05))
        settings = Gang(checkpoint_uri=self.uri)
        self.committer = Committer(settings, paths, self.vault, Path("/nowhere"), lambda _: self.fs, self.heard.append)

    def begin(self) -> Driver:
        """Start, on a disk of its own."""
        self.vault.restore()
        self.committer.begin()
        return self

    def write(self, step: int, number: int = 0, attempt: int = 0) -> CheckpointEntry:
        """The ranks write a checkpoint."""
        base, nonce = self.committer.base, self.committer.sharding().nonce
        shards = folder_name(attempt, nonce, step, number)
        for name in ("__0_0.distcp", "__1_0.distcp", METADATA):
            Files(self.fs).write(f"{self.uri}/{shards}/{name}", step.to_bytes(8, "big"))
        metrics = {"loss": 1 / step}
        return CheckpointEntry(
            attempt=attempt, step=step, size=32, digest="d", metrics=metrics, folder=base, shards=shards
        )

    def save(self, step: int, number: int, attempt: int = 0) -> Committed:
        """A whole checkpoint, committed and swept after as the brain asks."""
        written = self.write(step, number, attempt)
        self.committer.commit(written)
        self.committer.sweep_through(written)
        assert self.flush()
        return self.heard[-1]

    def flush(self) -> bool:
        return self.vault.worker.flush(PATIENCE, lane=LANE) and self.vault.flush(PATIENCE)

    def steps(self) -> list[int]:
        """Those that ranks would start from."""
        return [entry.step for entry in self.committer.sharding().start]

    def named(self) -> list[CheckpointEntry]:
        """What the manifest in storage names."""
        found = manifest.read(Files(self.fs), self.uri)
        assert found is not None
        return [entry for entry in found if entry.is_sharded]

    def folders(self) -> list[str]:
        """Those that lie in storage: step, attempt and number."""
        names = {"/".join(path.split("/")[:2]) for path in Files(self.fs).below(self.uri) if path.startswith("step-")}
        return sorted(name.rpartition("-")[0] for name in names)

    def close(self) -> None:
        self.committer.close()


MakeDriver = Callable[..., Driver]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[MakeDriver]:
    """Makes drivers of gangs that keep everything in a folder."""
    made: list[Driver] = []

    def make(uri: str | None = None, **how: Any) -> Driver:
        made.append(Driver(uri or str(tmp_path / "kept"), **how))
        return made[-1].begin()

    yield make
    for one in made:
        one.close()


def test_what_is_being_written_is_not_removed_but_what_was_given_up_is(driver: MakeDriver) -> None:
    mine = driver()
    mine.write(9, 0)  # given up: the next has begun
    written = mine.write(10, 1)
    mine.write(11, 2)  # goes on meanwhile
    mine.committer.commit(written)
    mine.committer.sweep(0, 1)
    assert mine.flush()
    assert mine.folders() == ["step-10/0-1", "step-11/0-2"]


def test_attempt_that_starts_removes_what_those_before_have_not_finished_and_what_they_write_later(
    driver: MakeDriver,
) -> None:
    mine = driver()
    mine.save(10, 0)
    mine.write(11, 1)
    mine.committer.sweep(1)
    assert mine.flush()
    assert mine.folders() == ["step-10/0-0"]
    mine.write(12, 2, attempt=0)  # a rank that was suspended wakes up, and writes
    mine.save(11, 0, attempt=1)
    assert mine.folders() == ["step-10/0-0", "step-11/1-0"]
    assert mine.steps() == [11, 10]


def test_driver_that_lost_its_folder_removes_no_checkpoint_of_the_driver_that_took_over(driver: MakeDriver) -> None:
    suspended = driver()
    suspended.save(1, 0)
    successor = driver()
    for number, step in enumerate((2, 3)):
        successor.save(step, number)
    suspended.committer.sweep(0, 0)  # the suspended driver wakes up
    assert suspended.flush()
    assert [entry.step for entry in successor.named()] == [3, 2]
    assert successor.folders() == ["step-2/0-0", "step-3/0-1"]


def test_who_keeps_less_drops_older_ones_with_the_first_commit_only(driver: MakeDriver) -> None:
    """Until then, the newest may be found damaged, and the ranks load an older one."""
    first = driver(keep=Keep(last=3))
    for number in range(3):
        first.save(10 + number, number)
    first.close()
    second = driver(keep=Keep(last=1))
    second.vault.hold([])  # as an evaluation's end does
    assert second.flush()
    assert second.steps() == [entry.step for entry in second.named()] == [12, 11, 10]
    assert len(second.folders()) == 3
    second.save(13, 0)
    assert second.steps() == [entry.step for entry in second.named()] == [13]
    assert second.folders() == ["step-13/0-0"]


@pytest.mark.parametrize("where", ["same", "other"])
def test_manifest_that_is_cut_off_costs_no_shards(driver: MakeDriver, tmp_path: Path, where: str) -> None:
    first = driver(str(tmp_path / "same"))
    first.save(10, 0)
    first.close()
    Path(first.uri, MANIFEST).write_text("{")
    second = driver(str(tmp_path / where), previous=first.uri)
    assert second.steps() == []
    assert second.flush()
    assert first.folders() == ["step-10/0-0"]


@pytest.mark.parametrize(("content", "found"), [('{"checkpoints": []}', 1), ('{"format": 5, "all": []}', 5)])
def test_checkpoints_of_another_version_are_refused_and_stay(driver: MakeDriver, content: str, found: int) -> None:
    first = driver()
    first.save(10, 0)
    first.close()
    Path(first.uri, MANIFEST).write_text(content)
    with pytest.raises(GangStartError, match=rf"of format {found}, which another version .* reads format 4"):
        driver()
    assert first.folders() == ["step-10/0-0"]
    assert Path(first.uri, MANIFEST).read_text() == content


def test_next_attempt_of_a_task_removes_what_the_one_before_has_not_finished(
    driver: MakeDriver, tmp_path: Path
) -> None:
    first = driver(str(tmp_path / "0"))
    first.write(9, 0)
    first.close()  # as one does that is killed: before anything counts
    second = driver(str(tmp_path / "1"), previous=str(tmp_path / "0"))
    second.save(10, 0)
    second.write(11, 1)
    second.close()
    assert first.folders() == []
    third = driver(str(tmp_path / "2"), previous=str(tmp_path / "1"))
    assert third.flush()
    assert third.steps() == [10]
    assert second.folders() == ["step-10/0-0"]


# ---- Storage that fails ---------------------------------------------------------------------------------------------


def test_shards_that_a_manifest_may_name_are_not_removed(driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage took the manifest, but its answer was lost: whoever reads it finds what it names."""
    mine = driver()
    real = Files.write

    def write(self: Files, path: str, data: bytes) -> None:
        real(self, path, data)
        if path.endswith(MANIFEST):
            raise TimeoutError("no answer")

    monkeypatch.setattr(committer, "MAX_COMMIT_ATTEMPTS", 2)
    monkeypatch.setattr(Files, "write", write)
    assert isinstance(mine.save(7, 0).error, TimeoutError)
    assert [entry.step for entry in mine.named()] == [7]
    assert mine.folders() == ["step-7/0-0"]
    assert mine.steps() == []
    monkeypatch.undo()
    mine.save(8, 1)
    assert mine.steps() == [8]
    assert mine.folders() == ["step-8/0-1"]


def test_driver_killed_in_the_middle_of_a_commit_leaves_the_checkpoint_before(
    driver: MakeDriver, tmp_path: Path
) -> None:
    """A driver of its own, which SIGKILL meets when it is about to write this object."""
    program = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(processes.__file__).parent)]!r}
        from test_committer import Driver, Files

        mine = Driver({str(tmp_path / "kept")!r}).begin()
        mine.save(10, 0)
        real = Files.write

        def die(self, path, data):
            if path.endswith({MANIFEST!r}):
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, path, data)

        Files.write = die
        mine.save(11, 1)
        """
    )
    done = run_program(["-c", program], cwd=tmp_path)
    assert done.returncode == -9, done.stderr
    second = driver()
    assert second.steps() == [10]
    assert second.flush()
    assert second.folders() == ["step-10/0-0"]


# ---- Where they lie -------------------------------------------------------------------------------------------------


class InFlyte(Execution):
    """Has a folder for each attempt."""

    name = "a1b2"

    def __init__(self, attempt: str) -> None:
        self.paths = StoragePaths(files=Files(LocalFileSystem()), previous=None, own=f"/flyte/{attempt}/gang")

    def checkpoint_paths(self, key: str) -> StoragePaths | None:
        return self.paths


def place_of(execution: Execution, key: str, settings: Gang, scratch: Path) -> Committer:
    def opened(uri: str) -> Any:
        raise AssertionError("nobody asked for it")

    paths = storage_of(execution, key, settings)
    return Committer(settings, paths, Vault(paths, Keep(), scratch), scratch, opened, lambda _: None)


def test_without_storage_shards_lie_in_a_folder_that_is_removed_with_the_driver(tmp_path: Path) -> None:
    place = place_of(Execution(), "train-1", Gang(), tmp_path)
    assert Path(place.base).parent == tmp_path
    assert place.token is not None
    assert place.token.parent == tmp_path


def test_in_a_flyte_task_they_lie_beside_the_other_checkpoints_of_the_attempt(tmp_path: Path) -> None:
    place = place_of(InFlyte("n0-0"), "gang", Gang(), tmp_path)
    assert (place.base, place.previous) == ("/flyte/n0-0/gang", None)
    retry = InFlyte("n0-1")
    retry.paths = replace(retry.paths, previous="file:///flyte/n0-0/gang")
    assert place_of(retry, "gang", Gang(), tmp_path).previous == place.base


def test_uri_in_a_flyte_task_holds_the_shards_of_each_attempt_apart_and_flyte_the_manifest(tmp_path: Path) -> None:
    settings, bases = Gang(checkpoint_uri="s3://bucket/shards/"), set()
    first, retry = InFlyte("n0-0"), InFlyte("n0-1")
    retry.paths = replace(retry.paths, previous=first.paths.own)
    places = [place_of(each, "gang", settings, tmp_path) for each in (first, retry)]
    assert [place.previous for place in places] == [None, places[0].base]
    for attempt in ("n0-0", "n0-1", "n1-0"):
        paths = storage_of(InFlyte(attempt), "gang", settings)
        assert paths is not None
        assert paths.own == f"/flyte/{attempt}/gang"
        place = place_of(InFlyte(attempt), "gang", settings, tmp_path)
        assert place.base.startswith("s3://bucket/shards/a1b2/")
        assert place.token is None
        bases.add(place.base)
    assert len(bases) == 3


def test_uri_outside_flyte_holds_all_of_each_gang_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in (str(tmp_path / "kept"), f"file://{tmp_path}/kept/", "kept"):
        paths = storage_of(Execution(), "train-1", Gang(checkpoint_uri=uri))
        assert paths is not None
        assert paths.own == paths.previous == str(tmp_path / "kept" / "train-1")
        place = place_of(Execution(), "train-1", Gang(checkpoint_uri=uri), tmp_path)
        assert place.base == place.previous == paths.own
        assert place.token is not None
        assert str(place.token.parent) == paths.own  # a folder that the ranks' machines may share


def test_folder_that_cannot_be_written_is_an_error_at_the_start_that_says_what_named_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    committer = place_of(Execution(), "train-1", Gang(checkpoint_uri=str(tmp_path / "file")), tmp_path)
    told = rf"^Gang\(checkpoint_uri=...\): {tmp_path}/file/train-1 cannot be used \(NotADirectoryError: .*Check"
    with pytest.raises(OSError, match=told):
        committer.begin()


def test_what_the_user_keeps_beside_the_shards_stays(tmp_path: Path) -> None:
    driver = Driver(str(tmp_path / "kept"))
    driver.begin()
    driver.save(1, 0)
    [named] = [entry.saved(None) for entry in driver.vault.sharded]
    mine = [Path(str(named.place), "notes.txt"), tmp_path / "kept" / "step-9" / "0-1-final" / "model.safetensors"]
    mine[1].parent.mkdir(parents=True)
    for path in mine:
        path.write_text("mine")
    for step in (2, 3, 4):
        driver.save(step, step)
    driver.close()
    again = Driver(str(tmp_path / "kept"))
    again.begin()
    assert again.flush()
    again.close()
    assert all(path.exists() for path in mine)
    assert [path.name for path in Path(str(named.place)).iterdir()] == ["notes.txt"]


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
