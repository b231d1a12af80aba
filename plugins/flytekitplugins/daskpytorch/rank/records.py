"""What a rank logs, and whatever can wait with it, on its way to the driver: several together, not a message each.

A record alone would cost a system call, and the agent's and the driver's turns. And whatever is done between two steps
runs with cold caches, ten times as slow: what can wait is therefore done for many at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.protocol.reports import Hint, Spent
from flytekitplugins.daskpytorch.rank.hints import of_loss

INTERVAL = 0.2
"""Seconds within which a record of rank 0 goes. A rank that is killed takes with it those that have not gone."""
INTERVAL_OF_OTHERS = 1.0
"""Seconds for those of other ranks, which nobody watches as they come: each message costs its agent and the driver."""
MAX_MESSAGES = 500
"""Of all these other ranks together, which the driver reads in a second."""
MAX_WAITING = 1 << 10
"""Records; a rank that logs more sends them itself, and so no faster than they are taken in."""


def interval_of(rank: int, world_size: int) -> float:
    """Seconds within which a record of this rank goes."""
    return INTERVAL if rank == 0 else max(INTERVAL_OF_OTHERS, world_size / MAX_MESSAGES)


class Records:
    """Gathers what is logged; a first record goes at once, those that follow it soon go together."""

    def __init__(self, send: Callable[[], None], interval: float, *, hints: bool = True) -> None:
        """Have `send` called when it is time to `take` what waits; `hints`: say what looks forgotten."""
        self._send = send
        self._interval = interval
        self._looks_for_hints = hints
        self._waiting: deque[LogRecord | Spent] = deque()
        self._send_at = 0.0
        """When a record may go at once, on the monotonic clock."""
        self._sender: threading.Thread | None = None

    def add(self, record: LogRecord | Spent) -> None:
        """Send it, now or soon."""
        self._waiting.append(record)
        if time.monotonic() >= self._send_at or len(self._waiting) >= MAX_WAITING:
            self._send()
        elif self._sender is None:
            self._sender = threading.Thread(target=self._keep_sending, name="daskpytorch-log", daemon=True)
            self._sender.start()

    def take(self) -> Sequence[LogRecord | Spent | Hint]:
        """All that waits, in order, as the driver can read it; for one thread at a time."""
        if not self._waiting:
            return []
        self._send_at = time.monotonic() + self._interval
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        sent = [each.sent() if isinstance(each, LogRecord) else each for each in waiting]
        return [*sent, *self._hint([each for each in waiting if isinstance(each, LogRecord)])]

    def _hint(self, records: Sequence[LogRecord]) -> Sequence[Hint]:
        """A loss that is no number; once, since it is so at every step from there on."""
        hint = next(filter(None, map(of_loss, records)), None) if self._looks_for_hints else None
        self._looks_for_hints &= hint is None
        return [] if hint is None else [hint]

    def _keep_sending(self) -> None:
        while True:
            time.sleep(self._patience() or self._interval)
            if self._waiting and not self._patience():
                self._send()

    def _patience(self) -> float:
        """Seconds until records may go: other reports take along what waits, and what comes then has time again."""
        return max(0.0, self._send_at - time.monotonic())
