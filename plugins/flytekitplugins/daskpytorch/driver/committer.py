"""Sharded checkpoints, which the ranks write straight to storage: committed here, and here alone. Runs in the driver.

    ranks ──objects──▶ storage
    ranks ──what they wrote──▶ brain ──▶ Committer ──layout.json, .metadata, and at last the manifest──▶ storage

A checkpoint counts once the manifest names it, and is removed only after a manifest does without it.
"""

import contextlib
import functools
import hashlib
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.driver.retention import find, retained
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol import torch_metadata
from flytekitplugins.daskpytorch.protocol.files import Files, full_path, unusable
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.sharded import (
    LAYOUT,
    METADATA,
    ShardedCheckpoint,
    Sharding,
    WrittenShards,
    folder_name,
    is_object,
    layout_of,
    save_of,
)
from flytekitplugins.daskpytorch.settings import Gang

MAX_COMMIT_ATTEMPTS = 10
"""Tries to commit a checkpoint before it is given up, which take some five minutes."""
LANE = "shards"


@dataclass(frozen=True)
class Committed:
    """A sharded checkpoint has been committed, or will not be, for this reason."""

    attempt: int
    number: int
    """Which of the attempt's saves it is."""
    step: int
    error: Exception | None


class Committer:
    """Makes checkpoints of what the ranks have written, and removes what is none."""

    def __init__(
        self,
        settings: Gang,
        paths: StoragePaths | None,
        vault: Vault,
        scratch: Path,
        filesystem: Callable[[str], Any],
        say: Callable[[Committed], object],
    ) -> None:
        """Make that of a gang with these settings.

        Args:
            settings: The gang's.
            paths: Where checkpoints go to; None: to a folder of the driver's, which goes with it.
            vault: Names the checkpoints.
            scratch: The driver's own folder.
            filesystem: Opens the file system of a path or fsspec URL.
            say: Called with what came of a commit, in the worker's thread.
        """
        self.vault = vault
        self._filesystem = filesystem
        self._say = say
        self._cache = settings.shard_cache
        self._nonce = secrets.token_hex(4)
        self.base = paths.shards or paths.own if paths is not None else str(scratch / "shards")
        """Path or fsspec URL, below which each checkpoint has a folder."""
        self.previous = paths.previous_shards or paths.previous if paths is not None else None
        """Base of the attempt or call before, which may be the same."""
        self.token: Path | None = None
        """File by which ranks see that they are on this machine. None if `base` is reached from everywhere."""
        if "://" not in self.base or self.base.startswith("file://"):
            self.base, self.previous = full_path(self.base), self.previous and full_path(self.previous)
            users = settings.checkpoint_uri is not None  # perhaps on a disk that the ranks' machines share
            self.token = Path(self.base if users else scratch, f".driver-{secrets.token_hex(4)}")
        self._outdated: set[str] = set()
        """Names of checkpoints that are not kept any more."""

    @functools.cached_property
    def files(self) -> Files:
        """File system of `base`, opened when it is needed: most gangs save no shards, and opening takes time."""
        return Files(self._filesystem(self.base))

    def begin(self) -> None:
        """Go on from the checkpoints that the vault has by now, and remove what no manifest names of earlier drivers.

        Raises:
            OSError: The user has named a folder that cannot be written.
        """
        self._leave_token()
        if self.vault.is_known and (previous := self.previous) is not None:
            self._submit_removal(previous, lambda _, nonce: nonce != self._nonce)

    def sharding(self) -> Sharding:
        """Return what the ranks of an attempt that starts now are told."""
        token = str(self.token) if self.token is not None else None
        start = tuple(reversed(self.vault.sharded))
        return Sharding(base=self.base, nonce=self._nonce, token=token, start=start, cache=self._cache)

    def newest(self) -> ShardedCheckpoint | None:
        """Return the newest that is committed."""
        kept = self.vault.sharded
        return kept[-1] if kept else None

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        """Return what a user is told of those that are kept."""
        return tuple(entry.saved for entry in self.vault.sharded)

    def find(self, step: int | None) -> ShardedCheckpoint | None:
        """Return the newest of this step or, with None, the best."""
        return find(self.vault.sharded, self.vault.keep, step)

    def commit(self, written: Sequence[WrittenShards]) -> None:
        """Make a checkpoint of what all the ranks of an attempt have written, in their order."""
        of = written[0]

        def gives_up(error: Exception, num_failures: int, _: float) -> bool:
            if num_failures == 1:
                say(
                    f"the sharded checkpoint of step {of.step} could not be committed ({type(error).__name__}: "
                    f"{error}); trying again for some minutes. The training goes on.",
                )
            if num_failures < MAX_COMMIT_ATTEMPTS:
                return False
            self._say(Committed(of.attempt, of.number, of.step, error))
            return True

        self.vault.worker.submit(LANE, lambda: self._commit(written), gives_up)

    def sweep(self, attempt: int, number: int = -1) -> None:
        """Remove what is in no checkpoint, of this attempt's saves up to this one, and of all attempts before."""
        self._submit_removal(self.base, lambda save, nonce: nonce == self._nonce and save <= (attempt, number))

    def flush(self, timeout: float) -> bool:
        """Wait until all is committed, and what no rank writes any more removed; return True if it was in time."""
        if self.vault.worker.has_begun(LANE):
            self.sweep(sys.maxsize)
        return self.vault.worker.flush(LANE, timeout)

    def close(self) -> None:
        """Commit nothing more."""
        self.vault.worker.close()
        if self.token is not None:
            with contextlib.suppress(OSError):
                self.token.unlink()

    def _leave_token(self) -> None:
        token = self.token
        if token is None:
            return
        try:
            token.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            token.touch(mode=0o600)
        except OSError as error:
            raise unusable("Gang(checkpoint_uri=...)", str(token.parent), error) from error

    def _submit_removal(self, base: str, is_over: Callable[[tuple[int, int], str], bool]) -> None:
        self.vault.worker.submit(LANE, lambda: self._remove(base, is_over))

    # ---- in the worker's thread

    def _commit(self, written: Sequence[WrittenShards]) -> None:
        first, files, before = written[0], self.files, self.vault.sharded
        uri = f"{self.base}/{folder_name(first.attempt, self._nonce, first.step, first.number)}"
        layout = layout_of(written)
        files.write(f"{uri}/{LAYOUT}", layout)
        if (metadata := _metadata_of(layout)) is not None:
            files.write(f"{uri}/{METADATA}", metadata)
        made = ShardedCheckpoint(
            attempt=first.attempt,
            step=first.step,
            world_size=len(written),
            uri=uri,
            size=sum(part.size for each in written for part in each.parts),
            layout_digest=hashlib.sha256(layout).hexdigest(),
            metrics=first.metrics,
        )
        kept = retained([*before, made], self.vault.keep)
        self.vault.name(kept)
        self._outdated |= set(map(_name_of, before)) - set(map(_name_of, kept))
        self._say(Committed(first.attempt, first.number, first.step, None))

    def _remove(self, base: str, is_over: Callable[[tuple[int, int], str], bool]) -> None:
        """Remove what no manifest names, where this says so of an attempt, its save and their nonce."""
        if self.vault.is_in_doubt:  # a manifest may name what seems to be in none; another time
            return
        named = set(map(_name_of, self.vault.sharded))
        with self.vault.removing(base):
            for name, save, nonce in self._saves(base):
                if name not in named and (is_over(save, nonce) or name in self._outdated):
                    self.files.remove(f"{base}/{name}", is_object)
            self._outdated.clear()

    def _saves(self, base: str) -> Iterator[tuple[str, tuple[int, int], str]]:
        """Yield the name of each save below a base, its attempt and number, and its driver's nonce."""
        for step in self.files.folders(base):
            for save in self.files.folders(f"{base}/{step}"):
                if (found := save_of(name := f"{step}/{save}")) is not None:
                    yield name, *found


def _name_of(entry: ShardedCheckpoint) -> str:
    """Return the last two parts of a checkpoint's folder. No other save of any driver has the same."""
    return "/".join(entry.uri.split("/")[-2:])


def _metadata_of(layout: bytes) -> bytes | None:
    try:
        return torch_metadata.metadata_of(layout)
    except Exception as error:  # whatever another torch raises: a gang reads the layout
        say(
            f"the checkpoint can be read by gangs only, not by plain torch: {type(error).__name__}: {error}",
        )
        return None
