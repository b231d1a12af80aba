"""Checkpoints of local runs are kept, found by the next run, and removed in time."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.flyte import context
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, digest_of
from flytekitplugins.daskpytorch.task import local_runs
from flytekitplugins.daskpytorch.task.local_runs import LocalRun, begun, local_run
from others import give_away


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all runs. The user asks for none of them."""
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    monkeypatch.delenv("DASKPYTORCH_RESUME", raising=False)
    return tmp_path / "kept"


@contextlib.contextmanager
def run_of(task: str = "flows.train") -> Iterator[LocalRun]:
    with begun(task):
        run = local_run.get()
        assert run is not None
        yield run


def save(run: LocalRun, step: int, scratch: Path, key: str = "gang") -> CheckpointEntry:
    """Save a checkpoint as a gang's driver does. The driver's own copy goes with the driver."""
    paths = run.paths(key)
    source = scratch / "checkpoint"
    source.write_bytes(b"weights %d" % step)
    file = CheckpointEntry(attempt=0, step=step, size=source.stat().st_size, digest=digest_of(source))
    vault = Vault(Gang(), paths, scratch)
    with contextlib.closing(vault.worker):
        source.rename(scratch / file.name)
        vault.add(file)
        assert vault.flush(60)
    (scratch / file.name).unlink()
    return file


def name_shards(run: LocalRun, folder: str = "/nowhere") -> None:
    """Name a sharded checkpoint of step 3 in the manifest of a run's gang."""
    vault = Vault(Gang(), run.paths("gang"), Path("/nowhere"))
    with contextlib.closing(vault.worker):
        vault.add(CheckpointEntry(attempt=0, step=3, folder=folder, shards="step-3/0-0-ab", size=5, digest="d"))
        assert vault.flush(60)


def restored(run: LocalRun, scratch: Path, key: str = "gang") -> bytes | None:
    vault = Vault(Gang(), run.paths(key), scratch)
    with contextlib.closing(vault.worker):
        found = vault.restore()
        assert vault.flush(60)
    return (scratch / found.name).read_bytes() if found is not None else None


def make_runs(tmp_path: Path, number: int) -> list[Path]:
    """Make runs with a checkpoint, the oldest first, all older than those of `run_of`."""
    folders = []
    for minute in range(number):
        with run_of() as run:
            save(run, 1, tmp_path)
        folders.append(run.folder.rename(run.folder.with_name(f"20250101-10{minute:02}00-0a1b2c")))
    return folders


def test_a_run_goes_on_from_the_newest_one_where_it_is_asked_to(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs(tmp_path, 1)
    with run_of() as newest:
        save(newest, 1, tmp_path)
        save(newest, 2, tmp_path)
    with run_of() as unasked:
        assert restored(unasked, tmp_path) is None
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of() as second:
        assert restored(second, tmp_path) == b"weights 2"
    assert capsys.readouterr().err == f"train: DASKPYTORCH_RESUME is set: going on from the run in {newest.folder}\n"


def test_nothing_to_go_on_from_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_of(task="flows.another") as another:
        save(another, 1, tmp_path)
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of() as run:
        assert run.previous is None
    assert f"no run in {root / 'flows.train'} has left a checkpoint: starting afresh" in capsys.readouterr().err
    monkeypatch.setenv("DASKPYTORCH_RESUME", str(tmp_path))
    with pytest.raises(ValueError, match=f"DASKPYTORCH_RESUME={tmp_path}: must be 1, for the task"), run_of():
        pass


def test_a_run_without_checkpoints_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    with run_of() as run:
        Path(run.paths("gang").own, "step-1").mkdir(parents=True)  # of a rank that did not come to write into it
        assert run.advice() == "no checkpoint was kept"
    assert list((root / "flows.train").iterdir()) == []


def test_the_newest_runs_with_a_checkpoint_stay(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of("flows.another") as other:
        save(other, 1, tmp_path)
    runs = make_runs(tmp_path, 4)
    monkeypatch.setattr(local_runs, "MAX_RUNS", 2)
    os.utime(runs[0] / "gang" / MANIFEST)
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
    with run_of():
        assert [run.exists() for run in runs] == [True, False, True, True]  # the first is gone on from
    monkeypatch.delenv("DASKPYTORCH_RESUME")
    with run_of():
        assert [run.exists() for run in runs] == [False, False, True, True]
    assert other.folder.exists()


def test_of_runs_with_a_journal_alone_the_newest_stay(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "MAX_JOURNALS", 2)
    runs = [root / "flows.train" / f"20261128-12000{second}-0a1b2c" for second in range(4)]
    for run in runs:
        run.mkdir(parents=True)
        (run / "journal.jsonl").touch()
    (runs[0] / "gang").mkdir()  # where checkpoints are
    with run_of():
        assert [run.exists() for run in runs] == [True, False, True, True]


def test_runs_that_train_and_folders_of_the_users_own_are_never_removed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "MAX_RUNS", 0)
    [run] = make_runs(tmp_path, 1)
    mine = root / "flows.train" / "20250101-101500-resnet"
    mine.mkdir(parents=True)
    (mine / "weights.pt").touch()
    renamed = shutil.copytree(run, root / "flows.train" / "the-best")
    with run_of() as training:
        save(training, 1, tmp_path)
        with run_of():
            assert training.folder.exists()
    assert not run.exists()
    assert (mine / "weights.pt").exists()
    assert (renamed / "gang" / MANIFEST).exists()
    with run_of():
        assert not training.folder.exists()


def test_a_run_stays_whose_shards_a_later_one_goes_on_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "MAX_RUNS", 0)
    with run_of() as first:
        part = first.folder / "gang" / "step-3" / "0-0-abc" / "part"
        part.parent.mkdir(parents=True)  # as ranks do
        part.write_bytes(bytes(100_000))
        name_shards(first, str(part.parent))
        assert first.newest_step() == 3
        assert "the checkpoint of step 3 is kept" in first.advice()
    with run_of("flows.another") as second:
        # Its first manifest, with which its folder is made, names the checkpoint that it goes on from.
        name_shards(second, str(part.parent))
    with run_of():
        assert part.exists()
    shutil.rmtree(second.folder)
    with run_of():
        assert not part.exists()


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


@pytest.mark.parametrize("who", ["owns", "can write to"])
@pytest.mark.parametrize("what", [".", "gang", "gang/step-*.pt", "task"])
def test_what_another_user_may_have_written_is_not_resumed_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, what: str
) -> None:
    with run_of() as first:
        save(first, 1, tmp_path)
    [path] = [first.folder.parent] if what == "task" else first.folder.glob(what) if what != "." else [first.folder]
    give_away(path, who)
    monkeypatch.setenv("DASKPYTORCH_RESUME", "1")
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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("an empty variable", ""),
        ("no folder", "checkpoints are not kept beyond this run"),
        ("no home", "checkpoints are not kept beyond this run"),
    ],
)
def test_without_a_folder_nothing_is_kept(
    how: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "file" / "below") if how == "no folder" else "")
    if how == "no home":
        for name in ("DASKPYTORCH_CHECKPOINTS", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2_000_000_001)  # has no entry among the users
    with begun("flows.train"):
        assert local_run.get() is None
    told = capsys.readouterr().err
    assert said in told
    assert bool(said) == bool(told)


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
