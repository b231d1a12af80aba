"""Manifest of a gang's checkpoints in storage, and the retention policy: last and best. Runs in the driver.

manifest.json: {"format": 4, "checkpoints": [...]}    the newest first, sharded ones after whole ones
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
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, digest_of
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MANIFEST = "manifest.json"
FORMAT = 4
"""Earlier formats were never released. Format 1 named no format."""
MAX_READ_ATTEMPTS = 5
E = TypeVar("E", CheckpointEntry, SavedCheckpoint)
T = TypeVar("T")


@dataclass(eq=False)
class Whole:
    """A whole (not sharded) checkpoint: on the driver's disk, in storage, or both."""

    file: CheckpointEntry
    state: tuple[int, ...] | None
    """Device, inode, size and modification time of the driver's file when its digest was right: while these stay, the
    digest need not be computed again. None: not on the driver's disk."""
    folder: str | None = None
    """In storage, perhaps an earlier attempt's. None: storage has no copy."""

    def is_intact_at(self, path: Path) -> bool:
        found = state_of(path)
        return found is not None and (found == self.state or digest_of(path) == self.file.digest)


def best_first(entries: Iterable[E], keep: Keep) -> list[E]:
    """Return the checkpoints whose metric is a number, the best first, only the newest of each step.

    `entries` are in the order in which they were kept. Of equally good checkpoints, the earlier comes first.
    """
    metric = keep.metric
    if metric is None:
        return []
    sign = 1 if (keep.mode or direction_of(metric)) == "min" else -1
    measured = {entry.step: entry for entry in entries if not math.isnan(entry.metrics.get(metric, math.nan))}
    return sorted(measured.values(), key=lambda entry: sign * entry.metrics[metric])


def find(entries: Sequence[E], keep: Keep, step: int | None) -> E | None:
    """Return the newest checkpoint of a step, or the best if `step` is None."""
    found = best_first(entries, keep) if step is None else [entry for entry in entries[::-1] if entry.step == step]
    return found[0] if found else None


def retained(entries: Sequence[E], keep: Keep, is_held: Callable[[E], bool] = lambda _: False) -> list[E]:
    """Return the checkpoints that the policy keeps, in their given order: the newest, and all that `is_held`, too."""
    stay = {id(entry) for entry in (*entries[-keep.last :], *best_first(entries, keep)[: keep.best])}
    return [entry for entry in entries if id(entry) in stay or is_held(entry)]


def evaluated(entry: CheckpointEntry, name: str, metrics: Mapping[str, float]) -> CheckpointEntry:
    if entry.name != name:
        return entry
    return replace(entry, metrics={**entry.metrics, **metrics}, is_evaluated=True)


def hint_of_metric(kept: Iterable[SavedCheckpoint], keep: Keep) -> str | None:
    names = {name for one in kept for name in one.metrics}
    if keep.best == 0 or not names or keep.metric in names:
        return None
    return (
        f"Keep(best={keep.best}, metric={keep.metric!r}): no checkpoint was saved with that metric so far, and so "
        f"none is kept as the best; they have: {', '.join(sorted(names))}"
    )


def content_of(named: Sequence[CheckpointEntry]) -> bytes:
    return json.dumps({"format": FORMAT, "checkpoints": [asdict(entry) for entry in named]}).encode()


def read(files: Files, folder: str) -> list[CheckpointEntry] | None:
    """Return the checkpoints in a folder's manifest, or None if it is incomplete. Empty without a manifest.

    Raises `GangStartError` if another version of this package has written it.
    """
    try:
        content = files.read(f"{folder}/{MANIFEST}")
    except FileNotFoundError:
        return []
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        written = json.loads(content)
        if (found := int(written.get("format", 1))) != FORMAT:
            raise GangStartError(
                f"the checkpoints at {folder} are of format {found}, which another version of this package has "
                f"written; this one reads format {FORMAT}. Go on with that version. Or start afresh: name another "
                "Gang(checkpoint_uri=...) or Gang(key=...), or move the folder away"
            )
        return [CheckpointEntry(**entry | {"metrics": _numbers(entry)}) for entry in written["checkpoints"]]
    return None


def fetch(files: Files, file: CheckpointEntry, target: Path) -> bool:
    """Copy a whole checkpoint from storage. Return False if its file is missing or has another digest."""
    with contextlib.suppress(FileNotFoundError):
        files.get(f"{file.folder}/{file.name}", target)
    return target.is_file() and digest_of(target) == file.digest


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in entry.get("metrics", {}).items()}


# ---- Checkpoints of the previous attempt, or of an earlier call


@dataclass
class Previous:
    found: list[CheckpointEntry] = field(default_factory=list)
    """Copied to the driver's disk, the newest first."""
    listed: list[CheckpointEntry] = field(default_factory=list)
    """All whole ones in the manifest, the newest first."""
    damaged: set[str] = field(default_factory=set)
    sharded: list[CheckpointEntry] = field(default_factory=list)
    """The newest last."""
    is_known: bool = False
    """The manifest was read. Otherwise the driver cannot tell which older checkpoints to keep."""


def restore(files: Files, folder: str, keep: Keep, disk: Path, retry_after: float) -> Previous:
    """Copy a folder's newest undamaged whole checkpoint, and its best ones, to the driver's disk.

    If storage fails to the last, a log line says so, and the result has what was read. Each retry doubles `retry_after`
    (seconds).
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
    listed, previous.is_known = named or [], named is not None
    previous.sharded = [entry for entry in reversed(listed) if entry.is_sharded]
    previous.listed = [replace(file, attempt=0, folder=file.folder or folder) for file in listed if not file.is_sharded]
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
