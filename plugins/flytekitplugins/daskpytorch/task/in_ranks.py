"""Task types whose function runs in every rank: the parts that flytekit and Flyte 2 share. Runs in the driver."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display import wandb as wandb_run
from flytekitplugins.daskpytorch.driver.request import Request, names_of_evaluation, packed_check, request_of_evaluation
from flytekitplugins.daskpytorch.driver.storage import storage_of
from flytekitplugins.daskpytorch.errors import GangStartError, WorkerLostError
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.ending import CtrlC
from flytekitplugins.daskpytorch.protocol.host import RankHost, current_execution
from flytekitplugins.daskpytorch.settings import is_debugging, is_local
from flytekitplugins.daskpytorch.task import local_runs
from flytekitplugins.daskpytorch.task.config import refuse_unknown
from flytekitplugins.daskpytorch.task.process import ctrl_c

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.driver.received import ReceivedResults
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher
    from flytekitplugins.daskpytorch.protocol.journal import Training
    from flytekitplugins.daskpytorch.protocol.observer import Observer
    from flytekitplugins.daskpytorch.results import TaskResults
    from flytekitplugins.daskpytorch.task.config import GangOnDask
    from flytekitplugins.daskpytorch.task.run import Shown


CLUSTER_SETTINGS = {
    # Dask tasks may start processes, for example DataLoader workers.
    "DASK_DISTRIBUTED__WORKER__DAEMON": "False",
    # Dask checks its event loops 50 times a second, which takes 2 % of a core per process.
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
    # Dask (2026.8) asks NVML for each GPU's usage in its event loops, which a broken GPU blocks, and does not start if
    # NVML does not suit the GPU driver.
    "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
}
GANG_SETTINGS = CLUSTER_SETTINGS | {
    # Dask profiles workers 100 times a second. A worker that runs only an agent needs no profile.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    # Two processes check the worker's memory, 10 times a second. The memory of ranks is not included.
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "500ms",
    # Dask must not restart an agent on another worker when the agent's worker dies.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
}
"""Environment variables for all pods of a gang's Dask cluster. Variables of the user win."""

UNDISTURBED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations of a task's pods, with which the cluster autoscaler and Karpenter leave their nodes alone.

A deleted job runner leaves the DaskJob running: dask-kubernetes (2026.3) does not see the end of a deleted pod.
"""

QUEUE, GROUP_SIZE = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-group-total-count"

INFRASTRUCTURE_ERRORS = (WorkerLostError, GangStartError)


def pod_group(name: str, labels: Mapping[str, str], annotations: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return the annotation that Kueue needs to admit all pods of a task together, unless the user gives it."""
    if QUEUE not in labels:
        return {}
    num_pods = str(num_workers + 2)  # the scheduler, and the task's own
    if (given := annotations.get(GROUP_SIZE, num_pods)) != num_pods:
        raise ValueError(
            f"{name}: the annotation {GROUP_SIZE}={given!r} must be {num_pods!r}, for {num_workers} workers, the "
            "scheduler and the task's own pod, or Kueue admits none of them. Leave it out, and the task adds it"
        )
    return {} if GROUP_SIZE in annotations else {GROUP_SIZE: num_pods}


class InRanks:
    """Base of the task types whose function runs in every rank. The output is rank 0's return value.

    They also inherit from `OnDaskWorkers` or `OnOwnNode`, and from a task class of Flyte's SDK.
    """

    name: str
    task_config: Any
    enable_deck: bool
    """True if the task has a Deck, or in Flyte 2 a report."""
    _task_function: Callable[..., Any]

    if TYPE_CHECKING:  # what the host's task type and one of the two classes below add

        def _as_output(self, folder: str) -> object:
            """Return a folder of the output storage as Flyte's type for folders, so that a task may return it."""

        def _environment_of_ranks(self) -> Mapping[str, str]:
            """Return the environment variables of Flyte and of the task that ranks get."""

        def _published(self, shown: Shown) -> AbstractContextManager[object]:
            """Publish the training's page during the block and at the end."""

        def _page_file(self) -> str | None:
            """Return the local file with the training's page. None: there is none."""

        def _deliver(self, inputs: dict[str, Any], output: Any) -> Any:
            """Convert rank 0's output to the value that Flyte expects from the task."""

        # ---- Of one of the two classes below

        def _get_ready(self) -> None: ...

        def _launcher(self) -> AbstractContextManager[AgentLauncher]: ...

        def _num_ranks_per_worker(self) -> int: ...

        def _num_gpus_to_find(self) -> int:
            """Return the number of GPUs that each worker, or the task's node, must see. 0 locally."""

    @property
    def _is_debugging(self) -> bool:
        return is_debugging(self.task_config.gang)

    def _check_evaluation(self, inputs: Collection[str]) -> None:
        """Check at the task's definition that the function of `Gang(evaluate=...)` fits these inputs of the task.

        Raises `TypeError` if a call would only make an object, and `ValueError` for an argument that no input has.
        """
        if (evaluate := self.task_config.gang.evaluate) is not None:
            names_of_evaluation(evaluate.function, inputs, self.name)

    def _train_here(self, inputs: dict[str, Any]) -> Any:
        refuse_unknown(inputs)
        with self._shown() as (shown, results), self._received(shown, results) as received:
            from flytekitplugins.daskpytorch.task.debug import run_here

            gang = self.task_config.gang
            return run_here(
                functools.partial(self._task_function, **inputs),
                gang,
                received,
                lambda: self._as_output(results.folder),
                observers=shown.all_observers(),
                training=self._training(inputs),
                storage=storage_of(current_execution(), "gang", gang),
            )

    def _train(self, inputs: dict[str, Any], rank_host: Callable[[str], RankHost]) -> Any:
        refuse_unknown(inputs)
        self._get_ready()
        with self._shown() as (shown, results):
            from flytekitplugins.daskpytorch.driver.supervisor import Supervisor

            request = self._request(inputs, rank_host(results.folder))
            shown.show_storage(request.storage)
            with self._received(shown, results) as received, self._launcher() as launcher:
                supervisor = Supervisor(replace(request, observers=shown.all_observers()), launcher, received)
                with ctrl_c.get(CtrlC()).ends(supervisor.cancel):
                    outputs = supervisor.run()
                output = received.take_returned(0, outputs[0])()
            return self._deliver(inputs, output)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[tuple[Shown, TaskResults]]:
        # Imported here: defining a task imports neither Dask nor torch. The fork server starts meanwhile.
        from flytekitplugins.daskpytorch.display import terminal
        from flytekitplugins.daskpytorch.display.run_state import RunState
        from flytekitplugins.daskpytorch.results import TaskResults
        from flytekitplugins.daskpytorch.task.run import Shown

        results = TaskResults(self.task_config.gang.grace_period, current_execution())
        shown = Shown(
            display=terminal.progress(self.name, is_plain=self._is_debugging),
            state=RunState(name=self.name),
            observers=self._observers(),
            run=local_runs.local_run.get(),
            results=results,
        )
        how, pressed = "failed", ctrl_c.get(CtrlC())
        try:
            yield shown, results
            how = "done"
        except BaseException as error:
            how = "interrupted" if pressed.was_pressed or isinstance(error, KeyboardInterrupt) else "failed"
            raise
        finally:
            file = self._page_file() if self.enable_deck else None
            shown.conclude(how, {"Deck": file} if file is not None else {})

    @contextlib.contextmanager
    def _received(self, shown: Shown, results: TaskResults) -> Iterator[ReceivedResults]:
        with contextlib.ExitStack() as stack:
            if self.enable_deck:
                stack.enter_context(self._published(shown))
                if (file := self._page_file()) is not None:
                    shown.say(f"its Deck, to be opened and reloaded: {file}")
            yield stack.enter_context(results.received())

    def _request(self, inputs: dict[str, Any], host: RankHost) -> Request:
        from flytekitplugins.daskpytorch.protocol.function import pack_call

        config = self.task_config
        request = Request(
            name=self.name,
            call=pack_call(self._task_function, (), {}),
            ranks_per_worker=self._num_ranks_per_worker(),
            num_gpus=self._num_gpus_to_find(),
            settings=config.gang,
            gpu_check=packed_check(config.gang),
            host=pickle.dumps(host),
            environment=self._environment_of_ranks(),
            training=self._training(inputs),
            storage=storage_of(current_execution(), "gang", config.gang),
        )
        return replace(request, evaluation=request_of_evaluation(request, inputs, host=host))

    def _training(self, inputs: dict[str, Any]) -> Training:
        from flytekitplugins.daskpytorch.display import training
        from flytekitplugins.daskpytorch.protocol.function import arguments_of

        arguments = arguments_of(self._task_function, (), inputs)
        return training.of_task(self.name, current_execution().name, arguments)

    def _observers(self) -> list[Observer]:
        config = self.task_config
        observers = [make() for make in config.gang.observers]
        if config.wandb is not None:
            variables = wandb_run.variables_of(config.wandb)
            observers.append(wandb_run.WandbObserver(config.wandb, variables, current_execution().name))
        return observers


class OnDaskWorkers(InRanks):
    def _get_ready(self) -> None:
        if is_local():
            fork_client.connect().close()  # the fork server's imports take seconds, and run beside this process's

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
            evaluate = config.gang.evaluate
            yield DaskAgents(client, config.num_workers, evaluate.workers if evaluate is not None else None)

    def _num_ranks_per_worker(self) -> int:
        chosen = self.task_config.gang.ranks_per_worker
        return (self._num_gpus_asked() or 1) if chosen == "auto" else int(chosen)

    def _num_gpus_to_find(self) -> int:
        return 0 if is_local() else self._num_gpus_asked()

    def _num_gpus_asked(self) -> int:
        return int(self.task_config.num_gpus)


class OnOwnNode(InRanks):
    def _get_ready(self) -> None:
        fork_client.connect().close()  # the server imports while this process does

    def _launcher(self) -> AbstractContextManager[AgentLauncher]:
        from flytekitplugins.daskpytorch.node.agent import OwnNode

        return contextlib.nullcontext(OwnNode())

    def _num_ranks_per_worker(self) -> int:
        from flytekitplugins.daskpytorch.node.hardware import num_ranks_here

        return num_ranks_here(self.task_config.nproc, self.task_config.gang.backend, self._num_gpus_to_find())
