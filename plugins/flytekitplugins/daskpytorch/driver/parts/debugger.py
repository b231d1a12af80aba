"""Debugged ranks: they do not count as hung, and the user hears how to attach a terminal. Runs in the driver."""

from dataclasses import replace

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Debugged


class Debugger(Part):
    takes = (Debugged,)

    def __init__(self, state: GangState, debugging: Debugging) -> None:
        self._debugging = debugging
        self._attach_timeout = state.request.settings.attach_timeout
        self._observers = state.observers
        self._debugged: set[int] = set()

    def equip(self, job: Job) -> Job:
        return replace(job, debugging=self._debugging)

    def begin(self, attempt: Attempt) -> None:
        self._debugged.clear()

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        match report:
            case Debugged(state=""):
                attempt.excuse()
                self._debugged.discard(rank)
            case Debugged():
                self._debugged.add(rank)
                if report.needs_terminal:
                    self._tell_user(attempt, rank, report.state)

    def rank_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        self._debugged.discard(rank)

    def blocks(self, moment: Moment) -> bool:
        return moment in (Moment.LATE, Moment.HUNG) and bool(self._debugged)

    def _tell_user(self, attempt: Attempt, rank: int, why: str) -> None:
        places = attempt.places
        self._observers.note(
            f"rank {rank} ({places[rank][1].host}) {why}, and waits up to {self._attach_timeout:g} s for a "
            f"terminal. The gang holds its {len(places)} ranks meanwhile. "
            f"Attach on that machine by: daskpytorch attach {rank}"
        )
