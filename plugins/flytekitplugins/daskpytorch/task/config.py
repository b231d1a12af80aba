"""Configs and inputs of tasks and their checks, shared by flytekit and Flyte 2. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, Self, get_origin, get_type_hints

from mashumaro.codecs.json import JSONDecoder
from mashumaro.dialect import Dialect
from mashumaro.exceptions import InvalidFieldValue, MissingField

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems, Rule, shown
from flytekitplugins.daskpytorch.settings import Gang, Wandb, check_workers

OF_GANGS = {"gang": checks.instance_of(Gang), "wandb": checks.optional(checks.instance_of(Wandb))}


_hosts: list[Host] = []


@dataclass(kw_only=True)
class Host:
    """One of Flyte's SDKs, flytekit or that of Flyte 2, with the task types that this package adds.

    Each refuses the other's configs. Otherwise flytekit would run tasks with unknown configs in the driver, without a
    gang.
    """

    sdk: str
    package: str
    """Package from which users import the SDK's configs."""
    register: Callable[[type, Any], object]
    """Lets the SDK learn the task type (second argument) for a class of configs (first argument)."""
    task_types: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.register(ConfigClass, _refuse_class)
        for other in _hosts:
            for config in other.task_types:
                self.know(config, other)
        _hosts.append(self)

    def add(self, config: type, task_type: Any) -> None:
        """Register a task type for a class of configs with this SDK, and an error with other SDKs."""
        self.task_types[config] = task_type
        for host in _hosts:
            host.know(config, self)

    def know(self, config: type, of: Host) -> None:
        name = next(base for base in config.__mro__ if base.__module__.startswith(of.package)).__name__
        self.register(config, of.task_types[config] if of is self else functools.partial(_refuse, name, of, self))


class ConfigClass(type):
    """Metaclass of configs, by which SDKs refuse a config's class that a user passes instead of an instance."""


class Config(metaclass=ConfigClass):
    """Base of the configs of tasks."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Register a user's subclass for the task type of its base, since SDKs look only at a config's own class."""
        super().__init_subclass__(**options)
        for host, base in itertools.product(_hosts, cls.__bases__):
            if base in host.task_types:
                host.add(cls, host.task_types[base])


class OnDask(Config):
    """Base of configs with a Dask cluster. Subclasses declare `scheduler` and `workers`."""

    KINDS: ClassVar[Mapping[str, type]]

    scheduler: Any
    workers: Any

    @property
    def num_workers(self) -> int:
        """Number of Dask workers."""
        return int(self.workers.number_of_workers)

    def _rules_of_pods(self) -> dict[str, Rule]:
        kinds = {name: checks.instance_of(kind) for name, kind in self.KINDS.items()}
        return {**kinds, "workers.number_of_workers": checks.COUNT}


@dataclass(frozen=True, kw_only=True)
class GangOnDask(OnDask):
    """Config of a task whose function runs in every rank of a gang on an ephemeral Dask cluster."""

    gang: Gang = field(default_factory=Gang)
    """Settings of the gang on the workers. Its `workers` must be None."""
    wandb: Wandb | None = None
    """Settings of the gang's Weights & Biases run. None: no run."""

    def __post_init__(self) -> None:
        own = {"gang.workers": checks.left_out("; workers.number_of_workers is the number")}
        problems = Problems(type(self).__name__, self, self._rules_of_pods() | OF_GANGS | own)
        if not problems.found:
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
        rules = OF_GANGS | {
            "nproc": checks.auto_or(checks.COUNT),
            "gang.ranks_per_worker": checks.must_be("left out; nproc is the number of ranks", checks.is_auto),
            **rules_of_own_node("nproc"),
        }
        Problems(type(self).__name__, self, rules).raise_any()


@dataclass(frozen=True, kw_only=True)
class Cluster(OnDask):
    """Config of a task whose function runs once, with a Dask cluster whose client `current_client()` returns."""

    start_timeout: float = 600.0
    """Timeout, in seconds, for the scheduler to answer and all workers to arrive."""

    def __post_init__(self) -> None:
        rules = self._rules_of_pods() | {"start_timeout": checks.SECONDS}
        Problems(type(self).__name__, self, rules).raise_any()


def rules_of_own_node(setting: str) -> dict[str, Rule]:
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


# ---- Inputs


class StrictInputs:
    """Base of a dataclass that a user gives as JSON, as in `pyflyte run … --hp '{"epochs": 3}'`.

    flytekit drops unknown keys, so a misspelt key would train with the default. `StrictInputs` raises an error, which
    suggests the right key. Values of another type are errors, such as 1.9 or "1" for an `int`. A float that is a whole
    number, such as 3.0, is accepted for an `int`.

    Examples:
        >>> from dataclasses import dataclass
        >>> from flytekitplugins.daskpytorch import StrictInputs
        >>> @dataclass(frozen=True)
        ... class Hyperparameters(StrictInputs):
        ...     epochs: int = 3
        >>> Hyperparameters.from_json('{"epochs": 4}')
        Hyperparameters(epochs=4)
        >>> Hyperparameters.from_json('{"epoch": 4}')
        Traceback (most recent call last):
        ValueError: Hyperparameters has no 'epoch' (did you mean 'epochs'?). It has: epochs
    """

    @classmethod
    def from_json(cls, text: str | bytes, **_: Any) -> Self:
        """Make an instance from JSON. flytekit calls it for values from the command line.

        Raises:
            ValueError: A key is unknown or missing, a value has the wrong type, or the dataclass refuses a
                value.
        """
        given = json.loads(text)
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        if not isinstance(given, dict):
            raise ValueError(f"{cls.__name__}={shown(given)}: must be a JSON object with the keys {', '.join(known)}")
        _refuse_others(cls, given, known)
        hints = get_type_hints(cls)
        for name, value in given.items():  # mashumaro would make a list of a dict's keys, or of a text's letters
            if get_origin(hints[name]) in {list, tuple, set, frozenset} and not isinstance(value, list):
                raise ValueError(f"{cls.__name__}: {name}={shown(value)} is not a {hints[name]}")
        try:
            return JSONDecoder(cls, default_dialect=_Exact).decode(text)
        except InvalidFieldValue as error:
            value, kind = shown(given[error.field_name]), error.field_type_name
            raise ValueError(f"{cls.__name__}: {error.field_name}={value} is not a {kind}") from error.__context__
        except MissingField as error:
            raise ValueError(f"{cls.__name__}: {error}") from error


def refuse_unknown(inputs: Mapping[str, Any]) -> None:
    """Raise an error for keys in the command line's JSON that the input's dataclass does not have.

    flytekit drops unknown keys when it reads the command line. `refuse_unknown` therefore reads the process's command
    line again. Only JSON for an option with the input's name counts, and only if the known keys match the input's
    value.

    Raises:
        ValueError: A key is unknown. The message suggests the right key.
    """
    for name, value in inputs.items():
        if not dataclasses.is_dataclass(value) or isinstance(value, (type, StrictInputs)):
            continue
        known = [field.name for field in dataclasses.fields(value)]
        for given in _typed_objects(name):
            if all(getattr(value, key) == text for key, text in given.items() if key in known):
                _refuse_others(type(value), given, known)


def _typed_objects(name: str) -> Iterator[dict[str, Any]]:
    for argument, following in itertools.pairwise([*sys.argv, ""]):
        option, _, text = argument.partition("=")
        if option.removeprefix("--").replace("-", "_") == name and option.startswith("--"):
            with contextlib.suppress(ValueError):  # a file, perhaps
                if isinstance(given := json.loads(text or following), dict):
                    yield given


def _refuse_others(kind: type, given: Iterable[str], known: list[str]) -> None:
    if unknown := [_with_suggestion(key, known) for key in given if key not in known]:
        raise ValueError(f"{kind.__name__} has no {' and no '.join(unknown)}. It has: {', '.join(known)}")


def _with_suggestion(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"{key!r} (did you mean {close[0]!r}?)" if close else shown(key)


def _exactly(kind: type, *others: type) -> dict[str, str | Callable[..., Any]]:
    def convert(value: Any) -> Any:
        if type(value) is not kind and not (type(value) in others and kind(value) == value):
            raise TypeError(f"{shown(value)} is not a {kind.__name__}")
        return kind(value)

    return {"deserialize": convert}


class _Exact(Dialect):
    """Checks types, where mashumaro by default converts values, for example by `int(value)`."""

    # Flyte's console and older backends write whole numbers as 3.0.
    serialization_strategy = {  # noqa: RUF012 - as its base has it
        bool: _exactly(bool),
        int: _exactly(int, float),
        float: _exactly(float, int),
        str: _exactly(str),
    }
