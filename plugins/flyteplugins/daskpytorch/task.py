"""Configs and task types for Flyte 2: how tasks of `TaskEnvironment(plugin_config=DaskDDP(...))` run.

Loaded where environments are defined, and imports no torch.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import re
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import flyte
import flyte.report
from flyte._internal.runtime.io import report_path
from flyte._utils.asyncify import run_sync_in_thread
from flyte.errors import GPUFaultSystemError, NonRecoverableError, RuntimeSystemError
from flyte.extend import AsyncFunctionTaskTemplate, TaskPluginRegistry
from flyteplugins.dask import Scheduler, WorkerGroup
from flyteplugins.dask.task import DaskTask

from flytekitplugins.daskpytorch.display import deck
from flytekitplugins.daskpytorch.errors import GangError, PreemptedError
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.protocol.function import check_function
from flytekitplugins.daskpytorch.protocol.host import known_to_threads
from flytekitplugins.daskpytorch.task import config, in_ranks, local_runs
from flytekitplugins.daskpytorch.task.config import refuse_unknown
from flytekitplugins.daskpytorch.task.process import IDLE_SIGTERM, SIGTERM, exit_quickly, heeding_sigterm
from flyteplugins.daskpytorch import context
from flyteplugins.daskpytorch.command_line import IMPORTED_AHEAD
from flyteplugins.daskpytorch.context import Flyte2Rank, TaskOutput

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.task.run import Shown

PRELOAD = {"DASK_DISTRIBUTED__WORKER__PRELOAD": "flyteplugins.daskpytorch.command_line"}

MAX_SYSTEM_RESTARTS = 3
"""Times that Flyte 2 restarts an attempt after failures of the infrastructure."""
GPU_FAULTS = {
    "GpuEccUncorrectable": r"uncorrectable (ECC error|memory errors \(ECC\))",
    "GpuRowRemapPending": r"waits to be remapped",
    "GpuFallenOffBus": r"GPU is lost|fallen off the bus|\bXid\b.{0,40}\b79\b",
    "GpuNvlinkError": r"uncorrectable NVLink error",
    "GpuXidError": r"could not be remapped|over nvlink or a hardware error",
}
"""Texts of a broken GPU's faults, by Flyte's code. The last code stands for faults without their own."""


@dataclass(kw_only=True)
class _Resumable(AsyncFunctionTaskTemplate):  # type: ignore[misc]
    """Base of all task types: infrastructure failures that Flyte retries, SIGTERM, and local runs."""

    debuggable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function(self.func, may_be_async=True)
        if self.reusable is not None:
            kind = type(self.plugin_config).__name__
            raise ValueError(
                f"{self.name}: {kind} has a cluster or ranks of its own, and cannot be reusable: leave reusable out of "
                "its environment"
            )
        self.pod_template: Any = _undisturbed(self.pod_template)

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task. If the infrastructure fails, raise a system error, after which Flyte restarts the attempt."""
        exit_quickly()
        is_local = flyte.ctx().mode == "local"
        may_start_again = is_local or context.earlier_system_errors() < MAX_SYSTEM_RESTARTS
        inputs = dict(zip(self.interface.inputs, args, strict=False)) | kwargs
        try:
            with local_runs.begun(self.name, is_local=is_local), known_to_threads():
                return await _heeding_sigterm(self._run(inputs))
        except KeyboardInterrupt:  # from the thread that trains, where it would end Flyte's event loop
            raise asyncio.CancelledError from None
        except in_ranks.INFRASTRUCTURE_ERRORS as error:
            if not may_start_again:  # a user error, which counts towards the task's retries
                raise
            raise _system_error(error) from error
        except Exception as error:
            gang_error = error if isinstance(error, GangError) else error.__cause__
            if isinstance(gang_error, GangError) and gang_error.is_repeated:
                raise NonRecoverableError(str(error), code=type(error).__name__) from error
            raise

    async def _run(self, inputs: dict[str, Any]) -> Any:
        raise NotImplementedError


@dataclass(kw_only=True)
class _OnDask(DaskTask):  # type: ignore[misc]
    """Base of tasks of Flyte's type `dask`, with this package's Dask settings in all pods."""

    _settings: ClassVar[Mapping[str, str]] = in_ranks.GANG_SETTINGS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.env_vars: Any = {**self._settings, **PRELOAD, **(self.env_vars or {})}
        self._check_gpus()
        template = self.pod_template
        if isinstance(template, flyte.PodTemplate):
            annotations, num_workers = template.annotations or {}, self.plugin_config.num_workers
            group = in_ranks.pod_group(self.name, template.labels or {}, annotations, num_workers)
            self.pod_template: Any = replace(template, annotations={**annotations, **group})

    def _check_gpus(self) -> None:
        """Refuse a kind of GPU that workers would not get, and warn of GPUs by a name that Kubernetes refuses."""
        is_users = "ACTION_NAME" not in os.environ and "RANK" not in os.environ  # pods and ranks import the task again
        if not is_users or not self.plugin_config.num_gpus:
            return
        resources = self.plugin_config.workers.resources
        what = (
            f"{self.name}: Flyte 2's plugin for Dask, as of 2.0.43, asks for GPUs of WorkerGroup(resources=...) "
            "without their kind, and by the name `gpu`, which Kubernetes refuses. Ask for them by the environment "
            f"instead, whose resources workers have that say nothing: flyte.TaskEnvironment(resources="
            f"flyte.Resources(gpu={resources.gpu!r}), plugin_config=...(workers=WorkerGroup(number_of_workers=...), "
            "scheduler=Scheduler(resources=...)))"
        )
        if resources.get_device().device:
            raise ValueError(what)
        warnings.warn(what, stacklevel=2)

    async def pre(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return no parameters: the driver sends the user's code to the ranks, which alone need it."""
        return {}


@dataclass(kw_only=True)
class _InRanks(in_ranks.InRanks, _Resumable):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.task_config, self._task_function, self.enable_deck = self.plugin_config, self.func, bool(self.report)
        secret = self.plugin_config.wandb.secret if self.plugin_config.wandb else None
        if secret is not None:
            self.secrets: Any = _with_secret(self.secrets, secret)
        self._check_evaluation(self.interface.inputs)

    async def _run(self, inputs: dict[str, Any]) -> Any:
        fork_client.import_ahead(IMPORTED_AHEAD)
        if self._is_debugging:
            return await run_sync_in_thread(self._train_here, inputs)
        return await run_sync_in_thread(self._train, inputs, self._rank_host(inputs))

    def _rank_host(self, inputs: dict[str, Any]) -> Callable[[str], Flyte2Rank]:
        return lambda folder: Flyte2Rank.of_current_task(self.name, inputs, list(self.interface.outputs), folder)

    def _as_output(self, folder: str) -> Any:
        from flyte.io import Dir

        return Dir(path=folder)

    def _environment_of_ranks(self) -> Mapping[str, str]:
        return {**context.rank_environment(self.secrets), **(self.env_vars or {})}

    def _published(self, shown: Shown) -> AbstractContextManager[None]:
        show, at_once = flyte.report.get_tab(deck.TITLE).replace, self._page_file() is not None
        return deck.kept_up_to_date(shown.state, shown.places, show, flyte.report.flush, at_once=at_once)

    def _page_file(self) -> str | None:
        return report_path(flyte.ctx().output_path) if flyte.ctx().mode == "local" else None

    def _deliver(self, inputs: dict[str, Any], output: TaskOutput) -> Any:
        for name, content in output.tabs.items():
            flyte.report.get_tab(name).content.extend(content)
        return output.value


@dataclass(kw_only=True)
class DaskDDPTask(_InRanks, in_ranks.OnDaskWorkers, _OnDask):
    task_type: str = "dask"

    def _num_gpus_asked(self) -> int:
        resources = self.plugin_config.workers.resources
        return num_gpus(self.resources if resources is None else resources)


@dataclass(kw_only=True)
class SpawnDDPTask(_InRanks, in_ranks.OnOwnNode):
    def _num_gpus_to_find(self) -> int:
        return 0 if flyte.ctx().mode == "local" else num_gpus(self.resources)


@dataclass(kw_only=True)
class DaskClusterTask(_Resumable, _OnDask):
    task_type: str = "dask"

    _settings: ClassVar[Mapping[str, str]] = in_ranks.CLUSTER_SETTINGS

    async def _run(self, inputs: dict[str, Any]) -> Any:
        from flytekitplugins.daskpytorch.dask import cluster

        refuse_unknown(inputs)
        fork_client.import_ahead(IMPORTED_AHEAD)
        asked: config.Cluster = self.plugin_config
        opened = cluster.opened(num_workers=asked.num_workers, start_timeout=asked.start_timeout)
        kept = contextvars.copy_context()  # Dask closes a client only in the context that has opened it
        await run_sync_in_thread(kept.run, opened.__enter__)
        try:
            if inspect.iscoroutinefunction(self.func):
                return await self.func(**inputs)
            return await run_sync_in_thread(kept.run, functools.partial(self.func, **inputs))
        finally:
            await run_sync_in_thread(kept.run, opened.__exit__, None, None, None)


def _system_error(error: GangError) -> RuntimeSystemError:
    cause = (error.cause or "") if error.kind == "lost" else ""
    code = next((code for code, text in GPU_FAULTS.items() if re.search(text, cause, re.IGNORECASE)), None)
    if code is None:
        return RuntimeSystemError(type(error).__name__, str(error))
    return GPUFaultSystemError(code, str(error))


async def _heeding_sigterm(running: Coroutine[Any, Any, Any]) -> Any:
    """Await a task's work. Meanwhile, SIGTERM ends the gangs after a checkpoint, and the task with a system error."""
    if threading.current_thread() is not threading.main_thread():  # a task's Ctrl-C would end the thread's event loop
        return await running
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(running)
    try:
        with heeding_sigterm(lambda: loop.call_soon_threadsafe(task.cancel)):
            return await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        raise PreemptedError(IDLE_SIGTERM, cause=SIGTERM) from None


def num_gpus(resources: Any) -> int:
    device = resources.get_device() if resources is not None else None
    return int(device.quantity or 0) if device is not None and device.device_class == "GPU" else 0


def _undisturbed(template: Any) -> Any:
    """Add our annotations to a task's pod template, below the user's, unless the user names a template.

    Flyte 2's SDK serialises a pod template with the package `kubernetes`, which the SDK does not install.
    """
    if isinstance(template, str) or not find_spec("kubernetes"):
        return template
    template = template or flyte.PodTemplate()
    return replace(template, annotations=in_ranks.UNDISTURBED | (template.annotations or {}))


def _with_secret(secrets: Any, secret: Any) -> list[Any]:
    present = [] if secrets is None else list(secrets) if isinstance(secrets, list) else [secrets]
    asked = {(getattr(each, "group", None), getattr(each, "key", each)) for each in present}
    if (secret.group, secret.key) in asked:
        return present
    return [*present, flyte.Secret(key=secret.key, group=secret.group)]


# ---- Configs


@dataclass(frozen=True, kw_only=True)
class _Clustered(config.OnDask):
    KINDS = {"scheduler": Scheduler, "workers": WorkerGroup}  # noqa: RUF012 - as its base has it

    scheduler: Scheduler = field(default_factory=Scheduler)
    """Image and resources of the Dask scheduler's pod."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """Number, image and resources of the Dask workers' pods. Default: two workers."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the resources of each Dask worker. 0: no GPUs."""
        return num_gpus(self.workers.resources)


@dataclass(frozen=True, kw_only=True)
class DaskDDP(_Clustered, config.GangOnDask):
    """Config of tasks whose functions run in every rank of a gang on an ephemeral Dask cluster.

    Use `TaskEnvironment(plugin_config=DaskDDP(...))`. A task's output is rank 0's return value.
    """


@dataclass(frozen=True, kw_only=True)
class SpawnDDP(config.GangOnOwnNode):
    """Config of tasks whose functions run in every rank of a gang on the task's own node, without Dask.

    Use `TaskEnvironment(plugin_config=SpawnDDP(...))`. A task's output is rank 0's return value. For Flyte, the task is
    an ordinary Python task. The environment's `resources` have its GPUs, and the shared memory that DataLoader workers
    need.
    """


@dataclass(frozen=True, kw_only=True)
class DaskCluster(_Clustered, config.Cluster):
    """Config of tasks whose functions run once, with a Dask cluster whose client `current_client()` returns.

    Use `TaskEnvironment(plugin_config=DaskCluster(...))`.
    """


HOST = config.Host(sdk="Flyte 2's SDK", package="flyteplugins.daskpytorch", register=TaskPluginRegistry.register)
HOST.add(DaskDDP, DaskDDPTask)
HOST.add(SpawnDDP, SpawnDDPTask)
HOST.add(DaskCluster, DaskClusterTask)
