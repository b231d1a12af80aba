"""Debugged ranks, and the driver's terminal, which attaches to one of them at a time. Runs in the driver.

A rank that stops in pdb waits for a terminal at a socket of its machine. On the driver's own machine the driver
attaches its terminal there, as the command `daskpytorch attach` does with another one.
"""

import contextlib
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol.debugging import DRIVER, Debugging, connect, has_terminal, talk
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.reports import AtPrompt, LeftPrompt, Noted

END_TIME = 1.0
"""Timeout, in seconds, for the terminal to be given back at the gang's end."""
_terminal = threading.Lock()
"""Lock of this process's terminal, held while a rank of any gang has the terminal."""


class Debugger(Part):
    """The debugged ranks of one gang."""

    takes = (AtPrompt, LeftPrompt, Noted)
    _attempt: Attempt
    """The current attempt. Unset until the first one begins."""

    def __init__(self, state: GangState, debugging: Debugging) -> None:
        self._debugging = debugging
        self._observers = state.observers
        self._post = state.agents.post
        self._debugged: dict[int, AtPrompt | None] = {}
        """Ranks in a debugger, with their newest prompt. None: the rank waits for an editor, or has one."""
        self._waiting: dict[int, socket.socket] = {}
        """Connections to ranks that wait until the driver's terminal is free."""
        self._talking: tuple[socket.socket, threading.Thread] | None = None
        """Connection to the rank that has the terminal, and the thread that serves it."""

    def equip(self, job: Job) -> Job:
        """Give ranks the settings for debuggers."""
        return replace(job, debugging=self._debugging)

    def begin(self, attempt: Attempt) -> None:
        """Forget the debuggers of earlier attempts."""
        self._attempt = attempt
        self._debugged.clear()
        self._close_waiting()

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        """Record that a rank's debugger shows a prompt or has left it, or that the rank waits for an editor."""
        match report:
            case AtPrompt(is_attached=is_attached):
                self._debugged[rank] = report
                if not is_attached and not self._attach(rank, report):
                    self._tell_user(rank, report)
            case LeftPrompt(steps):
                attempt.excuse()
                if not steps:
                    self._debugged.pop(rank, None)
            case Noted(text, is_debugged):
                if is_debugged:
                    self._debugged[rank] = None
                self._observers.note(f"rank {rank} {text}")

    def rank_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        """Forget the rank's debugger."""
        self._debugged.pop(rank, None)

    def blocks(self, moment: Moment) -> bool:
        """Count no rank as hung or late while one is debugged."""
        return moment in (Moment.LATE, Moment.HUNG) and bool(self._debugged)

    def orders(self, now: float) -> None:
        """Give the terminal to the next rank, if it is free."""
        if self._talking is None and self._waiting and has_terminal() and _terminal.acquire(blocking=False):
            rank = next(iter(self._waiting))
            connection = self._waiting.pop(rank)
            thread = threading.Thread(
                target=self._talk, args=(connection, rank), name="daskpytorch-terminal", daemon=True
            )
            self._talking = connection, thread
            self._observers.tell("debugging", rank)
            thread.start()

    def end(self) -> None:
        """Take the terminal from the ranks, at the gang's end."""
        self._close_waiting()
        if self._talking is not None:
            connection, thread = self._talking
            with contextlib.suppress(OSError):  # the thread has closed it
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(END_TIME)
            self._free(connection)

    def _close_waiting(self) -> None:
        for connection in self._waiting.values():
            connection.close()
        self._waiting.clear()

    def _attach(self, rank: int, prompt: AtPrompt) -> bool:
        """Connect the driver's terminal to a rank on this machine, and return True. False: the rank runs elsewhere."""
        if self._debugging.has_terminal and prompt.folder is not None:
            with contextlib.suppress(OSError):
                self._waiting[rank] = connect(Path(prompt.folder), rank, DRIVER)
                return True
        return False

    def _talk(self, connection: socket.socket, rank: int) -> None:
        """Serve the terminal to a rank, in a thread of its own."""
        has_left = True
        try:
            has_left = talk(connection)
        finally:
            connection.close()
            self._post(partial(self._free, connection, rank if has_left else None))

    def _free(self, connection: socket.socket, left: int | None = None) -> None:
        """Record that the terminal is free. `left`: the rank that the user has left at its prompt, by Ctrl-]."""
        if self._talking is None or self._talking[0] is not connection:
            return
        self._talking = None
        self._observers.tell("debugging", None)
        _terminal.release()
        if left is not None and (prompt := self._debugged.get(left)) is not None:
            self._tell_user(left, prompt)

    def _tell_user(self, rank: int, prompt: AtPrompt) -> None:
        places = self._attempt.places
        num_gpus = sum(place.gpu is not None for place, _ in places.values())
        held = f"{len(places)} ranks" + (f" and {num_gpus} GPUs" if num_gpus else "")
        self._observers.note(
            f"rank {rank} ({places[rank][1].host}) {prompt.state}, and waits up to {prompt.timeout:g} s for a "
            f"terminal. The gang holds its {held} meanwhile. Attach on that machine by: daskpytorch attach {rank}"
        )
