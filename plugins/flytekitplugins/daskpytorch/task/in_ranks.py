"""A task whose function runs in every rank of a gang: what its type does, whoever its host is. Runs in the driver."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.driver.request import storage_of
from flytekitplugins.daskpytorch.errors import GangStartError, WorkerLostError
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ctrl_c import CtrlC
from flytekitplugins.daskpytorch.protocol.host import RankHost, current_execution
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE, is_debugging, is_local
from flytekitplugins.daskpytorch.task import local_runs
from flytekitplugins.daskpytorch.task.inputs import refuse_unknown

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.display.deck import Recorder
    from flytekitplugins.daskpytorch.display.machine import MachineLog
    from flytekitplugins.daskpytorch.display.terminal import ProgressDisplay
    from flytekitplugins.daskpytorch.driver.received import ReceivedResults
    from flytekitplugins.daskpytorch.driver.request import Request
    from flytekitplugins.daskpytorch.protocol.messages import AgentLauncher
    from flytekitplugins.daskpytorch.protocol.observer import Observer, Training
    from flytekitplugins.daskpytorch.task.config import GangOnDask, GangOnOwnNode
    from flytekitplugins.daskpytorch.task.results import TaskResults


CLUSTER_SETTINGS = {
    # Dask tasks may start processes of their own, such as the workers of a DataLoader.
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
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

INFRASTRUCTURE_ERRORS = (WorkerLostError, GangStartError)

NO_PROCESS_GROUP = ("Default process group has not been initialized", "environment variable RANK expected")
"""What torch says to that."""

ctrl_c: ContextVar[CtrlC] = ContextVar("daskpytorch.ctrl_c")
"""What becomes of it in the task that runs here."""


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """One training of a task, as its user sees it."""

    display: ProgressDisplay | MachineLog
    recorder: Recorder
    """Keeps what the Deck shows."""
    observers: list[Observer]
    """The user's own, and that of Weights & Biases."""
    results: TaskResults

    def places(self) -> dict[str, str]:
        """Return what the training leaves beside its Deck, and where."""
        run = local_runs.local_run.get()
        places = {
            "results": self.results.folder if self.results.has_files else None,
            "checkpoints": str(run.folder) if run is not None and run.newest_step() is not None else None,
        }
        left = {what: where for what, where in places.items() if where is not None}
        for observer in self.observers:
            with contextlib.suppress(Exception):  # whatever a user's own raises
                left |= observer.places()
        return left

    def files(self) -> dict[str, str]:
        """Return the same, with the profiles one by one."""
        return self.places() | self.results.profiles()


class InRanks:
    """What the types share whose function runs in every rank of a gang; rank 0's return value is the output.

    A host's own type is this, one of the two below, and its host's task.
    """

    name: str

    if TYPE_CHECKING:  # what the host's own type has, as an attribute or as a property

        @property
        def task_config(self) -> Any:
            """What the user has asked for."""

        @property
        def _task_function(self) -> Callable[..., Any]:
            """The user's."""

        @property
        def enable_deck(self) -> bool:
            """Whether the training has a page."""

    # ---- What a host adds --------------------------------------------------------------------------------------------

    def _as_output(self, folder: str) -> object:
        """A folder there, as a task may return it."""
        raise NotImplementedError

    def _environment_of_ranks(self) -> Mapping[str, str]:
        """The host's variables for the ranks, and the task's own."""
        raise NotImplementedError

    def _published(
        self, recorder: Recorder, places: Callable[[], Mapping[str, str]]
    ) -> AbstractContextManager[Path | None]:
        """Publish the training's page all along, and leave it, however the training ends; yields a local file."""
        raise NotImplementedError

    def _page_file(self) -> str | None:
        """The page's file on this machine."""
        raise NotImplementedError

    def _deliver(self, inputs: dict[str, Any], output: Any) -> Any:
        """Rank 0's output, as the host wants it."""
        raise NotImplementedError

    def _write_page_of_failed(self, inputs: dict[str, Any]) -> None:
        """Write what the host writes only of tasks that have not failed."""

    # ---- What one of the two below adds ------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        raise NotImplementedError

    def _launcher(self) -> AbstractContextManager[AgentLauncher]:
        raise NotImplementedError

    def _num_ranks_per_worker(self) -> int:
        raise NotImplementedError

    def _num_gpus_to_find(self) -> int:
        """Return how many GPUs the limits of each worker, or of the task, ask for; 0 for a user's own machine."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _is_debugging(self) -> bool:
        """The function runs in this process, where Ctrl-C means to it what it means to any program."""
        return is_debugging(self.task_config.gang)

    def _train_here(self, inputs: dict[str, Any]) -> Any:
        """Call the function as the only rank, which is this process; what it returns is the host's to convert."""
        refuse_unknown(inputs)
        with self._shown(inputs) as shown, self._received(shown) as received:
            from flytekitplugins.daskpytorch.driver.in_process import run_here

            gang = self.task_config.gang
            return run_here(
                functools.partial(self._task_function, **inputs),
                self.name,
                gang,
                received,
                lambda: self._as_output(shown.results.folder),
                observers=[shown.display, shown.recorder, *shown.observers],
                training=self._training(inputs),
                storage=storage_of(current_execution(), "gang", gang),
            )

    def _train(self, inputs: dict[str, Any], rank_host: Callable[[str], RankHost]) -> Any:
        """Run the gang, and return rank 0's outputs.

        Args:
            inputs: The task's own.
            rank_host: What the ranks have of the host, given the folder of what they submit.
        """
        refuse_unknown(inputs)
        self._get_ready()
        with self._shown(inputs) as shown:
            from flytekitplugins.daskpytorch.driver.supervisor import Supervisor

            request = self._request(inputs, rank_host(shown.results.folder), shown.observers)
            with self._received(shown) as received, self._launcher() as launcher:
                supervisor = Supervisor(request, launcher, [shown.display, shown.recorder], received)
                with ctrl_c.get(CtrlC()).ends(supervisor.cancel, supervisor.interrupt):
                    outputs = supervisor.run()
                output = received.load_returned(0, outputs[0])
            return self._deliver(inputs, output)

    @contextlib.contextmanager
    def _shown(self, inputs: dict[str, Any]) -> Iterator[_Shown]:
        """Show a training, and at its end, whichever that is, where it leaves what."""
        # Late, so that defining a task imports neither Dask nor torch, and beside the start of the fork server.
        from flytekitplugins.daskpytorch.display import machine
        from flytekitplugins.daskpytorch.display.deck import Recorder
        from flytekitplugins.daskpytorch.task.results import TaskResults

        shown = _Shown(
            display=machine.progress(self.name, is_plain=self._is_debugging),
            recorder=Recorder(self.name, inputs),
            observers=self._observers(inputs),
            results=TaskResults(self.task_config.gang.grace_period, current_execution()),
        )
        how, pressed = "failed", ctrl_c.get(CtrlC())
        try:
            yield shown
            how = "done"
        except BaseException as error:
            how = "interrupted" if pressed.was_pressed or isinstance(error, KeyboardInterrupt) else "failed"
            self._write_page_of_failed(inputs)
            raise
        finally:
            run = local_runs.local_run.get()
            advice = run.advice() if run is not None and how != "done" else None
            file = self._page_file() if self.enable_deck else None
            places = ({"Deck": file} if file is not None else {}) | shown.places()
            shown.display.conclude(how, places, advice)

    @contextlib.contextmanager
    def _received(self, shown: _Shown) -> Iterator[ReceivedResults]:
        """Take in what the ranks submit, and keep the training's Deck up to date, if it has one."""
        with contextlib.ExitStack() as stack:
            if self.enable_deck:
                file = stack.enter_context(self._published(shown.recorder, shown.files))
                if file is not None:
                    shown.display.say(f"its Deck, to be opened and reloaded: {file}")
            yield stack.enter_context(shown.results.received())

    def _request(self, inputs: dict[str, Any], host: RankHost, observers: list[Observer]) -> Request:
        from flytekitplugins.daskpytorch.driver.request import Request
        from flytekitplugins.daskpytorch.protocol import code

        config = self.task_config
        return Request(
            name=self.name,
            call=code.pack_call(self._task_function, (), {}),
            ranks_per_worker=self._num_ranks_per_worker(),
            num_gpus=self._num_gpus_to_find(),
            settings=config.gang,
            host=pickle.dumps(host),
            environment=self._environment_of_ranks(),
            observers=observers,
            training=self._training(inputs),
            storage=storage_of(current_execution(), "gang", config.gang),
        )

    def _training(self, inputs: dict[str, Any]) -> Training:
        from flytekitplugins.daskpytorch.display import training

        return training.of_task(self.name, current_execution().name, inputs)

    def _observers(self, inputs: dict[str, Any]) -> list[Observer]:
        """The user's, and Weights & Biases."""
        config = self.task_config
        observers = [make() for make in config.gang.observers]
        if config.wandb is not None:
            run = wandb_run.begin(config.wandb, task=self.name, execution=current_execution().name)
            observers.append(wandb_run.WandbObserver(run, inputs))
        return observers


class OnDaskWorkers(InRanks):
    """On the workers of a Dask cluster; `task_config` is a `GangOnDask`."""

    def _get_ready(self) -> None:
        if is_local():
            if self.task_config.gang.backend == "nccl":
                _require_gpu()
            fork_client.connect().close()  # its imports take seconds, and run beside ours

    @contextlib.contextmanager
    def _launcher(self) -> Iterator[AgentLauncher]:
        from flytekitplugins.daskpytorch.dask import cluster
        from flytekitplugins.daskpytorch.dask.agents import DaskAgents

        config: GangOnDask = self.task_config
        with cluster.opened(
            num_workers=config.num_workers,
            min_workers=config.gang.min_workers,
            start_timeout=config.gang.start_timeout,
        ) as client:
            yield DaskAgents(client, config.num_workers)

    def _num_ranks_per_worker(self) -> int:
        return int(self.task_config.ranks_per_worker)

    def _num_gpus_to_find(self) -> int:
        return 0 if is_local() else self._num_gpus_asked()

    def _num_gpus_asked(self) -> int:
        return int(self.task_config.num_gpus)


class OnOwnNode(InRanks):
    """On the task's own node; `task_config` is a `GangOnOwnNode`."""

    def _get_ready(self) -> None:
        fork_client.connect(self.task_config.start_method).close()  # its imports take seconds, and run beside ours

    @contextlib.contextmanager
    def _launcher(self) -> Iterator[AgentLauncher]:
        from flytekitplugins.daskpytorch.node.own_node import OwnNode

        yield OwnNode(self.task_config.start_method)

    def _num_ranks_per_worker(self) -> int:
        from flytekitplugins.daskpytorch.node.own_node import num_ranks_here

        config: GangOnOwnNode = self.task_config
        return num_ranks_here(config.nproc, config.gang.backend, self._num_gpus_to_find())


def with_advice(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; where it fails for want of a process group, its error says how to have one."""

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


def _require_gpu() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise ValueError(
            "Gang(backend='nccl') needs GPUs, and torch finds none on this machine "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). Use backend='auto' to train on the "
            "CPU with gloo."
        )
