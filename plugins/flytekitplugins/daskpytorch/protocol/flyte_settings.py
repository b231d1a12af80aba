"""What the ranks of a Flyte task are told of it, and what rank 0 gives back. Imports no flytekit: agents pass it on."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FlyteSettings", "TaskOutput"]


@dataclass(frozen=True, kw_only=True)
class FlyteSettings:
    """What a rank needs to stand in the driver's Flyte execution."""

    mode: str | None
    """The name of the driver's `ExecutionState.Mode`: in a local run, secrets and Decks have local rules. None where no
    task is executed."""
    raw_output_prefix: str
    """Where files that are outputs go."""
    output_metadata_prefix: str | None
    checkpoint: str | None
    """Where this attempt's intratask checkpoint goes."""
    previous_checkpoint: str | None
    """Where the attempt before left its own."""
    environment: dict[str, str] = field(repr=False)
    """Names the execution and the task, and holds its secrets, in Flyte's own variables."""
    interface: bytes
    """The types of the task's inputs and outputs, pickled."""
    inputs: bytes
    """The task's inputs: a serialised `flyteidl.core.LiteralMap`. Each rank makes its own values of them, and so
    downloads input files to its own disk."""
    task_name: str
    results: str
    """The folder of what the ranks submit, complete when the task has ended."""


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    """Rank 0's return value as Flyte has it."""

    literal_map: bytes
    """A serialised `flyteidl.core.LiteralMap`."""
    decks: list[tuple[str, str]]
    """Name and HTML of the Decks made in the rank."""
