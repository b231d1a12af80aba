"""Manifest of a gang's checkpoints in storage, and the retention policy: last and best. Runs in the driver.

manifest.json: {"format": 2, "checkpoints": [...], "sharded": [...]}    the newest first
"""

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointFile, ShardedCheckpoint, digest_of
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MANIFEST = "manifest.json"
FORMAT = 2
"""Version of the manifest's and the checkpoints' format. 1 was never released, and named no format."""
MAX_READ_ATTEMPTS = 5
"""Maximum number of tries to read the previous attempt's manifest or one of its checkpoints from storage."""
Named = tuple[list[CheckpointFile], list[ShardedCheckpoint]]
"""The whole checkpoints and the sharded checkpoints in a manifest. In each list, the newest comes first."""


E = TypeVar("E", CheckpointFile, ShardedCheckpoint, SavedCheckpoint)
K = TypeVar("K", CheckpointFile, ShardedCheckpoint)
T = TypeVar("T")


@dataclass(eq=False)
class Whole:
    """A whole (not sharded) checkpoint: on the driver's disk, in storage, or both."""

    file: CheckpointFile
    state: tuple[int, ...] | None
    """Device, inode, size and modification time of the file on the driver's disk when its digest was right. While these
    stay the same, the digest need not be computed again. None: the checkpoint is not on the driver's disk."""
    folder: str | None = None
    """Folder of the checkpoint's file in storage, perhaps an earlier attempt's. None: storage has no copy."""

    def is_intact_at(self, path: Path) -> bool:
        """Return True if the file on the driver's disk is there, and has the digest of the checkpoint."""
        if not path.is_file() or path.stat().st_size != self.file.size:
            return False
        return state_of(path) == self.state or digest_of(path) == self.file.digest


def best_first(entries: Iterable[E], keep: Keep) -> list[E]:
    """Return the checkpoints whose metric is a number, the best first, and only the newest of each step.

    Among equally good checkpoints, the earlier comes first.

    Args:
        entries: Checkpoints in the order in which they were kept.
        keep: Retention policy, whose `metric` and `mode` define the best. Without a metric, the result is empty.
    """
    metric = keep.metric
    if metric is None:
        return []
    sign = 1 if (keep.mode or direction_of(metric)) == "min" else -1
    measured = {entry.step: entry for entry in entries if not math.isnan(entry.metrics.get(metric, math.nan))}
    return sorted(measured.values(), key=lambda entry: sign * entry.metrics[metric])


def find(entries: Sequence[E], keep: Keep, step: int | None) -> E | None:
    """Return the newest checkpoint of a step, or the best checkpoint.

    Args:
        entries: Checkpoints in the order in which they were kept.
        keep: Retention policy, whose `metric` and `mode` define the best.
        step: Training step. None: the best checkpoint.

    Returns:
        None if no checkpoint matches.
    """
    found = best_first(entries, keep) if step is None else [entry for entry in entries[::-1] if entry.step == step]
    return found[0] if found else None


def retained(entries: Sequence[E], keep: Keep, is_held: Callable[[E], bool] = lambda _: False) -> list[E]:
    """Return the checkpoints that the retention policy keeps, in their given order. The newest always stays.

    Args:
        entries: Checkpoints in the order in which they were kept.
        keep: Retention policy.
        is_held: Returns True for checkpoints that stay, too, until they are evaluated.
    """
    stay = {id(entry) for entry in (*entries[-keep.last :], *best_first(entries, keep)[: keep.best])}
    return [entry for entry in entries if id(entry) in stay or is_held(entry)]


def evaluated(entry: K, identity: str, metrics: Mapping[str, float]) -> K:
    """Return a checkpoint's description with the metrics of its evaluation added, if the identity is its own."""
    if entry.identity != identity:
        return entry
    return replace(entry, metrics={**entry.metrics, **metrics}, is_evaluated=True)


def hint_of_metric(kept: Iterable[SavedCheckpoint], keep: Keep) -> str | None:
    """Return a hint for the user if checkpoints have metrics, but all lack the one of `keep`. Otherwise None."""
    names = {name for one in kept for name in one.metrics}
    if keep.best == 0 or not names or keep.metric in names:
        return None
    return (
        f"Keep(best={keep.best}, metric={keep.metric!r}): no checkpoint was saved with that metric so far, and so "
        f"none is kept as the best; they have: {', '.join(sorted(names))}"
    )


def content_of(files: Sequence[CheckpointFile], sharded: Sequence[ShardedCheckpoint]) -> bytes:
    """Return the content of a manifest that names these checkpoints.

    Args:
        files: Whole checkpoints, the newest first.
        sharded: Sharded checkpoints, the newest last.
    """
    named = {"checkpoints": [asdict(entry) for entry in files], "sharded": [asdict(one) for one in reversed(sharded)]}
    return json.dumps({"format": FORMAT} | named).encode()


def read(files: Files, folder: str) -> Named | None:
    """Return the whole and sharded checkpoints in a folder's manifest, the newest first.

    Without a manifest, both lists are empty. None: the manifest is incomplete.

    Raises:
        GangStartError: Another version of this package has written the manifest.
        Exception: Any error of the storage's client but `FileNotFoundError`.
    """
    try:
        content = files.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        return [], []
    if (found := format_of(content)) not in (FORMAT, None):
        raise GangStartError(
            f"the checkpoints at {folder} are of format {found}, which another version of this package has written; "
            f"this one reads format {FORMAT}. Go on with that version. Or start afresh: name another "
            "Gang(checkpoint_uri=...) or Gang(key=...), or move the folder away"
        )
    return named_in(content)


def format_of(manifest: bytes) -> int | None:
    """Return the format of a manifest. None: the manifest is incomplete."""
    with contextlib.suppress(ValueError, AttributeError):
        return int(json.loads(manifest).get("format", 1))
    return None


def fetch(files: Files, file: CheckpointFile, target: Path) -> bool:
    """Copy a whole checkpoint from storage to `target`. Return True if its file exists and has the digest."""
    with contextlib.suppress(FileNotFoundError):
        files.get(f"{file.folder}/{file.name}", target)
    return target.is_file() and digest_of(target) == file.digest


def named_in(manifest: bytes) -> Named | None:
    """Return the whole and sharded checkpoints in a manifest, the newest first.

    Args:
        manifest: Content of the manifest.

    Returns:
        None if the manifest is incomplete, or of another format.
    """
    try:
        named = json.loads(manifest)
        return (
            [CheckpointFile(**entry | {"metrics": _numbers(entry)}) for entry in named["checkpoints"]],
            [ShardedCheckpoint(**entry) for entry in named["sharded"]],
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in entry.get("metrics", {}).items()}


# ---- Checkpoints of the previous attempt, or of an earlier call


@dataclass
class Previous:
    """Checkpoints of the previous attempt, as far as storage gives them."""

    found: list[CheckpointFile] = field(default_factory=list)
    """Whole checkpoints that were copied to the driver's disk, the newest first."""
    listed: list[CheckpointFile] = field(default_factory=list)
    """All whole checkpoints in the manifest, the newest first."""
    damaged: set[str] = field(default_factory=set)
    """File names of whole checkpoints that are missing or damaged."""
    sharded: list[ShardedCheckpoint] = field(default_factory=list)
    """Sharded checkpoints in the manifest, the newest last."""
    is_known: bool = False
    """True if the manifest was read. Otherwise the driver cannot tell which older checkpoints to keep."""


def restore(files: Files, folder: str, keep: Keep, disk: Path, retry_after: float) -> Previous:
    """Copy the newest undamaged whole checkpoint of a folder, and its best ones, to the driver's disk.

    If storage gives an error to the last, a line in the log says so, and the result has what was read before.

    Args:
        files: File system of the folder.
        folder: Folder in storage with the previous attempt's manifest.
        keep: Retention policy, which tells the best checkpoints.
        disk: Folder on the driver's disk for whole checkpoints.
        retry_after: Seconds before the first retry of a failed read. Each further retry doubles the pause.
    """
    previous = Previous()
    try:
        _restore(previous, files, folder, keep, disk, retry_after)
    except GangStartError:
        raise
    except Exception as error:  # storage clients raise errors of any class
        found = previous.found
        goes_on = f"goes on from step {found[0].step}" if found else "starts afresh"
        say(
            f"the previous attempt's checkpoints at {folder} cannot be read ({type(error).__name__}: {error}); "
            f"the training {goes_on}. Check the task's access to this storage",
        )
    return previous


def _restore(previous: Previous, files: Files, folder: str, keep: Keep, disk: Path, retry_after: float) -> None:
    named = _with_retries(functools.partial(read, files, folder), retry_after)
    listed, sharded = named or ([], [])
    previous.sharded, previous.is_known = sharded[::-1], named is not None
    previous.listed = [replace(file, attempt=0, folder=file.folder or folder) for file in listed]
    best = best_first(reversed(previous.listed), keep)[: keep.best]
    for file in previous.listed:
        if previous.found and file not in best:
            continue
        if _with_retries(functools.partial(fetch, files, file, disk / file.name), retry_after):
            previous.found.append(file)
        else:
            previous.damaged.add(file.name)
            say(
                f"the previous attempt's checkpoint of step {file.step} is incomplete or damaged, and is not "
                f"used: {file.folder}/{file.name} is missing or has another SHA-256 than in the manifest"
            )


def _with_retries(read: Callable[[], T], retry_after: float) -> T:
    for number in range(MAX_READ_ATTEMPTS - 1):
        try:
            return read()
        except GangStartError:
            raise
        except Exception as error:
            pause = retry_after * 2**number
            say(
                f"the previous checkpoint cannot be read yet ({type(error).__name__}: {error}); trying again in "
                f"{pause:g} s"
            )
            time.sleep(pause)
    return read()
