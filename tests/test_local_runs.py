"""Checkpoints of local runs are kept, found by the next run, told apart, and removed in time."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.flyte import context
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, digest_of
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint
from flytekitplugins.daskpytorch.task import local_runs
from flytekitplugins.daskpytorch.task.local_runs import LocalRun, begin, begun, local_run
from others import give_away


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs are kept, of which none is asked to go on."""
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    monkeypatch.delenv("DASKPYTORCH_RESUME", raising=False)
    return tmp_path / "kept"


@contextlib.contextmanager
def run_of(task: str = "flows.train") -> Iterator[LocalRun]:
    with begun(task):
        run = local_run.get()
        assert run is not None
        yield run


def save(run: LocalRun, step: int, scratch: Path, key: str = "gang") -> CheckpointFile:
    """As a gang's driver does; its own copy goes with it."""
    paths = run.paths(key)
    source = scratch / "checkpoint"
    source.write_bytes(b"weights %d" % step)
    file = CheckpointFile(attempt=0, step=step, size=source.stat().st_size, digest=digest_of(source))
    vault = Vault(paths, Keep(), scratch)
    with contextlib.closing(vault.worker):
        source.rename(scratch / file.name)
        vault.add(file)
        assert vault.flush(60)
    (scratch / file.name).unlink()
    return file


def name_shards(run: LocalRun, uri: str = "/nowhere") -> None:
    """Name a sharded checkpoint of step 3 in the manifest of a run's gang."""
    vault = Vault(run.paths("gang"), Keep(), Path("/nowhere"))
    vault.name(ShardedCheckpoint(attempt=0, step=3, world_size=1, uri=uri, size=5, layout_digest="d"))


def restored(run: LocalRun, scratch: Path, key: str = "gang") -> bytes | None:
    vault = Vault(run.paths(key), Keep(), scratch)
    with contextlib.closing(vault.worker):
        found = vault.restore()
        assert vault.flush(60)
    return (scratch / found.name).read_bytes() if found is not None else None


@pytest.mark.parametrize("how", ["1", "last", "folder"])
def test_a_run_goes_on_from_the_one_before_where_it_is_asked_to(
    how: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_of() as first:
        save(first, 1, tmp_path)
        save(first, 2, tmp_path)
    with run_of() as unasked:
        assert restored(unasked, tmp_path) is None
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DASKPYTORCH_RESUME", str(first.folder) if how == "folder" else how)
    with run_of() as second:
        assert restored(second, tmp_path) == b"weights 2"
    assert capsys.readouterr().err == (f"train: DASKPYTORCH_RESUME is set: going on from the run in {first.folder}\n")


def test_nothing_to_go_on_from_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_of(task="flows.another") as another:
        save(another, 1, tmp_path)
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of() as run:
        assert run.previous is None
    assert f"no run in {root / 'flows.train'} has left a checkpoint: starting afresh" in capsys.readouterr().err


def test_what_is_no_run_is_an_error_that_says_what_may_be_given(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_RESUME", str(tmp_path))
    with pytest.raises(ValueError, match=f"DASKPYTORCH_RESUME={tmp_path}: must be 1 or last.*{root}"), run_of():
        pass


def test_a_run_without_checkpoints_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    with run_of() as run:
        Path(run.paths("gang").own, "step-1").mkdir(parents=True)  # of a rank that did not come to write into it
        assert run.advice() == "no checkpoint was kept"
    assert list((root / "flows.train").iterdir()) == []


def test_a_run_that_is_training_is_not_the_last_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_of() as first:
        save(first, 1, tmp_path)
    with run_of() as training:
        save(training, 1, tmp_path)
        monkeypatch.setenv("DASKPYTORCH_RESUME", "last")
        with run_of() as third:
            assert third.previous == first.folder


def make_runs(tmp_path: Path, *days: float) -> list[Path]:
    """Runs whose newest files are so many days old."""
    folders = []
    for age in days:
        with run_of() as run:
            save(run, 1, tmp_path)
        for path in run.folder.rglob("*"):
            os.utime(path, (time.time() - age * 86_400,) * 2)
        folders.append(run.folder)
    return folders


def test_old_runs_are_removed(root: Path, tmp_path: Path) -> None:
    old, young = make_runs(tmp_path, 15, 13)
    local_runs.clean(root)
    assert not old.exists()
    assert young.exists()


def test_the_oldest_runs_are_removed_where_all_take_too_much(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, middle, newest = make_runs(tmp_path, 3, 2, 1)
    size = sum(path.stat().st_size for path in newest.rglob("*"))
    monkeypatch.setattr(local_runs, "MAX_BYTES", int(2.5 * size))
    local_runs.clean(root)
    assert [run.exists() for run in (oldest, middle, newest)] == [False, True, True]


def test_shards_of_a_run_that_ended_before_its_first_checkpoint_was_whole_are_removed_when_they_are_old(
    root: Path, tmp_path: Path
) -> None:
    with run_of() as run:
        part = Path(run.paths("gang").own) / "step-1" / "0-0-abc" / "part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"shard")
    local_runs.clean(root)
    assert part.exists()
    for path in run.folder.rglob("*"):
        os.utime(path, (0, 0))
    local_runs.clean(root)
    assert not run.folder.exists()


def test_a_run_goes_on_from_shards(root: Path, tmp_path: Path) -> None:
    with run_of() as run:
        (run.folder / "gang" / "step-3" / "0-0-abc").mkdir(parents=True)  # as ranks do, before there is a record
        name_shards(run)
        assert run.newest_step() == 3
        assert "the checkpoint of step 3 is kept" in run.advice()


@pytest.mark.parametrize("why", ["old", "large"])
def test_a_run_stays_whose_shards_a_later_one_goes_on_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with run_of() as first:
        part = first.folder / "gang" / "step-3" / "0-0-abc" / "part"
        part.parent.mkdir(parents=True)
        part.write_bytes(bytes(100_000))
        name_shards(first, str(part.parent))
    for path in first.folder.rglob("*"):
        os.utime(path, (time.time() - 86_400 * (15 if why == "old" else 1),) * 2)
    if why == "large":
        monkeypatch.setattr(local_runs, "MAX_BYTES", 50_000)
    monkeypatch.setenv("DASKPYTORCH_RESUME", str(first.folder))
    with run_of() as second:
        # Its first manifest, with which its folder is made, names what it goes on from.
        name_shards(second, str(part.parent))
        assert part.exists()
    local_runs.clean(root)
    assert part.exists()
    shutil.rmtree(second.folder)
    local_runs.clean(root)
    assert not part.exists()


def test_a_run_that_is_training_is_never_removed_nor_is_what_no_run_has_left(root: Path, tmp_path: Path) -> None:
    mine = root / "flows.train" / "mine"
    mine.mkdir(parents=True)
    (mine / "notes").touch()
    with run_of() as training:
        save(training, 1, tmp_path)
        for path in [*training.folder.rglob("*"), mine / "notes"]:
            os.utime(path, (0, 0))
        local_runs.clean(root)
        assert training.folder.exists()
    assert mine.exists()
    local_runs.clean(root)
    assert not training.folder.exists()


def age(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (0, 0))


def test_folders_of_the_users_own_are_never_removed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [run] = make_runs(tmp_path, 15)
    mine = root / "resnet" / "20250101-101500-resnet"  # named like a run of ours
    with_record = root / "resnet" / "20250101-101501-resnet"
    for folder in (mine, with_record):
        folder.mkdir(parents=True)
        (folder / "weights.pt").touch()
    (with_record / "daskpytorch.json").write_text("{}")
    copied = shutil.copytree(run, root / "flows.train" / "20250101-101502-copied")
    shutil.copytree(run, root / "kept" / run.name)
    with run_of() as noted:
        save(noted, 1, tmp_path)
    (noted.folder / "gang" / "notes.txt").write_text("the best of all")
    age(root)
    monkeypatch.setattr(local_runs, "MAX_BYTES", 1)
    local_runs.clean(root)
    assert not run.exists()
    assert (mine / "weights.pt").exists()
    assert (with_record / "weights.pt").exists()
    assert (copied / "gang" / MANIFEST).exists()
    assert (root / "kept" / run.name / "gang" / MANIFEST).exists()
    assert (noted.folder / "gang" / "notes.txt").exists()


def test_a_run_stays_whose_files_a_later_one_has_not_copied_yet(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_of() as first:
        file = save(first, 1, tmp_path)
    age(first.folder)
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of() as second:
        restored(second, tmp_path)
        (second.folder / "gang" / file.name).unlink()  # as if it had named the file only, and been killed
        manifest = second.folder / "gang" / MANIFEST
        manifest.write_text(manifest.read_text().replace('"folder": null', f'"folder": "{first.folder / "gang"}"'))
    local_runs.clean(root)
    assert (first.folder / "gang" / file.name).exists()


def test_each_folder_is_this_users_alone_whatever_the_umask(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(root / "more" / "levels"))
    before = os.umask(0)
    try:
        with run_of() as run:
            save(run, 1, tmp_path)
    finally:
        os.umask(before)
    levels = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert run.folder / "gang" in levels
    assert {path.stat().st_mode & 0o777 for path in levels} == {0o700}


@pytest.mark.parametrize("how", ["1", "folder"])
@pytest.mark.parametrize("who", ["owns", "can write to"])
@pytest.mark.parametrize("what", [".", "gang", "gang/step-*.pt", "task"])
def test_what_another_user_may_have_written_is_not_resumed_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, who: str, what: str
) -> None:
    with run_of() as first:
        save(first, 1, tmp_path)
    [path] = [first.folder.parent] if what == "task" else first.folder.glob(what) if what != "." else [first.folder]
    give_away(path, who)
    monkeypatch.setenv("DASKPYTORCH_RESUME", str(first.folder) if how == "folder" else how)
    if what.endswith(".pt") and who == "can write to":  # nobody else can reach it there
        with run_of() as second:
            assert restored(second, tmp_path) == b"weights 1"
        return
    with pytest.raises(PermissionError, match=str(path)), run_of():
        pass


def test_root_and_users_of_a_shared_folder_go_on_from_their_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    give_away(shared, "owns")
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(shared))
    with run_of() as first:
        save(first, 1, tmp_path)
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of() as second:
        assert restored(second, tmp_path) == b"weights 1"


def test_an_empty_variable_keeps_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", "")
    with begun("flows.train"):
        assert local_run.get() is None
    assert not root.exists()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with begun("flows.train"):
        assert "DASKPYTORCH_RESUME=1 has no effect" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_costs_a_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "file" / "below"))
    with begun("flows.train"):
        assert local_run.get() is None
    assert "checkpoints are not kept beyond this run" in capsys.readouterr().err


def test_a_user_without_a_home_gets_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("DASKPYTORCH_CHECKPOINTS", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_001)  # has no entry among the users
    with begun("flows.train"):
        assert local_run.get() is None
    assert "checkpoints are not kept beyond this run" in capsys.readouterr().err


def test_a_disk_that_is_full_costs_no_result(root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run_of() as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            with contextlib.suppress(OSError):
                run.make_folder()
            run.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.newest_step() is None


def test_a_run_goes_on_from_runs_of_its_own_program_only(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin("train.train", program="/a/train.py")
    assert first is not None
    save(first, 1, tmp_path)
    first.close()
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    found = [begin("train.train", program=f"/{name}/train.py") for name in ("b", "a")]
    assert [run and run.previous for run in found] == [None, first.folder]


def test_the_usual_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DASKPYTORCH_CHECKPOINTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with run_of() as run:
        assert run.folder.parent == tmp_path / "daskpytorch" / "checkpoints" / "flows.train"


def test_gangs_of_a_run_find_their_own_checkpoints(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of() as first:
        save(first, 1, tmp_path, "train-1")
        save(first, 2, tmp_path, "train-2")
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of():
        paths = context.current().checkpoint_paths("train-2")
        assert paths is not None
        assert paths.previous == str(first.folder / "train-2")
        shutil.rmtree(first.folder / "train-1")
        assert json.loads(Path(paths.previous, MANIFEST).read_text())["checkpoints"][0]["step"] == 2
