"""Temporary folders are removed with their process, even after a kill."""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from flytekitplugins.daskpytorch.process import folders as scratch
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from processes import end, is_alive, until


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "odd 'name' \\ of it"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_folder_is_there_for_its_time_alone(temporary: Path) -> None:
    with scratch_folder("daskpytorch-") as one, scratch_folder("daskpytorch-") as other:
        assert sorted(temporary.iterdir()) == sorted([one, other])
        assert one.name.startswith("daskpytorch-")
        assert one.stat().st_mode & 0o777 == 0o700
        (one / "file").touch()
    assert not list(temporary.iterdir())


def test_folder_that_is_written_into_while_it_is_removed_goes_at_last(temporary: Path) -> None:
    stop = threading.Event()

    def write(folder: Path) -> None:  # as a rank that is being killed
        numbers = itertools.count()
        while not stop.is_set():
            with contextlib.suppress(OSError):
                (folder / str(next(numbers))).touch()

    with scratch_folder("daskpytorch-") as folder:
        writing = threading.Thread(target=write, args=(folder,))
        writing.start()
        threading.Timer(0.1, stop.set).start()
    writing.join()
    assert not list(temporary.iterdir())


def test_what_killed_processes_have_left_goes_with_the_first_folder_of_the_next(temporary: Path) -> None:
    env = os.environ | {"TMPDIR": str(temporary)}
    parent = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        users = [temporary / "daskpytorch-checkpoints", temporary / "daskpytorch-cafe"]  # with names of their own
        for folder in users:
            folder.mkdir()
        parent.kill()
        parent.wait()
        assert folders_after_another(temporary) == ["child", "parent"]  # a fork still has both
        child.kill()
        until(lambda: not is_alive(child.pid), "the fork to end")
        assert folders_after_another(temporary) == []
        assert all(folder.exists() for folder in users)
    finally:
        end(parent)
        child.kill()
        parent.stdout.close()


def folders_after_another(temporary: Path) -> list[str]:
    """Return the folders of other processes that remain after a new process has made its first folder."""
    scratch.remove_abandoned.cache_clear()
    scratch.remove_abandoned(str(temporary))
    return sorted(path.name.split("-")[1] for path in temporary.iterdir() if scratch.NAME.fullmatch(path.name))


FORKING = """
import os, time
from flytekitplugins.daskpytorch.process.folders import scratch_folder

with scratch_folder("daskpytorch-parent-"):
    if os.fork() == 0:
        with scratch_folder("daskpytorch-child-"):
            print(os.getpid(), flush=True)
            time.sleep(600)
    time.sleep(600)
"""
