"""Questions between driver and ranks, and their answers. Each question travels as `Ask`, each answer as `Answer`.

The driver asks all ranks of an attempt, in `Tell`, and each rank answers. A rank asks the driver, and all ranks of its
node get the answer. The ranks' n-th questions of one kind have the same answer.
"""

import enum
from dataclasses import dataclass
from typing import Any


class Question(enum.Enum):
    """Kind of a question. In brackets: what it is about, and the type of the answer."""

    STACKS = enum.auto()
    """Of the driver: stacks and progress (True if the rank also writes them to its log; `Located`)."""
    COLLECTIVES = enum.auto()
    """Of the driver: newest collectives (None, `Recalled`, or None if torch does not record them)."""
    HOLD = enum.auto()
    """Of the driver: block the next call of `should_stop` (signal that the driver may pass to the rank's program, or
    None; number of calls so far, and whether the program handles the signal)."""
    HALT = enum.auto()
    """Of the driver: halt in a call of a gang that stays (number of the call; number of the newest collective)."""
    GOODPUT = enum.auto()
    """Of a rank: the account of the gang's time (None, `Goodput`)."""
    CHECKPOINT = enum.auto()
    """Of a rank: a checkpoint on its node (`Wanted`; the agent tells by `Arrived`)."""


@dataclass(frozen=True)
class Ask:
    """A question of the driver to all ranks, or of a rank to the driver."""

    question: Question
    number: int
    """Number of the question, from 1. The driver counts all its questions of an attempt, a rank those of one kind. The
    answer repeats the number."""
    about: Any = None


@dataclass(frozen=True)
class Answer:
    """Answer to a question."""

    question: Question
    number: int
    value: Any


@dataclass(frozen=True)
class Located:
    """Where a rank is: the answer to `Question.STACKS`."""

    num_collectives: int
    """Number of collectives that the rank has entered."""
    stacks: str
    """Stacks of all threads of the rank."""
    num_moves: int
    """Number of the rank's signs of life so far."""


@dataclass(frozen=True)
class Wanted:
    """The checkpoint that a rank asks for by `Question.CHECKPOINT`."""

    step: int | None
    """Step of the checkpoint. None means the best checkpoint."""
    is_sharded: bool = False
