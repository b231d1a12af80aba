"""Record of one gang, with handlers for messages and reports. Runs in the driver, in the gang's thread.

Handlers only record, or pass on to the part that takes the type. The queue between `Listener` and `Supervisor` holds
bound calls of the handlers.
"""

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from signal import SIGINT, SIGTERM

from flytekitplugins.daskpytorch.driver.agents import Agents, Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Moment, Part, Stage
from flytekitplugins.daskpytorch.driver.received import ReceivedPiece, ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Answer
from flytekitplugins.daskpytorch.protocol.observer import Observers
from flytekitplugins.daskpytorch.records import LogRecord

SIGNALS = (KeyboardInterrupt.__name__, SystemExit.__name__)


class Deadlines:
    """Seconds for the parts of a gang's end.

    After SIGTERM the sum is at most 1.5 grace periods. It is more only if the driver has to end ranks whose trackers
    close slowly (`close`).

    SIGTERM ── `grace_period` ──▶ ranks have stopped ── `storage` ──▶ their checkpoint is stored ── `results` ──▶ end
    """

    def __init__(self, grace_period: float) -> None:
        self.grace_period = grace_period
        self.unheeded = grace_period / 4
        """Time for ranks to stop if no rank has ever called `should_stop`."""
        self.storage = grace_period * 0.3
        self.cancelled = min(1.0, grace_period / 20)
        """Time for the newest checkpoint of a cancelled gang to reach storage. Short, as a user may wait."""
        self.results = grace_period / 10
        self.stop = min(1.5, grace_period / 10)
        """Time for ranks to end after the stop order. Exit functions of failed ranks have a part of it
        (`rank.main.EXIT_TIME`).
        """
        self.close = grace_period / 2
        """Additional time for rank 0 after the last attempt's stop order, if it has observers to close."""
        self.all_stopped = grace_period * 0.75
        """Time for all ranks' exits, before silent nodes count as lost. Longer than every rank's own timeout."""
        self.dismiss = grace_period / 4


@dataclass
class StopRequest:
    reason: str
    ends_gang: bool
    deadline: float
    """Time on the driver's clock at which the driver ends ranks that have not stopped."""
    is_workers: bool = False
    is_awaited: bool = False
    """A user waits for the end. If no rank has ever called `should_stop`, all ranks end at once."""
    heeding: set[int] = field(default_factory=set, init=False)
    """Ranks whose program handles the request's signal."""
    has_signalled: bool = field(default=False, init=False)
    """The driver has passed the signal to the ranks' program, which ends itself within the grace period."""

    @property
    def signal(self) -> int:
        """The request's signal, as far as programs see it."""
        return SIGINT if self.is_awaited else SIGTERM

    def explains(self, attempt: Attempt) -> bool:
        """Return True if the attempt has ended by the request: no rank has failed by itself, except by the signal."""
        if not attempt.has_independent_failure or (root := attempt.root_failure()).is_infrastructure:
            return True
        return self.has_signalled and (root.failure is None or root.failure.type_name in SIGNALS)


SCHEDULER_LOST = "the Dask scheduler was lost"


class GangState:
    number = 0
    num_after_memory = 0
    attempt: Attempt | None = None
    is_training = False
    """True while the ranks of the attempt are neither told to stop nor all ended."""
    stop_request: StopRequest | None = None
    is_cancelled = False
    parts: Sequence[Part] = ()

    def __init__(
        self,
        request: Request,
        agents: Agents,
        observers: Observers,
        received: ReceivedResults,
        *,
        asked_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` serves all deadlines, may leave out times in which the driver was suspended, and never goes back."""
        self.request = request
        self.id = request.training.id if request.training is not None else secrets.token_hex(8)
        self.agents = agents
        self.received = received
        self.asked_at = asked_at
        self.now = clock
        self.deadlines = Deadlines(request.settings.grace_period)
        self.observers = observers
        self._takers: dict[type, list[Part]] = {}

    def use(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        kinds = {kind for part in parts for kind in part.takes}
        self._takers = {kind: [part for part in parts if kind in part.takes] for kind in kinds}

    @property
    def has_lost_scheduler(self) -> bool:
        """All workers end when the Dask scheduler is gone, and may report that before this value changes."""
        return not self.agents.launcher.is_connected()

    # ---- what parts ask

    @property
    def training(self) -> Attempt | None:
        is_there = self.attempt is not None and self.is_training and not self.attempt.is_over
        return self.attempt if is_there else None

    def blocks(self, moment: Moment) -> bool:
        return any(part.blocks(moment) for part in self.parts)

    # ---- what the core tells

    def enter(self, stage: Stage) -> None:
        self.is_training &= stage == "training"
        for part in self.parts:
            part.enter(stage)

    def begin(self, attempt: Attempt) -> None:
        self.attempt, self.is_training = attempt, True
        self.stop_request = None
        attempt.on_over = functools.partial(self._note_over, attempt)
        for part in self.parts:
            part.begin(attempt)

    def _note_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        for part in self.parts:
            part.rank_over(attempt, rank, failure)

    def newest_step(self) -> int | None:
        steps = [part.newest_step() for part in self.parts]
        return max((step for step in steps if step is not None), default=None)

    # ---- from the user's side

    def cancel(self) -> None:
        self.is_cancelled = True
        for part in self.parts:
            part.close()

    def request_stop(
        self, reason: str, *, ends_gang: bool = True, is_workers: bool = False, is_awaited: bool = False
    ) -> None:
        """Request that the gang save a checkpoint, then end or continue without a departing worker.

        A second request only counts if the first does not end the gang, but the second does.
        """
        for part in self.parts if ends_gang else ():
            part.close()
        if self.stop_request is None:
            self.observers.note(f"{reason}: saving a checkpoint and ending")
            deadline = self.now() + self.deadlines.grace_period
            self.stop_request = StopRequest(reason, ends_gang, deadline, is_workers, is_awaited)
        elif ends_gang and not self.stop_request.ends_gang:
            self.stop_request.reason, self.stop_request.ends_gang = reason, True
            self.stop_request.is_workers = is_workers

    # ---- from agents

    def hear(self, connection: Connection, message: messages.FromAgent) -> None:
        if isinstance(message, messages.Hello):
            if (displaced := self.agents.welcome(message, connection)) is not None:
                self._note_loss(displaced)
            return
        if (peer := self.agents.find(connection)) is None:  # the agent was given up
            return
        match message:
            case RankExit(rank=rank):
                if (attempt := self._attempt_of(peer, rank)) is not None:
                    attempt.note_exit(message)
            case messages.Broken(text):
                peer.traceback = text
            case messages.Leaving():
                self._note_leaving(peer)
            case messages.Lines(rank, lines):
                self.observers.tell(journal.Wrote(rank=rank, lines=lines))

    def note_end(self, connection: Connection) -> None:
        """Record the end of an agent's connection, and close it.

        Runs in the thread that sends to agents. If another thread closed connections, a message could go to another
        connection with the same descriptor.
        """
        connection.close()
        self._lose(connection)

    def look_for_silence(self) -> None:
        for peer in self.agents.silent():
            self.give_up(peer)

    def give_up(self, peer: Peer) -> None:
        """A silent agent counts as lost, though its process may only be suspended."""
        self._lose(peer.connection)
        self.agents.give_up_silent(peer)

    def _lose(self, connection: Connection) -> None:
        if (peer := self.agents.forget(connection)) is not None:
            self._note_loss(peer)

    def _note_loss(self, peer: Peer) -> None:
        worker = peer.node.worker
        if self.attempt is not None and worker in self.attempt.ranks_of:
            self.attempt.lose(worker, peer.traceback)

    def _note_leaving(self, peer: Peer) -> None:
        self.agents.leaving.add(peer.node.worker)
        if self.attempt is None or peer.node.worker not in self.attempt.ranks_of:
            peer.send(messages.Close())
            return
        settings = self.request.settings
        may_shrink = settings.min_workers is not None and settings.max_restarts > 0
        goes_on = may_shrink and self.agents.num_nodes >= self.agents.num_least
        reason = f"the worker {peer.node.title} was told to end"
        if self.has_lost_scheduler:
            reason, goes_on = SCHEDULER_LOST, False
        self.request_stop(reason, ends_gang=not goes_on, is_workers=True)

    # ---- from ranks

    def note_beat(self, connection: Connection, beat: messages.Beat) -> None:
        if (peer := self.agents.find(connection)) is not None:
            for rank in beat.num_moves:
                if (attempt := self._attempt_of(peer, rank)) is not None:
                    self._hand_out(peer, attempt, rank, beat)

    def hear_of_rank(
        self, connection: Connection, rank: int, said: Iterable[messages.ShortReport | ReceivedPiece]
    ) -> None:
        if (peer := self.agents.find(connection)) is None or (attempt := self._attempt_of(peer, rank)) is None:
            return
        for report in said:
            self._take_report(peer, attempt, rank, report)

    def _attempt_of(self, peer: Peer, rank: int) -> Attempt | None:
        attempt = self.attempt
        if attempt is None or rank in attempt.exits or rank not in attempt.ranks_of.get(peer.node.worker, ()):
            return None
        return attempt

    def _take_report(
        self, peer: Peer, attempt: Attempt, rank: int, report: messages.ShortReport | ReceivedPiece
    ) -> None:
        match report:
            case LogRecord(step=step):
                attempt.steps[rank] = step
                self.observers.tell(journal.Logged(record=report))
            case messages.Noted(text, adapts):
                attempt.adapts |= adapts
                if text:
                    self.observers.note(f"rank {rank} {text}")
            case ReceivedPiece():
                self.received.add(report)
            case messages.Ready():
                self._note_ready(attempt, rank)
            case Answer():
                attempt.note_answer(rank, report)
            case messages.Returned(value, stopped_early):
                attempt.results[rank] = value
                attempt.has_stopped_early |= stopped_early
            case Failure():
                attempt.note_failure(rank, report)
        self._hand_out(peer, attempt, rank, report)

    def _hand_out(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        for part in self._takers.get(type(report), ()):
            part.take(peer, attempt, rank, report)

    def _note_ready(self, attempt: Attempt, rank: int) -> None:
        attempt.ready.add(rank)
        if rank == 0:
            self.enter("training")
        if attempt.is_formed:
            attempt.excuse()
            began_at = self.asked_at if attempt.number == 0 else attempt.began_at
            self.observers.tell(journal.Formed(seconds=self.now() - began_at))


def late_at(state: GangState, attempt: Attempt) -> float | None:
    is_awaited = not attempt.is_formed and not state.blocks(Moment.LATE)
    return attempt.began_at + state.request.settings.start_timeout if is_awaited else None


def is_complete(state: GangState, attempt: Attempt) -> bool:
    is_unfinished = attempt.has_stopped_early or attempt.is_failing or state.is_cancelled
    if state.stop_request is not None:
        is_cut = attempt.is_program and any(exit_.stopped for exit_ in attempt.exits.values())
        is_unfinished |= is_cut or state.stop_request.has_signalled or state.request.stays
    return attempt.has_delivered and not is_unfinished
