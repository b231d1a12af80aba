"""Flyte's storage for the ranks of `dispatch.run` in a task. Made in the driver, runs in a rank."""

from dataclasses import dataclass
from typing import Any

from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import get_fsspec_storage_options
from fsspec.core import split_protocol

from flytekitplugins.daskpytorch.protocol import host


@dataclass(frozen=True)
class FlyteStorage(host.Execution):
    """Execution for the ranks of `dispatch.run`: opens Flyte's storage with the credentials of the driver's task."""

    data_config: DataConfig
    """Settings of flytekit's storage, with the keys of an S3 server other than Amazon's. Roles are the worker's own."""

    def filesystem(self, uri: str) -> Any:
        """Return the file system of a URI, opened as flytekit opens it in the driver."""
        protocol = split_protocol(uri)[0] or "file"
        return host.open_filesystem(uri, **get_fsspec_storage_options(protocol, self.data_config))
