"""Configs of tasks and their checks, shared by flytekit and Flyte 2. Imports no torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems, Rule
from flytekitplugins.daskpytorch.settings import Gang, Wandb, check_workers

OF_GANGS = {"gang": checks.instance_of(Gang), "wandb": checks.optional(checks.instance_of(Wandb))}


_hosts: list[Host] = []
"""SDKs of Flyte whose adapters are imported in this process."""


@dataclass(kw_only=True)
class Host:
    """One of Flyte's SDKs, flytekit or that of Flyte 2, with the task types that this package adds.

    Each SDK refuses configs of the other SDK. Otherwise flytekit would run tasks with unknown configs in the driver,
    without a gang.
    """

    sdk: str
    """Name of the SDK, for error messages."""
    package: str
    """Package from which users import the SDK's configs."""
    register: Callable[[type, Any], object]
    """Function by which the SDK learns the task type (second argument) for a class of configs (first argument)."""
    task_types: dict[type, Any] = field(default_factory=dict)
    """Task types that this package adds to the SDK, by the class of their configs."""

    def __post_init__(self) -> None:
        self.register(ConfigClass, _refuse_class)
        for other in _hosts:
            for config in other.task_types:
                self.refuse(config, other)
        _hosts.append(self)

    def add(self, config: type, task_type: Any) -> None:
        """Register a task type for a class of configs with this SDK, and an error with other SDKs."""
        self.task_types[config] = task_type
        self.register(config, task_type)
        for other in _hosts:
            if other is not self:
                other.refuse(config, self)

    def refuse(self, config: type, of: Host) -> None:
        """Let this SDK raise an error for tasks whose config has a class that belongs to the other SDK `of`."""
        name = next(base for base in config.__mro__ if base.__module__.startswith(of.package)).__name__
        self.register(config, functools.partial(_refuse, name, of, self))


class ConfigClass(type):
    """Metaclass of configs, by which SDKs refuse a config's class that a user passes instead of an instance."""


class Config(metaclass=ConfigClass):
    """Base of the configs of tasks, for flytekit and Flyte 2. The constructor checks the fields."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Register a user's subclass for the task type of its base, since SDKs look only at a config's own class."""
        super().__init_subclass__(**options)
        for host, base in itertools.product(_hosts, cls.__bases__):
            if base in host.task_types:
                host.add(cls, host.task_types[base])

    def _check_kinds(self, kinds: Mapping[str, Rule]) -> None:
        """Check the classes of the fields' values, before other rules read the values.

        Args:
            kinds: Rule for each field, by the field's name.

        Raises:
            ValueError: A field's value has a wrong class.
        """
        Problems(type(self).__name__, self, kinds).raise_any()


class OnDask(Config):
    """Base of configs with a Dask cluster. Subclasses for flytekit and Flyte 2 declare `scheduler` and `workers`."""

    # The host's classes for `scheduler` and `workers`.
    KINDS: ClassVar[Mapping[str, type]]

    scheduler: Any
    workers: Any

    @property
    def num_workers(self) -> int:
        """Number of Dask workers of the cluster. 1 if the config does not set a number."""
        return int(self.workers.number_of_workers or 1)

    def _kinds(self) -> dict[str, Rule]:
        return {name: checks.instance_of(kind) for name, kind in self.KINDS.items()}

    def _rules_of_pods(self) -> dict[str, Rule]:
        image = checks.optional(checks.text())
        return {"workers.number_of_workers": checks.COUNT, "workers.image": image, "scheduler.image": image}

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the config requests for each worker. 0: no GPUs."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GangOnDask(OnDask):
    """Config of a task whose function runs in every rank of a gang on an ephemeral Dask cluster."""

    gang: Gang = field(default_factory=Gang)
    """Settings of the gang on the workers. Its `workers` must be None."""
    wandb: Wandb | None = None
    """Settings of the gang's Weights & Biases run. None: no run."""

    def __post_init__(self) -> None:
        self._check_kinds(self._kinds() | OF_GANGS)
        own = {"gang.workers": checks.left_out("; workers.number_of_workers is the number")}
        problems = Problems(type(self).__name__, self, self._rules_of_pods() | own)
        if checks.COUNT(self.workers.number_of_workers) is None:
            number, name = self.workers.number_of_workers, "workers.number_of_workers"
            check_workers(problems, self.gang.evaluate, self.gang.min_workers, number, name, "gang.")
        problems.raise_any()


@dataclass(frozen=True, kw_only=True)
class GangOnOwnNode(Config):
    """Config of a task whose function runs in every rank of a gang on the task's own node, without Dask."""

    nproc: int | Literal["auto"] = "auto"
    """Number of ranks, from 1 up. `auto`: one per visible GPU, or one on a node without GPUs."""
    gang: Gang = field(default_factory=Gang)
    """Settings of the gang. `ranks_per_worker`, `workers` and `min_workers` must keep their defaults, since the gang
    has no Dask workers."""
    wandb: Wandb | None = None
    """Settings of the gang's Weights & Biases run. None: no run."""

    def __post_init__(self) -> None:
        rules = {
            "nproc": checks.auto_or(checks.COUNT),
            "gang.ranks_per_worker": checks.must_be("left out; nproc is the number of ranks", checks.is_auto),
            **rules_of_own_node("nproc"),
        }
        self._check_kinds(OF_GANGS)
        Problems(type(self).__name__, self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Cluster(OnDask):
    """Config of a task whose function runs once, with a Dask cluster whose client `current_client()` returns."""

    start_timeout: float = 600.0
    """Timeout, in seconds, for the scheduler to answer and all workers to arrive."""

    def __post_init__(self) -> None:
        self._check_kinds(self._kinds())
        rules = self._rules_of_pods() | {"start_timeout": checks.SECONDS}
        Problems(type(self).__name__, self, rules).raise_any()


def rules_of_own_node(setting: str) -> dict[str, Rule]:
    """Return the rules for the settings of a gang without Dask workers.

    Args:
        setting: Name of the setting with the number of ranks, for messages.
    """
    return {
        "gang.workers": checks.left_out(f", since there is one node; {setting} is the number of ranks"),
        "gang.min_workers": checks.must_be("left out, since there is one node", lambda value: value in (None, 1)),
        "gang.evaluate": checks.must_be(
            "None or an Evaluate with workers=0, since there is one node",
            lambda evaluate: evaluate is None or evaluate.workers == 0,
        ),
    }


def _refuse(name: str, of: Host, by: Host, /, *_: object, **__: object) -> NoReturn:
    raise TypeError(
        f"this {name} is that of {of.package}, which is for {of.sdk}, and the task is one of {by.sdk}. Use the one of "
        f"{by.package}, which takes the same arguments: from {by.package} import {name}"
    )


def _refuse_class(*args: object, **kwargs: object) -> NoReturn:
    [name] = [each.__name__ for each in (*args, *kwargs.values()) if isinstance(each, ConfigClass)]
    raise TypeError(f"{name} is a class, and a task needs a config that is made of it: {name}()")
