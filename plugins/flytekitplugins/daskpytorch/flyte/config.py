"""What a user may ask of a task, and whether it makes sense. Read where tasks are defined; imports no torch.

Importing it registers the task types with flytekit.
"""

import re
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Literal

from flytekit import Resources
from flytekit.extend import TaskPlugins
from flytekitplugins.dask import Scheduler, WorkerGroup

from flytekitplugins.daskpytorch import settings
from flytekitplugins.daskpytorch.flyte.task import DaskClusterTask, DaskDDPTask, SpawnDDPTask
from flytekitplugins.daskpytorch.settings import Gang, Problems, Wandb

__all__ = ["DaskCluster", "DaskDDP", "SpawnDDP"]

START_METHODS = ("forkserver", "spawn")
KINDS = {"scheduler": Scheduler, "workers": WorkerGroup, "gang": Gang, "wandb": (Wandb, NoneType)}
"""What the fields of these names hold."""
NUM_GPUS = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True, kw_only=True)
class _OnDask:
    """The cluster that a task asks for."""

    scheduler: Scheduler = field(default_factory=Scheduler)
    """The scheduler pod's image and resources."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """The worker pods' number, image and resources."""

    @property
    def num_workers(self) -> int:
        """The number of Dask workers asked for."""
        return int(self.workers.number_of_workers or 1)


@dataclass(frozen=True, kw_only=True)
class DaskDDP(_OnDask):
    """`@task(task_config=DaskDDP(...))`: the function runs in every rank of a gang on an ephemeral Dask cluster.

    Rank 0's return value is the task's output.
    """

    gang: Gang = field(default_factory=Gang)
    """How the ranks are formed on the workers."""
    wandb: Wandb | None = None
    """Record the run in Weights & Biases; None does not."""

    def __post_init__(self) -> None:
        problems = _checked_kinds(self)
        _check_pods(problems, self.scheduler, self.workers)
        workers, least = self.workers.number_of_workers, self.gang.min_workers
        problems.unless(
            least is None or not settings.is_count(workers) or least <= (workers or 0),
            "gang.min_workers",
            f"at most workers.number_of_workers, which is {workers}",
        )
        problems.raise_any()

    @property
    def ranks_per_worker(self) -> int:
        """Ranks on each worker: as the gang says, else one per GPU in the worker's limits (or requests), else 1."""
        if self.gang.ranks_per_worker != "auto":
            return int(self.gang.ranks_per_worker)
        return _num_gpus(self.workers) or 1


@dataclass(frozen=True, kw_only=True)
class SpawnDDP:
    """`@task(task_config=SpawnDDP(...))`: the function runs in every rank of a gang on the task's own node; no Dask.

    Rank 0's return value is the task's output. For Flyte it is an ordinary Python task: GPUs are asked for in its
    `requests`, and `accelerator`, `shared_memory` and `pod_template` work. Shared memory, which DataLoader workers
    need, is bounded by the container's memory alone unless the task or its pod template says otherwise.
    """

    nproc: int | Literal["auto"] = "auto"
    """Ranks; `auto` is one per visible GPU, and one on a node without GPUs."""
    gang: Gang = field(default_factory=Gang)
    """How the ranks are formed; what is said there of workers has no meaning here."""
    wandb: Wandb | None = None
    """Record the run in Weights & Biases; None does not."""
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    """How a rank's process starts, as in `torch.multiprocessing`: forked in milliseconds from a process that has
    imported torch and never touched CUDA, or a fresh interpreter, in seconds."""

    def __post_init__(self) -> None:
        problems = _checked_kinds(self)
        problems.unless(
            settings.is_among(self.nproc, ("auto",)) or settings.is_count(self.nproc),
            "nproc",
            f"'auto' or {settings.COUNT}",
        )
        problems.unless(
            settings.is_among(self.start_method, START_METHODS), "start_method", f"one of {', '.join(START_METHODS)}"
        )
        problems.unless(
            self.gang.ranks_per_worker == "auto", "gang.ranks_per_worker", "left alone; nproc is the number of ranks"
        )
        problems.unless(self.gang.min_workers in (None, 1), "gang.min_workers", "left alone; there is one node")
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class DaskCluster(_OnDask):
    """`@task(task_config=DaskCluster(...))`: the function runs once, with `current_client()` at its service."""

    start_timeout: float = 600.0
    """Seconds within which the scheduler answers and all the workers come."""

    def __post_init__(self) -> None:
        problems = _checked_kinds(self)
        _check_pods(problems, self.scheduler, self.workers)
        problems.unless(settings.is_seconds(self.start_timeout), "start_timeout", settings.SECONDS)
        problems.raise_any()


def _checked_kinds(config: DaskDDP | SpawnDDP | DaskCluster) -> Problems:
    """A list of problems to add to, once each field holds a value of its kind.

    Raises:
        ValueError: Some do not.
    """
    problems = Problems(type(config).__name__, config)
    for name in [entry.name for entry in fields(config) if entry.name in KINDS]:
        value, kind = getattr(config, name), KINDS[name]
        names = "None or a Wandb" if name == "wandb" else f"a {kind.__name__}"
        problems.unless(isinstance(value, kind), name, names)
    problems.raise_any()
    return problems


def _check_pods(problems: Problems, scheduler: Scheduler, workers: WorkerGroup) -> None:
    count = workers.number_of_workers
    problems.unless(settings.is_count(count), "workers.number_of_workers", settings.COUNT)
    for name, pods in (("scheduler", scheduler), ("workers", workers)):
        problems.unless(pods.image is None or settings.is_text(pods.image), f"{name}.image", f"None or {settings.TEXT}")
        for part in ("requests", "limits"):
            _check_resources(problems, f"{name}.{part}", getattr(pods, part))


def _check_resources(problems: Problems, name: str, resources: Resources | None) -> None:
    if not isinstance(resources, Resources):
        problems.unless(resources is None, name, "None or a flytekit.Resources")
        return
    pairs = [value for value in vars(resources).values() if isinstance(value, (list, tuple))]
    problems.unless(not pairs, name, "without pairs of request and limit, which have fields of their own")
    is_number = resources.gpu is None or NUM_GPUS.fullmatch(str(resources.gpu)) is not None
    problems.unless(bool(pairs) or is_number, f"{name}.gpu", "None or a whole number")


def _num_gpus(workers: WorkerGroup) -> int:
    for resources in (workers.limits, workers.requests):
        if resources is not None and resources.gpu:
            return int(resources.gpu)
    return 0


TaskPlugins.register_pythontask_plugin(DaskDDP, DaskDDPTask)
TaskPlugins.register_pythontask_plugin(SpawnDDP, SpawnDDPTask)
TaskPlugins.register_pythontask_plugin(DaskCluster, DaskClusterTask)
