"""Checks of dataclasses that are workflow inputs. Runs where the command line is read."""

import contextlib
import dataclasses
import difflib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, get_origin, get_type_hints

from mashumaro.codecs.json import JSONDecoder
from mashumaro.dialect import Dialect
from mashumaro.exceptions import InvalidFieldValue, MissingField

from flytekitplugins.daskpytorch.checks import shown


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
        except (InvalidFieldValue, MissingField) as error:
            name = error.field_name
            if (reason := error.__context__ or error.__cause__) and isinstance(error, InvalidFieldValue):
                raise ValueError(
                    f"{cls.__name__}: {name}={shown(given[name])} is not a {error.field_type_name}"
                ) from reason
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
    """Yield the JSON objects of an input's option in the command line, `--name JSON` or `--name=JSON`."""
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
    """Return a mashumaro strategy that accepts values of the type `kind`, and equal values of the other types."""

    def convert(value: Any) -> Any:
        if type(value) is not kind and not (type(value) in others and kind(value) == value):
            raise TypeError(f"{shown(value)} is not a {kind.__name__}")
        return kind(value)

    return {"deserialize": convert}


class _Exact(Dialect):
    """Mashumaro dialect that checks types. By default, mashumaro converts values, for example by `int(value)`."""

    # Flyte's console and older backends write whole numbers as 3.0.
    serialization_strategy = {  # noqa: RUF012 - as its base has it
        bool: _exactly(bool),
        int: _exactly(int, float),
        float: _exactly(float, int),
        str: _exactly(str),
    }
