"""Decides what a gang does next: start, grow, stop, restart, give up. Runs in the driver.

`GangState` only records events, and `Brain.decide` alone acts on them. Features are parts (`part`), which the brain
asks and does not know. The gang's present phase is a method:

    _gather ──▶ _train ──▶ _end_ranks ──▶ _settle ──▶ _gather ...
       │          │                          │
       └──────────┴── results, or an error ◀─┘

Tests can replay a gang: the module starts no threads, reads only the given clock, and waits for storage only at last.
"""

import math
from collections.abc import Callable
from typing import Any

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.blame import NO_RESTARTS, STATE_IS_GONE, AttemptFailure, FailurePolicy, error_of
from flytekitplugins.daskpytorch.driver.part import ANSWER_TIME, Moment
from flytekitplugins.daskpytorch.driver.state import SCHEDULER_LOST, GangState, StopRequest, is_complete, late_at
from flytekitplugins.daskpytorch.errors import GangCancelledError, Kind, PreemptedError
from flytekitplugins.daskpytorch.node.hardware import check_versions
from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.protocol import journal, messages, placement
from flytekitplugins.daskpytorch.protocol.code import Code

BLAME_WINDOW = 0.7
"""Seconds to wait for another rank's failure while every failure so far reads like the loss of a peer."""
MAX_LEAVE_WAIT = 75.0 + ending.MAX_WAIT
"""Seconds between the last rank's result and its exit, for rank 0's observers and Python's exit."""
GPU_SETTLE_TIME = 1.0
"""Seconds between a GPU's failure and a restart that may use that GPU, as the cluster may offer another worker."""
SETTLE_TIME = 0.2
"""Seconds between an attempt's end and a restart with fewer workers, as more losses often follow."""
TICK = 1.0


Phase = Callable[[], Any]
"""Acts on the events so far. Returns the next phase, or None to repeat after the next event."""


class Brain:
    """Call `decide` after each event, at the latest after `patience` seconds."""

    _attempt: Attempt

    def __init__(self, state: GangState, code: Code) -> None:
        self._state = state
        self._code = code
        self._request = state.request
        self._settings = state.request.settings
        self._agents = state.agents
        self._observers = state.observers
        self._deadlines = state.deadlines
        self._now = state.now
        self._policy = FailurePolicy(self._settings.max_restarts, STATE_IS_GONE if state.request.stays else NO_RESTARTS)
        self._late: set[int] = set()
        self._deadline = 0.0
        self._settled_at = 0.0
        self._wake_at = state.asked_at
        self._results: list[Any] | None = None
        self._phase: Phase = self._begin_to_gather()

    def decide(self) -> list[Any] | None:
        """Return the ranks' results after the gang's success, else None. Raise the error that ends the gang."""
        self._let_parts_order()
        while self._results is None:
            if self._state.is_cancelled and self._phase not in (self._train, self._end_ranks):  # no rank runs
                raise GangCancelledError(f"{self._request.name} was cancelled")
            if (following := self._phase()) is None:
                break
            self._phase = following
        return self._results

    def _let_parts_order(self) -> None:
        now = self._now()
        for part in self._state.parts:
            part.orders(now)

    @property
    def patience(self) -> float:
        return max(0.0, min(self._wake_at - self._now(), TICK))

    def _wait(self, *moments: float | None) -> Phase | None:
        self._wake_at = min((moment for moment in moments if moment is not None), default=math.inf)
        return None

    # ---- forming an attempt

    def _begin_to_gather(self) -> Phase:
        now = self._now()
        is_first = self._state.number == 0
        self._state.enter("gathering")
        self._state.attempt = None
        self._deadline = (self._state.asked_at if is_first else now) + self._settings.start_timeout
        self._settled_at = now if is_first else now + SETTLE_TIME
        if self._agents.faulty:
            self._settled_at = now + GPU_SETTLE_TIME
        return self._gather

    def _gather(self) -> Phase | None:
        if self._state.stop_request is not None:
            raise self._preempted(self._state.stop_request)
        is_first, now, agents = self._state.number == 0, self._now(), self._agents
        if agents.num_nodes < agents.num_wanted:
            agents.recruit()
        is_settled, is_late = now >= self._settled_at, now >= self._deadline
        if agents.num_nodes < agents.num_least and (is_late or (is_settled and not agents.expected)):
            agents.faulty.clear()  # no other workers are there
        found = agents.verdict(is_first=is_first, is_settled=is_settled, is_late=is_late)
        if found == "start":
            return self._start()
        if found == "refuse" and is_first:
            raise agents.too_few_came(self._request.name, self._settings.start_timeout)
        if found == "refuse":
            failures = [failure.what for failure in self._policy.failures]
            raise agents.too_few_left(self._request.name, self._settings.start_timeout, failures)
        self._observers.remind(agents.awaited())
        return self._wait(self._deadline, self._settled_at if now < self._settled_at else now + SETTLE_TIME)

    def _start(self) -> Phase:
        self._state.enter("starting")
        self._attempt = start_attempt(self._state, self._state.number, self._code)
        self._state.begin(self._attempt)
        return self._train

    # ---- watching an attempt

    def _train(self) -> Phase | None:
        attempt, now = self._attempt, self._now()
        if attempt.is_over:
            return self._begin_to_settle()
        is_time = attempt.stop_at is not None and now >= attempt.stop_at
        if is_time or self._state.is_cancelled or self._observers.stopped_early is not None or self._must_stop(attempt):
            return self._stop()
        due = (part.due(attempt) for part in self._state.parts)
        return self._wait(attempt.stop_at, late_at(self._state, attempt), *due)

    def _must_stop(self, attempt: Attempt) -> bool:
        request = self._state.stop_request
        if request is not None and request.has_signalled:
            if request.heeding.isdisjoint(attempt.running):
                self._let_leave(attempt)
            return self._now() >= request.deadline or attempt.exits.keys() >= request.heeding
        if attempt.is_failing:
            return self._is_understood(attempt)
        if attempt.has_delivered:
            self._let_leave(attempt)
            return False
        return self._is_to_end(attempt)

    def _is_understood(self, attempt: Attempt) -> bool:
        """Return True once a failure's cause is known.

        While all failures read like the loss of a peer, the true one may follow.
        """
        is_independent = attempt.has_independent_failure
        if is_independent and not attempt.root_failure().may_be_of_collective:
            return True
        if attempt.stop_at is None:
            attempt.stop_at = self._now() + (ANSWER_TIME if is_independent else BLAME_WINDOW)
            self._let_parts_order()  # such as questions about the cause
        return is_independent and not self._state.blocks(Moment.STOP)

    def _is_to_end(self, attempt: Attempt) -> bool:
        deadline = late_at(self._state, attempt)
        if deadline is not None and self._now() >= deadline:
            self._late = attempt.places.keys() - attempt.ready
            return True
        for part in self._state.parts:
            if (ends := part.ends(attempt)) is not None:
                return ends
        return False

    def _let_leave(self, attempt: Attempt) -> None:
        if attempt.stop_at is None and not self._state.blocks(Moment.LEAVE):
            attempt.stop_at = self._now() + MAX_LEAVE_WAIT
            attempt.tell(messages.Tell(messages.Leave()))
        if attempt.stop_at is not None and self._state.stop_request is not None:
            attempt.stop_at = min(attempt.stop_at, self._state.stop_request.deadline)

    def _stop(self) -> Phase:
        wish = None if self._state.is_cancelled else self._observers.stopped_early
        self._state.enter("stopping")
        ends, attempt = self._deadlines, self._attempt
        main_grace = ends.stop + (ends.close if attempt.has_observers and self._is_last() else 0)
        reason = str(wish) if wish is not None else None
        attempt.tell(messages.Stop(grace=ends.stop, main_grace=main_grace, reason=reason))
        self._deadline = self._now() + ends.all_stopped
        return self._end_ranks

    def _end_ranks(self) -> Phase | None:
        """Late failures still count in the search for the root failure."""
        attempt = self._attempt
        if not attempt.is_over and self._now() < self._deadline:
            return self._wait(self._deadline)
        for worker in attempt.unaccounted():
            if (peer := self._agents.peers.get(worker)) is not None:
                self._state.give_up(peer)
        return self._begin_to_settle()

    def _is_last(self) -> bool:
        attempt = self._attempt
        if self._state.is_cancelled or self._observers.stopped_early is not None or self._late:
            return True
        if self._state.stop_request is not None:
            return self._state.stop_request.ends_gang
        if attempt.is_failing:
            return self._policy.refusal(self._failure(attempt)) is not None
        return attempt.ended_for is None

    # ---- after an attempt's end

    def _begin_to_settle(self) -> Phase:
        attempt = self._attempt
        self._state.enter("settling")
        if is_complete(self._state, attempt):
            if (count := len(attempt.ranks_of)) < (num_wanted := self._agents.num_wanted):
                self._observers.note(f"ended with {count} of {num_wanted} workers, as min_workers allows")
            return self._conclude
        is_last = self._is_last()
        for part in self._state.parts:
            part.settle(is_last=is_last)
        return self._settle

    def _conclude(self) -> Phase | None:
        attempt = self._attempt
        if self._state.blocks(Moment.LEAVE):
            return self._wait()
        self._results = [attempt.results[rank] for rank in range(attempt.world_size)]
        return None

    def _settle(self) -> Phase:
        if self._observers.stopped_early is not None:
            raise self._observers.stopped_early
        if self._late:
            raise self._attempt.not_formed(self._settings.start_timeout, self._late)
        reason, kind = self._reason_to_go_on(self._attempt)
        self._state.stop_request = None
        self._state.number += 1
        for part in self._state.parts:
            part.restart(self._state.number)
        step = self._state.newest_step()
        self._observers.tell(journal.Restarted(reason=reason, step=step, kind=kind))
        start = "without a checkpoint: current_rank().checkpoint has saved nothing"
        self._observers.note(reason)
        self._observers.note(f"going on from step {step}" if step is not None else f"going on {start}")
        return self._begin_to_gather()

    def _reason_to_go_on(self, attempt: Attempt) -> tuple[str, Kind | None]:
        request = self._state.stop_request
        if request is not None and request.explains(attempt):
            return self._go_on_without(request)
        if attempt.ended_for is not None and not attempt.has_independent_failure:
            return attempt.ended_for, None
        failure = self._failure(attempt)
        root_failure = attempt.root_failure()
        if (refusal := self._policy.refusal(failure)) is not None:
            history = [earlier.what for earlier in self._policy.failures]
            raise error_of(root_failure, attempt.world_size, refusal, history)
        if request is not None and request.ends_gang:  # the next attempt may try again
            raise self._preempted(request, failure.what) from error_of(root_failure, attempt.world_size)
        trace = root_failure.failure.traceback.rstrip() if root_failure.failure is not None else ""
        if trace and failure.cause not in {each.cause for each in self._policy.failures}:
            self._observers.note(f"rank {root_failure.rank} raised\n{trace}")
        self._policy.failures.append(failure)
        self._state.num_after_memory += failure.kind == "memory"
        self._agents.faulty |= attempt.faulty
        return f"{failure.what}; starting again (failure {len(self._policy.failures)})", failure.kind

    def _go_on_without(self, request: StopRequest) -> tuple[str, Kind]:
        failure = AttemptFailure(what=request.reason, cause=request.reason, is_infrastructure=True)
        if request.ends_gang or self._policy.refusal(failure) is not None:
            raise self._preempted(request)
        self._policy.failures.append(failure)
        return failure.what, failure.kind

    def _failure(self, attempt: Attempt) -> AttemptFailure:
        # The stop request itself may make a rank fail.
        gets_further = attempt.has_progressed or self._state.stop_request is not None
        root, has, adapts = attempt.root_failure(), attempt.has_delivered, attempt.adapts
        return AttemptFailure.of(root, gets_further=gets_further, has_delivered=has, adapts=adapts)

    def _preempted(self, request: StopRequest, failure: str | None = None) -> Exception:
        reason = SCHEDULER_LOST if request.is_workers and self._state.has_lost_scheduler else request.reason
        rest = "; ".join(filter(None, (part.farewell(self._deadlines.storage) for part in self._state.parts)))
        failed = f" while it was failing ({failure})" if failure else ""
        return PreemptedError(f"{self._request.name} was ended{failed}: {reason}; {rest}", cause=reason)


# ---- Start of an attempt


def start_attempt(state: GangState, number: int, code: Code) -> Attempt:
    """`ValueError`: driver and workers differ in a package's version, or the workers do not suit the settings."""
    request, settings, agents = state.request, state.request.settings, state.agents
    for worker in agents.leaving:  # each waits for its agent's end
        agents.peers[worker].send(messages.Close())
    nodes = agents.best_nodes()
    check_versions(nodes)
    places = placement.place_ranks(nodes, request.ranks_per_worker, settings.devices)
    backend = placement.choose_backend(settings.backend, nodes, places)
    shape = journal.Shape(name=request.name, backend=backend, nodes=nodes, places=places)
    state.observers.tell(journal.Placed(shape=shape))
    carriers = [agents.peers[node.worker] for node in nodes]
    store = carriers[0].meets_at if shape.world_size > 1 or backend == "nccl" else None
    job = request.job(
        gang=state.id,
        attempt=number,
        num_after_memory=state.num_after_memory,
        backend=backend,
        store=store,
        observers=state.observers.for_rank(),
    )
    for part in state.parts:
        job = part.equip(job)
    for peer, here in zip(carriers, places, strict=True):
        peer.send(messages.Start(job, code, here))
    placed = {place.rank: (place, node) for node, here in zip(nodes, places, strict=True) for place in here}
    return Attempt(
        number=number,
        places=placed,
        carriers=carriers,
        has_observers=bool(job.observers),
        is_program=request.script is not None,
        clock=state.now,
    )
