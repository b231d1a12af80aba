"""Dataclasses as workflow inputs, without silent typing errors. Runs where the command line is read."""

import contextlib
import dataclasses
import difflib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, get_origin, get_type_hints

from mashumaro.codecs.json import JSONDecoder
from mashumaro.dialect import Dialect
from mashumaro.exceptions import InvalidFieldValue, MissingField

from flytekitplugins.daskpytorch.checks import shown


class StrictInputs:
    """Base of a dataclass that is given as JSON, as in `pyflyte run … --hp '{"epochs": 3}'`.

    flytekit drops keys that the dataclass does not have, so that a misspelt one trains with its default; here it is an
    error that says which key was meant. Nor is a value made fit that is of another type, as 1.9 or "1" for an `int`
    (3.0 is 3), or a key given twice.

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
        """Called by flytekit for a value from the command line.

        Raises:
            ValueError: A key is unknown, missing or given twice, a value is of the wrong type, or the dataclass itself
                refuses it.
        """
        given = json.loads(text)
        if repeated := _repeated(text) or _repeated_where_typed(given):
            raise ValueError(f"{cls.__name__}: {' and '.join(map(shown, repeated))} given twice; which one is meant?")
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        if not isinstance(given, dict):
            raise ValueError(f"{cls.__name__} is given as a JSON object of {', '.join(known)}; got {shown(given)}")
        if unknown := [_with_suggestion(key, known) for key in given if key not in known]:
            raise ValueError(f"{cls.__name__} has no {' and no '.join(unknown)}. It has: {', '.join(known)}")
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
    """Look for keys of the command line's JSON that a dataclass of the user's own does not have.

    flytekit drops them when it reads the command line. All that can be seen here is this process's command line, so
    only what was typed for an input of this name, and fits the value that came of it, counts.

    Raises:
        ValueError: There is one; the message has the one that was probably meant.
    """
    for name, value in inputs.items():
        if not dataclasses.is_dataclass(value) or isinstance(value, (type, StrictInputs)):
            continue
        known = [field.name for field in dataclasses.fields(value)]
        for given in _typed_objects(name):
            unknown = [_with_suggestion(key, known) for key in given if key not in known]
            if unknown and all(getattr(value, key) == text for key, text in given.items() if key in known):
                kind = type(value).__name__
                raise ValueError(f"{kind} has no {' and no '.join(unknown)}. It has: {', '.join(known)}")


def _typed_objects(name: str) -> Iterator[dict[str, Any]]:
    """What the command line gives for an input, as `--name JSON` or `--name=JSON`."""
    for argument, following in itertools.pairwise([*sys.argv, ""]):
        option, _, text = argument.partition("=")
        if option.removeprefix("--").replace("-", "_") == name and option.startswith("--"):
            with contextlib.suppress(ValueError):  # a file, perhaps
                if isinstance(given := json.loads(text or following), dict):
                    yield given


def _with_suggestion(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"{key!r} (did you mean {close[0]!r}?)" if close else shown(key)


def _repeated(text: str | bytes) -> list[str]:
    found: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    json.loads(text, object_pairs_hook=note)
    return found


def _repeated_where_typed(given: object) -> list[str]:
    """The same in this process's command line: of a key given twice there, flytekit passes on only the last."""
    for argument in sys.argv[1:]:
        with contextlib.suppress(ValueError):  # it is no JSON, as most
            if argument.startswith("{") and json.loads(argument) == given and (repeated := _repeated(argument)):
                return repeated
    return []


def _exactly(kind: type, *others: type) -> dict[str, str | Callable[..., Any]]:
    """How a value becomes one of this kind: it must be one, or be worth the same as one."""

    def convert(value: Any) -> Any:
        if type(value) is not kind and not (type(value) in others and kind(value) == value):
            raise TypeError(f"{shown(value)} is not a {kind.__name__}")
        return kind(value)

    return {"deserialize": convert}


class _Exact(Dialect):
    """Mashumaro's own calls `int(value)` and the like."""

    # Flyte's console and older backends have whole numbers as 3.0.
    serialization_strategy = {  # noqa: RUF012 - as its base has it
        bool: _exactly(bool),
        int: _exactly(int, float),
        float: _exactly(float, int),
        str: _exactly(str),
    }
