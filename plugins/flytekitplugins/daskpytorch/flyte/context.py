"""Adapter of flytekit's context to the plugin's `Execution`. Runs in the driver."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from flytekit.configuration import DataConfig
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.data_persistence import get_fsspec_storage_options
from flytekit.extend import TaskPlugins
from flytekit.interfaces.random import random
from flytekit.models.security import Secret
from fsspec.core import split_protocol

from flytekitplugins.daskpytorch.protocol import host
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.task.config import Host
from flytekitplugins.daskpytorch.task.local_runs import LocalRun, local_run

HOST = Host(sdk="flytekit", package="flytekitplugins.daskpytorch", register=TaskPlugins.register_pythontask_plugin)
CHECKPOINTS = "daskpytorch"
"""Our folder in the attempt's intratask checkpoint, where the user may have other files."""


class FlyteExecution(host.Execution):
    def __init__(self, ctx: FlyteContext, run: LocalRun | None) -> None:
        self._ctx = ctx
        self._run = run
        self._params = params = ctx.user_space_params
        self.name = params.execution_id.name if params and params.execution_id else None
        self.task = ctx.execution_state if _is_in_task(ctx) else None

    def checkpoint_paths(self, key: str) -> host.StoragePaths | None:
        if self._run is not None:
            return self._run.paths(key)
        if not is_on_backend(self._ctx):
            return None
        checkpoint = getattr(self._params, "_checkpoint", None)
        own, previous = getattr(checkpoint, "_checkpoint_dest", None), getattr(checkpoint, "_checkpoint_src", None)
        if not own:
            return None
        files, ours = Files(self.filesystem(own)), f"{CHECKPOINTS}/{key}"
        return host.StoragePaths(
            files=files,
            previous=f"{files.path(previous)}/{ours}" if previous else None,
            own=f"{files.path(own)}/{ours}",
        )

    def filesystem(self, uri: str) -> Any:
        return self._ctx.file_access.get_filesystem(split_protocol(uri)[0] or "file", path=uri)

    def new_folder(self) -> str | None:
        state = self._ctx.execution_state
        is_executing = state is not None and state.mode is not None
        return str(self._ctx.file_access.get_random_remote_directory()) if is_executing else None

    def put_folder(self, folder: Path, uri: str) -> None:
        """If the upload fails, Flyte retries the task."""
        self._ctx.file_access.put_data(str(folder), uri, is_multipart=True)

    def in_ranks(self) -> host.Execution | None:
        open_here = partial(opened, settings=self._ctx.file_access.data_config)
        return host.StorageInRanks(open_here) if self.task is not None else None

    def secret(self, name: Secret) -> str:
        return str(self._params.secrets.get(name.group, name.key, name.group_version))


def opened(uri: str, settings: DataConfig) -> Any:
    protocol = split_protocol(uri)[0] or "file"
    return host.open_filesystem(uri, **get_fsspec_storage_options(protocol, settings))


def rank_environment() -> dict[str, str]:
    params = FlyteContextManager.current_context().user_space_params
    execution, task = getattr(params, "execution_id", None), getattr(params, "_task_id", None)
    names = {
        "FLYTE_INTERNAL_EXECUTION_ID": getattr(execution, "name", None),
        "FLYTE_INTERNAL_EXECUTION_PROJECT": getattr(execution, "project", None),
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": getattr(execution, "domain", None),
        "FLYTE_INTERNAL_TASK_PROJECT": getattr(task, "project", None),
        "FLYTE_INTERNAL_TASK_DOMAIN": getattr(task, "domain", None),
        "FLYTE_INTERNAL_TASK_NAME": getattr(task, "name", None),
        "FLYTE_INTERNAL_TASK_VERSION": getattr(task, "version", None),
    }
    inherited = {name: value for name, value in os.environ.items() if name.startswith(("FLYTE_", "_F_", "_FSEC_"))}
    return inherited | {name: str(value) for name, value in names.items() if value}


def current() -> FlyteExecution:
    return FlyteExecution(FlyteContextManager.current_context(), local_run.get())


def is_on_backend(ctx: FlyteContext) -> bool:
    return ctx.execution_state is not None and ctx.execution_state.mode == ExecutionState.Mode.TASK_EXECUTION


def _is_in_task(ctx: FlyteContext) -> bool:
    modes = (ExecutionState.Mode.TASK_EXECUTION, ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    return ctx.execution_state is not None and ctx.execution_state.mode in modes


host.provide(current)
# flytekit names folders and files by a random generator of its own, and forked ranks would inherit its state.
os.register_at_fork(after_in_child=random.seed)
