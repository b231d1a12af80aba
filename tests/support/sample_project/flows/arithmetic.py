"""A module that the tasks need."""

OFFSET = 100


def shifted(value: float) -> float:
    """The value, moved."""
    return value + OFFSET
