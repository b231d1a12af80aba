"""Checks of hyper-parameters. One error names all wrong values of a dataclass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any


def raise_if_wrong(given: Any, checks: Mapping[str, tuple[bool, str]]) -> None:
    """Raise one `ValueError` that names every wrong field.

    Args:
        given: The dataclass.
        checks: Result of the check and description of the allowed values, by field. Fields in `USUAL` need no entry
            here.

    Raises:
        ValueError: A field has a wrong value.
    """
    problems = []
    for name in (field.name for field in fields(given)):
        value = getattr(given, name)
        is_right, allowed = USUAL.get(name, (lambda _: True, ""))
        ok, allowed = checks.get(name, (is_right(value), allowed))
        if not ok:
            problems.append(f"{type(given).__name__}({name}={value!r}): must be {allowed}")
    if problems:
        raise ValueError("; ".join(problems))


def is_whole(value: object, least: int) -> bool:
    """Return True if the value is a whole number and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_between(value: object, low: float, high: float) -> bool:
    """Return True if the value is a number above `low` and below `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low < value < high


COUNT = "a whole number from 1 up"
USUAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "epochs": (lambda value: is_whole(value, 1), COUNT),
    "batch_size": (lambda value: is_whole(value, 1), COUNT),
    "log_interval": (lambda value: is_whole(value, 1), COUNT),
    "checkpoint_interval": (lambda value: is_whole(value, 0), "a whole number from 0 up"),
    "learning_rate": (lambda value: is_between(value, 0, math.inf), "a finite number above 0"),
    "momentum": (lambda value: is_between(value, -1, 1) and value >= 0, "a number from 0 to below 1"),
    "held_out": (lambda value: is_between(value, 0, 1), "a fraction above 0 and below 1"),
    "seed": (lambda value: is_whole(value, 0) and value < 2**63, "a whole number from 0 up and below 2**63"),
}
USUAL["sgd_momentum"] = USUAL["momentum"]
"""Check and description of the allowed values, by field, for fields that several trainings have."""
