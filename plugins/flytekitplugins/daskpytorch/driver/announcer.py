"""Passes a gang's events to its observers, which may stop the gang early. Runs in the driver."""

from collections.abc import Callable

from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observers

NOTICE_INTERVAL = 10.0
"""Minimum number of seconds between two reminders that the gang waits."""


class Announcer:
    """Passes the events of one gang to its observers."""

    stopped_early: StoppedEarlyError | None = None
    """First request of an observer to stop the gang early. None: no request."""

    def __init__(
        self, name: str, observers: Observers, *, hints: bool, began_at: float, clock: Callable[[], float]
    ) -> None:
        self._name = name.rpartition(".")[2]
        self._observers = observers
        self._now = clock
        self._hints = hints
        self._hints_given: set[str] = set()
        self._noticed_at = began_at

    def tell(self, method: str, *args: object) -> None:
        """Call this method of all observers, and record the first request to stop early."""
        wish = self._observers.tell(method, *args)
        self.stopped_early = self.stopped_early or wish

    def for_rank(self) -> list[bytes]:
        """Return the pickled factories of the observers' parts in rank 0."""
        return self._observers.for_rank()

    def note(self, text: str) -> None:
        """Send observers a line about an event of the gang."""
        self.tell("noted", f"{self._name}: {text}")

    def remind(self, text: str) -> None:
        """Send observers a line about the gang's wait, at most once per `NOTICE_INTERVAL`."""
        if self._now() - self._noticed_at >= NOTICE_INTERVAL:
            self._noticed_at = self._now()
            self.note(text)

    def hint(self, kind: str, text: str) -> None:
        """Send observers a hint for the user, once for each kind, unless `Gang(hints=False)`."""
        if self._hints and kind not in self._hints_given:
            self._hints_given.add(kind)
            self.note(f"{text} (A hint, given once; Gang(hints=False) for none.)")
