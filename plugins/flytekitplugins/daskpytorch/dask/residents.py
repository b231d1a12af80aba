"""The workers that stay for many gangs, as their driver sees them: each gets its orders over one connection."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flytekitplugins.daskpytorch.driver.events import Cancelled, Event, Gone, Said
from flytekitplugins.daskpytorch.driver.listener import Listener
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.launcher import AgentLauncher, OnFailure
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder, Arrived, Failed

__all__ = ["Residents"]


@dataclass(eq=False)
class _Post:
    """A worker that was asked to stay."""

    connection: Connection | None = None
    """None until it has come."""
    waiting: list[AgentOrder] = field(default_factory=list)
    """Orders for when it comes."""
    newest: tuple[bytes, OnFailure] | None = None
    """The token of its newest order, and whom to tell that nothing came of it."""


class Residents:
    """Passes orders on to the workers that have stayed, and asks others to stay. Safe for threads."""

    def __init__(self, launcher: AgentLauncher) -> None:
        self._launcher = launcher
        self._posts: dict[str, _Post] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._token = os.urandom(32)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener = Listener(launcher.host, self._token, self._events)
        threading.Thread(target=self._serve, name="daskpytorch-residents", daemon=True).start()

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Have agents started; `on_failure(worker, error)` is called for one that could not be."""
        with self._lock:
            strangers = [order.worker for order in orders if order.worker not in self._posts]
            for order in orders:
                post = self._posts.setdefault(order.worker, _Post())
                post.newest = (order.token, on_failure)
                self._pass_on(post, order)
        self._launcher.launch([self._invitation(worker) for worker in strangers], self._note_failure)

    def close(self) -> None:
        """Let all go, also those that have just been asked."""
        self._listener.close()
        with self._lock:
            self._is_closed = True
        self._launcher.close()
        self._events.put(Cancelled())

    def _invitation(self, worker: str) -> AgentOrder:
        return AgentOrder(worker=worker, driver=self._listener.address, num_ranks=0, token=self._token)

    @staticmethod
    def _pass_on(post: _Post, order: AgentOrder) -> None:
        if post.connection is None:
            post.waiting.append(order)
            return
        try:
            post.connection.send(order)
        except OSError:  # it has gone, which arrives as an event
            return

    # ---- what the workers say

    def _serve(self) -> None:
        while not isinstance(event := self._events.get(), Cancelled):
            self._hear(event)
        with self._lock:  # nobody sends meanwhile
            self._listener.end()

    def _hear(self, event: Event) -> None:
        match event:
            case Gone(connection):
                self._note_loss(connection)
                with self._lock:
                    connection.close()
            case Said(connection, Arrived(worker)):
                self._welcome(worker, connection)
            case Said(connection, Failed() as failed):
                self._note_refusal(connection, failed)

    def _welcome(self, worker: str, connection: Connection) -> None:
        with self._lock:
            post = self._posts.setdefault(worker, _Post())
            post.connection, waiting, post.waiting = connection, post.waiting, []
            for order in waiting:
                self._pass_on(post, order)

    def _note_loss(self, connection: Connection) -> None:
        if (worker := self._worker_of(connection)) is not None:
            self._note_failure(worker, WorkerLostError("the worker was lost"))

    def _note_refusal(self, connection: Connection, failed: Failed) -> None:
        if (worker := self._worker_of(connection)) is None:
            return
        with self._lock:
            newest = self._posts[worker].newest
        if newest is not None and newest[0] == failed.token:
            newest[1](worker, RuntimeError(failed.text))

    def _note_failure(self, worker: str, error: Exception) -> None:
        """The worker does not stay (any more)."""
        with self._lock:
            post = self._posts.pop(worker, None)
            if self._is_closed:
                return
        if post is not None and post.newest is not None:
            post.newest[1](worker, error)

    def _worker_of(self, connection: Connection) -> str | None:
        with self._lock:
            return next((worker for worker, post in self._posts.items() if post.connection is connection), None)
