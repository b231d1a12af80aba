"""Decides what a gang does next: start, grow, stop, start again, give up. Runs in the driver.

The supervisor lends it ears. Handlers record what has happened and do nothing else; `decide` alone acts on it, so that
whatever happens, at whatever moment, meets the same rules. What the gang is in the middle of is a phase, which is a
method:

    _gather ──▶ _train ──▶ _end_ranks ──▶ _settle ──▶ _gather ...
       │          │                          │
       └──────────┴── results, or an error ◀─┘

What ranks save is kept in `saving`, a hang looked for by `hang_watch`, and `announcer` tells the observers.
Nothing here starts threads, waits (but for storage, at the very end) or looks at another clock than those it is given:
a test can play a whole gang's life through.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, assert_never

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.driver import events
from flytekitplugins.daskpytorch.driver.agents import Agents, Peer
from flytekitplugins.daskpytorch.driver.announcer import Announcer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.blame import AttemptFailure, FailurePolicy, error_of
from flytekitplugins.daskpytorch.driver.checkpoints import Checkpoints
from flytekitplugins.daskpytorch.driver.committer import Committer
from flytekitplugins.daskpytorch.driver.goodput import Accountant
from flytekitplugins.daskpytorch.driver.hang_detector import pulse_for
from flytekitplugins.daskpytorch.driver.hang_watch import ANSWER_TIME, HangWatch
from flytekitplugins.daskpytorch.driver.preemption import Deadlines, StopRequest
from flytekitplugins.daskpytorch.driver.received import Part, ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.saving import Saving
from flytekitplugins.daskpytorch.errors import PreemptedError, StoppedEarlyError, WorkerLostError
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.protocol import heartbeat, messages, orders, placement, reports
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.observer import Observers, Shape
from flytekitplugins.daskpytorch.protocol.orders import Job
from flytekitplugins.daskpytorch.protocol.placement import Node

BLAME_WINDOW = 0.7
"""Seconds to wait for a better cause while every failure so far reads like the loss of a peer."""
MAX_LEAVE_WAIT = 75.0
"""Seconds for the ranks to leave once all have delivered, and for observers in rank 0 to close what they have open."""
SETTLE_TIME = 0.2
"""Seconds after a loss before a gang that may be smaller goes on: losses seldom come alone."""
GROWTH_SETTLE_TIME = 1.0
"""Seconds after a newcomer before a gang stops to take it in: newcomers seldom come alone either."""
TICK = 1.0
"""Seconds between looks at what may have changed without an event."""
SCHEDULER_LOST = "the Dask scheduler was lost"
GROWS = "more workers have come"
"""The one reason to start again that is none to worry about."""


class GangCancelledError(Exception):
    """The gang was cancelled."""


Phase = Callable[[], Any]
"""Does what is due, and returns the phase that follows at once, or None to be called again when something happens."""


class Brain:
    """Sees one gang through. `take` what happens and `decide`, in turn, on one thread; not later than `patience`."""

    def __init__(
        self,
        request: Request,
        agents: Agents,
        checkpoints: Checkpoints,
        committer: Committer,
        observers: Observers,
        received: ReceivedResults,
        *,
        code: Code,
        checkpoint: CheckpointFile | None = None,
        asked_at: float,
        debugging: Debugging | None = None,
        clock: Callable[[], float] = time.monotonic,
        running_clock: Callable[[], float] | None = None,
    ) -> None:
        """Begin with gathering the workers, whose agents are on their way.

        The first attempt starts from `checkpoint`. `asked_at`, like all moments, is by the `clock`, which only goes
        forward. Deadlines are by the `running_clock`, by default the same.
        """
        self._request = request
        self._settings = request.settings
        self._deadlines = Deadlines(request.settings.grace_period)
        self._agents = agents
        self._observers = observers
        self._received = received
        self._code = code
        self._asked_at = asked_at
        self._debugging = debugging or Debugging()
        self._now = running_clock or clock
        self._num_wanted = agents.launcher.num_wanted
        self._num_least = self._settings.min_workers or self._num_wanted
        self._policy = FailurePolicy(self._settings.max_restarts)
        self._has_observers_in_rank = False
        self._accountant = Accountant(asked_at, clock)
        self._announcer = Announcer(request.name, observers, hints=self._settings.hints, began_at=asked_at, clock=clock)
        self._saving = Saving(
            checkpoints, committer, self._accountant, self._announcer, keep=self._settings.keep, newest=checkpoint
        )
        # What has happened, and was not acted on yet.
        self._broken: dict[str, str] = {}
        self._is_cancelled = False
        self._stop_request: StopRequest | None = None
        # What the gang is in the middle of.
        self._attempt: Attempt | None = None
        self._watch: HangWatch | None = None
        self._number = 0
        self._is_growing = False
        self._late: set[int] = set()
        """Ranks that did not meet the others in time."""
        self._deadline = 0.0
        self._lost_at: float | None = None
        """When the newest loss among its workers was."""
        self._settled_at = 0.0
        self._ended_at = 0.0
        self._wake_at = asked_at
        self._results: list[Any] | None = None
        self._phase: Phase = self._begin_to_gather()

    def decide(self) -> list[Any] | None:
        """Do all that follows from what has happened; the ranks' results once the gang has ended well.

        Raises:
            Exception: What ended the gang otherwise; see `Supervisor.run`.
        """
        while self._results is None and (following := self._phase()) is not None:
            self._phase = following
        if self._accountant.is_due():
            self._announcer.tell("accounted", self._accountant.goodput())
        return self._results

    def final_account(self, error: Exception | None) -> Goodput:
        """Where the time has gone, now that the gang has ended so: of a failed one what no checkpoint holds is lost."""
        self._accountant.close(is_lost=error is not None and not isinstance(error, StoppedEarlyError))
        return self._accountant.goodput()

    @property
    def patience(self) -> float:
        """Seconds until there may be something to decide though nothing happens."""
        return max(0.0, min(self._wake_at - self._now(), TICK))

    @property
    def at_prompt(self) -> int | None:
        """The rank whose debugger has the terminal."""
        return self._attempt.prompts.shown if self._attempt is not None else None

    def _wait(self, *moments: float | None) -> Phase | None:
        """Stay in this phase until something happens, or the first of these moments."""
        self._wake_at = min((moment for moment in moments if moment is not None), default=math.inf)
        return None

    # ---- what happens

    def take(self, event: events.Event) -> None:  # noqa: C901 - a case for each event
        """Record one thing that has happened."""
        match event:
            case events.Said(connection, message):
                self._hear(connection, message)
            case events.RankSaid(connection, rank, said):
                self._hear_of_rank(connection, rank, said)
            case events.Beaten(newest):
                self._hear_beats(newest)
            case events.Gone(connection):
                self._lose(connection)
            case events.NotLaunched(worker, error, launch):
                self._agents.refuse(worker, error, launch)
            case events.Uploaded(file, failure):
                self._saving.note_kept(self._attempt, file, failure)
            case events.Committed():
                self._saving.note_committed(self._attempt, event)
            case events.Preempted(reason, is_awaited):
                self._request_stop(reason, ends_gang=True, is_awaited=is_awaited)
            case events.Cancelled():
                self._is_cancelled = True
            case events.Interrupted():
                if (debugged := self.at_prompt) is not None:
                    self._gang.tell(messages.Tell(orders.Interrupt(debugged)))
            case _:
                assert_never(event)

    def look_for_silence(self) -> None:
        """Give up agents that have said nothing for too long."""
        for peer in self._agents.silent():
            self._give_up(peer)

    def _hear(self, connection: Connection, message: messages.FromAgent) -> None:
        if isinstance(message, messages.Hello):
            self._welcome(message, connection)
            return
        if (peer := self._agents.find(connection)) is None:  # it was given up, and may not have a say any more
            return
        match message:
            case messages.Exited():
                self._note_exit(peer, message)
            case messages.Broken(text):
                self._broken[peer.node.worker] = text
            case messages.Leaving():
                self._note_leaving(peer)
            case messages.Stacks(rank, text):
                self._note_stacks(rank, text)
            case messages.Lines(rank, lines):
                self._announcer.tell("wrote", rank, lines)
            case messages.NotSent(file, reason):
                self._saving.note_kept(self._attempt, file, OSError(f"{peer.node.worker} could not send it: {reason}"))
            case messages.Reported():
                pass  # reports come opened
            case _:
                assert_never(message)

    def _welcome(self, hello: messages.Hello, connection: Connection) -> None:
        if (displaced := self._agents.welcome(hello, connection)) is not None:
            self._note_loss(displaced)

    def _note_exit(self, peer: Peer, exited: messages.Exited) -> None:
        if (attempt := self._attempt_of(peer, exited.rank)) is not None:
            attempt.note_exit(exited)

    def _note_stacks(self, rank: int, text: str) -> None:
        if self._watch is not None:
            self._watch.stacks[rank] = text

    def _attempt_of(self, peer: Peer, rank: int) -> Attempt | None:
        """The attempt, where this rank is one of its own, is this agent's, and has not left."""
        attempt = self._attempt
        if attempt is None or rank in attempt.exits or rank not in attempt.ranks_of.get(peer.node.worker, ()):
            return None
        return attempt

    def _hear_of_rank(self, connection: Connection, rank: int, said: Iterable[reports.ShortReport | Part]) -> None:
        if (peer := self._agents.find(connection)) is None or (attempt := self._attempt_of(peer, rank)) is None:
            return
        for report in said:
            self._take_report(peer, attempt, rank, report)

    def _hear_beats(self, newest: Mapping[Connection, bytes]) -> None:
        for connection, beat in newest.items():
            if (peer := self._agents.find(connection)) is not None:
                for rank, num_moves in heartbeat.unpacked(beat):
                    if (attempt := self._attempt_of(peer, rank)) is not None:
                        attempt.note_moves(rank, num_moves)

    def _take_report(  # noqa: C901, PLR0912 - a case for each report
        self, peer: Peer, attempt: Attempt, rank: int, report: reports.ShortReport | Part
    ) -> None:
        match report:
            case LogRecord(step=step):
                attempt.steps[rank] = step
                self._announcer.tell("logged", report)
            case reports.Used() | reports.Spent() | reports.GoodputWanted():
                self._account_for(peer, attempt, rank, report)
            case reports.Hint(kind, text):
                self._announcer.hint(kind, f"rank {rank} {text}")
            case reports.Noted(text):
                self._announcer.note(f"rank {rank} {text}")
            case reports.Saved(file):
                self._saving.note_saved(peer, attempt, rank, file)
            case reports.ShardsWritten(shards):
                self._saving.note_shards(attempt, rank, shards)
            case reports.ShardsNotWritten():
                self._saving.note_shards(attempt, rank, report)
            case reports.Wanted():
                attempt.wanted.append((peer, rank, report))
            case Part():
                self._received.add(report)
            case reports.FolderWanted():
                self._received.folder_is_wanted = True
            case reports.AtPrompt():
                attempt.prompts.ask(rank)
            case reports.LeftPrompt(steps):
                self._note_left_prompt(attempt, rank, steps=steps)
            case reports.Waits(text):
                attempt.prompts.debugged.add(rank)
                self._announcer.note(text)
            case reports.Ready():
                self._note_ready(attempt, rank)
            case reports.Held(num_calls):
                attempt.held[rank] = num_calls
            case reports.Stands(is_still):
                attempt.standing.add(rank) if is_still else attempt.standing.discard(rank)
            case reports.Located(num_moves=num_moves):
                attempt.located[rank] = report
                attempt.remembered.pop(rank, None)  # of an earlier question
                attempt.note_moves(rank, num_moves)
            case reports.Remembered(recalled):
                attempt.remembered[rank] = recalled
            case reports.StoppedEarly():
                attempt.stopped_early.add(rank)
            case reports.Returned(value):
                attempt.results[rank] = value
            case Failure():
                attempt.note_failure(rank, report)
            case _:
                assert_never(report)

    def _note_left_prompt(self, attempt: Attempt, rank: int, *, steps: bool) -> None:
        attempt.prompts.leave(rank, steps=steps)
        attempt.note_stirring()
        self._announcer.tell("debugging", None)

    def _account_for(
        self, peer: Peer, attempt: Attempt, rank: int, said: reports.Used | reports.Spent | reports.GoodputWanted
    ) -> None:
        """Note what a rank has used and done, and tell one where the time has gone that wants to know."""
        if isinstance(said, reports.GoodputWanted):
            if rank and self._accountant.is_training and said.number not in attempt.accounts:
                attempt.accounts_wanted.append((peer, said.number))
            else:
                self._tell_account(peer, attempt, said.number)
            return
        if isinstance(said, reports.Used):
            self._announcer.tell("used", said.usage)
        if rank == 0:
            self._accountant.hear(said)
            wanted, attempt.accounts_wanted = attempt.accounts_wanted, []
            for other, number in wanted:
                self._tell_account(other, attempt, number)

    def _tell_account(self, peer: Peer, attempt: Attempt, number: int) -> None:
        account = attempt.accounts.setdefault(number, self._accountant.goodput())
        peer.send(messages.Tell(orders.Accounted(number, account)))

    def _note_ready(self, attempt: Attempt, rank: int) -> None:
        attempt.note_ready(rank)
        if rank == 0:
            self._accountant.enter("training")
        if attempt.is_formed:
            began_at = self._asked_at if attempt.number == 0 else attempt.began_at
            self._announcer.tell("formed", self._now() - began_at)

    def _lose(self, connection: Connection) -> None:
        if (peer := self._agents.forget(connection)) is not None:
            self._note_loss(peer)

    def _give_up(self, peer: Peer) -> None:
        """An agent does not answer; it may be suspended."""
        self._lose(peer.connection)
        self._agents.give_up_silent(peer)

    def _note_loss(self, peer: Peer) -> None:
        worker = peer.node.worker
        traceback = self._broken.pop(worker, None)
        if traceback is not None:
            self._agents.note_broken(worker, traceback)
        if self._attempt is not None and worker in self._attempt.ranks_of:
            self._attempt.lose(worker, traceback)
            self._lost_at = self._now()
        self._saving.forget(peer)

    def _note_leaving(self, peer: Peer) -> None:
        self._agents.leaving.add(peer.node.worker)
        if self._attempt is None or peer.node.worker not in self._attempt.ranks_of:
            peer.send(messages.Close())
            return
        may_shrink = self._settings.min_workers is not None and self._settings.max_restarts > 0
        goes_on = may_shrink and self._agents.num_nodes >= self._num_least
        reason = f"the worker {peer.node.worker} was told to end"
        if self._has_lost_scheduler():
            reason, goes_on = SCHEDULER_LOST, False
        self._request_stop(reason, ends_gang=not goes_on, is_workers=True)

    def _has_lost_scheduler(self) -> bool:
        """Then all the workers end by themselves, and say so perhaps before this process learns why."""
        return not self._agents.launcher.is_connected()

    def _request_stop(
        self, reason: str, *, ends_gang: bool, is_workers: bool = False, is_awaited: bool = False
    ) -> None:
        if self._stop_request is None:
            self._announcer.note(f"{reason}: saving a checkpoint and ending")
            whose = {"is_workers": is_workers, "is_awaited": is_awaited}
            self._stop_request = StopRequest(reason, ends_gang, self._deadlines, **whose, clock=self._now)
        elif ends_gang and not self._stop_request.ends_gang:
            self._stop_request.reason, self._stop_request.ends_gang = reason, True
            self._stop_request.is_workers = is_workers

    # ---- forming an attempt

    def _begin_to_gather(self) -> Phase:
        now = self._now()
        is_first = self._number == 0
        self._accountant.enter("starting" if is_first else "waiting")
        self._attempt = self._watch = None
        self._deadline = (self._asked_at if is_first else now) + self._settings.start_timeout
        self._settled_at = now if is_first else (now if self._lost_at is None else self._lost_at) + SETTLE_TIME
        if self._agents.faulty_gpus:  # another worker may be found
            self._settled_at = now + GROWTH_SETTLE_TIME
        return self._gather

    def _gather(self) -> Phase | None:
        """Wait for the workers: all that are wanted, or after losses those that are left, if they are enough."""
        if self._is_cancelled:
            raise self._cancelled()
        if self._stop_request is not None:
            raise self._preempted(self._stop_request)
        is_first, now = self._number == 0, self._now()
        recruits = not is_first or self._settings.max_restarts > 0
        num_sound = self._agents.num_sound
        if num_sound < self._num_wanted:
            self._look_for_workers(recruits=recruits)
        count = self._agents.num_nodes
        awaits_gpus = num_sound < self._num_wanted <= count and bool(self._agents.expected or now < self._settled_at)
        is_settled = now >= self._settled_at and not (is_first and self._agents.expected) and not awaits_gpus
        is_whole = count == self._num_wanted and not awaits_gpus
        if is_whole or (count >= self._num_least and (is_settled or now >= self._deadline)):
            return self._start()
        if is_first and (now >= self._deadline or self._is_hopeless(recruits=recruits)):
            raise self._agents.too_few_came(self._request.name, self._num_wanted, self._settings.start_timeout)
        if now >= self._deadline:
            raise self._too_few_left(count)
        hindrance = self._agents.launcher.hindrance()
        self._announcer.remind(f"{count} of {self._num_wanted} workers are here, waiting for the others{hindrance}")
        return self._wait(self._deadline, self._settled_at if now < self._settled_at else now + SETTLE_TIME)

    def _is_hopeless(self, *, recruits: bool) -> bool:
        return self._agents.is_hopeless(self._num_wanted, self._num_least, recruits)

    def _look_for_workers(self, *, recruits: bool) -> None:
        try:
            if recruits:
                self._agents.recruit(self._num_wanted)
            else:
                self._agents.note_absences()
        except ConnectionError as error:
            raise WorkerLostError(f"{self._request.name} cannot go on: {error}", cause=str(error)) from error

    def _too_few_left(self, count: int) -> Exception:
        failures = "\n".join(failure.what for failure in self._policy.failures)
        return WorkerLostError(
            f"{count} of {self._num_wanted} workers are left of {self._request.name}, {self._num_least} are needed, "
            f"and no others came within {self._settings.start_timeout:g} s{self._agents.launcher.hindrance()}. Lower "
            f"Gang(min_workers=...) to go on with fewer, or raise start_timeout. Failures so far:\n{failures}"
        )

    def _start(self) -> Phase:
        """Place the ranks on the workers that are here, and have them started."""
        self._accountant.enter("starting")
        self._agents.dismiss_leaving()
        nodes = self._agents.best_nodes(self._num_wanted, self._num_least)
        _check_versions(nodes)
        places = placement.place_ranks(nodes, self._request.ranks_per_worker, self._settings.devices)
        backend = placement.choose_backend(self._settings.backend, nodes, places)
        shape = Shape(name=self._request.name, backend=backend, nodes=nodes, places=places)
        self._announcer.tell("placed", shape)
        in_rank = self._observers.for_rank()
        self._has_observers_in_rank = bool(in_rank)
        carriers = [self._agents.peers[node.worker] for node in nodes]
        job = Job(
            gang=hashlib.sha256(self._agents.token).hexdigest()[:16],
            attempt=self._number,
            call=self._request.call,
            large=self._request.large.address if self._request.large is not None else None,
            pass_local_rank=self._request.pass_local_rank,
            backend=backend,
            store=carriers[0].meets_at if shape.world_size > 1 or backend == "nccl" else None,
            timeout=self._settings.start_timeout,
            devices=self._settings.devices,
            max_restarts=self._settings.max_restarts,
            checkpoint=self._saving.newest,
            sharding=self._saving.sharding(),
            kept=self._saving.saved(),
            storage=self._request.storage.own if self._request.storage is not None else None,
            best_by=self._settings.keep.metric,
            profile=self._settings.profile,
            hints=self._settings.hints,
            debugging=self._debugging,
            pulse=pulse_for(self._settings.hang_timeout),
            host=self._request.host,
            execution=self._request.execution,
            environment=self._request.environment,
            observers=in_rank,
        )
        for peer, here in zip(carriers, places, strict=True):
            peer.start(job, self._code, here)
        placed = {place.rank: (place, node) for node, here in zip(nodes, places, strict=True) for place in here}
        self._attempt = attempt = Attempt(number=self._number, places=placed, carriers=carriers, clock=self._now)
        self._watch = HangWatch(attempt, self._settings.hang_timeout, self._now, lambda: self._saving.is_committing)
        self._stop_request = self._lost_at = None
        self._saving.has_news = False
        return self._train

    # ---- seeing it through

    @property
    def _gang(self) -> Attempt:
        if self._attempt is None:
            raise AssertionError("no attempt has been started")
        return self._attempt

    @property
    def _hang_watch(self) -> HangWatch:
        if self._watch is None:
            raise AssertionError("no attempt has been started")
        return self._watch

    def _train(self) -> Phase | None:
        """Until every rank has left, or all must be ended because something happened."""
        attempt, now = self._gang, self._now()
        if attempt.is_over:
            return self._begin_to_settle()
        is_time = attempt.stop_at is not None and now >= attempt.stop_at
        if is_time or self._is_cancelled or self._announcer.stopped_early is not None:
            return self._stop()
        if attempt.is_failing:
            if self._is_understood(attempt):
                return self._stop()
        elif attempt.has_delivered:
            self._let_leave(attempt)
        elif self._is_to_end(attempt):
            return self._stop()
        self._saving.give_wanted(attempt)
        if (rank := attempt.prompts.turn()) is not None:
            self._announcer.tell("debugging", rank)
            attempt.tell(messages.Tell(orders.Prompt(rank)))
        return self._wait(*self._moments(attempt))

    def _is_understood(self, attempt: Attempt) -> bool:
        """Whether a failure ends the attempt at once.

        Where all ranks' failures read like the loss of a peer a better cause may follow. Where one may come of a
        collective the other ranks say first where they are.
        """
        is_earnest = attempt.has_earnest_failure
        if is_earnest and not attempt.root_failure().may_be_of_collective:
            return True
        now = self._now()
        if attempt.stop_at is None:
            attempt.stop_at = now + (ANSWER_TIME if is_earnest else BLAME_WINDOW)
            attempt.ask_at = attempt.stop_at - ANSWER_TIME
        if now >= attempt.ask_at:
            attempt.ask_at = math.inf
            attempt.tell(messages.Tell(orders.Locate()))
        return is_earnest and attempt.have_answered(attempt.remembered)

    def _is_to_end(self, attempt: Attempt) -> bool:
        """Whether a training in which nothing has failed is to be stopped all the same."""
        has_kept, self._saving.has_news = self._saving.has_news, False
        if self._is_late(attempt):
            self._late = attempt.places.keys() - attempt.ready
            return True
        if self._stop_request is not None:
            return self._stop_request.pursue(attempt)
        if self._hang_watch.is_hung():
            return True
        if len(attempt.ranks_of) < self._num_wanted:
            self._is_growing = has_kept and self._has_newcomers(attempt)
            self._look_for_more_workers()
        return self._is_growing

    def _is_late(self, attempt: Attempt) -> bool:
        is_due = self._now() >= attempt.began_at + self._settings.start_timeout
        return is_due and not attempt.is_formed and not attempt.prompts.debugged

    def _moments(self, attempt: Attempt) -> list[float | None]:
        """When something is due in the training though nothing happens."""
        asked = self._stop_request is not None and not attempt.has_delivered
        return [
            attempt.stop_at,
            attempt.ask_at,
            attempt.prompts.due,
            None if attempt.is_formed or attempt.prompts.debugged else attempt.began_at + self._settings.start_timeout,
            self._stop_request.deadline if asked and self._stop_request is not None else None,
            self._hang_watch.due,
        ]

    def _let_leave(self, attempt: Attempt) -> None:
        """All have delivered: nobody needs the others any more."""
        if attempt.stop_at is None:
            attempt.stop_at = self._now() + MAX_LEAVE_WAIT
            attempt.tell(messages.Tell(orders.Leave()))

    def _has_newcomers(self, attempt: Attempt) -> bool:
        """Whether it is time to take more workers in: right after a checkpoint, so that no steps are lost."""
        if attempt.results:
            return False
        carrying = attempt.ranks_of.keys() - self._agents.leaving
        spare = [self._agents.peers[worker] for worker in self._agents.sound_workers() - carrying]
        if not spare or len(carrying) != len(attempt.ranks_of):
            return False
        is_whole = len(carrying) + len(spare) >= self._num_wanted
        return is_whole or self._agents.clock() >= max(peer.joined_at for peer in spare) + GROWTH_SETTLE_TIME

    def _look_for_more_workers(self) -> None:
        try:
            self._agents.recruit(self._num_wanted)
        except ConnectionError:  # a lost scheduler takes the workers along by itself
            return

    def _stop(self) -> Phase:
        """Have every rank ended."""
        wish = None if self._is_cancelled else self._announcer.stopped_early
        self._hang_watch.stop_asking()
        self._accountant.enter("waiting")
        ends = self._deadlines
        close = (ends.close if self._is_last() else ends.reopen) if self._has_observers_in_rank else ends.stop
        self._gang.tell(
            messages.Stop(grace=ends.stop, main_grace=close, reason=str(wish) if wish is not None else None)
        )
        self._deadline = self._now() + ends.all_stopped
        return self._end_ranks

    def _end_ranks(self) -> Phase | None:
        """Wait until all ranks are gone; late failures still count for the blame."""
        attempt = self._gang
        if not attempt.is_over and self._now() < self._deadline:
            return self._wait(self._deadline)
        for worker in attempt.unaccounted():
            if (peer := self._agents.peers.get(worker)) is not None:
                self._give_up(peer)
        return self._begin_to_settle()

    def _is_last(self) -> bool:
        """Whether no other attempt follows, as far as is known."""
        attempt = self._gang
        if self._is_cancelled or self._announcer.stopped_early is not None or self._late:
            return True
        if self._stop_request is not None:
            return self._stop_request.ends_gang
        if attempt.is_failing:
            return self._policy.refusal(self._failure(attempt)) is not None
        return not self._is_growing

    # ---- after an attempt's end

    def _begin_to_settle(self) -> Phase:
        attempt = self._gang
        self._accountant.enter("waiting")
        self._ended_at = self._now()
        if attempt.is_failing and attempt.hang is None:
            attempt.explain_failure()
        if attempt.has_delivered and not attempt.stopped_early and not self._is_cancelled:
            if (num_workers := len(attempt.ranks_of)) < self._num_wanted:
                self._announcer.note(f"ended with {num_workers} of {self._num_wanted} workers, as min_workers allows")
            return self._conclude
        if self._is_last():
            self._saving.hurry()
        return self._settle

    def _conclude(self) -> Phase | None:
        """Give the results out once the last sharded checkpoint is committed."""
        attempt, limit = self._gang, self._ended_at + self._settings.start_timeout
        if self._is_cancelled:
            raise self._cancelled()
        if (self._saving.is_committing or (self._saving.is_fetching and self._stays_here())) and self._now() < limit:
            self._announcer.remind("waiting for the newest checkpoint, which is on its way")
            return self._wait(limit)
        self._results = [attempt.results[rank] for rank in range(attempt.world_size)]
        return None

    def _stays_here(self) -> bool:
        """Whether its checkpoints are a user's own to use after it, in a folder of this machine."""
        return self._request.storage is not None and "://" not in self._request.storage.own

    def _settle(self) -> Phase | None:
        """Wait for checkpoints that are on their way, as long as whoever sends them is there."""
        if self._is_cancelled:
            raise self._cancelled()
        if self._announcer.stopped_early is not None:
            raise self._announcer.stopped_early
        if self._late:
            raise self._gang.not_formed(self._settings.start_timeout, self._late)
        limit = self._deadlines.upload if self._is_last() else self._settings.start_timeout
        if self._saving.is_busy and self._now() < self._ended_at + limit:
            self._announcer.remind("waiting for the newest checkpoint, which is on its way")
            return self._wait(self._ended_at + limit)
        self._saving.give_up_fetches()
        return self._go_on()

    def _go_on(self) -> Phase:
        reason = self._reason_to_go_on(self._gang)
        self._is_growing, self._stop_request = False, None
        self._accountant.close(is_lost=True)
        self._number += 1
        self._saving.begin(self._number)
        step = self._saving.newest_step
        self._announcer.tell("restarting", reason, step)
        start = f"step {step}" if step is not None else "the beginning, since no checkpoint was saved"
        self._announcer.note(reason)
        self._announcer.note(f"going on from {start}")
        return self._begin_to_gather()

    def _reason_to_go_on(self, attempt: Attempt) -> str:
        """Why the gang starts again; raises what ends it if it does not."""
        request = self._stop_request
        if request is not None and not attempt.has_own_failure:  # losses are what such requests are made of
            return self._go_on_without(request)
        if self._is_growing and not attempt.has_earnest_failure:
            return GROWS
        failure = self._failure(attempt)
        root_failure = attempt.root_failure()
        if (refusal := self._policy.refusal(failure)) is not None:
            history = [earlier.what for earlier in self._policy.failures]
            raise error_of(root_failure, attempt.world_size, refusal, history)
        if request is not None and request.ends_gang:  # the next attempt may try again
            raise self._preempted(request, failure.what) from error_of(root_failure, attempt.world_size)
        if root_failure.failure is not None and failure.cause not in {each.cause for each in self._policy.failures}:
            self._announcer.note(f"rank {root_failure.rank} raised\n{root_failure.failure.traceback.rstrip()}")
        self._policy.note(failure)
        self._agents.faulty_gpus |= attempt.faulty_gpus
        return f"{failure.what}; starting again (failure {len(self._policy.failures)})"

    def _go_on_without(self, request: StopRequest) -> str:
        """The worker that is being taken away is all that the gang lacks, unless the gang is to end itself."""
        failure = AttemptFailure(
            what=request.reason, cause=request.reason, position=(None, None), is_infrastructure=True
        )
        if request.ends_gang or self._policy.refusal(failure) is not None:
            raise self._preempted(request)
        self._policy.note(failure)
        return failure.what

    def _failure(self, attempt: Attempt) -> AttemptFailure:
        # A rank that was about to be stopped may fail for that reason alone.
        gets_further = attempt.has_saved or self._saving.is_busy or self._stop_request is not None
        return AttemptFailure.of(attempt.root_failure(), gets_further=gets_further)

    def _cancelled(self) -> Exception:
        return GangCancelledError(f"{self._request.name} was cancelled")

    def _preempted(self, request: StopRequest, failure: str | None = None) -> Exception:
        """The error that ends the task, once the newest checkpoint is in storage."""
        reason = SCHEDULER_LOST if request.is_workers and self._has_lost_scheduler() else request.reason
        rest = self._saving.store(self._request.storage, self._deadlines.storage)
        failed = f" while it was failing ({failure})" if failure else ""
        return PreemptedError(f"{self._request.name} was ended{failed}: {reason}; {rest}", cause=reason)


def _check_versions(nodes: Sequence[Node]) -> None:
    mine = local_versions()
    differing = [
        f"{node.worker} has {name} {theirs}, this process {mine.get(name)}"
        for node in nodes
        for name, theirs in node.versions.items()
        if theirs != mine.get(name)
    ]
    if differing:
        raise ValueError(
            f"driver and workers differ: {'; '.join(differing)}. Use one image for the task and its Dask cluster."
        )
