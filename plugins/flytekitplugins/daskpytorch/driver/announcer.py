"""What observers are told of a gang, and what one of them may wish: that it stops early. Runs in the driver."""

from collections.abc import Callable

from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol.observer import Observers

NOTICE_INTERVAL = 10.0
"""Seconds between two words about what is waited for."""


class Announcer:
    """Speaks for one gang."""

    stopped_early: StoppedEarlyError | None = None
    """The first such wish."""

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
        """Call this method of all observers."""
        wish = self._observers.tell(method, *args)
        self.stopped_early = self.stopped_early or wish

    def for_rank(self) -> list[bytes]:
        """Return what makes the observers' parts in rank 0, pickled."""
        return self._observers.for_rank()

    def note(self, text: str) -> None:
        """Say what has happened to the gang."""
        self.tell("noted", f"{self._name}: {text}")

    def remind(self, text: str) -> None:
        """Say what is waited for, now and then."""
        if self._now() - self._noticed_at >= NOTICE_INTERVAL:
            self._noticed_at = self._now()
            self.note(text)

    def hint(self, kind: str, text: str) -> None:
        """Say what the user may have forgotten, unless such a hint was given or none is wanted."""
        if self._hints and kind not in self._hints_given:
            self._hints_given.add(kind)
            self.note(f"{text} (A hint, given once; Gang(hints=False) for none.)")
