"""A rank's last collectives, from torch's flight recorder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_COLLECTIVES = 32
"""Maximum number of collectives that a rank reports, the newest. Ranks that differ stop at once, or a few collectives
later."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call of a collective operation."""

    group: str
    """Name of the process group, such as `the default group (gloo)`. One of `Recalled.groups`."""
    number: int
    """Number of the collective in its group, from 1. Ranks that run the same code count alike."""
    operation: str
    """Name of the operation, such as `all_reduce`."""
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    dtypes: Sequence[str]
    """Types of the inputs. A call without inputs has its output types here."""
    is_done: bool
    """True if the other ranks have taken part."""
    frames: Sequence[str] = ()
    """Stack of the call in the format of `faulthandler`, the innermost frame first."""


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """A rank's last collectives and its process groups."""

    groups: Sequence[str]
    """Names of the rank's process groups."""
    collectives: Sequence[Collective]
    """The rank's newest collectives, oldest first."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Group name -> ranks, for groups of gloo with a timeout of 120 s or more. Empty if the ranks' numbers of
    collectives are not comparable."""
