"""Temporary folders that go with their process: by itself, and when it is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from flytekitplugins.daskpytorch.process import scratch
from flytekitplugins.daskpytorch.process.scratch import scratch_folder
from processes import end, is_alive, nothing_left_behind, until

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "odd 'name' \\ of it"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, which is asked for its standard output's first line."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *args: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *args],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(HERE)},
            )
        )
        return started[-1]

    yield run  # type: ignore[misc]
    for process in started:
        end(process)
        process.communicate()


def test_folder_is_there_for_its_time_alone(temporary: Path) -> None:
    with scratch_folder("some-") as one, scratch_folder("some-") as other:
        assert sorted(temporary.iterdir()) == sorted([one, other])
        assert one.name.startswith("some-")
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

    with scratch_folder("some-") as folder:
        writing = threading.Thread(target=write, args=(folder,))
        writing.start()
        threading.Timer(0.1, stop.set).start()
    writing.join()
    assert not list(temporary.iterdir())


def test_many_at_once_are_watched_by_one_shell(temporary: Path) -> None:
    def use(_: int) -> int:
        with scratch_folder("some-"):
            assert scratch._watcher._shell is not None
            return scratch._watcher._shell.pid

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(use, range(50)))) == 1
    assert not list(temporary.iterdir())


def test_another_shell_takes_the_place_of_one_that_was_killed() -> None:
    with scratch_folder("some-"):
        first = scratch._watcher._shell
        assert first is not None
        first.kill()
        first.wait()
    with scratch_folder("some-"):
        second = scratch._watcher._shell
        assert second is not None
        assert is_alive(second.pid)


def test_without_a_shell_there_is_still_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FileNotFoundError("/bin/sh")

    monkeypatch.setattr(scratch, "_watcher", scratch._Watcher())
    monkeypatch.setattr(scratch, "_start_shell", fail)
    with scratch_folder("some-") as folder:
        assert folder.is_dir()


FORKING = """
import os, time
from flytekitplugins.daskpytorch.process.scratch import scratch_folder

with scratch_folder("parent-"):
    if os.fork() == 0:
        with scratch_folder("child-"):
            print(os.getpid(), flush=True)
            time.sleep(600)
    time.sleep(600)
"""


def test_fork_of_a_process_has_folders_of_its_own(start: type[subprocess.Popen[str]], temporary: Path) -> None:
    parent = start(FORKING)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        assert sorted(path.name.partition("-")[0] for path in temporary.iterdir()) == ["child", "parent"]
        parent.kill()
        until(lambda: not list(temporary.glob("parent-*")), "the parent's folder to go")
        assert list(temporary.glob("child-*"))
    finally:
        child.kill()
    until(lambda: not list(temporary.iterdir()), "the child's folder to go")


DRIVER = """
import sys
from pathlib import Path

import fault_training as ft

with ft.watching(Path(sys.argv[1])) as launch:
    launch(2, "wait").futures.result()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGTERM to all"])
def test_nothing_stays_of_a_driver_that_is_killed_with_a_checkpoint(
    start: type[subprocess.Popen[str]], tmp_path: Path, temporary: Path, how: str
) -> None:
    with nothing_left_behind():
        driver = start(DRIVER, str(tmp_path / "traces"))
        until(lambda: (tmp_path / "traces" / "broken").exists() or driver.poll() is not None, "the gang to wait")
        assert list(temporary.glob("daskpytorch-checkpoints-*/step-4-*"))
        family = psutil.Process(driver.pid).children(recursive=True)
        shells = [process for process in family if is_alive(process.pid) and process.name() == "sh"]
        assert len(shells) == 1
        if how == "SIGTERM to all":
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        driver.send_signal(signal.SIGKILL if how == "SIGKILL" else signal.SIGTERM)
        mine = "daskpytorch-checkpoints-*" if how == "SIGTERM to all" else "daskpytorch-*"  # the agent's, too
        until(lambda: not list(temporary.glob(mine)), "the driver's folders to go")
        until(lambda: not is_alive(shells[0].pid), "the shell to end")
