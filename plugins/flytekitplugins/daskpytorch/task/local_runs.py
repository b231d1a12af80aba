"""Checkpoints of local runs, in a folder of the user, from which a later run may go on. Runs in the driver.

    ~/.cache/daskpytorch/checkpoints/flows.train/20261123-081245-1f0c9a/
        daskpytorch.json    this folder and the program; locked while the run trains
        gang/               the files that an attempt has in Flyte's storage on a backend

A run goes on from an earlier run as an attempt goes on from the previous attempt on a backend.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch.driver.manifest import MANIFEST, named_in
from flytekitplugins.daskpytorch.process.folders import make_private, refuse_foreign
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths

FOLDER_VARIABLE = "DASKPYTORCH_CHECKPOINTS"
"""Environment variable with the folder for checkpoints of local runs. Empty: checkpoints are not kept after a run."""
RESUME_VARIABLE = "DASKPYTORCH_RESUME"
"""Environment variable with the earlier local run from whose checkpoints to go on.

`1` or `last`: the task's newest run. Else the folder of a run.
"""
HOW_TO_GO_ON = f"{RESUME_VARIABLE}=1 and the same command"
RECORD = "daskpytorch.json"
OURS = re.compile(
    r"daskpytorch\.json|(.+/)?(unfinished-)?(manifest\.json|step--?\d+-\w+\.pt)(\.[0-9a-f]{32})?"
    r"|(.+/)?step--?\d+/\d+-\d+-\w+/[^/]+"
)
"""Pattern of the files that this package writes in a local run's folder: record, manifests, checkpoints, shards."""
MAX_NAME = 200
"""Maximum number of characters of the name of a folder with local runs. Longer names lose their beginning."""
MAX_AGE = 14 * 86_400.0
"""Age, in seconds since the last write, from which a local run's folder is removed: two weeks."""
MAX_BYTES = 10 << 30
"""Maximum number of bytes of all local runs' folders together. Beyond, the oldest folders are removed."""


CLEANING_INTERVAL = 3600.0
"""Seconds between two searches of this process for old runs, which take time with thousands of runs."""
_cleaned_at: dict[Path, float] = {}
"""Time of this process's newest search, by the folder of all local runs, in seconds on the monotonic clock."""


class LocalRun:
    """Local run of a task or of `dispatch.run`, with a folder for its checkpoints.

    The folder stays after the run if it has a checkpoint.
    """

    def __init__(self, runs_of_task: Path, program: str, previous: Path | None) -> None:
        """Choose a new folder.

        Args:
            runs_of_task: Folder of the task's local runs.
            program: Path of the program's file, for the run's record. Empty for tasks.
            previous: Folder of the earlier run to go on from. None: start afresh.
        """
        self.folder = runs_of_task / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self.previous = previous
        self._about = {"folder": str(self.folder), "program": program}
        self._record: IO[str] | None = None

    def paths(self, key: str) -> StoragePaths:
        """Return the checkpoint folders of the gang `key`: of this run, and of the earlier run to go on from."""
        previous = str(self.previous / key) if self.previous is not None else None
        with contextlib.suppress(OSError):  # the first checkpoint tries again, and reports the error
            self.make_folder()  # with its record, before ranks write shards to it
            make_private(self.folder / key)
        files, own = Files(LocalFileSystem()), str(self.folder / key)
        return StoragePaths(files=files, previous=previous, own=own, prepare=self.make_room, resume=HOW_TO_GO_ON)

    def newest_step(self) -> int | None:
        """Return the training step of the newest checkpoint in this run's folder. None: there is no checkpoint."""
        with contextlib.suppress(OSError, LookupError):
            manifests = sorted(self.folder.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
            return max((kind[0].step for kind in named_in(manifests[-1].read_bytes()) or () if kind), default=None)
        return None

    def advice(self) -> str:
        """Return a text for the user: the step of the kept checkpoint, and how to go on from it in another run."""
        if (step := self.newest_step()) is None:
            return "no checkpoint was kept"
        return f"the checkpoint of step {step} is kept, {HOW_TO_GO_ON} go on from it"

    def make_folder(self) -> None:
        """Make the run's folder, with its record, which stays locked until the run ends."""
        if self._record is not None:
            return
        make_private(self.folder)
        self._record = (self.folder / RECORD).open("w")
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(self._about, self._record)
        self._record.flush()

    def make_room(self) -> None:
        """Make the run's folder. Once an hour, remove runs of over two weeks, and the oldest beyond 10 GiB."""
        self.make_folder()
        root = self.folder.parent.parent
        if time.monotonic() - _cleaned_at.get(root, -math.inf) > CLEANING_INTERVAL:
            _cleaned_at[root] = time.monotonic()
            clean(root, self.previous)

    def close(self) -> None:
        """End the run: unlock its record, and remove its folder if it has no checkpoint."""
        if self._record is None:
            return
        with contextlib.suppress(OSError):
            for folder, _, _ in os.walk(self.folder, topdown=False):
                with contextlib.suppress(OSError):  # the folder is not empty
                    Path(folder).rmdir()
            if [path.name for path in self.folder.iterdir()] == [RECORD]:
                (self.folder / RECORD).unlink()
                self.folder.rmdir()
        with contextlib.suppress(OSError):  # a full disk, at the flush of the record
            self._record.close()


@contextlib.contextmanager
def begun(task: str, attempt_before: Path | None = None) -> Iterator[None]:
    """During the block, keep checkpoints of the task's gangs in a local run's folder. Log if an earlier run goes on.

    Args:
        task: Name of the task.
        attempt_before: Folder of the task's previous attempt. None: this is the run's first attempt.

    Raises:
        ValueError: `DASKPYTORCH_RESUME` names no run's folder.
        PermissionError: `DASKPYTORCH_RESUME` names a folder that another user owns or can write to.
    """
    run = begin(task, attempt_before)
    token = local_run.set(run)
    try:
        yield
    finally:
        local_run.reset(token)
        if run is not None:
            run.close()


def clean(root: Path, previous: Path | None = None) -> None:
    """Remove folders of local runs that are older than two weeks, and the oldest while all exceed 10 GiB.

    Folders of unfinished runs stay, and folders that the user has copied, moved or added files to. So do folders with
    checkpoints that a remaining run refers to.

    Args:
        root: Folder of all local runs.
        previous: Folder that stays in any case. None: no folder.
    """
    total, needed = 0, {previous}
    for changed_at, folder in sorted(_runs(root), reverse=True):
        with contextlib.suppress(OSError):  # another process may remove runs, too
            total += sum(path.stat().st_size for path in folder.rglob("*"))
            is_over = time.time() - changed_at > MAX_AGE or total > MAX_BYTES
            if is_over and folder not in needed and _is_removable(folder):
                shutil.rmtree(folder)
            else:
                needed |= _folders_named_by(folder, root)


def _is_removable(run: Path) -> bool:
    """Return True if a folder of a local run may be removed: the run has ended, and all files are this package's.

    Copied and moved folders, and folders with other files, belong to the user and stay.
    """
    with contextlib.suppress(OSError):
        files = (path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_symlink() or not path.is_dir())
        is_ours = _about(run).get("folder") == str(run) and run.lstat().st_uid == os.geteuid()
        return is_ours and all(map(OURS.fullmatch, files)) and not _goes_on(run)
    return False


def _folders_named_by(run: Path, root: Path) -> set[Path]:
    """Return the folders, below `root`, of all local runs whose checkpoints the manifests of `run` list."""
    named = [*filter(None, (named_in(path.read_bytes()) for path in run.glob(f"*/{MANIFEST}")))]
    folders = [Path(entry.uri) for _, sharded in named for entry in sharded]
    folders += [Path(file.folder) for files, _ in named for file in files if file.folder]
    return {root.joinpath(*folder.relative_to(root).parts[:2]) for folder in folders if folder.is_relative_to(root)}


def begin(task: str, attempt_before: Path | None = None, program: str = "") -> LocalRun | None:
    """Return a new local run, which the caller closes at its end. Log the earlier run that it goes on from, if any.

    Args:
        task: Name of the task, or of the run.
        attempt_before: Folder of the task's previous attempt. None: this is the run's first attempt.
        program: Path of the program's file. A run goes on only from runs of the same program. Empty for tasks.

    Returns:
        None if checkpoints are not kept, because the user has turned this off, or because the disk refuses the folder.

    Raises:
        ValueError: `DASKPYTORCH_RESUME` names no run's folder.
        PermissionError: `DASKPYTORCH_RESUME` names a folder that another user owns or can write to.
    """
    try:
        if (root := _root()) is None:
            if asked := asked_run():
                _say(task, f"{RESUME_VARIABLE}={asked} has no effect, since {FOLDER_VARIABLE} is set to nothing")
            return None
        make_private(root / task)
    except (OSError, RuntimeError) as error:  # there may be no home
        if asked_run():
            raise
        _say(task, f"checkpoints are not kept beyond this run ({error}); {FOLDER_VARIABLE} names another folder")
        return None
    attempt_before = attempt_before if attempt_before is not None and (attempt_before / RECORD).exists() else None
    run = LocalRun(root / task, program, attempt_before or _previous(root / task, program))
    if attempt_before is not None:
        _say(task, "going on from the attempt before")
    elif run.previous is not None:
        _say(task, f"{RESUME_VARIABLE} is set: going on from the run in {run.previous}")
    elif asked_run():
        _say(task, f"{RESUME_VARIABLE} is set, but no run in {root / task} has left a checkpoint: starting afresh")
    return run


def _root() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return (
            Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "daskpytorch" / "checkpoints"
        )
    return Path(folder).expanduser().resolve() if folder else None


def asked_run() -> str | None:
    """Return the earlier run that the user asks to go on from: `1`, `last` or a folder. None: no such run."""
    asked = os.environ.get(RESUME_VARIABLE, "")
    return None if asked in ("", "0") else asked


def _previous(runs_of_task: Path, program: str) -> Path | None:
    """Return the folder of the earlier run of this program that `DASKPYTORCH_RESUME` names. None: start afresh.

    Raises:
        ValueError: The variable names no run's folder.
        PermissionError: Another user owns the folder or can write to it.
    """
    asked = asked_run()
    if asked is None:
        return None
    if asked in ("1", "last"):
        found = sorted(_runs(runs_of_task.parent), reverse=True)
        here = (run for _, run in found if run.parent == runs_of_task and _is_of_use(run))
        folder = next((run for run in here if _about(run).get("program", "") == program), None)
    else:
        folder = Path(asked).expanduser().absolute()
        if not (folder / RECORD).is_file():
            raise ValueError(
                f"{RESUME_VARIABLE}={asked}: must be 1 or last, for the task's newest run, or the folder of a run, "
                f"which has a file {RECORD}. Those of this task are in {runs_of_task}."
            )
    for each in [folder, *filter(Path.is_dir, folder.iterdir())] if folder is not None else ():
        refuse_foreign(each)  # a checkpoint is a pickle
    return folder


def _runs(root: Path) -> Iterator[tuple[float, Path]]:
    """Yield for each local run the time of its last write, in seconds since 1970, and its folder."""
    for found in root.glob(f"*/*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError):  # another process has just removed the folder
            yield max(path.stat().st_mtime for path in found.parent.rglob("*")), found.parent


def _about(run: Path) -> dict[str, Any]:
    """Return the record of a run. Empty if the file is damaged, or another process has just removed the folder."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(about := json.loads((run / RECORD).read_text()), dict):
            return about
    return {}


def _is_of_use(run: Path) -> bool:
    return any(run.glob(f"*/{MANIFEST}")) and not _goes_on(run)


def _goes_on(run: Path) -> bool:
    with (run / RECORD).open() as record:
        try:
            fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # some file systems have no locks
            return False
    return False


def _say(task: str, text: str) -> None:
    say(f"{task.rpartition('.')[2]}: {text}")


local_run: ContextVar[LocalRun | None] = ContextVar("flytekitplugins.daskpytorch.local_run", default=None)
"""Local run of the task that runs in this context. None on Flyte's backend, and if checkpoints are not kept."""
