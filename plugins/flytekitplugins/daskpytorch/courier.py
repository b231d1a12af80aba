"""Has checkpoints brought from the agents to the vault: one at a time, and the newest next. Runs in the driver."""

from __future__ import annotations

from dataclasses import dataclass

from flytekitplugins.daskpytorch.checkpoint import CheckpointFile
from flytekitplugins.daskpytorch.messages import Fetch
from flytekitplugins.daskpytorch.roster import Peer

__all__ = ["Courier"]


@dataclass
class Courier:
    """Knows what is on its way, and what comes next."""

    _on_its_way: tuple[Peer, CheckpointFile] | None = None
    _next: tuple[Peer, CheckpointFile] | None = None

    @property
    def is_busy(self) -> bool:
        """Something is on its way."""
        return self._on_its_way is not None

    def fetch(self, peer: Peer, file: CheckpointFile) -> None:
        """Have a checkpoint brought; one that still waits for its turn is passed over."""
        if self._on_its_way is not None:
            self._next = (peer, file)
            return
        self._on_its_way = (peer, file)
        peer.send(Fetch(file))

    def note_end(self, file: CheckpointFile) -> None:
        """This one has arrived, or will not."""
        if self._on_its_way is not None and self._on_its_way[1] == file:
            self._turn()

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
