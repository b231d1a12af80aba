"""Whether a failed gang may start again. Pure; runs in the driver."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["AttemptFailure", "FailurePolicy"]


@dataclass(frozen=True, kw_only=True)
class AttemptFailure:
    """How a attempt ended."""

    what: str
    """Who failed and how, in a line."""
    cause: str
    """How, without the rank: what makes two errors the same."""
    position: tuple[int | None, int | None]
    """Where: the newest named step, and the signs of life since then."""
    is_infrastructure: bool
    """Something was taken away from outside; else the function failed."""
    is_final: bool = False
    """It would come again."""


@dataclass
class FailurePolicy:
    """Two budgets: for losses of infrastructure, and for errors of the function."""

    limit: int
    """FailurePolicy for each of the two."""
    failures: list[AttemptFailure] = field(default_factory=list)
    """Those noted so far, the newest last."""

    def refusal(self, failure: AttemptFailure) -> str | None:
        """Why this further failure would end the gang; None if the gang may start again."""
        alike = [earlier for earlier in self.failures if earlier.is_infrastructure == failure.is_infrastructure]
        if self.limit == 0:
            return "max_restarts is 0"
        if failure.is_final:
            return "the function had returned, and would return the same again"
        if not failure.is_infrastructure and alike and _is_same(alike[-1], failure):
            return "the same error came at the same step twice"
        if len(alike) >= self.limit:
            kind = "losses of infrastructure" if failure.is_infrastructure else "errors of the function"
            return f"max_restarts={self.limit} is used up by {kind}"
        return None

    def note(self, failure: AttemptFailure) -> None:
        """Count a failure after which the gang starts again."""
        self.failures.append(failure)


def _is_same(one: AttemptFailure, other: AttemptFailure) -> bool:
    return one.cause == other.cause and one.position == other.position
