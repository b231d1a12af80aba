"""Commits sharded checkpoints, whose shards the ranks write straight to storage. Runs in the driver.

    ranks ──objects──▶ storage
    rank 0 ──report──▶ brain ──▶ Committer ──manifest──▶ storage

A checkpoint counts once the manifest names its folder. Files are removed only after the manifest has dropped their
checkpoint.
"""

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol.checkpoints import (
    CheckpointEntry,
    Sharding,
    is_object,
    save_of,
)
from flytekitplugins.daskpytorch.protocol.files import Files, full_path, unusable
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.settings import Gang

MAX_COMMIT_ATTEMPTS = 10
"""Tries to commit, over about five minutes."""
LANE = "shards"


@dataclass(frozen=True)
class Committed:
    entry: CheckpointEntry
    error: Exception | None = None
    """Error for which the driver has given up the checkpoint."""


class Committer:
    """Writes the manifest once all ranks have written their shards, and removes outdated and uncommitted saves."""

    def __init__(
        self,
        settings: Gang,
        paths: StoragePaths | None,
        vault: Vault,
        scratch: Path,
        filesystem: Callable[[str], Any],
        say: Callable[[Committed], object],
    ) -> None:
        """`scratch` is removed with the driver's end, and holds the checkpoints if `paths` is None.

        `say` is called with each commit's outcome, in the thread that writes to storage.
        """
        self.vault = vault
        self._filesystem = filesystem
        self._say = say
        self._nonce = secrets.token_hex(4)
        self._earlier: set[str] = set()
        """Nonces of the earlier drivers whose checkpoints the gang starts from."""
        self.base = paths.shards or paths.own if paths is not None else str(scratch / "shards")
        """Path or fsspec URL. Contains a folder for each sharded checkpoint."""
        self.previous = paths.previous_shards or paths.previous if paths is not None else None
        """Folder with the sharded checkpoints of the task's previous attempt or call, perhaps `base`, or None."""
        self.token: Path | None = None
        """File by which ranks check that they share the driver's folder `base`. None for a URL."""
        if "://" not in self.base or self.base.startswith("file://"):
            self.base, self.previous = full_path(self.base), self.previous and full_path(self.previous)
            users = settings.checkpoint_uri is not None  # perhaps on a disk that the ranks' machines share
            self.token = Path(self.base if users else scratch, f".driver-{secrets.token_hex(4)}")

    @functools.cached_property
    def files(self) -> Files:
        """Opened at first use, since most gangs save no sharded checkpoints."""
        return Files(self._filesystem(self.base))

    def begin(self) -> None:
        """Write `token`, and queue the removal of old uncommitted saves. Call after `Vault.restore`.

        Raises `OSError` if the folder that the user has named cannot be written.
        """
        self._leave_token()
        saves = (save_of(entry.name) for entry in self.vault.sharded)
        self._earlier = {save[1] for save in saves if save is not None}
        if self.vault.is_known and (previous := self.previous) is not None:
            self._submit_removal(previous, lambda _, nonce: nonce != self._nonce)

    def sharding(self) -> Sharding:
        token = str(self.token) if self.token is not None else None
        start = tuple(reversed(self.vault.sharded))
        return Sharding(base=self.base, nonce=self._nonce, token=token, start=start)

    def commit(self, entry: CheckpointEntry) -> None:

        def gives_up(error: Exception, num_failures: int, _: float) -> bool:
            if num_failures == 1:
                say(
                    f"the sharded checkpoint of step {entry.step} could not be committed ({type(error).__name__}: "
                    f"{error}); trying again for some minutes. The training goes on.",
                )
            if num_failures < MAX_COMMIT_ATTEMPTS:
                return False
            self._say(Committed(entry, error))
            return True

        self.vault.worker.submit(lambda: self._commit(entry), gives_up, lane=LANE)

    def sweep(self, attempt: int, number: int = -1) -> None:
        """Queue the removal of outdated checkpoints and of uncommitted saves up to this save of this attempt.

        Saves of drivers that this one does not follow stay: they may have taken over the folder while this driver stood
        still. A number of -1 removes only saves of earlier attempts.
        """

        def is_over(save: tuple[int, int], nonce: str) -> bool:
            return save <= (attempt, number) if nonce == self._nonce else nonce in self._earlier

        self._submit_removal(self.base, is_over)

    def sweep_through(self, entry: CheckpointEntry) -> None:
        """Sweep the saves up to this one, which was committed or given up."""
        if (save := save_of(entry.name)) is not None:
            self.sweep(*save[0])

    def flush(self, timeout: float) -> bool:
        """Wait for commits and removals. Return False after `timeout` seconds."""
        if self.vault.worker.has_begun(LANE):

            def gives_up(_: Exception, num_failures: int, __: float) -> bool:
                return not self.vault.sharded or num_failures >= MAX_COMMIT_ATTEMPTS  # whole ones are not waited for

            self.vault.worker.submit(self.vault.name, gives_up, lane=LANE)
            self.sweep(sys.maxsize)
        return self.vault.worker.flush(timeout, lane=LANE)

    def close(self) -> None:
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
        self.vault.worker.submit(lambda: self._remove(base, is_over), lane=LANE)

    # ---- in the thread of the vault's worker

    def _commit(self, entry: CheckpointEntry) -> None:
        self.vault.name(entry)
        self._say(Committed(entry))

    def _remove(self, base: str, is_over: Callable[[tuple[int, int], str], bool]) -> None:
        if self.vault.is_in_doubt:  # storage may hold the new or the old manifest: a later removal will know
            return
        named = {entry.name for entry in self.vault.sharded}
        with self.vault.removing(base):
            for name, save, nonce in self._saves(base):
                if name not in named and is_over(save, nonce):
                    self.files.remove(f"{base}/{name}", is_object)

    def _saves(self, base: str) -> Iterator[tuple[str, tuple[int, int], str]]:
        for step in self.files.folders(base):
            for save in self.files.folders(f"{base}/{step}"):
                if (found := save_of(name := f"{step}/{save}")) is not None:
                    yield name, *found
