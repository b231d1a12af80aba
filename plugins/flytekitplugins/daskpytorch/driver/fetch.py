"""Has checkpoints brought from the agents' nodes: one at a time, and the newest next. Runs in the driver."""

from __future__ import annotations

from dataclasses import dataclass

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.messages import Fetch

__all__ = ["Fetches"]


MAX_RETRIES = 2
"""How often a checkpoint is asked for again whose connection broke."""


@dataclass
class Fetches:
    """Knows what is on its way, and what comes next."""

    _on_its_way: tuple[Peer, CheckpointFile] | None = None
    _next: tuple[Peer, CheckpointFile] | None = None
    _num_retries: int = 0
    """Of what is on its way."""

    @property
    def is_busy(self) -> bool:
        """Something is on its way."""
        return self._on_its_way is not None

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        """Have a checkpoint brought; one that still waits for its turn is passed over."""
        if self._on_its_way is not None:
            self._next = (peer, file)
            return
        self._on_its_way, self._num_retries = (peer, file), 0
        peer.send(Fetch(file))

    def note_end(self, file: CheckpointFile) -> None:
        """This one has arrived."""
        if self._on_its_way is not None and self._on_its_way[1] == file:
            self._turn()

    def note_failure(self, file: CheckpointFile, *, is_worth_a_retry: bool) -> bool:
        """This one has not arrived; whether it will not, which is said once."""
        if self._on_its_way is None or self._on_its_way[1] != file:
            return False
        if is_worth_a_retry and self._next is None and self._num_retries < MAX_RETRIES:
            self._num_retries += 1
            self._on_its_way[0].send(Fetch(file))
            return False
        self._turn()
        return True

    def forget(self, peer: Peer) -> None:
        """An agent has gone, and what it was to bring."""
        if self._next is not None and self._next[0] is peer:
            self._next = None
        if self._on_its_way is not None and self._on_its_way[0] is peer:
            self._turn()

    def clear(self) -> None:
        """Expect nothing more."""
        self._on_its_way = self._next = None

    def _turn(self) -> None:
        self._on_its_way, waiting, self._next = None, self._next, None
        if waiting is not None:
            self.fetch(*waiting)
