"""Questions between driver and ranks, and their answers. Each question travels as `Ask`, each answer as `Answer`.

The driver asks all ranks of an attempt, in `Tell`, and each rank answers. A rank asks the driver, and all ranks of its
node get the answer. The ranks' n-th questions of one kind have the same answer. Answers that every attempt or call
needs come unasked.
"""

import enum
from dataclasses import dataclass
from typing import Any


class Question(enum.Enum):
    """Kind of a question. `about` and the answer are None if the kind names none."""

    STACKS = enum.auto()
    """Stacks and progress of a rank, for the driver. `about`: True if the rank also writes its stacks to its log.
    Answer: `Located`."""
    COLLECTIVES = enum.auto()
    """Newest collectives of a rank, for the driver. Answer: `Recalled`, or None if torch does not record them."""
    HOLD = enum.auto()
    """Order of the driver to block the next call of `should_stop`. `about`: signal that the driver may pass to the
    rank's program, or None. Answer: number of calls so far, and whether the program handles the signal."""
    HALT = enum.auto()
    """Order of the driver to halt in a call of a gang that stays. `about`: number of the call. Answer: number of the
    collective after which the rank can leave the call, or 0 if unknown."""
    GOODPUT = enum.auto()
    """Account of the gang's time, for a rank. Answer: `Goodput`."""
    CHECKPOINT = enum.auto()
    """Whole checkpoint that a rank needs on its node. `about`: its step, or None for the best. Answer:
    `CheckpointFile`, or None if there is no such checkpoint. Number 0, unasked: the attempt's start."""
    SHARDED = enum.auto()
    """Sharded checkpoint that a rank needs. `about` as above. Answer: `ShardedCheckpoint`, or None."""
    ARGUMENTS = enum.auto()
    """Large arguments of a call, which a rank needs on its node. Unasked. The number is that of a staying gang's call,
    else 0. Answer: `Address`."""


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
    failure: str | None = None
    """Reason why the value has not arrived on the rank's node. None without a failure."""


@dataclass(frozen=True)
class Located:
    """Where a rank is: the answer to `Question.STACKS`."""

    num_collectives: int
    """Number of collectives that the rank has entered."""
    stacks: str
    """Stacks of all threads of the rank."""
    num_moves: int
    """Number of the rank's signs of life so far."""
