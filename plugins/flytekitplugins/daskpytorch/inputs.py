"""Dataclasses as workflow inputs, without silent typing errors. Runs where the command line is read."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any, Self

from mashumaro.codecs.json import JSONDecoder
from mashumaro.exceptions import InvalidFieldValue, MissingField

__all__ = ["StrictInputs"]


class StrictInputs:
    """Base of a dataclass that is given as JSON, as in `pyflyte run … --hp '{"epochs": 3}'`.

    flytekit drops keys that the dataclass does not have, so that a misspelt one trains with its default; here it is an
    error that says which key was meant.
    """

    @classmethod
    def from_json(cls, text: str | bytes, **_: Any) -> Self:
        """Called by flytekit for a value from the command line.

        Raises:
            ValueError: A key is unknown or missing, a value is of the wrong type, or the dataclass itself refuses it.
        """
        given = json.loads(text)
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        if not isinstance(given, dict):
            raise ValueError(f"{cls.__name__} is given as a JSON object of {', '.join(known)}; got {given!r}")
        if unknown := [_with_suggestion(key, known) for key in given if key not in known]:
            raise ValueError(f"{cls.__name__} has no {' and no '.join(unknown)}. It has: {', '.join(known)}")
        try:
            return JSONDecoder(cls).decode(text)
        except (InvalidFieldValue, MissingField) as error:
            name = error.field_name
            if (reason := error.__context__ or error.__cause__) and isinstance(error, InvalidFieldValue):
                raise ValueError(f"{cls.__name__}: {name}={given[name]!r} is not a {error.field_type_name}") from reason
            raise ValueError(f"{cls.__name__}: {error}") from error


def _with_suggestion(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"{key!r} (did you mean {close[0]!r}?)" if close else repr(key)
