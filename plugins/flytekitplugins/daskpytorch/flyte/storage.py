"""Flyte's storage for ranks that are in a task, but not the task's own. Made in the driver, runs in a rank."""

from dataclasses import dataclass
from typing import Any

from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import get_fsspec_storage_options
from fsspec.core import split_protocol

from flytekitplugins.daskpytorch.protocol import host


@dataclass(frozen=True)
class FlyteStorage(host.Execution):
    """What the ranks of `dispatch.run` know of the execution: how the driver's task reaches Flyte's data."""

    data_config: DataConfig
    """With the keys of an S3 server other than Amazon's; roles and the like are the worker's own."""

    def filesystem(self, uri: str) -> Any:
        """As flytekit opens it there."""
        protocol = split_protocol(uri)[0] or "file"
        return host.open_filesystem(uri, **get_fsspec_storage_options(protocol, self.data_config))
