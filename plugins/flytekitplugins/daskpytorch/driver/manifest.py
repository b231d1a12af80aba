"""Manifest of a gang's checkpoints in storage, and the retention policy: last and best. Runs in the driver.

manifest.json: {"format": 5, "checkpoints": [...]}    the newest first
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.process.worker import with_retries
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, digest_of
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MANIFEST = "manifest.json"
FORMAT = 5
"""Earlier formats were never released. Format 1 named no format."""
E = TypeVar("E", CheckpointEntry, SavedCheckpoint)


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


def lack_of_metric(kept: Iterable[SavedCheckpoint], keep: Keep) -> str | None:
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
        return [_entry(named, folder) for named in written["checkpoints"]]
    return None


def _entry(named: dict[str, Any], folder: str) -> CheckpointEntry:
    metrics = {name: float(value) for name, value in named.get("metrics", {}).items()}
    return CheckpointEntry(**named | {"metrics": metrics, "folder": named.get("folder") or folder})


# ---- Checkpoints of the previous attempt, or of an earlier call


def restore(
    files: Files, folder: str, keep: Keep, disk: Path, retry_after: float
) -> tuple[list[CheckpointEntry] | None, list[CheckpointEntry]]:
    """Copy a folder's newest undamaged whole checkpoint, and its best ones, to the driver's disk.

    Returns all checkpoints in the manifest, the newest first, and the damaged ones. None: the manifest was not read,
    and nobody can tell which older checkpoints to keep. If storage fails to the last, a log line says so, and the
    result has what was read. Each retry doubles `retry_after` (seconds).
    """
    listed, damaged, newest = None, list[CheckpointEntry](), None

    def tell(error: Exception) -> None:
        say(f"the previous checkpoint cannot be read yet ({type(error).__name__}: {error}); trying again")

    waits = [retry_after * 2**number for number in range(4)]
    try:
        listed = with_retries(lambda: read(files, folder), waits, tell, final=(GangStartError,))
        whole = [entry for entry in listed or () if not entry.is_sharded]
        best = best_first(reversed(whole), keep)[: keep.best]
        for entry in whole:
            if newest is None or entry in best:
                is_whole = with_retries(functools.partial(_fetch, files, entry, disk / entry.name), waits, tell)
                if is_whole:
                    newest = newest or entry
                else:
                    damaged.append(entry)
    except GangStartError:
        raise
    except Exception as error:  # storage clients raise errors of any class
        goes_on = f"goes on from step {newest.step}" if newest is not None else "starts afresh"
        say(
            f"the previous attempt's checkpoints at {folder} cannot be read ({type(error).__name__}: {error}); "
            f"the training {goes_on}. Check the task's access to this storage",
        )
    return listed, damaged


def _fetch(files: Files, entry: CheckpointEntry, target: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        files.get(entry.uri, target)
    if target.is_file() and digest_of(target) == entry.digest:
        return True
    say(
        f"the previous attempt's checkpoint of step {entry.step} is incomplete or damaged, and is not used: "
        f"{entry.uri} is missing or has another digest than in the manifest"
    )
    return False
