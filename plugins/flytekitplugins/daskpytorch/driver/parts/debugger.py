"""Debugged ranks, and the driver's terminal, which attaches to one of them at a time. Runs in the driver.

A rank that stops in pdb waits for a terminal at a socket of its machine.
"""

import contextlib
import termios
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.debugging import Debugging, has_terminal, talk
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Debugged

END_TIME = 1.0
_terminal = threading.Lock()
"""Held while a rank of any gang has this process's terminal."""


class Debugger(Part):
    takes = (Debugged,)
    _attempt: Attempt

    def __init__(self, state: GangState, debugging: Debugging) -> None:
        self._debugging = debugging
        self._attach_timeout = state.request.settings.attach_timeout
        self._observers = state.observers
        self._post = state.agents.post
        self._debugged: dict[int, Debugged] = {}
        self._is_talking = False

    def equip(self, job: Job) -> Job:
        return replace(job, debugging=self._debugging)

    def begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._debugged.clear()

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        match report:
            case Debugged(state=""):
                attempt.excuse()
                self._debugged.pop(rank, None)
            case Debugged():
                self._debugged[rank] = report
                if report.needs_terminal:
                    self._open(rank, report)

    def rank_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        self._debugged.pop(rank, None)

    def blocks(self, moment: Moment) -> bool:
        return moment in (Moment.LATE, Moment.HUNG) and bool(self._debugged)

    def end(self) -> None:
        """Wait until the terminal is as it was, after the ranks' ends."""
        self._debugged.clear()
        if self._is_talking and _terminal.acquire(timeout=END_TIME):
            _terminal.release()

    def _open(self, rank: int, prompt: Debugged) -> None:
        if self._debugging.has_terminal and prompt.folder is not None and Path(prompt.folder).exists():
            threading.Thread(
                target=self._talk, args=(rank, prompt, prompt.folder), name="daskpytorch-terminal", daemon=True
            ).start()
        else:
            self._tell_user(rank, prompt)

    def _talk(self, rank: int, prompt: Debugged, folder: str) -> None:
        with _terminal:
            if self._debugged.get(rank) is not prompt:
                return
            if not has_terminal():
                self._post(partial(self._tell_user, rank, prompt))
                return
            self._is_talking, is_shown = True, threading.Event()
            self._post(partial(self._observers.tell, journal.Prompted(rank=rank)))
            self._post(is_shown.set)
            is_shown.wait(END_TIME)  # other lines must not mix with pdb's
            has_left = False
            with contextlib.suppress(OSError, termios.error):  # the rank has ended, or has another terminal
                has_left = talk(Path(folder), rank)
            self._is_talking = False
            self._post(partial(self._observers.tell, journal.Prompted(rank=None)))
        if has_left:
            self._post(partial(self._tell_user, rank, prompt))

    def _tell_user(self, rank: int, prompt: Debugged) -> None:
        places = self._attempt.places
        self._observers.note(
            f"rank {rank} ({places[rank][1].host}) {prompt.state}, and waits up to {self._attach_timeout:g} s for a "
            f"terminal. The gang holds its {len(places)} ranks meanwhile. "
            f"Attach on that machine by: daskpytorch attach {rank}"
        )
