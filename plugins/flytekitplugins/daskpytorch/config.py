"""What a user may ask of a task, and whether it makes sense. Read where tasks are defined; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flytekitplugins.dask import Scheduler, WorkerGroup

from flytekitplugins.daskpytorch.settings import Gang, Problems, Wandb, is_count, is_positive

__all__ = ["DaskCluster", "DaskDDP", "SpawnDDP"]

START_METHODS = ("forkserver", "spawn")


@dataclass(frozen=True, kw_only=True)
class DaskDDP:
    """`@task(task_config=DaskDDP(...))`: the function runs in every rank of a gang on an ephemeral Dask cluster.

    Rank 0's return value is the task's output.
    """

    scheduler: Scheduler = field(default_factory=Scheduler)
    """The scheduler pod's image and resources."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """The worker pods' number, image and resources."""
    gang: Gang = field(default_factory=Gang)
    """How the ranks are formed on the workers."""
    wandb: Wandb | None = None
    """Record the run in Weights & Biases; None does not."""

    def __post_init__(self) -> None:
        _register_task_types()
        problems = Problems("DaskDDP")
        _check_workers(problems, self.workers)
        workers, least = self.workers.number_of_workers, self.gang.min_workers
        problems.unless(
            least is None or not is_count(workers) or least <= (workers or 0),
            "gang.min_workers",
            least,
            f"at most workers.number_of_workers, which is {workers}",
        )
        problems.raise_any()

    @property
    def num_workers(self) -> int:
        """The number of Dask workers asked for."""
        return int(self.workers.number_of_workers or 1)

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
        _register_task_types()
        problems = Problems("SpawnDDP")
        problems.unless(
            self.nproc == "auto" or is_count(self.nproc), "nproc", self.nproc, "'auto' or a whole number from 1 up"
        )
        problems.unless(
            self.start_method in START_METHODS, "start_method", self.start_method, f"one of {', '.join(START_METHODS)}"
        )
        problems.unless(
            self.gang.ranks_per_worker == "auto",
            "gang.ranks_per_worker",
            self.gang.ranks_per_worker,
            "left alone; nproc is the number of ranks",
        )
        problems.unless(
            self.gang.min_workers in (None, 1),
            "gang.min_workers",
            self.gang.min_workers,
            "left alone; there is one node",
        )
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class DaskCluster:
    """`@task(task_config=DaskCluster(...))`: the function runs once, with `current_client()` at its service."""

    scheduler: Scheduler = field(default_factory=Scheduler)
    """The scheduler pod's image and resources."""
    workers: WorkerGroup = field(default_factory=lambda: WorkerGroup(number_of_workers=2))
    """The worker pods' number, image and resources."""
    start_timeout: float = 600.0
    """Seconds within which the scheduler answers and all the workers come."""

    def __post_init__(self) -> None:
        _register_task_types()
        problems = Problems("DaskCluster")
        _check_workers(problems, self.workers)
        problems.unless(is_positive(self.start_timeout), "start_timeout", self.start_timeout, "seconds above 0")
        problems.raise_any()

    @property
    def num_workers(self) -> int:
        """The number of Dask workers asked for."""
        return int(self.workers.number_of_workers or 1)


def _check_workers(problems: Problems, workers: WorkerGroup) -> None:
    count = workers.number_of_workers
    problems.unless(is_count(count), "workers.number_of_workers", count, "a whole number from 1 up")


def _num_gpus(workers: WorkerGroup) -> int:
    for resources in (workers.limits, workers.requests):
        if resources is not None and resources.gpu:
            return int(resources.gpu)
    return 0


def _register_task_types() -> None:
    """Have flytekit know them. To one that it does not know, a task would be a plain function, run once."""
    import flytekitplugins.daskpytorch.task  # noqa: F401
