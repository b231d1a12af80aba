"""Checkpoints of local runs, in a folder of the user, from which a later run may go on. Runs in the driver.

    ~/.cache/daskpytorch/checkpoints/flows.train/20261123-081245-1f0c9a/
        gang/    the files that an attempt has in Flyte's storage on a backend

Of a task's runs, the newest with a checkpoint wins. The kernel's lock on a run's folder says that the run goes on.
"""

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.driver.manifest import MANIFEST, read
from flytekitplugins.daskpytorch.process.folders import (
    FOLDER_VARIABLE,
    local_runs_folder,
    make_private,
    refuse_foreign,
    remove_unlocked,
)
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths

RESUME_VARIABLE = "DASKPYTORCH_RESUME"
"""Environment variable. `1`: the local run goes on from the task's newest one that has a checkpoint."""
HOW_TO_GO_ON = f"{RESUME_VARIABLE}=1 and the same command"
NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
MAX_NAME = 200
MAX_RUNS = 5
"""Newest runs of a task with a checkpoint whose folders stay."""
MAX_JOURNALS = 50
"""Newest runs of a task without a checkpoint whose folders stay."""


class LocalRun:
    """Local run of a task or of `dispatch.run`.

    Its folder stays if it has a checkpoint, or a journal of a newest run.
    """

    def __init__(self, runs_of_task: Path, previous: Path | None) -> None:
        self.folder = runs_of_task / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self.previous = previous
        self._lock: int | None = None

    def paths(self, key: str) -> StoragePaths:
        """Return the checkpoint folders of the gang `key`, and lock the run's folder until `close`."""
        own = self.folder / key
        with contextlib.suppress(OSError):  # the first checkpoint reports the error
            make_private(own)  # before ranks write shards to it
            if self._lock is None:
                self._lock = os.open(self.folder, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # some file systems have no locks
        previous = str(self.previous / key) if self.previous is not None else None
        return StoragePaths(files=Files(LocalFileSystem()), previous=previous, own=str(own), resume=HOW_TO_GO_ON)

    def newest_step(self) -> int | None:
        with contextlib.suppress(OSError, LookupError):
            if (manifest := _newest_manifest(self.folder)) is not None:
                named = read(Files(LocalFileSystem()), str(manifest.parent)) or ()
                return max((entry.step for entry in named), default=None)
        return None

    def advice(self) -> str:
        if (step := self.newest_step()) is None:
            return "no checkpoint was kept"
        return f"the checkpoint of step {step} is kept, {HOW_TO_GO_ON} go on from it"

    def close(self) -> None:
        if self._lock is not None:
            for folder, _, _ in os.walk(self.folder, topdown=False):
                with contextlib.suppress(OSError):  # the folder is not empty
                    Path(folder).rmdir()
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def begun(task: str, *, is_local: bool = True) -> Iterator[None]:
    run = begin(task) if is_local else None
    token = local_run.set(run)
    try:
        yield
    finally:
        local_run.reset(token)
        if run is not None:
            run.close()


def begin(task: str) -> LocalRun | None:
    """Return a new local run, which the caller closes. None: the user keeps no checkpoints, or the disk refuses them.

    Raises `PermissionError` if another user owns or can write to the run to go on from.
    """
    if os.environ.get(FOLDER_VARIABLE) == "":
        return None
    asked = os.environ.get(RESUME_VARIABLE, "0") or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"{RESUME_VARIABLE}={asked}: must be 1, for the task's newest run that has a checkpoint, or 0")
    is_asked = asked == "1"
    try:
        runs = local_runs_folder() / task
        make_private(runs)
        previous = _newest(runs) if is_asked else None
    except (OSError, RuntimeError) as error:  # there may be no home
        if is_asked:
            raise
        _say(task, f"checkpoints are not kept beyond this run ({error}); {FOLDER_VARIABLE} names another folder")
        return None
    if is_asked:
        found = f"going on from the run in {previous}"
        none = f"no run in {runs} has left a checkpoint: starting afresh"
        _say(task, f"{RESUME_VARIABLE} is set: {found if previous is not None else none}")
    with contextlib.suppress(OSError):  # another process may remove runs, too
        clean(runs, previous)
    return LocalRun(runs, previous)


def _newest(runs_of_task: Path) -> Path | None:
    manifest = _newest_manifest(*runs_of_task.iterdir())
    if manifest is None:
        return None
    folder = manifest.parent.parent
    for each in (folder, *filter(Path.is_dir, folder.iterdir())):
        refuse_foreign(each)  # a checkpoint is a pickle
    return folder


def _newest_manifest(*runs: Path) -> Path | None:
    manifests = [manifest for run in runs for manifest in run.glob(f"*/{MANIFEST}")]
    return max(manifests, key=lambda path: path.stat().st_mtime_ns, default=None)


def clean(runs_of_task: Path, previous: Path | None) -> None:
    """Remove old runs, except unfinished ones, renamed folders, `previous`, and those with another run's shards."""
    runs = sorted((run for run in runs_of_task.iterdir() if NAME.fullmatch(run.name)), reverse=True)
    with_checkpoint = [run for run in runs if any(map(Path.is_dir, run.iterdir()))]
    for run in with_checkpoint[MAX_RUNS:]:
        others = [each for each in runs_of_task.parent.glob(f"*/*/*/{MANIFEST}") if run not in each.parents]
        has_shards = any(f"{json.dumps(str(run))[1:-1]}/" in manifest.read_text() for manifest in others)
        if run != previous and not has_shards:
            remove_unlocked(run)
    for run in [run for run in runs if run not in with_checkpoint][MAX_JOURNALS:]:
        remove_unlocked(run)


def _say(task: str, text: str) -> None:
    say(f"{task.rpartition('.')[2]}: {text}")


local_run: ContextVar[LocalRun | None] = ContextVar("flytekitplugins.daskpytorch.local_run", default=None)
"""The running task's local run. None on Flyte's backend, and if checkpoints are not kept."""
