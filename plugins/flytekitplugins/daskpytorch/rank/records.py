"""Queue of a rank's log records and other reports that may wait. One message to the driver has several records.

A message costs a system call, and time in the agent and the driver. Code that runs between two steps finds cold caches
and takes ten times as long, so the queue prepares many records at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from flytekitplugins.daskpytorch.protocol.reports import Hint, Spent
from flytekitplugins.daskpytorch.rank.hints import of_loss
from flytekitplugins.daskpytorch.records import LogRecord

INTERVAL = 0.2
"""Maximum number of seconds that a record of rank 0 waits. A rank that is killed loses its waiting records."""
INTERVAL_OF_OTHERS = 1.0
"""Minimum limit, in seconds, for the wait of other ranks' records, which no display shows at once."""
MAX_MESSAGES = 500
"""Maximum number of messages of all other ranks together per second, for the driver to read."""
MAX_WAITING = 1 << 10
"""Maximum number of records that wait. With more, the logging thread sends them itself, and so waits for the agent."""


def interval_of(rank: int, world_size: int) -> float:
    """Return the most seconds that a record of this rank waits."""
    return INTERVAL if rank == 0 else max(INTERVAL_OF_OTHERS, world_size / MAX_MESSAGES)


class Records:
    """Queues log records. The first record goes at once, and the records of the following interval go together."""

    def __init__(self, send: Callable[[], None], interval: float, *, hints: bool = True) -> None:
        """Create an empty queue.

        Args:
            send: Called when waiting records must go. The function must call `take` and send the result.
            interval: Most seconds that a record waits.
            hints: True: add a hint to the first loss that is infinite or NaN.
        """
        self._send = send
        self._interval = interval
        self._looks_for_hints = hints
        self._waiting: deque[LogRecord | Spent] = deque()
        self._send_at = 0.0
        """Time, in seconds on the monotonic clock, from which a new record goes at once."""
        self._sender: threading.Thread | None = None

    def add(self, record: LogRecord | Spent) -> None:
        """Send the record at once or within the interval."""
        self._waiting.append(record)
        if time.monotonic() >= self._send_at or len(self._waiting) >= MAX_WAITING:
            self._send()
        elif self._sender is None:
            self._sender = threading.Thread(target=self._keep_sending, name="daskpytorch-log", daemon=True)
            self._sender.start()

    def take(self) -> Sequence[LogRecord | Spent | Hint]:
        """Return all waiting records in order, without values of the user's classes. Only one thread may call this."""
        if not self._waiting:
            return []
        self._send_at = time.monotonic() + self._interval
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        sent = [each.sent() if isinstance(each, LogRecord) else each for each in waiting]
        return [*sent, *self._hint([each for each in waiting if isinstance(each, LogRecord)])]

    def _hint(self, records: Sequence[LogRecord]) -> Sequence[Hint]:
        """Return a hint of the first infinite or NaN loss, once, as most later losses are not finite either."""
        hint = next(filter(None, map(of_loss, records)), None) if self._looks_for_hints else None
        self._looks_for_hints &= hint is None
        return [] if hint is None else [hint]

    def _keep_sending(self) -> None:
        while True:
            time.sleep(self._patience() or self._interval)
            if self._waiting and not self._patience():
                self._send()

    def _patience(self) -> float:
        """Return the seconds until waiting records must go. Each `take` begins a new interval."""
        return max(0.0, self._send_at - time.monotonic())
