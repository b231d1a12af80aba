"""What of a gang's checkpoints counts: one small object in storage, replaced as a whole. Runs in the driver.

    {"checkpoints": [...], "sharded": [...]}    the newest first; the second is missing where there are none

Checkpoints in one file lie beside it, or in the `folder` that it says; sharded ones are named by their folders,
wherever those are. So an attempt's manifest names at once what the attempt before has left; of that, only files are
copied.
"""

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.host import Storage, StoragePaths
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint

MANIFEST = "manifest.json"
Named = tuple[list[CheckpointFile], list[ShardedCheckpoint]]


class Manifest:
    """The one of this attempt; two threads write to it, that of the copies of files and that of the shards."""

    def __init__(self, paths: StoragePaths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self.files: list[CheckpointFile] = []
        self.sharded: list[ShardedCheckpoint] = []
        self.is_known = False
        """What the manifest before this one names was read, so that what is left of others can be told apart."""

    def write(
        self, *, files: Sequence[CheckpointFile] | None = None, sharded: Sequence[ShardedCheckpoint] | None = None
    ) -> None:
        """Name these in place of those of their kind before.

        Raises:
            Exception: Whatever a store's client raises.
        """
        with self._lock:
            files = self.files if files is None else list(files)
            sharded = self.sharded if sharded is None else list(sharded)
            named = {"checkpoints": [asdict(entry) for entry in files]}
            named |= {"sharded": [asdict(entry) for entry in sharded]} if sharded else {}
            with tempfile.TemporaryDirectory(prefix="daskpytorch-manifest-") as folder:
                local = Path(folder, MANIFEST)
                local.write_text(json.dumps(named))
                self._paths.file_access.put_data(str(local), f"{self._paths.own}/{MANIFEST}")
            self.files, self.sharded = files, sharded


def read_manifest(storage: Storage, folder: str) -> Named | None:
    """What a folder's manifest names, which is nothing where there is none; None: it cannot be told.

    Raises:
        Exception: Whatever a store's client raises.
    """
    uri = f"{folder}/{MANIFEST}"
    with tempfile.TemporaryDirectory(prefix="daskpytorch-manifest-") as here:
        local = Path(here, MANIFEST)
        if not storage.get_filesystem_for_path(uri).exists(uri):
            return [], []
        storage.get_data(uri, str(local))
        return named_in(local)


def named_in(path: Path) -> Named | None:
    """What a manifest that is a file here names; None: it is torn, or of a later version."""
    try:
        named = json.loads(path.read_bytes())
        return (
            [CheckpointFile(**entry | {"metrics": _numbers(entry)}) for entry in named["checkpoints"]],
            [ShardedCheckpoint(**entry) for entry in named.get("sharded", ())],
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in entry.get("metrics", {}).items()}
