"""Whether a failed gang may start again. Pure; runs in the driver."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Defeat", "Restarts"]


@dataclass(frozen=True, kw_only=True)
class Defeat:
    """How a generation ended."""

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
class Restarts:
    """Two budgets: for losses of infrastructure, and for errors of the function."""

    limit: int
    """Restarts for each of the two."""
    defeats: list[Defeat] = field(default_factory=list)
    """Those noted so far, the newest last."""

    def refusal(self, defeat: Defeat) -> str | None:
        """Why this further defeat would end the gang; None if the gang may start again."""
        alike = [earlier for earlier in self.defeats if earlier.is_infrastructure == defeat.is_infrastructure]
        if self.limit == 0:
            return "max_restarts is 0"
        if defeat.is_final:
            return "the function had returned, and would return the same again"
        if not defeat.is_infrastructure and alike and _is_same(alike[-1], defeat):
            return "the same error came at the same step twice"
        if len(alike) >= self.limit:
            kind = "losses of infrastructure" if defeat.is_infrastructure else "errors of the function"
            return f"max_restarts={self.limit} is used up by {kind}"
        return None

    def note(self, defeat: Defeat) -> None:
        """Count a defeat after which the gang starts again."""
        self.defeats.append(defeat)


def _is_same(one: Defeat, other: Defeat) -> bool:
    return one.cause == other.cause and one.position == other.position
