"""The task types: what `@task(task_config=DaskDDP(...))` makes, how it runs and how it is serialised."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flyteidl.core import literals_pb2
from flytekit import Deck
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import FlyteContext, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.system import FlyteSystemException
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import TaskPlugins
from flytekit.models.literals import LiteralMap
from flytekitplugins.dask.task import DaskTask

from flytekitplugins.daskpytorch import forkserver, tracking
from flytekitplugins.daskpytorch.blame import GangStartError, PreemptedError, WorkerLostError
from flytekitplugins.daskpytorch.config import DaskCluster, DaskDDP, Wandb, is_local

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.flyte import TaskOutput
    from flytekitplugins.daskpytorch.gang import Request
    from flytekitplugins.daskpytorch.observer import Shape

__all__ = ["DaskClusterTask", "DaskDDPTask"]

CLUSTER_SETTINGS = {
    # Dask tasks may start processes of their own, such as the workers of a DataLoader.
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    # Workers import torch for their ranks while the driver still waits for all of them.
    "DASK_DISTRIBUTED__WORKER__PRELOAD": "flytekitplugins.daskpytorch.preload",
}
GANG_SETTINGS = CLUSTER_SETTINGS | {
    # An agent whose worker dies must not be tried on another worker.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
}
"""Task environment that reaches all pods of the cluster; what the user sets wins."""
MAX_CONFIG_ITEMS = 20
"""Longer lists among a task's inputs go to Weights & Biases as their lengths."""


_input_literals: ContextVar[LiteralMap] = ContextVar("flytekitplugins.daskpytorch.input_literals")
"""The inputs of the task that is being executed, as Flyte has them."""


class _OnDask(DaskTask):  # type: ignore[misc]
    """What the two task types share: Flyte's `dask` task type, and system errors for failed infrastructure."""

    def __init__(
        self, task_config: Any, task_function: Callable[..., Any], settings: Mapping[str, str], **kwargs: Any
    ) -> None:
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)
        self._cluster_settings = settings

    def get_container(self, settings: SerializationSettings) -> Any:
        """The container, with our Dask settings below all others: the task's `environment` and the registration's."""
        return super().get_container(self._with_cluster_settings(settings))

    def get_k8s_pod(self, settings: SerializationSettings) -> Any:
        """The same for a task that has a pod template."""
        return super().get_k8s_pod(self._with_cluster_settings(settings))

    def _with_cluster_settings(self, settings: SerializationSettings) -> SerializationSettings:
        return dataclasses.replace(settings, env={**self._cluster_settings, **(settings.env or {})})

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        """Run the task; what Flyte's infrastructure did becomes a system error, which Flyte retries by itself."""
        token = _input_literals.set(input_literal_map)
        try:
            with _heeding_sigterm():
                return super().dispatch_execute(ctx, input_literal_map)
        except FlyteUserRuntimeException as error:
            if isinstance(error.value, (WorkerLostError, GangStartError)):
                raise FlyteSystemException(str(error.value)) from error.value
            raise
        finally:
            _input_literals.reset(token)


class DaskDDPTask(_OnDask):
    """Runs the task's function in every rank of a gang; rank 0's return value is the output."""

    def __init__(self, task_config: DaskDDP, task_function: Callable[..., Any], **kwargs: Any) -> None:
        secret = task_config.wandb.secret if task_config.wandb else None
        if secret is not None and secret not in (kwargs.get("secret_requests") or []):
            kwargs["secret_requests"] = [*(kwargs.get("secret_requests") or []), secret]
        super().__init__(task_config, task_function, GANG_SETTINGS, **kwargs)
        if self.execution_mode != self.ExecutionBehavior.DEFAULT:
            raise ValueError(f"{self.name}: DaskDDP cannot be the task_config of a @dynamic or @eager function")

    def execute(self, **kwargs: Any) -> Any:
        """Open the cluster, run the gang, report, and return rank 0's outputs."""
        config: DaskDDP = self.task_config
        with contextlib.ExitStack() as stack:
            if is_local():
                if config.gang.backend == "nccl":
                    _require_gpu()
                stack.callback(forkserver.shutdown)
                forkserver.connect().close()  # its imports take seconds, and run beside ours
            return self._train(config, kwargs)

    def _train(self, config: DaskDDP, inputs: dict[str, Any]) -> LiteralMap:
        # Late, so that defining a task imports neither Dask nor torch.
        from flytekitplugins.daskpytorch import cluster
        from flytekitplugins.daskpytorch.dispatch import DaskAgents
        from flytekitplugins.daskpytorch.gang import Supervisor
        from flytekitplugins.daskpytorch.progress import ProgressDisplay
        from flytekitplugins.daskpytorch.report import Recorder

        recorder = Recorder()
        request = self._request(inputs)
        try:
            with cluster.opened(
                num_workers=config.num_workers,
                min_workers=config.gang.min_workers,
                start_timeout=config.gang.start_timeout,
            ) as client:
                agents = DaskAgents(client, config.num_workers)
                outputs = Supervisor(request, agents, [ProgressDisplay(), recorder]).run()
        finally:
            if self.enable_deck:
                Deck("Training", recorder.html())
        return self._deliver(inputs, outputs[0])

    def get_config(self, settings: SerializationSettings) -> dict[str, str]:
        """Add what the console's link to Weights & Biases is made from."""
        config = dict(super().get_config(settings) or {})
        if self.task_config.wandb is not None:
            config |= tracking.console_link(self.task_config.wandb)
        return config

    def _request(self, inputs: dict[str, Any]) -> Request:
        from flytekitplugins.daskpytorch import flyte, ship
        from flytekitplugins.daskpytorch.gang import Request

        config: DaskDDP = self.task_config
        return Request(
            name=self.name,
            call=ship.pack_call(self.task_function, (), {}),
            ranks_per_worker=config.ranks_per_worker,
            settings=config.gang,
            flyte=flyte.capture(self.name, self.python_interface, _input_literals.get()),
            tracking=self._tracking(config.wandb, inputs) if config.wandb else None,
            mirror=flyte.checkpoint_paths("gang"),
        )

    def _tracking(self, wandb: Wandb, inputs: dict[str, Any]) -> Callable[[Shape], tracking.RunSettings]:
        params = FlyteContextManager.current_context().user_space_params
        execution = params.execution_id.name if params and params.execution_id else None

        def settings(shape: Shape) -> tracking.RunSettings:
            gang = {
                "world_size": shape.world_size,
                "num_workers": len(shape.nodes),
                "backend": shape.backend,
                "hosts": [node.host for node in shape.nodes],
                "gpus": [gpu for node in shape.nodes for gpu in node.gpu_names],
            }
            config = {**_plain_config(inputs), "gang": gang}
            return tracking.settings(wandb, task=self.name, execution=execution, config=config)

        return settings

    def _deliver(self, inputs: dict[str, Any], output: TaskOutput) -> LiteralMap:
        """Rank 0's literals and Decks, as this task's own."""
        ctx = FlyteContextManager.current_context()
        literals = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(output.literal_map))
        if self.enable_deck:
            for name, html in output.decks:
                Deck(name, html)
            # flytekit leaves these out where execute() returns literals.
            values = TypeEngine.literal_map_to_kwargs(ctx, literals, self.python_interface.outputs)
            self._write_decks(inputs, values, ctx, ctx.user_space_params)
        return literals


class DaskClusterTask(_OnDask):
    """Runs the task's function once, with a client of a ready Dask cluster."""

    def __init__(self, task_config: DaskCluster, task_function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(task_config, task_function, CLUSTER_SETTINGS, **kwargs)

    def execute(self, **kwargs: Any) -> Any:
        """Open the cluster and call the function."""
        from flytekitplugins.daskpytorch import cluster

        config: DaskCluster = self.task_config
        with cluster.opened(num_workers=config.num_workers, start_timeout=config.start_timeout, dashboard=True):
            return super().execute(**kwargs)


@contextlib.contextmanager
def _heeding_sigterm() -> Iterator[None]:
    """While a task runs here, have SIGTERM end its gangs after a checkpoint, and the task with a system error."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's to handle
        yield
        return
    previous = signal.signal(signal.SIGTERM, _end_task)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _end_task(*_: object) -> None:
    reason = "the task was told to end (SIGTERM)"
    gang = sys.modules.get(f"{__package__}.gang")  # not imported before there is one
    if gang is None or not gang.preempt_all(reason):
        raise PreemptedError(f"{reason}, while no gang was running", cause=reason)


def _require_gpu() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise ValueError(
            "Gang(backend='nccl') needs GPUs, and torch finds none on this machine "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Use backend='auto' to train on the "
            "CPU with gloo."
        )


def _plain_config(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A task's inputs as Weights & Biases can show them: numbers, strings, dataclasses as dictionaries."""
    plain: dict[str, Any] = {}
    for name, value in inputs.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain |= _plain_config({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        elif isinstance(value, (str, int, float, bool, type(None))):
            plain[name] = value
        elif isinstance(value, (list, tuple, dict, set)) and len(value) > MAX_CONFIG_ITEMS:
            plain[f"num_{name}"] = len(value)
        else:
            plain[name] = str(value)
    return plain


TaskPlugins.register_pythontask_plugin(DaskDDP, DaskDDPTask)
TaskPlugins.register_pythontask_plugin(DaskCluster, DaskClusterTask)
