"""Checkpoints of local runs, in a folder of the user, from which a later run may go on. Runs in the driver.

    ~/.cache/daskpytorch/checkpoints/flows.train/20261123-081245-1f0c9a/
        daskpytorch.json    this folder, the task's name, and digests of its inputs and of its function's source
        gang/               the files that an attempt has in Flyte's storage on a backend

A run goes on from an earlier run as an attempt goes on from the previous attempt on a backend.
"""

import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
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
"""Environment variable with another folder for all runs. Empty: checkpoints are not kept after the run."""
RESUME_VARIABLE = "DASKPYTORCH_RESUME"
"""Environment variable with the run to go on from: `1` or `last` for the task's newest run, or a run's folder."""
RECORD = "daskpytorch.json"
OURS = re.compile(
    r"daskpytorch\.json|(.+/)?(unfinished-)?(manifest\.json|step--?\d+-\w+\.pt)(\.[0-9a-f]{32})?"
    r"|(.+/)?step--?\d+/\d+-\d+-\w+/[^/]+"
)
"""Pattern of the files that this package writes in a run's folder: record, manifests, checkpoints and shards."""
MAX_AGE = 14 * 86_400.0
"""Seconds from a run's last checkpoint to the removal of its folder: two weeks."""
MAX_BYTES = 10 << 30
"""Maximum number of bytes of all runs together. Above, the oldest runs are removed."""


class LocalRun:
    """Local run of a task. The first gang makes the run's folder, which stays if a checkpoint was saved."""

    def __init__(
        self, root: Path, task: str, inputs: dict[str, str], source: str, previous: Path | None = None
    ) -> None:
        self.task = task
        self.inputs = inputs
        self.source = source
        self.folder = root / task / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self.previous = previous or _previous(root / task)
        self._record: IO[str] | None = None
        self._has_made_room = False

    def paths(self, key: str) -> StoragePaths:
        """Return the folders of a gang's checkpoints in this run, and in the run to go on from."""
        previous = str(self.previous / key) if self.previous is not None else None
        with contextlib.suppress(OSError):  # the first checkpoint tries again, and reports the error
            self.make_folder()  # with its record, before ranks write shards to it
            make_private(self.folder / key)
        files, own = Files(LocalFileSystem()), str(self.folder / key)
        return StoragePaths(files=files, previous=previous, own=own, prepare=self.make_room)

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint that a later run would find. None: there is no checkpoint."""
        with contextlib.suppress(OSError, LookupError):
            manifests = sorted(self.folder.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
            return max((kind[0].step for kind in named_in(manifests[-1].read_bytes()) or () if kind), default=None)
        return None

    def advice(self) -> str:
        """Return a text with the kept checkpoint's step and the way to go on."""
        if (step := self.newest_step()) is None:
            return "no checkpoint was kept"
        return f"the checkpoint of step {step} is kept, {RESUME_VARIABLE}=1 and the same command go on from it"

    def differences(self) -> list[str]:
        """Return names of differences from the run to go on from: inputs, the task, the function's source."""
        earlier = json.loads((self.previous / RECORD).read_text()) if self.previous is not None else {}
        then = earlier.get("inputs", {})
        found = [f"input {name}" for name in sorted({*then, *self.inputs}) if then.get(name) != self.inputs.get(name)]
        found += ["the task"] if earlier.get("task") != self.task else []
        return [*found, "the function's source"] if earlier.get("source") != self.source else found

    def make_folder(self) -> None:
        """Make the folder, with a record. The record is locked while the run goes on."""
        if self._record is not None:
            return
        make_private(self.folder)
        record = {"folder": str(self.folder), "task": self.task, "inputs": self.inputs, "source": self.source}
        self._record = (self.folder / RECORD).open("w")
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        json.dump(record, self._record)
        self._record.flush()

    def make_room(self) -> None:
        """Make the folder. Before its first checkpoint is kept, remove other runs that are too old or too large."""
        self.make_folder()
        if not self._has_made_room:
            self._has_made_room = True
            clean(self.folder.parent.parent, self.previous)

    def close(self) -> None:
        """Release the lock, and remove a folder without checkpoints."""
        if self._record is None:
            return
        with contextlib.suppress(OSError):
            for folder, _, _ in os.walk(self.folder, topdown=False):
                with contextlib.suppress(OSError):  # the folder is not empty
                    Path(folder).rmdir()
            if [path.name for path in self.folder.iterdir()] == [RECORD]:
                (self.folder / RECORD).unlink()
                self.folder.rmdir()
        self._record.close()


@contextlib.contextmanager
def begun(
    task: str, inputs: Mapping[str, bytes], function: Callable[..., Any], attempt_before: Path | None = None
) -> Iterator[None]:
    """Keep the checkpoints of the task's gangs. A line says if the run goes on from an earlier run.

    Args:
        task: Name of the task.
        inputs: Bytes that identify each input's value, by name.
        function: Function of the task.
        attempt_before: Folder of the previous attempt. None: this is the run's first attempt.

    Raises:
        ValueError: `DASKPYTORCH_RESUME` names no run's folder.
        PermissionError: `DASKPYTORCH_RESUME` names a folder that another user owns or can write to.
    """
    run = _begin(task, inputs, function, attempt_before)
    token = local_run.set(run)
    try:
        yield
    finally:
        local_run.reset(token)
        if run is not None:
            run.close()


def clean(root: Path, previous: Path | None = None) -> None:
    """Remove runs that are older than `MAX_AGE`, and the oldest runs while all together exceed `MAX_BYTES`.

    Runs that are still going on stay. So do `previous`, and folders with checkpoints that a kept run refers to.
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
    """Return True for an ended run's folder that was not moved and has only this package's files.

    Copied and moved folders, and folders with other files, belong to the user and stay.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        record = json.loads((run / RECORD).read_text())
        files = (path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_symlink() or not path.is_dir())
        is_ours = record["folder"] == str(run) and run.lstat().st_uid == os.geteuid()
        return is_ours and all(map(OURS.fullmatch, files)) and not _goes_on(run)
    return False


def _folders_named_by(run: Path, root: Path) -> set[Path]:
    """Return folders with checkpoints of a run: the run's own folder, and folders of earlier runs."""
    named = [*filter(None, (named_in(path.read_bytes()) for path in run.glob(f"*/{MANIFEST}")))]
    folders = [Path(entry.uri) for _, sharded in named for entry in sharded]
    folders += [Path(file.folder) for files, _ in named for file in files if file.folder]
    return {root.joinpath(*folder.relative_to(root).parts[:2]) for folder in folders if folder.is_relative_to(root)}


def _begin(
    task: str, inputs: Mapping[str, bytes], function: Callable[..., Any], attempt_before: Path | None
) -> LocalRun | None:
    if (root := _root()) is None:
        return None
    try:
        make_private(root / task)
    except OSError as error:
        if _asked():
            raise
        _say(task, f"checkpoints are not kept beyond this run ({error}); {FOLDER_VARIABLE} names another folder")
        return None
    digests = {name: _digest(identity) for name, identity in inputs.items()}
    attempt_before = attempt_before if attempt_before is not None and (attempt_before / RECORD).exists() else None
    run = LocalRun(root, task, digests, _digest(source_of(function).encode()), attempt_before)
    if attempt_before is not None:
        _say(task, "going on from the attempt before")
    elif run.previous is not None:
        differing = f"; what differs from then: {', '.join(found)}" if (found := run.differences()) else ""
        _say(task, f"{RESUME_VARIABLE} is set: going on from the run in {run.previous}{differing}")
    elif _asked():
        _say(task, f"{RESUME_VARIABLE} is set, but no run in {root / task} has left a checkpoint: starting afresh")
    return run


def _root() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return (
            Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().resolve() / "daskpytorch" / "checkpoints"
        )
    return Path(folder).expanduser().resolve() if folder else None


def _asked() -> str | None:
    asked = os.environ.get(RESUME_VARIABLE, "")
    return None if asked in ("", "0") else asked


def _previous(runs_of_task: Path) -> Path | None:
    """Return the folder of the run to go on from, or None. Folders that another user can write to are refused."""
    asked = _asked()
    if asked is None:
        return None
    if asked in ("1", "last"):
        found = sorted(_runs(runs_of_task.parent), reverse=True)
        folder = next((run for _, run in found if run.parent == runs_of_task and _is_of_use(run)), None)
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
    """Yield the time of each run's last write, in seconds since 1970, and its folder."""
    for found in root.glob(f"*/*/{RECORD}"):
        with contextlib.suppress(OSError):
            yield max(path.stat().st_mtime for path in found.parent.rglob("*")), found.parent


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


def identity_of_file(uri: str) -> bytes:
    """Return bytes that identify a file: its name and size, since a host may copy the file anew for each run."""
    file = Path(uri.removeprefix("file://"))
    return f"{file.name} {file.stat().st_size if file.is_file() else 0}".encode()


def source_of(function: Callable[..., Any]) -> str:
    """Return the source code of a function. Empty if Python cannot find it."""
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(function)
    return ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _say(task: str, text: str) -> None:
    say(f"{task.rpartition('.')[2]}: {text}")


local_run: ContextVar[LocalRun | None] = ContextVar("flytekitplugins.daskpytorch.local_run", default=None)
"""Local run of the current task. None on a backend, and if checkpoints are not kept."""
