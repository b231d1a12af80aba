"""What a user may ask of a task, and whether it makes sense, whoever its host is. Imports no torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems, Rule
from flytekitplugins.daskpytorch.settings import Gang, Wandb

OF_GANGS = {"gang": checks.instance_of(Gang), "wandb": checks.optional(checks.instance_of(Wandb))}


_hosts: list[Host] = []
"""The SDKs that are in use."""


@dataclass(kw_only=True)
class Host:
    """One of Flyte's SDKs, which makes tasks of the configs that are made for it, and refuses those of the others.

    flytekit would run the function of a task whose config it does not know in the driver, undistributed.
    """

    sdk: str
    """The SDK's name."""
    package: str
    """The package in which users find its configs."""
    register: Callable[[type, Any], object]
    """Tells the SDK what to call for a task whose config is of a class."""
    task_types: dict[type, Any] = field(default_factory=dict)
    """The classes of its configs, and the task types that they stand for."""

    def __post_init__(self) -> None:
        self.register(ConfigClass, _refuse_class)
        for other in _hosts:
            for config in other.task_types:
                self.refuse(config, other)
        _hosts.append(self)

    def add(self, config: type, task_type: Any) -> None:
        """Have tasks with configs of a class be of a task type here, and be an error elsewhere."""
        self.task_types[config] = task_type
        self.register(config, task_type)
        for other in _hosts:
            if other is not self:
                other.refuse(config, self)

    def refuse(self, config: type, of: Host) -> None:
        """Have tasks with configs of a class that belongs to another host be an error."""
        name = next(base for base in config.__mro__ if base.__module__.startswith(of.package)).__name__
        self.register(config, functools.partial(_refuse, name, of, self))


class ConfigClass(type):
    """The class of the configs' classes, by which an SDK tells a config's class from a config."""


class Config(metaclass=ConfigClass):
    """A task's config for any host, whose fields are checked as soon as it is made."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Have a user's subclass stand for the same task type: SDKs look for a config's own class alone."""
        super().__init_subclass__(**options)
        for host, base in itertools.product(_hosts, cls.__bases__):
            if base in host.task_types:
                host.add(cls, host.task_types[base])

    def _check_kinds(self, kinds: Mapping[str, Rule]) -> None:
        """Check that fields hold values of their classes; all other rules need that.

        Raises:
            ValueError: Some do not.
        """
        Problems(type(self).__name__, self, kinds).raise_any()


class OnDask(Config):
    """The cluster that a task asks for; a host's own class adds its records for `scheduler` and `workers`."""

    # The host's classes of these two.
    KINDS: ClassVar[Mapping[str, type]]

    scheduler: Any
    workers: Any

    @property
    def num_workers(self) -> int:
        """The number of Dask workers asked for."""
        return int(self.workers.number_of_workers or 1)

    def _kinds(self) -> dict[str, Rule]:
        return {name: checks.instance_of(kind) for name, kind in self.KINDS.items()}

    def _rules_of_pods(self) -> dict[str, Rule]:
        image = checks.optional(checks.text())
        return {"workers.number_of_workers": checks.COUNT, "workers.image": image, "scheduler.image": image}

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
        self._check_kinds(self._kinds() | OF_GANGS)
        problems = Problems(type(self).__name__, self, self._rules_of_pods())
        workers, least = self.workers.number_of_workers, self.gang.min_workers
        problems.unless(
            least is None or checks.COUNT(workers) is not None or least <= workers,
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
class GangOnOwnNode(Config):
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
        rules = {
            "nproc": checks.auto_or(checks.COUNT),
            "start_method": checks.one_of("forkserver", "spawn"),
            "gang.ranks_per_worker": checks.must_be("left alone; nproc is the number of ranks", checks.is_auto),
            "gang.min_workers": checks.must_be("left alone; there is one node", lambda value: value in (None, 1)),
        }
        self._check_kinds(OF_GANGS)
        Problems(type(self).__name__, self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Cluster(OnDask):
    """The function runs once, with `current_client()` at its service."""

    start_timeout: float = 600.0
    """Seconds within which the scheduler answers and all the workers come."""

    def __post_init__(self) -> None:
        self._check_kinds(self._kinds())
        rules = self._rules_of_pods() | {"start_timeout": checks.SECONDS}
        Problems(type(self).__name__, self, rules).raise_any()


def _refuse(name: str, of: Host, by: Host, /, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        f"this {name} is that of {of.package}, which is for {of.sdk}, and the task is one of {by.sdk}. Use the one of "
        f"{by.package}, which takes the same arguments: from {by.package} import {name}"
    )


def _refuse_class(*args: object, **kwargs: object) -> NoReturn:
    [name] = [each.__name__ for each in (*args, *kwargs.values()) if isinstance(each, ConfigClass)]
    raise TypeError(f"{name} is a class, and a task needs a config that is made of it: {name}()")
