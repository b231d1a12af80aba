"""Ends an attempt whose ranks wait in NCCL for a rank that has returned. Runs in the driver.

With gloo, a rank that has returned closes its connections, and its peers' collectives fail. A rank with NCCL stays, as
its peers may still read its GPU's memory.
"""

from dataclasses import replace

from flytekitplugins.daskpytorch.driver.attempt import Answers, Attempt
from flytekitplugins.daskpytorch.driver.collectives import AwaitsReturned, awaits_returned
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol.failure import RankExit
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.messages import Question

LOOK_INTERVAL = 5.0
"""Seconds between two questions for the ranks' collectives."""
ANSWER_LIMIT = 2 * LOOK_INTERVAL
"""Seconds after which a look without all answers is given up: a rank inside C code cannot answer."""


class ReturnedWatch(Part):
    """Asks for the ranks' collectives from the first return on, and ends the attempt at the second equal proof."""

    def __init__(self, state: GangState) -> None:
        self._state = state

    def equip(self, job: Job) -> Job:
        self._uses_nccl = job.backend == "nccl"
        return job

    def begin(self, attempt: Attempt) -> None:
        self._look: Answers | None = None
        self._next_at: float | None = None
        self._proof: AwaitsReturned | None = None
        self._ended_by = ""
        explain = attempt.explain
        attempt.explain = lambda exit_: self._explain(explain(exit_))

    def ends(self, attempt: Attempt) -> bool | None:
        now = attempt.clock()
        if not self._uses_nccl or not attempt.results or not attempt.running:
            return None
        if self._next_at is None or self._state.blocks(Moment.HUNG):
            self._next_at, self._look = now + LOOK_INTERVAL, None
        if self._look is not None and (attempt.have_answered(self._look) or now >= self._next_at):
            return self._is_proven(attempt, self._look) or None
        if self._look is None and now >= self._next_at:
            self._look, self._next_at = attempt.ask(Question.COLLECTIVES), now + ANSWER_LIMIT
        return None

    def due(self, attempt: Attempt) -> float | None:
        return self._next_at if self._next_at is not None and attempt.running else None  # quick: asked at each message

    def _is_proven(self, attempt: Attempt, look: Answers) -> bool:
        before, self._proof = self._proof, awaits_returned(look, attempt.running)
        self._look, self._next_at = None, attempt.clock() + LOOK_INTERVAL
        if self._proof is None or self._proof != before:
            return False
        self._ended_by = self._proof.what
        attempt.hang = self._proof.rank, self._proof.what
        attempt.ask(Question.STACKS, True)  # for the log
        return True

    def _explain(self, root_failure: RankExit) -> RankExit:
        is_hang = self._ended_by and root_failure.hang is not None and root_failure.failure is None
        return replace(root_failure, left_by=self._ended_by) if is_hang else root_failure
