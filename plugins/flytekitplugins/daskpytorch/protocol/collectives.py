"""What a rank says of its last collectives, as torch's flight recorder has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_COLLECTIVES = 32
"""So many of a rank's newest are told: ranks that differ stop at once, or a few collectives later."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call of a collective operation."""

    group: str
    """Its process group by name, such as `the default group (gloo)`; one of `Recalled.groups`."""
    number: int
    """Which of the group's collectives it is, from 1; ranks that run the same code count alike."""
    operation: str
    """Such as `all_reduce`."""
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    dtypes: Sequence[str]
    """Of the inputs, or where there are none of the outputs."""
    is_done: bool
    """The other ranks have taken part."""
    frames: Sequence[str] = ()
    """Where it was called, written as `faulthandler` does, the innermost call first."""


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """What a rank remembers."""

    groups: Sequence[str]
    """The process groups that it is in."""
    collectives: Sequence[Collective]
    """The newest, in order."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of those groups whose collectives are all recorded under comparable numbers, and wait for minutes."""
