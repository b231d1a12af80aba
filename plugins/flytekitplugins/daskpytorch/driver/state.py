"""State of one gang, with handlers for messages and reports. Runs in the driver, in the gang's thread.

Handlers only record messages of agents and reports of ranks. Only `Brain` decides and acts, so equal rules apply to
every event at any time. The queue between `Listener` and `Supervisor` holds bound calls of the handlers.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, assert_never

from flytekitplugins.daskpytorch.driver.agents import Agents, Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.committer import Committed, Committer
from flytekitplugins.daskpytorch.driver.evaluation import Evaluator
from flytekitplugins.daskpytorch.driver.goodput import Accountant
from flytekitplugins.daskpytorch.driver.preemption import Deadlines, StopRequest
from flytekitplugins.daskpytorch.driver.received import Part, ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.saving import Saving
from flytekitplugins.daskpytorch.driver.terminals import Terminals
from flytekitplugins.daskpytorch.protocol import framing, messages, orders, reports
from flytekitplugins.daskpytorch.protocol.attaching import Awaits, FromTerminal, Shown
from flytekitplugins.daskpytorch.protocol.calls import CallEnded, Halted
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import AgentLauncher
from flytekitplugins.daskpytorch.protocol.observer import Observer, Observers
from flytekitplugins.daskpytorch.protocol.sharded import WrittenShards
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.driver.supervisor import Supervisor

SCHEDULER_LOST = "the Dask scheduler was lost"


class GangState:
    """State of one gang across all attempts."""

    attempt: Attempt | None = None
    """The current attempt. None while the gang gathers its workers."""
    stop_request: StopRequest | None = None
    """Request that the gang save a checkpoint and end. None without a request."""
    is_cancelled = False
    """True once the caller has cancelled the gang."""
    lost_at: float | None = None
    """Time at which the attempt last lost a worker, in seconds on the driver's clock. None without losses."""

    def __init__(
        self,
        request: Request,
        agents: Agents,
        committer: Committer,
        observers: Observers,
        received: ReceivedResults,
        *,
        asked_at: float,
        make: Callable[[Request, AgentLauncher, Sequence[Observer]], "Supervisor"],
        clock: Callable[[], float] = time.monotonic,
        running_clock: Callable[[], float] | None = None,
    ) -> None:
        """Begin a gang whose agents have not connected yet.

        Args:
            request: The gang's request.
            agents: The gang's agents.
            committer: Commits sharded checkpoints, and holds the vault of whole checkpoints.
            observers: The gang's observers.
            received: Results and return values of the ranks.
            asked_at: Time of the user's request, in seconds on `clock`.
            make: Makes the supervisor of an evaluation's gang.
            clock: Returns seconds, and never goes back.
            running_clock: Clock of all deadlines, which may leave out times in which the driver was suspended. None for
                `clock`.
        """
        self.request = request
        self.id = request.training.id if request.training is not None else secrets.token_hex(8)
        self.calls = request.calls
        """Calls of a gang that stays. None in a gang of one call."""
        self.agents = agents
        self.received = received
        self.asked_at = asked_at
        self.now = running_clock or clock
        self.deadlines = Deadlines(request.settings.grace_period)
        self.accountant = Accountant(asked_at, clock)
        self.observers = observers
        self.evaluator = Evaluator(request, agents, committer, observers, make, self.now)
        self.terminals = Terminals(request.name, self.id, agents.launcher, observers, self.now)
        self.saving = Saving(committer, self.accountant, self.observers, self.evaluator)
        self.evaluator.on_end = self._tell_metrics
        self._broken: dict[str, str] = {}
        """Worker -> traceback of its failed agent, until the agent's connection ends."""

    @property
    def at_prompt(self) -> int | None:
        """Rank whose debugger uses the terminal, or None."""
        return self.attempt.prompts.shown if self.attempt is not None else None

    @property
    def has_lost_scheduler(self) -> bool:
        """True if the Dask scheduler is gone. All workers end then, and may report that before this value changes."""
        return not self.agents.launcher.is_connected()

    # ---- from the user's side

    def cancel(self) -> None:
        """Note that the caller has cancelled the gang."""
        self.is_cancelled = True
        self.evaluator.close()

    def interrupt(self) -> None:
        """Forward Ctrl-C to the rank whose debugger uses the terminal."""
        if self.attempt is not None and self.attempt.prompts.shown is not None:
            self.attempt.tell(messages.Tell(orders.Interrupt(self.attempt.prompts.shown)))

    def request_stop(
        self, reason: str, *, ends_gang: bool = True, is_workers: bool = False, is_awaited: bool = False
    ) -> None:
        """Request that the gang save a checkpoint, then end or continue without a departing worker.

        A second request only counts if the first does not end the gang, but the second does.

        Args:
            reason: Reason for the user.
            ends_gang: False if the gang continues without the departing worker.
            is_workers: True if a departing worker requests the stop.
            is_awaited: True if a user waits for the end.
        """
        if ends_gang:
            self.evaluator.close()
        if self.stop_request is None:
            self.observers.note(f"{reason}: saving a checkpoint and ending")
            whose = {"is_workers": is_workers, "is_awaited": is_awaited}
            self.stop_request = StopRequest(reason, ends_gang, self.deadlines, **whose, clock=self.now)
        elif ends_gang and not self.stop_request.ends_gang:
            self.stop_request.reason, self.stop_request.ends_gang = reason, True
            self.stop_request.is_workers = is_workers

    # ---- from agents

    def hear_terminal(self, connection: Connection, message: FromTerminal) -> None:
        """Follow a message of a terminal that attaches to a rank."""
        self.terminals.hear(self.attempt, connection, message)

    def hear(self, connection: Connection, message: messages.FromAgent) -> None:  # noqa: C901 - a case for each message
        """Record an agent's message."""
        if isinstance(message, messages.Hello):
            self._welcome(message, connection)
            return
        if (peer := self.agents.find(connection)) is None:  # the agent was given up
            return
        match message:
            case messages.Exited(rank):
                if (attempt := self._attempt_of(peer, rank)) is not None:
                    attempt.note_exit(message)
            case messages.Broken(text):
                self._broken[peer.node.worker] = text
            case messages.Leaving():
                self._note_leaving(peer)
            case messages.Stacks(rank, text):
                if self.attempt is not None:
                    self.attempt.stacks[rank] = text
            case messages.Lines(rank, lines):
                self.observers.tell("wrote", rank, lines)
            case messages.Sent():
                self.saving.note_sent(peer, self.attempt, message)
            case messages.Reported():
                pass  # the listener unpacks reports for `hear_of_rank`
            case _:
                assert_never(message)

    def _welcome(self, hello: messages.Hello, connection: Connection) -> None:
        if (displaced := self.agents.welcome(hello, connection)) is not None:
            self._note_loss(displaced)

    def note_end(self, connection: Connection) -> None:
        """Record the end of an agent's connection, and close the connection.

        Runs in the thread that sends messages to agents. If another thread closed connections, a message could go to
        another connection with the same descriptor.
        """
        connection.close()
        self.terminals.forget(self.attempt, connection)
        self._lose(connection)

    def look_for_silence(self) -> None:
        """Give up agents that have been silent for 15 seconds (`agents.MAX_SILENCE`). Answer terminals on time."""
        self.terminals.answer(self.attempt)
        for peer in self.agents.silent():
            self.give_up(peer)

    def give_up(self, peer: Peer) -> None:
        """Count a silent agent as lost, though its process may only be suspended."""
        self._lose(peer.connection)
        self.agents.give_up_silent(peer)

    def _lose(self, connection: Connection) -> None:
        if (peer := self.agents.forget(connection)) is not None:
            self._note_loss(peer)

    def _note_loss(self, peer: Peer) -> None:
        worker = peer.node.worker
        traceback = self._broken.pop(worker, None)
        if traceback is not None:
            self.agents.note_broken(worker, traceback)
        if self.attempt is not None and worker in self.attempt.ranks_of:
            self.attempt.lose(worker, traceback)
            self.lost_at = self.now()
        self.saving.fetches.forget(peer)

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

    def hear_beats(self, newest: Mapping[Connection, bytes]) -> None:
        """Record the ranks' signs of life from their agents' newest heartbeats."""
        for connection, beat in newest.items():
            if (peer := self.agents.find(connection)) is not None:
                for rank, num_moves in framing.moves_in(beat):
                    if (attempt := self._attempt_of(peer, rank)) is not None:
                        attempt.note_moves(rank, num_moves)

    def hear_of_rank(self, connection: Connection, rank: int, said: Iterable[reports.ShortReport | Part]) -> None:
        """Record a rank's reports, in order. Ignore exited ranks and ranks outside the attempt."""
        if (peer := self.agents.find(connection)) is None or (attempt := self._attempt_of(peer, rank)) is None:
            return
        for report in said:
            self._take_report(peer, attempt, rank, report)

    def _attempt_of(self, peer: Peer, rank: int) -> Attempt | None:
        """Return the current attempt if this agent carries the rank and the rank has not exited. Else return None."""
        attempt = self.attempt
        if attempt is None or rank in attempt.exits or rank not in attempt.ranks_of.get(peer.node.worker, ()):
            return None
        return attempt

    def _take_report(  # noqa: C901, PLR0912 - a case for each report
        self, peer: Peer, attempt: Attempt, rank: int, report: reports.ShortReport | Part
    ) -> None:
        match report:
            case LogRecord(step=step):
                attempt.steps[rank] = step
                self.observers.tell("logged", report)
            case RankUsage() | reports.Spent() | reports.GoodputWanted():
                self._account_for(peer, attempt, rank, report)
            case reports.Hint() | reports.Noted():
                self._tell_user(attempt, rank, report)
            case CheckpointFile():
                self.saving.note_saved(peer, attempt, rank, report)
            case WrittenShards() | reports.ShardsNotWritten():
                self.saving.note_shards(attempt, rank, report)
            case reports.Wanted():
                attempt.wanted.append((peer, rank, report))
            case Part():
                self.received.add(report)
            case reports.AtPrompt():
                attempt.prompts.ask(rank)
            case reports.LeftPrompt(steps):
                self._note_left_prompt(attempt, rank, steps=steps)
            case Awaits() | Shown():
                self.terminals.note(attempt, rank, report)
            case reports.Ready():
                self._note_ready(attempt, rank)
            case reports.Held(num_calls, heeds_signal):
                attempt.held[rank] = num_calls
                if heeds_signal and self.stop_request is not None:
                    self.stop_request.heeding.add(rank)
            case reports.Located():
                attempt.note_located(rank, report)
                self.terminals.note_located(attempt, rank, report)
            case reports.Remembered():
                attempt.note_remembered(rank, report)
            case CallEnded():
                if self.calls is not None:
                    self.calls.note_ended(attempt, rank, report, self.received)
            case Halted():
                if self.calls is not None:
                    self.calls.note_halted(rank, report)
            case reports.Returned(value, stopped_early):
                attempt.results[rank] = value
                attempt.has_stopped_early |= stopped_early
            case Failure():
                attempt.note_failure(rank, report)
            case _:
                assert_never(report)

    def _tell_user(self, attempt: Attempt, rank: int, said: reports.Hint | reports.Noted) -> None:
        match said:
            case reports.Hint(kind, text):
                self.observers.hint(kind, f"rank {rank} {text}")
            case reports.Noted(text, is_debugged):
                if is_debugged:
                    attempt.prompts.debugged.add(rank)
                self.observers.note(f"rank {rank} {text}")

    def _note_left_prompt(self, attempt: Attempt, rank: int, *, steps: bool) -> None:
        attempt.prompts.leave(rank, steps=steps)
        attempt.note_sign_of_life()
        self.terminals.note_left(rank, steps=steps)

    def _account_for(
        self, peer: Peer, attempt: Attempt, rank: int, said: RankUsage | reports.Spent | reports.GoodputWanted
    ) -> None:
        """Note a rank's usage or account of its time, or answer its request for the goodput.

        While rank 0 trains, other ranks' new requests wait for rank 0's next report. Equal request numbers get equal
        answers.
        """
        if isinstance(said, reports.GoodputWanted):
            if rank and self.accountant.is_training and said.number not in attempt.accounts:
                attempt.accounts_wanted.append((peer, said.number))
            else:
                self._tell_account(peer, attempt, said.number)
            return
        if isinstance(said, RankUsage):
            self.observers.tell("used", said)
        if rank == 0:
            self.accountant.hear(said)
            wanted, attempt.accounts_wanted = attempt.accounts_wanted, []
            for other, number in wanted:
                self._tell_account(other, attempt, number)

    def _tell_account(self, peer: Peer, attempt: Attempt, number: int) -> None:
        account = attempt.accounts.setdefault(number, self.accountant.goodput())
        peer.send(messages.Tell(orders.Accounted(number, account)))

    def _note_ready(self, attempt: Attempt, rank: int) -> None:
        attempt.note_ready(rank)
        if rank == 0:
            self.accountant.enter("training")
            self._tell_trackers()
        if attempt.is_formed:
            began_at = self.asked_at if attempt.number == 0 else attempt.began_at
            self.observers.tell("formed", self.now() - began_at)

    def awaits_evaluations(self, attempt: Attempt) -> bool:
        """Return True while the end of an attempt whose functions have all returned waits for evaluations."""
        if attempt.delivered_at is None:
            attempt.delivered_at = self.now()
        is_awaited = self.evaluator.is_awaited(attempt.delivered_at, more_come=self.saving.is_busy)
        return is_awaited and not attempt.has_stopped_early

    def _tell_metrics(self) -> None:
        """Tell trackers, observers and ranks about an evaluation's metrics, and the checkpoints that are kept now."""
        self._tell_trackers()
        self.saving.tell_kept(self.attempt)

    def _tell_trackers(self) -> None:
        """Send the metrics of evaluations to rank 0's trackers, or keep them until rank 0 is ready."""
        attempt = self.attempt
        if attempt is not None and 0 in attempt.ready and 0 not in attempt.exits:
            records, self.evaluator.records = self.evaluator.records, []
            if records and attempt.has_observers:
                attempt.tell(messages.Tell(orders.Evaluated(tuple(records))))

    # ---- from threads that store checkpoints

    def note_upload(self, file: CheckpointFile, error: Exception | None) -> None:
        """Record that a checkpoint has arrived in the driver, or that its transfer failed with this error."""
        self.saving.note_kept(self.attempt, file, error)

    def note_commit(self, commit: Committed) -> None:
        """Record that a sharded checkpoint was committed, or that its commit failed."""
        self.saving.note_committed(self.attempt, commit)


def is_late(state: GangState, attempt: Attempt) -> bool:
    """Return True if ranks have not joined the process group in time."""
    is_due = state.now() >= attempt.began_at + state.request.settings.start_timeout
    return is_due and not attempt.is_formed and not attempt.prompts.debugged


def is_complete(state: GangState, attempt: Attempt) -> bool:
    """Return True if the ended attempt has delivered its results, and neither failed nor was stopped before."""
    is_unfinished = attempt.has_stopped_early or attempt.is_failing or state.is_cancelled
    if state.stop_request is not None:
        is_cut = attempt.is_program and any(exit_.stopped for exit_ in attempt.exits.values())
        is_unfinished |= is_cut or state.stop_request.has_signalled or state.calls is not None
    return attempt.has_delivered and not is_unfinished
