"""Task types for flytekit: how a task runs and is serialised, and the configs. Imports no torch."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any

from flyteidl.core import literals_pb2
from flytekit import Deck, PodTemplate, PythonFunctionTask
from flytekit.configuration import SerializationSettings
from flytekit.core.array_node_map_task import ArrayNodeMapTask
from flytekit.core.context_manager import FlyteContext, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.deck.deck import DeckField
from flytekit.exceptions.system import FlyteSystemException, FlyteUploadDataException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.dask import Scheduler, WorkerGroup
from flytekitplugins.dask.task import DaskTask

from flytekitplugins.daskpytorch.display.wandb import KEYLESS
from flytekitplugins.daskpytorch.flyte import context, deck
from flytekitplugins.daskpytorch.flyte.context import HOST, FlyteRank, TaskOutput
from flytekitplugins.daskpytorch.process.ending import CtrlC
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol.function import check_function
from flytekitplugins.daskpytorch.protocol.host import known_to_threads
from flytekitplugins.daskpytorch.settings import is_local
from flytekitplugins.daskpytorch.task import config, in_ranks, local_runs
from flytekitplugins.daskpytorch.task.config import Cluster, GangOnDask, GangOnOwnNode, refuse_unknown
from flytekitplugins.daskpytorch.task.process import ctrl_c, exit_quickly, heeding_sigterm

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.task.run import Shown


# Workers import torch for their ranks while the driver still waits for other workers.
PRELOAD = {"DASK_DISTRIBUTED__WORKER__PRELOAD": "flytekitplugins.daskpytorch.flyte.early_start"}

NO_LINK = "none"
"""A link without a template. Flyte tells tasks with any type of link the address of their execution's page."""
LINK_TYPE = "wandb-daskpytorch"
"""Type of the console's link to a run in Flyte's configuration, where the template ends in {{ .executionName }}-{{
.nodeId }}."""

INFRASTRUCTURE_ERRORS = (*in_ranks.INFRASTRUCTURE_ERRORS, FlyteUploadDataException)

_dispatched: ContextVar[tuple[object, LiteralMap] | None] = ContextVar("daskpytorch.dispatched", default=None)


class _Resumable(PythonFunctionTask):  # type: ignore[misc]
    """Base of all task types: infrastructure failures that Flyte retries, SIGTERM, and local runs."""

    # For this tab, flytekit runs pip twice, which takes 2 s (1.16.31, 2026-11-29).
    _left_out: tuple[DeckField, ...] = (DeckField.DEPENDENCIES,)

    def __init__(self, task_config: Any, task_function: Callable[..., Any], **kwargs: Any) -> None:
        kwargs["annotations"] = _annotations(kwargs)
        kwargs["deck_fields"] = [each for each in kwargs.get("deck_fields") or () if each not in self._left_out]
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)

    def _write_decks(self, inputs: dict[str, Any], outputs: dict[str, Any], ctx: FlyteContext, params: Any) -> None:
        with context.outcome_kept():  # without an execution, flytekit writes no file: see `write_local`
            super()._write_decks(inputs, outputs, ctx.with_execution_state(None).build(), params)
        if self.enable_deck:
            deck.write_local(ctx)

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        """Run the task. If the infrastructure fails, raise a system error, after which Flyte retries the task."""
        exit_quickly()
        pressed = CtrlC()
        tokens = _dispatched.set((self, input_literal_map)), ctrl_c.set(pressed), deck.local_file.set(None)
        try:
            heeded = contextlib.nullcontext() if self._is_debugging else pressed.heeded()
            with heeding_sigterm(), heeded, local_runs.begun(self.name, is_local=_is_local(ctx)):
                return super().dispatch_execute(ctx, input_literal_map)
        except FlyteUserRuntimeException as error:
            if isinstance(error.value, INFRASTRUCTURE_ERRORS):
                raise FlyteSystemException(str(error.value)) from error.value
            raise
        finally:
            _dispatched.reset(tokens[0])
            ctrl_c.reset(tokens[1])
            deck.local_file.reset(tokens[2])

    @property
    def _is_debugging(self) -> bool:
        return False


class _OnDask(DaskTask):  # type: ignore[misc]
    """Base of tasks of Flyte's type `dask`, with this package's Dask settings in all pods."""

    _settings: Mapping[str, str] = in_ranks.GANG_SETTINGS

    def __init__(self, task_config: Any, task_function: Callable[..., Any], **kwargs: Any) -> None:
        name, num_workers = f"{task_function.__module__}.{task_function.__name__}", task_config.num_workers
        labels = {**_of_template(kwargs, "labels"), **(kwargs.get("labels") or {})}
        annotations = {**_of_template(kwargs, "annotations"), **kwargs["annotations"]}
        kwargs["annotations"] |= in_ranks.pod_group(name, labels, annotations, num_workers)
        kwargs["environment"] = {**self._settings, **PRELOAD, **(kwargs.get("environment") or {})}
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)
        self._check_accelerator()

    def _check_accelerator(self) -> None:
        """Refuse an `accelerator` that Flyte would ignore, so that Dask workers would get GPUs of any kind."""
        workers, own = self.task_config.workers, self.resources
        has_gpus = [any(part and part.gpu for part in (each.requests, each.limits)) for each in (workers, own)]
        is_users = is_local() and "RANK" not in os.environ  # pods and ranks import the task again
        if is_users and self.accelerator is not None and has_gpus == [True, False] and self.pod_template is None:
            kind = self.accelerator.to_flyte_idl().device
            raise ValueError(
                f"{self.name}: accelerator={kind} does not reach the workers, which alone ask for GPUs: Flyte chooses "
                "nodes by the task's own GPUs. Choose them for all pods instead, with the labels and taints of your "
                "nodes: pod_template=PodTemplate(pod_spec=V1PodSpec(containers=[], node_selector={...}, "
                "tolerations=[...]))",
            )


class _InRanks(in_ranks.InRanks, _Resumable):
    _left_out = (DeckField.DEPENDENCIES, DeckField.OUTPUT)  # the driver may be unable to load the outputs

    def __init__(
        self, task_config: GangOnDask | GangOnOwnNode, task_function: Callable[..., Any], **kwargs: Any
    ) -> None:
        check_function(task_function)
        secret = task_config.wandb.secret if task_config.wandb else None
        if secret is not None and secret not in (kwargs.get("secret_requests") or []):
            kwargs["secret_requests"] = [*(kwargs.get("secret_requests") or []), secret]
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)
        if self.execution_mode != self.ExecutionBehavior.DEFAULT:
            kind = type(task_config).__name__
            raise ValueError(
                f"{self.name}: {kind} cannot be the task_config of a @dynamic or @eager function, which would start "
                "its tasks in every rank. Train in a @task, and call that from the @dynamic or @eager function."
            )
        self._check_evaluation(self.python_interface.inputs)

    def execute(self, **kwargs: Any) -> Any:
        """Train, and return rank 0's outputs: as literals if Flyte runs the task, else as Python values."""
        if self._is_debugging:
            return self._train_here(kwargs)
        task, literals = _dispatched.get() or (None, None)
        if task is self:
            return self._train(kwargs, self._rank_host(literals))
        ctx = FlyteContextManager.current_context()
        is_mapped = context.is_on_backend(ctx) and _is_of_map_task(inspect.currentframe())
        literals = TypeEngine.dict_to_literal_map(ctx, kwargs, self.python_interface.inputs)
        try:
            with heeding_sigterm():
                made = self._train(kwargs, self._rank_host(literals))
        except INFRASTRUCTURE_ERRORS as error:
            if not context.is_on_backend(ctx):
                raise
            # `map_task` turns all exceptions into user errors, so that retries count towards the task's `retries`
            raise FlyteRecoverableException(str(error)) from error
        if is_mapped:
            return made
        by_name = TypeEngine.literal_map_to_kwargs(ctx, made, self.python_interface.outputs)
        values = [by_name[name] for name in self.python_interface.outputs]
        if len(values) > 1 or self.python_interface.output_tuple_name:
            return self.python_interface.output_tuple(*values)
        return next(iter(values), None)

    def _rank_host(self, literals: LiteralMap) -> Callable[[str], FlyteRank]:
        return lambda folder: FlyteRank.of_current_task(self.name, self.python_interface, literals, folder)

    def _as_output(self, folder: str) -> FlyteDirectory:
        return FlyteDirectory(folder, remote_directory=False)

    def _environment_of_ranks(self) -> Mapping[str, str]:
        # Flyte sets the task's own variables on a backend only, where Dask's variables for its workers may win.
        return {**context.rank_environment(), **self.environment}

    def _published(self, shown: Shown) -> AbstractContextManager[object]:
        return deck.published(shown)

    def _page_file(self) -> str | None:
        return str(deck.local_file.get() or "") or None

    def get_config(self, settings: SerializationSettings) -> dict[str, str]:
        config = dict(super().get_config(settings) or {})
        if (wandb := self.task_config.wandb) is not None:
            # The template names no run without an entity, and no run with the user's own id.
            has_page = wandb.entity is not None and wandb.id is None and wandb.mode not in KEYLESS
            run = {name: getattr(wandb, name) for name in ("project", "entity", "host")} if has_page else {}
            config |= {"link_type": LINK_TYPE if has_page else NO_LINK, **run}
        return config

    def _deliver(self, inputs: dict[str, Any], output: TaskOutput) -> LiteralMap:
        ctx = FlyteContextManager.current_context()
        literals = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(output.literal_map))
        if self.enable_deck:  # flytekit writes no Deck if execute() returns literals
            self._write_decks(inputs, {}, ctx, ctx.user_space_params)
            for name, html in output.decks:
                Deck(name, html)
            deck.write_local(ctx)
        return literals


class DaskDDPTask(_InRanks, in_ranks.OnDaskWorkers, _OnDask):
    """Calls the task's function in ranks on Dask workers."""


class SpawnDDPTask(_InRanks, in_ranks.OnOwnNode):
    def __init__(self, task_config: GangOnOwnNode, task_function: Callable[..., Any], **kwargs: Any) -> None:
        if kwargs.get("shared_memory") is None and not _mounts_shared_memory(kwargs.get("pod_template")):
            kwargs["shared_memory"] = True  # with a container's default of 64 MB, DataLoader workers die of bus errors
        super().__init__(task_config, task_function, **kwargs)

    def _num_gpus_to_find(self) -> int:
        if _is_local(FlyteContextManager.current_context()):
            return 0
        asked = [part.gpu for part in (self.resources.limits, self.resources.requests) if part is not None and part.gpu]
        return int(asked[0]) if asked and str(asked[0]).isdecimal() else 0


class DaskClusterTask(_Resumable, _OnDask):
    _settings = in_ranks.CLUSTER_SETTINGS

    def execute(self, **kwargs: Any) -> Any:
        from flytekitplugins.daskpytorch.dask import cluster

        config: Cluster = self.task_config
        refuse_unknown(kwargs)
        with known_to_threads(), cluster.opened(num_workers=config.num_workers, start_timeout=config.start_timeout):
            return super().execute(**kwargs)

    def _write_decks(self, *args: Any) -> None:
        super()._write_decks(*args)
        if (file := deck.local_file.get()) is not None:
            say(f"{self.name.rpartition('.')[2]}: Deck: {file}")


def _annotations(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of a task's pods. The user's, also those of a pod template, win over ours.

    Flyte lets annotations of a task win over those of its pod template.
    """
    # flytekit 1.16.0 and 1.16.1 have no annotations in the metadata
    own = given.get("annotations") or getattr(given.get("metadata"), "annotations", None) or {}
    of_template = _of_template(given, "annotations")
    return {name: value for name, value in in_ranks.UNDISTURBED.items() if name not in of_template} | dict(own)


def _of_template(given: Mapping[str, Any], what: str) -> Mapping[str, str]:
    return getattr(given.get("pod_template"), what, None) or {}


def _is_local(ctx: FlyteContext) -> bool:
    return ctx.execution_state is not None and bool(ctx.execution_state.is_local_execution())


def _is_of_map_task(frame: FrameType | None) -> bool:
    """Return True if a `map_task` has called the method that runs in a stack frame.

    On a backend, a `map_task` returns literals unchanged. It would convert Python values to literals again, but the
    driver may be unable to load the values from rank 0's literals.
    """
    caller = frame.f_back if frame is not None else None
    return caller is not None and isinstance(caller.f_locals.get("self"), ArrayNodeMapTask)


def _mounts_shared_memory(template: PodTemplate | None) -> bool:
    containers = template.pod_spec.containers if template is not None and template.pod_spec is not None else []
    return any(mount.mount_path == "/dev/shm" for c in containers for mount in c.volume_mounts or [])  # noqa: S108


# ---- Configs of tasks


@dataclass(frozen=True, kw_only=True)
class _WithPods(config.OnDask):
    KINDS = {"scheduler": Scheduler, "workers": WorkerGroup}  # noqa: RUF012 - as its base has it

    scheduler: Scheduler = field(default_factory=Scheduler)
    """Image and resources of the Dask scheduler's pod."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """Number, image and resources of the Dask workers' pods. Default: two workers."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the limits of each Dask worker, or else in its requests. 0: no GPUs."""
        for resources in (self.workers.limits, self.workers.requests):
            if resources is not None and resources.gpu:
                return int(resources.gpu)
        return 0


@dataclass(frozen=True, kw_only=True)
class DaskDDP(_WithPods, config.GangOnDask):
    """Config of a task whose function runs in every rank of a gang on an ephemeral Dask cluster.

    Use `@task(task_config=DaskDDP(...))`. The task's output is rank 0's return value.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Train in eight ranks, on four workers with two GPUs each. A call in Python starts the cluster on this machine:

        >>> from flytekit import Resources, task
        >>> from flytekitplugins.daskpytorch import DaskDDP, WorkerGroup, current_rank
        >>> workers = WorkerGroup(number_of_workers=4, limits=Resources(cpu="8", mem="32Gi", gpu="2"))
        >>> @task(task_config=DaskDDP(workers=workers))
        ... def train(epochs: int) -> int:
        ...     for epoch in range(epochs):
        ...         current_rank().log({"epoch": epoch + 1})
        ...     return epochs
        >>> train(epochs=3)
        3
    """


@dataclass(frozen=True, kw_only=True)
class SpawnDDP(config.GangOnOwnNode):
    """Config of a task whose function runs in every rank of a gang on the task's own node, without Dask.

    Use `@task(task_config=SpawnDDP(...))`. The task's output is rank 0's return value. For Flyte, the task is an
    ordinary Python task: its `requests` have the GPUs, and `accelerator`, `shared_memory` and `pod_template` work.

    DataLoader workers need shared memory. By default only the container's memory limits it. The task or its pod
    template may set a limit.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        >>> from flytekit import Resources, task
        >>> from flytekitplugins.daskpytorch import SpawnDDP, current_rank
        >>> @task(task_config=SpawnDDP(), requests=Resources(cpu="16", mem="64Gi", gpu="4"))
        ... def train(epochs: int) -> str:
        ...     return f"rank {current_rank().rank} of {current_rank().world_size}"  # of 4; of 1 on a laptop
        >>> train(epochs=3)
        'rank 0 of 1'
    """


@dataclass(frozen=True, kw_only=True)
class DaskCluster(_WithPods, config.Cluster):
    """Config of a task whose function runs once, with a Dask cluster whose client `current_client()` returns.

    Use `@task(task_config=DaskCluster(...))`.

    Raises:
        ValueError: A field's value is invalid.

    Examples:
        Train a model for each learning rate, side by side:

        >>> from flytekit import task
        >>> from flytekitplugins.daskpytorch import DaskCluster, WorkerGroup, current_client, dispatch
        >>> def train(rate: float) -> float:
        ...     return (rate - 0.3) ** 2  # stands for a held-out loss
        >>> @task(task_config=DaskCluster(workers=WorkerGroup(number_of_workers=2)))
        ... def sweep(rates: list[float]) -> float:
        ...     return min(dispatch.map(current_client(), train, rates).result())
        >>> sweep(rates=[0.1, 0.3])
        0.0
    """


HOST.add(DaskDDP, DaskDDPTask)
HOST.add(SpawnDDP, SpawnDDPTask)
HOST.add(DaskCluster, DaskClusterTask)
if (
    sys.modules.get("flyte") is not None and find_spec("flyteplugins") and find_spec("flyteplugins.dask")
):  # Flyte 2's SDK
    import_module("flyteplugins.daskpytorch.task")
