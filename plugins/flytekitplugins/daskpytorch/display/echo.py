"""What a user of `dispatch.run` sees while a gang trains: plain lines. Runs in the driver."""

from __future__ import annotations

from flytekitplugins.daskpytorch.process.screen import Screen
from flytekitplugins.daskpytorch.protocol.observer import Observer

__all__ = ["Echo"]


class Echo(Observer):
    """Writes what the ranks write to this process's standard error, with their ranks, and what happens to the gang."""

    def noted(self, text: str) -> None:
        """Say it."""
        Screen().write(f"{text}\n")

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Pass it on."""
        Screen().write("".join(f"[rank {rank}] {line}\n" for line in lines))
