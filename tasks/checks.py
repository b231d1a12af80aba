"""What dataclasses of hyper-parameters say of wrong values: all of them, in one error."""

from __future__ import annotations

import math
from collections.abc import Mapping


def raise_if_wrong(given: object, checks: Mapping[str, tuple[bool, str]]) -> None:
    """Raise one `ValueError` that names every wrong field.

    Args:
        given: The dataclass.
        checks: For each field whether its value is right, and what is allowed.

    Raises:
        ValueError: A field is wrong.
    """
    problems = [
        f"{type(given).__name__}({name}={getattr(given, name)!r}): must be {allowed}"
        for name, (ok, allowed) in checks.items()
        if not ok
    ]
    if problems:
        raise ValueError("; ".join(problems))


def is_whole(value: object, least: int) -> bool:
    """Whether the value is a whole number from `least` up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_between(value: object, low: float, high: float) -> bool:
    """Whether the value is a number above `low` and below `high`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low < value < high
