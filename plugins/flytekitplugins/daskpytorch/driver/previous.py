"""Reads the checkpoints of the task's previous attempt, or of an earlier call, from storage. Runs in the driver."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.manifest import best_first
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint
from flytekitplugins.daskpytorch.settings import Keep

MAX_READ_ATTEMPTS = 5
"""Maximum number of tries to read the previous attempt's manifest or one of its checkpoints from storage."""
T = TypeVar("T")


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


def read(files: Files, folder: str, keep: Keep, disk: Path, retry_after: float) -> Previous:
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
        _read(previous, files, folder, keep, disk, retry_after)
    except Exception as error:  # storage clients raise errors of any class
        found = previous.found
        goes_on = f"goes on from step {found[0].step}" if found else "starts afresh"
        say(
            f"the previous attempt's checkpoints at {folder} cannot be read ({type(error).__name__}: {error}); "
            f"the training {goes_on}. Check the task's access to this storage",
        )
    return previous


def _read(previous: Previous, files: Files, folder: str, keep: Keep, disk: Path, retry_after: float) -> None:
    named = _with_retries(functools.partial(manifest.read, files, folder), retry_after)
    listed, sharded = named or ([], [])
    previous.sharded, previous.is_known = sharded[::-1], named is not None
    previous.listed = [replace(file, attempt=0, folder=file.folder or folder) for file in listed]
    best = best_first(reversed(previous.listed), keep)[: keep.best]
    for file in previous.listed:
        if previous.found and file not in best:
            continue
        if _with_retries(functools.partial(manifest.fetch, files, file, disk / file.name), retry_after):
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
        except Exception as error:
            pause = retry_after * 2**number
            say(
                f"the previous checkpoint cannot be read yet ({type(error).__name__}: {error}); trying again in "
                f"{pause:g} s"
            )
            time.sleep(pause)
    return read()
