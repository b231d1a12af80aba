"""What a user may ask of a task, and whether it makes sense, whoever its host is. Imports no torch."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Literal, NoReturn

from flytekitplugins.daskpytorch import settings
from flytekitplugins.daskpytorch.settings import Gang, Problems, Wandb

START_METHODS = ("forkserver", "spawn")


class OnDask:
    """The cluster that a task asks for; a host's own class adds its records for `scheduler` and `workers`."""

    # What the host has for these two.
    KINDS: ClassVar[Mapping[str, type]]

    scheduler: Any
    workers: Any

    @property
    def num_workers(self) -> int:
        """The number of Dask workers asked for."""
        return int(self.workers.number_of_workers or 1)

    def _check_pods(self, problems: Problems) -> None:
        """Add what is wrong with them."""
        count = self.workers.number_of_workers
        problems.unless(settings.is_count(count), "workers.number_of_workers", settings.COUNT)
        for name in ("scheduler", "workers"):
            pods = getattr(self, name)
            is_named = pods.image is None or settings.is_text(pods.image)
            problems.unless(is_named, f"{name}.image", f"None or {settings.TEXT}")
            self._check_resources(problems, name, pods)

    def _check_resources(self, problems: Problems, name: str, pods: Any) -> None:
        raise NotImplementedError

    @property
    def num_gpus(self) -> int:
        """GPUs that each worker asks for."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GangOnDask(OnDask):
    """The function runs in every rank of a gang on an ephemeral Dask cluster."""

    gang: Gang = field(default_factory=Gang)
    """How the ranks are formed on the workers."""
    wandb: Wandb | None = None
    """Record the run in Weights & Biases; None does not."""

    def __post_init__(self) -> None:
        problems = _checked_kinds(self, self.KINDS)
        self._check_pods(problems)
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
        return self.num_gpus or 1


@dataclass(frozen=True, kw_only=True)
class GangOnOwnNode:
    """The function runs in every rank of a gang on the task's own node; no Dask."""

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
        problems = _checked_kinds(self, {})
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
class Cluster(OnDask):
    """The function runs once, with `current_client()` at its service."""

    start_timeout: float = 600.0
    """Seconds within which the scheduler answers and all the workers come."""

    def __post_init__(self) -> None:
        problems = _checked_kinds(self, self.KINDS)
        self._check_pods(problems)
        problems.unless(settings.is_seconds(self.start_timeout), "start_timeout", settings.SECONDS)
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class _Host:
    sdk: str
    package: str
    configs: tuple[type, ...]
    register: Callable[[type, Any], None]


def keep_apart(sdk: str, package: str, configs: tuple[type, ...], register: Callable[[type, Any], None]) -> None:
    """Have each host refuse the other's configs, once both are here: flytekit would run the function undistributed.

    Args:
        sdk: The host's name.
        package: Where users find its configs.
        configs: These; perhaps none so far.
        register: Tells the host what to call for a task with a config of a class.
    """
    here = _Host(sdk=sdk, package=package, configs=configs, register=register)
    is_new = all(each.sdk != sdk for each in _hosts)
    for other in {each.sdk: each for each in _hosts if each.sdk != sdk}.values():
        _refuse(here, other)
        if is_new:
            _refuse(other, here)
    _hosts.append(here)


def _refuse(of: _Host, by: _Host) -> None:
    for config in of.configs:
        by.register(config, functools.partial(_raise, config.__name__, of, by))


def _raise(name: str, of: _Host, by: _Host, /, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        f"this {name} is that of {of.package}, which is for {of.sdk}, and the task is one of {by.sdk}. Use the one of "
        f"{by.package}, which takes the same arguments: from {by.package} import {name}"
    )


def _checked_kinds(config: Any, of_host: Mapping[str, type]) -> Problems:
    """A list of problems to add to, once each field holds a value of its kind.

    Raises:
        ValueError: Some do not.
    """
    problems = Problems(type(config).__name__, config)
    kinds: Mapping[str, Any] = {**of_host, "gang": Gang, "wandb": (Wandb, NoneType)}
    for name in [entry.name for entry in fields(config) if entry.name in kinds]:
        value, kind = getattr(config, name), kinds[name]
        names = "None or a Wandb" if name == "wandb" else f"a {kind.__name__}"
        problems.unless(isinstance(value, kind), name, names)
    problems.raise_any()
    return problems


_hosts: list[_Host] = []
