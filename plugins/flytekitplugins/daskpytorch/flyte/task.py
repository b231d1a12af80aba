"""The task types: what `@task(task_config=DaskDDP(...))` makes, how it runs and how it is serialised."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyteidl.core import literals_pb2
from flytekit import Deck, PodTemplate, PythonFunctionTask
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.deck.deck import DECK_FILE_NAME, DeckField
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.system import FlyteSystemException, FlyteUploadDataException
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.models.literals import LiteralMap
from flytekitplugins.dask.task import DaskTask

from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.driver.request import check_function, storage_of
from flytekitplugins.daskpytorch.errors import GangError, GangStartError, PreemptedError, WorkerLostError
from flytekitplugins.daskpytorch.flyte import context, local_runs
from flytekitplugins.daskpytorch.flyte.inputs import refuse_unknown
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ctrl_c import CtrlC
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.host import preempt_all
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE, is_debugging, is_local

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.display.deck import Recorder
    from flytekitplugins.daskpytorch.display.machine import MachineLog
    from flytekitplugins.daskpytorch.display.terminal import ProgressDisplay
    from flytekitplugins.daskpytorch.driver.request import Request
    from flytekitplugins.daskpytorch.flyte.config import DaskCluster, DaskDDP, SpawnDDP
    from flytekitplugins.daskpytorch.flyte.rank import TaskOutput
    from flytekitplugins.daskpytorch.flyte.task_results import TaskResults
    from flytekitplugins.daskpytorch.protocol.messages import AgentLauncher
    from flytekitplugins.daskpytorch.protocol.observer import Observer, Training

__all__ = ["DaskClusterTask", "DaskDDPTask", "SpawnDDPTask"]

CLUSTER_SETTINGS = {
    # Dask tasks may start processes of their own, such as the workers of a DataLoader.
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    # Workers import torch for their ranks while the driver still waits for all of them.
    "DASK_DISTRIBUTED__WORKER__PRELOAD": "flytekitplugins.daskpytorch.flyte.preload",
    # Dask looks at its event loops 50 times a second: two hundredths of a core per process, which the ranks want.
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
}
GANG_SETTINGS = CLUSTER_SETTINGS | {
    # Nor is a worker whose only task is an agent worth a profile, taken 100 times a second.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    # Its ranks' memory is not the worker's own; two processes would look at that 10 times a second.
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "500ms",
    # An agent whose worker dies must not be tried on another worker.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
}
"""Task environment that reaches all pods of the cluster; what the user sets wins."""

INFRASTRUCTURE_ERRORS = (WorkerLostError, GangStartError, FlyteUploadDataException)

NO_PROCESS_GROUP = ("Default process group has not been initialized", "environment variable RANK expected")
"""What torch says to that."""

_dispatched: ContextVar[tuple[object, LiteralMap] | None] = ContextVar("daskpytorch.dispatched", default=None)
"""The task that Flyte executes here, and its inputs as Flyte has them."""
_ctrl_c: ContextVar[CtrlC] = ContextVar("daskpytorch.ctrl_c")


class _Resumable(PythonFunctionTask):  # type: ignore[misc]
    """What all our task types share: system errors for failed infrastructure, and time to save a checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lists_packages = DeckField.DEPENDENCIES in self._deck_fields
        if self._lists_packages:
            self._deck_fields.remove(DeckField.DEPENDENCIES)

    def _write_decks(self, *args: Any) -> None:
        """Write them with a list of packages of our own: for flytekit's, pip runs twice, which takes seconds."""
        if self._lists_packages:
            from flytekitplugins.daskpytorch.report import card, page, table

            installed = sorted({(each.name, each.version) for each in distributions()})
            Deck(DeckField.DEPENDENCIES.value, page(card("Packages", table(("Name", "Version"), installed))))
        super()._write_decks(*args)

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        """Run the task; what Flyte's infrastructure did becomes a system error, which Flyte retries by itself."""
        _exit_quickly()
        ctrl_c = CtrlC()
        tokens = _dispatched.set((self, input_literal_map)), _ctrl_c.set(ctrl_c)
        try:
            heeded = contextlib.nullcontext() if self._is_debugging else ctrl_c.heeded()
            with _heeding_sigterm(), heeded, self._begun(ctx, input_literal_map):
                return super().dispatch_execute(ctx, input_literal_map)
        except FlyteUserRuntimeException as error:
            if isinstance(error.value, INFRASTRUCTURE_ERRORS):
                failed_at = getattr(error.value, "time", None)
                raise FlyteSystemException(str(error.value), timestamp=failed_at) from error.value
            raise _timed(error) from error.value
        finally:
            _dispatched.reset(tokens[0])
            _ctrl_c.reset(tokens[1])

    @property
    def _is_debugging(self) -> bool:
        """The function runs in this process, where Ctrl-C means to it what it means to any program."""
        return False

    def _begun(self, ctx: FlyteContext, inputs: LiteralMap) -> AbstractContextManager[None]:
        return local_runs.begun(self.name, inputs, self.task_function) if _is_local(ctx) else contextlib.nullcontext()

    def _write_local_deck(self, inputs: dict[str, Any]) -> None:
        """Write the Deck of a task that has failed, which flytekit does on a backend alone."""
        ctx = FlyteContextManager.current_context()
        if self.enable_deck and _is_local(ctx):
            self._write_decks(inputs, {}, ctx, ctx.user_space_params)


class _OnDask(DaskTask):  # type: ignore[misc]
    """What the types for Dask share: Flyte's `dask` task type with our settings of Dask in the cluster's pods."""

    def __init__(
        self, task_config: Any, task_function: Callable[..., Any], settings: Mapping[str, str], **kwargs: Any
    ) -> None:
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)
        self._cluster_settings = settings

    def get_container(self, settings: SerializationSettings) -> Any:
        """The container, with our Dask settings below all others: the task's `environment` and the registration's."""
        return super().get_container(self._with_cluster_settings(settings))

    def get_k8s_pod(self, settings: SerializationSettings) -> Any:
        return super().get_k8s_pod(self._with_cluster_settings(settings))

    def _with_cluster_settings(self, settings: SerializationSettings) -> SerializationSettings:
        return dataclasses.replace(settings, env={**self._cluster_settings, **(settings.env or {})})


class _InRanks(_Resumable):
    """What the types share whose function runs in every rank of a gang; rank 0's return value is the output."""

    def __init__(self, task_config: DaskDDP | SpawnDDP, task_function: Callable[..., Any], **kwargs: Any) -> None:
        check_function(task_function)
        secret = task_config.wandb.secret if task_config.wandb else None
        if secret is not None and secret not in (kwargs.get("secret_requests") or []):
            kwargs["secret_requests"] = [*(kwargs.get("secret_requests") or []), secret]
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)
        if self.execution_mode != self.ExecutionBehavior.DEFAULT:
            kind = type(task_config).__name__
            raise ValueError(f"{self.name}: {kind} cannot be the task_config of a @dynamic or @eager function")

    def execute(self, **kwargs: Any) -> Any:
        """Train, and return rank 0's outputs: to Flyte as it has them, to `map_task` and to the user as values."""
        if self._is_debugging:
            return self._train_here(kwargs)
        task, literals = _dispatched.get() or (None, None)
        if task is self:
            return self._train(kwargs, literals)
        ctx = FlyteContextManager.current_context()
        literals = TypeEngine.dict_to_literal_map(ctx, kwargs, self.python_interface.inputs)
        with _heeding_sigterm(), _retried_by_the_mapped():
            made = self._train(kwargs, literals)
        by_name = TypeEngine.literal_map_to_kwargs(ctx, made, self.python_interface.outputs)
        values = [by_name[name] for name in self.python_interface.outputs]
        if len(values) > 1 or self.python_interface.output_tuple_name:
            return self.python_interface.output_tuple(*values)
        return next(iter(values), None)

    @property
    def _is_debugging(self) -> bool:
        return is_debugging(self.task_config.gang)

    @property
    def task_function(self) -> Callable[..., Any]:
        """The function itself; where it fails for want of a process group, its error says how to have one."""
        return _with_advice(self._task_function)

    def _train_here(self, kwargs: dict[str, Any]) -> Any:
        """Call the function as the only rank, which is this process; what it returns is Flyte's to convert."""
        refuse_unknown(kwargs)
        from flytekitplugins.daskpytorch.display import machine
        from flytekitplugins.daskpytorch.display.deck import Recorder
        from flytekitplugins.daskpytorch.driver.in_process import InProcess
        from flytekitplugins.daskpytorch.flyte.task_results import TaskResults

        gang, recorder = self.task_config.gang, Recorder(self.name, kwargs)
        display = machine.progress(self.name, is_plain=True)
        results = TaskResults(gang.grace_period)
        how, observers = "failed", self._observers(kwargs)
        try:
            with self._deck(recorder, display, observers, results), results.received() as received:
                rank = InProcess(
                    self.name,
                    gang,
                    [display, recorder, *observers],
                    received,
                    training=self._training(kwargs),
                    storage=storage_of(context.current(), "gang", gang),
                    ask_for_folder=lambda: results.wanted_folder(received),
                )
                with rank.joined():
                    returned = self._task_function(**kwargs)
            how = "done"
        finally:
            if how != "done":
                self._write_local_deck(kwargs)
            display.conclude(how, self._places(observers, results))
        return returned

    def _train(self, kwargs: dict[str, Any], literals: LiteralMap) -> LiteralMap:
        """Get ready, open what the ranks run on, run the gang, report, and return rank 0's outputs."""
        refuse_unknown(kwargs)
        with contextlib.ExitStack() as stack:
            self._get_ready(stack)
            # Late, so that defining a task imports neither Dask nor torch, and beside what was just started.
            from flytekitplugins.daskpytorch.display import machine
            from flytekitplugins.daskpytorch.display.deck import Recorder
            from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
            from flytekitplugins.daskpytorch.flyte.task_results import TaskResults

            display, recorder = machine.progress(self.name), Recorder(self.name, kwargs)
            results = TaskResults(self.task_config.gang.grace_period)
            request = self._request(kwargs, literals, results.folder)
            how, ctrl_c = "failed", _ctrl_c.get(CtrlC())
            try:
                with (
                    self._deck(recorder, display, request.observers, results),
                    results.received() as received,
                    self._launcher() as launcher,
                ):
                    supervisor = Supervisor(request, launcher, [display, recorder], received)
                    with ctrl_c.ends(supervisor.cancel, supervisor.interrupt):
                        outputs = supervisor.run()
                delivered, how = self._deliver(kwargs, outputs[0]), "done"
            except BaseException as error:
                how = "interrupted" if ctrl_c.was_pressed or isinstance(error, KeyboardInterrupt) else "failed"
                self._write_local_deck(kwargs)
                raise
            finally:
                run = local_runs.local_run.get()
                advice = run.advice() if run is not None and how != "done" else None
                display.conclude(how, self._places(request.observers, results), advice)
            return delivered

    @contextlib.contextmanager
    def _deck(
        self,
        recorder: Recorder,
        display: ProgressDisplay | MachineLog,
        observers: Sequence[Observer],
        results: TaskResults,
    ) -> Iterator[None]:
        """Show the training's Deck all along, and leave it, however it ends."""
        if not self.enable_deck:
            yield
            return
        from flytekitplugins.daskpytorch.flyte import live_deck

        with live_deck.published(recorder, lambda: self._left_by(observers, results)) as file:
            if file is not None:
                display.say(f"its Deck, to be opened and reloaded: {file}")
            yield

    def _write_decks(self, *args: Any) -> None:
        super()._write_decks(*args)
        if self.enable_deck and (file := _deck_file()) is not None:
            from flytekitplugins.daskpytorch.flyte import live_deck

            live_deck.move_to_live_file(Path(file))

    def _places(self, observers: Sequence[Observer], results: TaskResults) -> dict[str, str]:
        """What a run leaves, and where; its Deck first."""
        file = _deck_file() if self.enable_deck else None
        return ({"Deck": file} if file is not None else {}) | self._left_by(observers, results)

    def _left_by(self, observers: Sequence[Observer], results: TaskResults) -> dict[str, str]:
        """What a run leaves beside its Deck."""
        run = local_runs.local_run.get()
        places = {
            "results": results.folder if results.has_files else None,
            "checkpoints": str(run.folder) if run is not None and run.newest_step() is not None else None,
        }
        left = {what: where for what, where in places.items() if where is not None}
        for observer in observers:
            with contextlib.suppress(Exception):  # whatever a user's own raises
                left |= observer.places()
        return left

    def _get_ready(self, stack: contextlib.ExitStack) -> None:
        raise NotImplementedError

    def _launcher(self) -> AbstractContextManager[AgentLauncher]:
        raise NotImplementedError

    def _num_ranks_per_worker(self) -> int:
        raise NotImplementedError

    def get_config(self, settings: SerializationSettings) -> dict[str, str]:
        """Add what the console's link to Weights & Biases is made from."""
        config = dict(super().get_config(settings) or {})
        if self.task_config.wandb is not None:
            config |= wandb_run.console_link(self.task_config.wandb)
        return config

    def _request(self, inputs: dict[str, Any], literals: LiteralMap, results: str) -> Request:
        from flytekitplugins.daskpytorch.driver.request import Request
        from flytekitplugins.daskpytorch.flyte.rank import FlyteRank
        from flytekitplugins.daskpytorch.protocol import code

        config = self.task_config
        rank = FlyteRank.of_current_task(self.name, self.python_interface, literals, results)
        return Request(
            name=self.name,
            call=code.pack_call(self._task_function, (), {}),
            ranks_per_worker=self._num_ranks_per_worker(),
            settings=config.gang,
            host=pickle.dumps(rank),
            # Flyte sets the task's own on a backend alone, and there Dask's for its workers may stand above.
            environment=context.rank_environment() | self.environment,
            observers=self._observers(inputs),
            training=self._training(inputs),
            storage=storage_of(context.current(), "gang", config.gang),
        )

    def _training(self, inputs: dict[str, Any]) -> Training:
        from flytekitplugins.daskpytorch.display import training

        return training.of_task(self.name, context.current().name, inputs)

    def _observers(self, inputs: dict[str, Any]) -> list[Observer]:
        """The user's, and Weights & Biases."""
        config = self.task_config
        observers = [make() for make in config.gang.observers]
        if config.wandb is not None:
            run = wandb_run.settings(config.wandb, task=self.name, execution=context.current().name)
            observers.append(wandb_run.WandbObserver(run, inputs))
        return observers

    def _deliver(self, inputs: dict[str, Any], output: TaskOutput) -> LiteralMap:
        ctx = FlyteContextManager.current_context()
        literals = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(output.literal_map))
        if self.enable_deck:
            for name, html in output.decks:
                Deck(name, html)
            # flytekit leaves these out where execute() returns literals.
            values = TypeEngine.literal_map_to_kwargs(ctx, literals, self.python_interface.outputs)
            self._write_decks(inputs, values, ctx, ctx.user_space_params)
        return literals


class DaskDDPTask(_InRanks, _OnDask):
    """Runs the function in every rank of a gang on the workers of a Dask cluster."""

    def __init__(self, task_config: DaskDDP, task_function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(task_config, task_function, settings=GANG_SETTINGS, **kwargs)

    def _get_ready(self, stack: contextlib.ExitStack) -> None:
        if is_local():
            if self.task_config.gang.backend == "nccl":
                _require_gpu()
            stack.callback(fork_client.shutdown)
            fork_client.connect().close()  # its imports take seconds, and run beside ours

    @contextlib.contextmanager
    def _launcher(self) -> Iterator[AgentLauncher]:
        from flytekitplugins.daskpytorch.dask import cluster
        from flytekitplugins.daskpytorch.dask.agents import DaskAgents

        config: DaskDDP = self.task_config
        with cluster.opened(
            num_workers=config.num_workers,
            min_workers=config.gang.min_workers,
            start_timeout=config.gang.start_timeout,
        ) as client:
            yield DaskAgents(client, config.num_workers)

    def _num_ranks_per_worker(self) -> int:
        return int(self.task_config.ranks_per_worker)


class SpawnDDPTask(_InRanks):
    """Runs the function in every rank of a gang on the task's own node."""

    def __init__(self, task_config: SpawnDDP, task_function: Callable[..., Any], **kwargs: Any) -> None:
        if kwargs.get("shared_memory") is None and not _mounts_shared_memory(kwargs.get("pod_template")):
            kwargs["shared_memory"] = True  # else a container has 64 MB, and DataLoader workers die of bus errors
        super().__init__(task_config, task_function, **kwargs)

    def _get_ready(self, stack: contextlib.ExitStack) -> None:
        stack.callback(fork_client.shutdown)
        fork_client.connect(self.task_config.start_method).close()  # its imports take seconds, and run beside ours

    @contextlib.contextmanager
    def _launcher(self) -> Iterator[AgentLauncher]:
        from flytekitplugins.daskpytorch.node.own_node import OwnNode

        yield OwnNode(self.task_config.start_method)

    def _num_ranks_per_worker(self) -> int:
        from flytekitplugins.daskpytorch.node.own_node import num_ranks_here

        return num_ranks_here(self.task_config.nproc, self.task_config.gang.backend)


class DaskClusterTask(_Resumable, _OnDask):
    """Runs the task's function once, with a client of a ready Dask cluster."""

    def __init__(self, task_config: DaskCluster, task_function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(task_config, task_function, settings=CLUSTER_SETTINGS, **kwargs)

    def execute(self, **kwargs: Any) -> Any:
        """Open the cluster and call the function."""
        from flytekitplugins.daskpytorch.dask import cluster

        config: DaskCluster = self.task_config
        refuse_unknown(kwargs)
        with (
            context.known_to_threads(),
            cluster.opened(num_workers=config.num_workers, start_timeout=config.start_timeout, dashboard=True),
        ):
            try:
                return super().execute(**kwargs)
            except BaseException:
                self._write_local_deck(kwargs)
                raise

    def _write_decks(self, *args: Any) -> None:
        super()._write_decks(*args)
        if self.enable_deck and (file := _deck_file()) is not None:
            say(f"{self.name.rpartition('.')[2]}: Deck: {file}")


def _with_advice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def advised(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if any(text in str(error) for text in NO_PROCESS_GROUP):
                error.add_note(
                    "task_function(...) calls the function itself, with no gang around it. Call the task for that, in "
                    f"a test or a debugger with {DEBUG_VARIABLE}=1: then it runs here, as the only rank of a gang. In "
                    "pytest the fixture one_rank of flytekitplugins.daskpytorch.testing sets that."
                )
            raise

    return advised


def _is_local(ctx: FlyteContext) -> bool:
    return ctx.execution_state is not None and bool(ctx.execution_state.is_local_execution())


@functools.cache
def _exit_quickly() -> None:
    """Have this process end without a last search for garbage, which takes two seconds where torch is imported."""
    atexit.register(gc.freeze)


def _deck_file() -> str | None:
    """The newest Deck of this process, whose place flytekit only logs; on a backend the console shows it."""
    ctx = FlyteContextManager.current_context()
    files = Path(ctx.file_access.local_sandbox_dir).glob(f"*/{DECK_FILE_NAME}") if _is_local(ctx) else ()
    return str(max(files, key=lambda file: file.stat().st_mtime, default=None) or "") or None


def _timed(error: FlyteUserRuntimeException) -> FlyteUserRuntimeException:
    """The error with the time at which its rank failed, where flytekit looks for it."""
    value = error.value
    gang_error = value if isinstance(value, GangError) else value.__cause__
    if not isinstance(gang_error, GangError):
        return error
    if isinstance(value, FlyteException):
        value._timestamp = value.timestamp or gang_error.time  # noqa: SLF001 - the user's own constructor may not ask
        return error
    # flytekit asks only exceptions of its own for their time, and shows the type's name and the text of the value.
    looks = {"__str__": lambda _: str(value), "error_code": error.error_code}
    return FlyteUserRuntimeException(type(type(value).__name__, (FlyteException,), looks)(timestamp=gang_error.time))


def _mounts_shared_memory(template: PodTemplate | None) -> bool:
    containers = template.pod_spec.containers if template is not None and template.pod_spec is not None else []
    return any(mount.mount_path == "/dev/shm" for c in containers for mount in c.volume_mounts or [])  # noqa: S108


@contextlib.contextmanager
def _retried_by_the_mapped() -> Iterator[None]:
    """On a backend, have what the infrastructure did retried where `map_task` calls: from the task's `retries`.

    It makes user errors of all exceptions, so that Flyte's budget for system errors cannot be had.
    """
    try:
        yield
    except INFRASTRUCTURE_ERRORS as error:
        state = FlyteContextManager.current_context().execution_state
        if state is None or state.mode != ExecutionState.Mode.TASK_EXECUTION:
            raise
        raise FlyteRecoverableException(str(error), timestamp=getattr(error, "time", None)) from error


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
    if not preempt_all(reason):
        raise PreemptedError(f"{reason}, while no gang was running", cause=reason)


def _require_gpu() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise ValueError(
            "Gang(backend='nccl') needs GPUs, and torch finds none on this machine "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Use backend='auto' to train on the "
            "CPU with gloo."
        )
