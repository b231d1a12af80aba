"""The driver's brain: gathers the workers, places the ranks, hears of everything, decides what follows.

The first failure ends a generation; the next one starts from the newest checkpoint.
One `Supervisor` per gang. Agents dial in and live as long as the gang; what they do is said in messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import queue
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flytekitplugins.daskpytorch import messages, placement, ship
from flytekitplugins.daskpytorch.blame import (
    Failure,
    PreemptedError,
    StoppedEarlyError,
    WorkerLostError,
    describe,
    verdict,
)
from flytekitplugins.daskpytorch.checkpoint import CheckpointFile
from flytekitplugins.daskpytorch.courier import Courier
from flytekitplugins.daskpytorch.generation import Generation
from flytekitplugins.daskpytorch.inbox import Inbox, Part
from flytekitplugins.daskpytorch.listener import Event, Listener
from flytekitplugins.daskpytorch.mirror import Mirror, MirrorPaths
from flytekitplugins.daskpytorch.node import local_versions
from flytekitplugins.daskpytorch.observer import Observer, Shape
from flytekitplugins.daskpytorch.placement import Node
from flytekitplugins.daskpytorch.preemption import StopRequest
from flytekitplugins.daskpytorch.rank import Job
from flytekitplugins.daskpytorch.restarts import Defeat, Restarts
from flytekitplugins.daskpytorch.roster import AgentLauncher, Peer, Roster, hang_up
from flytekitplugins.daskpytorch.settings import Gang
from flytekitplugins.daskpytorch.ship import Code
from flytekitplugins.daskpytorch.task_context import FlyteSettings
from flytekitplugins.daskpytorch.tracking import RunSettings
from flytekitplugins.daskpytorch.vault import Vault
from flytekitplugins.daskpytorch.watchdog import Witness, report_hang

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["GangCancelledError", "Request", "Supervisor", "preempt_all"]

BLAME_WINDOW = 0.7
"""Seconds to wait for a better culprit while every failure so far reads like the loss of a peer."""
MAX_LEAVE_WAIT = 75.0
"""Seconds for the ranks to leave once all have delivered; more than Weights & Biases may take to close its run."""
MAX_STOP_WAIT = 15.0
"""Seconds for the ranks to end once they are told to stop; more than an agent waits before it kills."""
SETTLE_TIME = 0.25
"""Seconds after a loss before a gang that may be smaller goes on: losses seldom come alone."""
MAX_UPLOAD_WAIT = 10.0
"""Seconds for a checkpoint that is on its way when its generation ends."""
STACKS_WAIT = 1.5
"""Seconds for the ranks of a gang that hangs to say where they are."""
MIRROR_GRACE = 7.0
"""Seconds for the last checkpoint to reach storage after that."""
DISMISS_TIMEOUT = 5.0
"""Seconds for the agents to clean up after the last rank has left."""
TICK = 1.0
"""Seconds between looks at what may have changed without an event."""
NOTICE_INTERVAL = 10.0


class GangCancelledError(Exception):
    """The gang was cancelled."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run, ready to go."""

    name: str
    call: bytes
    ranks_per_worker: int
    settings: Gang
    pass_local_rank: bool = False
    flyte: FlyteSettings | None = None
    tracking: Callable[[Shape], RunSettings] | None = None
    mirror: MirrorPaths | None = None
    """Where the checkpoints of other attempts are; None outside a Flyte backend."""
    code: Code | None = None
    """The project's sources, where they are packed already."""
    key: str = ""
    """Names it among the gangs of its task, alike in every attempt; empty where there is only one."""
    keep: object = field(default=None, repr=False, compare=False)
    """What the call was made of: what Dask holds for it, it holds for as long as the driver has this."""


class Supervisor:
    """Runs one gang from its first worker to its last exit."""

    def __init__(
        self, request: Request, launcher: AgentLauncher, observers: Sequence[Observer] = (), inbox: Inbox | None = None
    ) -> None:
        self._request = request
        self._settings = request.settings
        self._launcher = launcher
        self._observers = observers
        self.inbox = inbox or Inbox()
        """What the ranks have submitted."""
        self._num_wanted = launcher.num_wanted
        self._num_least = request.settings.min_workers or launcher.num_wanted
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # one that a signal handler may put into
        self._restarts = Restarts(request.settings.max_restarts)
        self._broken: dict[str, Failure] = {}
        self._courier = Courier()
        self._stop_request: StopRequest | None = None
        self._is_growing = False
        self._stacks: dict[int, str] = {}
        self._tracking: RunSettings | None = None
        self._asked_at = time.monotonic()
        self._noticed_at = self._asked_at

    def cancel(self) -> None:
        """End the gang from any thread; `run` raises `GangCancelledError`."""
        self._events.put(("cancel", None, None))

    def preempt(self, reason: str) -> None:
        """Have the gang save a checkpoint and end, from any thread or signal handler; `run` raises `PreemptedError`."""
        self._events.put(("preempt", None, reason))

    def run(self) -> list[Any]:
        """Form the gang and see it through; the ranks' reported results, in rank order.

        Raises:
            GangStartError: Workers or ranks did not come within `start_timeout`.
            ValueError: The workers do not suit what was asked for.
            GangError: A rank failed; or the rank's own exception, from such an error.
            WorkerLostError: A worker or a rank's process was taken away.
            PreemptedError: `preempt` was called, or a worker was told to end.
            GangCancelledError: `cancel` was called.
            StoppedEarlyError: An observer raised it, and the ranks had not returned by then.
        """
        error: Exception | None = None
        running.add(self)
        try:
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="daskpytorch-checkpoints-"))
                mirror = Mirror(self._request.mirror) if self._request.mirror else None
                self._vault = Vault(Path(folder), mirror)
                stack.callback(self._vault.close)
                self._listen(stack)
                try:
                    return self._run()
                except (GangCancelledError, StoppedEarlyError):
                    raise
                except Exception:
                    self._vault.flush(MIRROR_GRACE)  # for the next attempt, if Flyte makes one
                    raise
        except Exception as caught:
            error = caught
            raise
        finally:
            running.discard(self)
            self._observe("ended", error)

    def _listen(self, stack: contextlib.ExitStack) -> None:
        token = os.urandom(32)
        listener = Listener(self._launcher.host, token, self._events, self._vault.serve, self.inbox.keep)
        self._roster = Roster(
            launcher=self._launcher,
            num_ranks=self._request.ranks_per_worker,
            address=listener.address,
            on_failure=lambda worker, error: self._events.put(("not launched", worker, error)),
            token=token,
        )
        stack.callback(self._launcher.close)
        stack.callback(self._dismiss)
        stack.callback(listener.close)

    def _run(self) -> list[Any]:
        self._roster.launch(self._launcher.workers)
        code = self._request.code or ship.pack_code()  # while the agents are on their way
        if (checkpoint := self._vault.restore()) is not None:
            self._note(f"going on from the previous attempt's checkpoint of step {checkpoint.step}")
        with contextlib.closing(_Rendezvous(self._launcher.host)) as rendezvous:
            if self._num_wanted * self._request.ranks_per_worker > 1:
                rendezvous.address()  # torch's imports take seconds, and run beside those of the workers
            for number in itertools.count():
                self._gather(is_first=number == 0)
                generation = self._start(number, code, rendezvous, checkpoint)
                self._watch(generation)
                if not generation.bad_exits and not generation.stopped_early:
                    return [generation.results[rank] for rank in range(generation.world_size)]
                self._settle_uploads(MAX_UPLOAD_WAIT)
                reason = self._reason_to_go_on(generation)
                self._vault.fence(number + 1)
                checkpoint = self._vault.newest()
                self._observe("restarting", reason, checkpoint.step if checkpoint else None)
                start = f"step {checkpoint.step}" if checkpoint else "the beginning, since no checkpoint was saved"
                self._note(reason)
                self._note(f"going on from {start}")
        raise AssertionError("the loop above returns or raises")

    # ---- forming a generation

    def _gather(self, *, is_first: bool) -> None:
        """Wait for the workers: all that are wanted, or after losses those that are left, if they are enough."""
        now = time.monotonic()
        deadline = (self._asked_at if is_first else now) + self._settings.start_timeout
        settled_at = now if is_first else now + SETTLE_TIME
        recruits = not is_first or self._settings.max_restarts > 0
        while (count := self._roster.num_nodes) < self._num_wanted:
            now = time.monotonic()
            is_settled = now >= settled_at and not (is_first and self._roster.expected)
            if count >= self._num_least and (is_settled or now >= deadline):
                return
            if is_first and (now >= deadline or self._roster.is_hopeless(self._num_wanted, self._num_least, recruits)):
                raise self._roster.too_few_came(self._request.name, self._num_wanted, self._settings.start_timeout)
            if now >= deadline:
                raise self._too_few_left(count)
            self._handle(self._next_event(min(SETTLE_TIME, deadline - now)), None)
            if self._stop_request is not None:
                raise self._preempted(self._stop_request.reason)
            self._look_for_workers(recruits=recruits)
            self._give_notice(f"{count} of {self._num_wanted} workers are here, waiting for the others")

    def _look_for_workers(self, *, recruits: bool) -> None:
        try:
            if recruits:
                self._roster.recruit(self._num_wanted)
            else:
                self._roster.note_absences()
        except ConnectionError as error:
            raise WorkerLostError(f"{self._request.name} cannot go on: {error}", cause=str(error)) from error

    def _too_few_left(self, count: int) -> Exception:
        failures = "\n".join(defeat.what for defeat in self._restarts.defeats)
        return WorkerLostError(
            f"{count} of {self._num_wanted} workers are left of {self._request.name}, {self._num_least} are needed, "
            f"and no others came within {self._settings.start_timeout:g} s. Lower Gang(min_workers=...) to go on with "
            f"fewer, or raise start_timeout. Failures so far:\n{failures}"
        )

    def _start(self, number: int, code: Code, rendezvous: _Rendezvous, checkpoint: CheckpointFile | None) -> Generation:
        """Place the ranks on the workers that are here, and have them started."""
        self._roster.dismiss_leaving()
        nodes = self._roster.nodes()[: self._num_wanted]
        _check_versions(nodes)
        places = placement.place_ranks(nodes, self._request.ranks_per_worker)
        backend = placement.choose_backend(self._settings.backend, nodes, places)
        shape = Shape(name=self._request.name, backend=backend, nodes=nodes, places=places)
        self._observe("placed", shape)
        if self._request.tracking is not None and self._tracking is None:  # one run for all generations
            self._tracking = self._request.tracking(shape)
        job = Job(
            gang=hashlib.sha256(self._roster.token).hexdigest()[:16],
            generation=number,
            call=self._request.call,
            pass_local_rank=self._request.pass_local_rank,
            backend=backend,
            store=rendezvous.address() if shape.world_size > 1 or backend == "nccl" else None,
            timeout=self._settings.start_timeout,
            checkpoint=checkpoint,
            pulse=min(1.0, self._settings.hang_timeout / 5) if self._settings.hang_timeout else None,
            flyte=self._request.flyte,
            tracking=self._tracking,
        )
        for node, here in zip(nodes, places, strict=True):
            self._roster.peers[node.worker].send(messages.Start(job, code, here))
        placed = {place.rank: (place, node) for node, here in zip(nodes, places, strict=True) for place in here}
        return Generation(number=number, places=placed)

    # ---- seeing it through

    def _watch(self, generation: Generation) -> None:
        """Until every rank has left: all with results, or all because one failed or was told to."""
        try:
            while not generation.is_over:
                self._handle(self._next_event(self._patience(generation)), generation)
                self._advance(generation)
        except GangCancelledError:
            self._stop(generation, is_last=True)
            raise
        except StoppedEarlyError as error:
            self._stop(generation, is_last=True, reason=str(error))
            if not generation.has_delivered:  # else it ended by itself meanwhile
                raise

    def _patience(self, generation: Generation) -> float:
        """How long nothing need be done unless something happens."""
        due = [time.monotonic() + TICK]
        if generation.stop_at is not None:
            due.append(generation.stop_at)
        if not generation.is_formed:
            due.append(generation.began_at + self._settings.start_timeout)
        if self._stop_request is not None and not generation.has_delivered:
            due.append(self._stop_request.deadline)
        if (hangs_at := self._hangs_at(generation)) is not None:
            due.append(hangs_at)
        return min(due) - time.monotonic()

    def _advance(self, generation: Generation) -> None:
        """Decide what follows from all that has happened."""
        now = time.monotonic()
        if generation.is_over:
            return
        is_time = generation.stop_at is not None and now >= generation.stop_at
        if is_time or generation.has_earnest_failure:
            self._stop(generation)
        elif generation.is_failing:
            generation.stop_at = generation.stop_at or now + BLAME_WINDOW
        elif not generation.is_formed and now >= generation.began_at + self._settings.start_timeout:
            self._stop(generation, is_last=True)
            raise generation.not_formed(self._settings.start_timeout)
        elif self._stop_request is not None:
            if self._stop_request.pursue(generation, self._roster):
                self._stop(generation)
        elif (hangs_at := self._hangs_at(generation)) is not None and now >= hangs_at:
            self._investigate(generation)
            self._stop(generation)
        elif len(generation.ranks_of) < self._num_wanted:
            with contextlib.suppress(WorkerLostError):  # a lost scheduler takes the workers along by itself
                self._look_for_workers(recruits=True)

    def _handle(self, event: Event, generation: Generation | None) -> None:
        """Take in one thing that happened."""
        kind, source, value = event
        match kind:
            case "message":
                self._hear(source, value, generation)
            case "gone":
                self._lose(source, generation)
            case "not launched":
                self._roster.refuse(source, value)
            case "kept":
                self._note_kept(source, value, generation)
            case "preempt":
                self._request_stop(value, ends_gang=True)
            case "cancel":
                raise GangCancelledError(f"{self._request.name} was cancelled")
        for peer in self._roster.silent():
            self._lose(peer.connection, generation)
            hang_up(peer.connection)

    def _hear(self, connection: Connection, message: object, generation: Generation | None) -> None:
        if isinstance(message, messages.Hello):
            self._roster.welcome(message, connection)
            return
        peer = self._roster.find(connection)
        if peer is None:  # it was given up, and may not have a say any more
            return
        peer.heard_at = time.monotonic()
        match message:
            case messages.Broken(text):
                self._broken[peer.node.worker] = _agent_failure(text)
            case messages.Leaving():
                self._note_leaving(peer, generation)
            case messages.Stacks(texts):
                self._stacks |= texts
            case messages.Lines(rank, lines):
                self._observe("wrote", rank, lines)
            case messages.Reported() | messages.Exited() | Part() if generation is not None:
                self._hear_of_rank(peer, message, generation)

    def _hear_of_rank(
        self, peer: Peer, message: messages.Reported | messages.Exited | Part, generation: Generation
    ) -> None:
        if message.rank not in generation.places or generation.places[message.rank][1].worker != peer.node.worker:
            return  # it is not that agent's, or not any more
        if isinstance(message, messages.Exited):
            generation.note_exit(message)
        elif isinstance(message, Part):
            self.inbox.add(message)
        else:
            self._take_report(peer, message.rank, message.report, generation)

    def _take_report(self, peer: Peer, rank: int, report: bytes, generation: Generation) -> None:
        kind, value = generation.take(rank, report)
        if kind == "log":
            self._observe("logged", value)
        elif kind == "saved":
            self._courier.fetch(peer, value)
        elif kind == "folder":
            self.inbox.folder_is_wanted = True
        elif kind == "ready" and generation.is_formed:
            began_at = self._asked_at if generation.number == 0 else generation.began_at
            self._observe("formed", time.monotonic() - began_at)
        elif kind == "result" and generation.has_delivered:
            self._roster.broadcast(messages.Tell("end"))
            generation.stop_at = time.monotonic() + MAX_LEAVE_WAIT

    def _lose(self, connection: Connection, generation: Generation | None) -> None:
        peer = self._roster.forget(connection)
        if peer is None:
            return
        if generation is not None:
            generation.lose(peer.node.worker, self._broken.get(peer.node.worker))
        self._courier.forget(peer)

    def _stop(self, generation: Generation, *, is_last: bool | None = None, reason: str | None = None) -> None:
        """End every rank, and wait until all are gone; late failures still count for the blame."""
        if is_last is None:
            is_last = self._is_last(generation)
        self._roster.broadcast(messages.Stop(is_last=is_last, reason=reason))
        deadline = time.monotonic() + MAX_STOP_WAIT
        while not generation.is_over and time.monotonic() < deadline:
            self._handle(self._next_event(deadline - time.monotonic()), generation)
        for worker in generation.unaccounted():  # it does not even answer (it may be suspended)
            peer = self._roster.peers[worker]
            self._lose(peer.connection, generation)
            hang_up(peer.connection)

    # ---- after a generation's end

    def _reason_to_go_on(self, generation: Generation) -> str:
        """Why the gang starts again; raises what ends it if it does not."""
        request, self._stop_request = self._stop_request, None
        if self._is_growing:
            self._is_growing = False
            return "more workers have come"
        if request is not None and (generation.stopped_early or not generation.has_own_failure):
            defeat = Defeat(what=request.reason, cause=request.reason, position=(None, None), is_infrastructure=True)
            if request.ends_gang or self._restarts.refusal(defeat) is not None:
                raise self._preempted(request.reason)
            self._restarts.note(defeat)
            return defeat.what
        defeat = self._defeat(generation)
        if (refusal := self._restarts.refusal(defeat)) is not None:
            history = [earlier.what for earlier in self._restarts.defeats]
            raise verdict(generation.culprit(), generation.world_size, refusal, history)
        self._restarts.note(defeat)
        return f"{defeat.what}; starting again (failure {len(self._restarts.defeats)})"

    def _defeat(self, generation: Generation) -> Defeat:
        culprit = generation.culprit()
        how = describe(culprit)
        step = culprit.position[0]
        where = f" after step {step}" if step is not None else ""
        return Defeat(
            what=f"rank {culprit.rank} on {culprit.worker}{where}: {how}",
            cause="a hang" if culprit.hang is not None else how,
            position=culprit.position,
            is_infrastructure=culprit.is_infrastructure,
            is_final=culprit.failure is not None and culprit.failure.is_final,
        )

    def _is_last(self, generation: Generation) -> bool:
        """Whether no other generation follows, as far as is known."""
        if self._is_growing:
            return False
        if self._stop_request is not None:
            return self._stop_request.ends_gang
        if not generation.is_failing:
            return True
        return self._restarts.refusal(self._defeat(generation)) is not None

    # ---- checkpoints

    def _note_kept(self, file: CheckpointFile, error: Exception | None, generation: Generation | None) -> None:
        self._courier.note_end(file)
        if error is not None:
            self._note(f"the checkpoint of step {file.step} was not kept ({type(error).__name__}: {error})")
            return
        self._observe("kept", file.step)
        if generation is None or generation.is_failing or self._stop_request is not None:
            return
        if self._is_growing or generation.results:
            return
        spare = [node.worker for node in self._roster.nodes() if node.worker not in generation.ranks_of]
        if spare and len(generation.ranks_of) < self._num_wanted:
            self._is_growing = True
            self._stop(generation)

    def _settle_uploads(self, timeout: float) -> None:
        """Wait for checkpoints that are on their way."""
        deadline = time.monotonic() + timeout
        while self._courier.is_busy and time.monotonic() < deadline:
            self._handle(self._next_event(deadline - time.monotonic()), None)
        self._courier.clear()

    # ---- being told to stop

    def _note_leaving(self, peer: Peer, generation: Generation | None) -> None:
        self._roster.leaving.add(peer.node.worker)
        if generation is None or peer.node.worker not in generation.ranks_of:
            peer.send(messages.Close())
            return
        may_shrink = self._settings.min_workers is not None and self._settings.max_restarts > 0
        goes_on = may_shrink and self._roster.num_nodes >= self._num_least
        reason = f"the worker {peer.node.worker} was told to end"
        if not self._launcher.is_connected():  # then all the workers end by themselves
            reason, goes_on = "the Dask scheduler was lost", False
        self._request_stop(reason, ends_gang=not goes_on)

    def _request_stop(self, reason: str, *, ends_gang: bool) -> None:
        if self._stop_request is None:
            self._note(f"{reason}: saving a checkpoint and ending")
            self._stop_request = StopRequest(reason=reason, ends_gang=ends_gang)
        elif ends_gang:
            self._stop_request.reason, self._stop_request.ends_gang = reason, True

    def _preempted(self, reason: str) -> Exception:
        """The error that ends the task, once the newest checkpoint is in storage."""
        newest = self._vault.newest()
        is_stored = self._vault.flush(MIRROR_GRACE)
        if newest is None:
            rest = "there is no checkpoint, so the next attempt starts afresh"
        elif self._request.mirror is None:
            rest = f"the newest checkpoint was that of step {newest.step}"
        elif is_stored:
            rest = f"the next attempt goes on from the checkpoint of step {newest.step}"
        else:
            rest = f"the checkpoint of step {newest.step} did not reach {self._request.mirror.own} in time"
        return PreemptedError(f"{self._request.name} was ended: {reason}; {rest}", cause=reason)

    # ---- hanging

    def _hangs_at(self, generation: Generation) -> float | None:
        """When the gang counts as hung unless something moves."""
        if self._settings.hang_timeout is None or generation.stillness is None:
            return None
        if time.monotonic() >= generation.hangs_at:  # else there is no need to go through all ranks
            oldest = generation.stillness.oldest(generation.running)
            generation.hangs_at = math.inf if oldest is None else oldest + self._settings.hang_timeout
        return generation.hangs_at

    def _investigate(self, generation: Generation) -> None:
        """Find out which rank holds up the others, and what all of them are doing."""
        self._stacks.clear()
        generation.num_collectives.clear()
        self._roster.broadcast(messages.Dump())
        deadline = time.monotonic() + STACKS_WAIT
        while time.monotonic() < deadline and not generation.is_failing:
            if len(self._stacks) == len(generation.num_collectives) == generation.world_size:
                break
            self._handle(self._next_event(deadline - time.monotonic()), generation)
        if generation.is_failing or generation.stillness is None:
            return
        now = time.monotonic()
        witnesses = {
            rank: Witness(
                is_done=rank in generation.results,
                num_collectives=generation.num_collectives.get(rank),
                still_for=generation.stillness.still_for(rank, now),
                stacks=self._stacks.get(rank, "it did not answer"),
            )
            for rank in generation.places
        }
        generation.hang = report_hang(witnesses, self._settings.hang_timeout or 0.0)

    # ---- talking

    def _dismiss(self) -> None:
        """Let the agents go, and wait until they have cleaned up."""
        self._roster.broadcast(messages.Close())
        staying = {peer.connection for peer in self._roster.peers.values()}
        deadline = time.monotonic() + DISMISS_TIMEOUT
        while staying and time.monotonic() < deadline:
            kind, source, _ = self._next_event(deadline - time.monotonic())
            if kind == "gone":
                staying.discard(source)
        for connection in staying:
            hang_up(connection)

    def _next_event(self, timeout: float) -> Event:
        try:
            event = self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return ("timeout", None, None)
        if event[0] == "gone":
            event[1].close()  # by the only thread that sends: another's send might reach whoever gets the number next
        return event

    def _give_notice(self, text: str) -> None:
        if time.monotonic() - self._noticed_at >= NOTICE_INTERVAL:
            self._noticed_at = time.monotonic()
            self._note(text)

    def _note(self, text: str) -> None:
        self._observe("noted", f"{self._request.name.rpartition('.')[2]}: {text}")

    def _observe(self, method: str, *args: object) -> None:
        for observer in self._observers:
            getattr(observer, method)(*args)


class Preemptible(Protocol):
    """What runs in this process and must end when the task is told to."""

    def preempt(self, reason: str) -> None:
        """Save and end; called by a signal handler."""


running: weakref.WeakSet[Preemptible] = weakref.WeakSet()
"""Whatever is to hear of it."""


def preempt_all(reason: str) -> bool:
    """Have all gangs of this process save a checkpoint and end; whether there are any."""
    present = list(running)
    for preemptible in present:
        preemptible.preempt(reason)
    return bool(present)


class _Rendezvous:
    """A store on a port that the system picks, in this process, which outlives every rank; opened when it is needed.

    Torch asks for the name of every address that it connects to, so each connection costs a query of the domain name
    system, and five seconds where that does not answer: a rank that is alone does without.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._store: TCPStore | None = None

    def address(self) -> tuple[str, int]:
        """Its host and port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return self._host, self._store.port

    def close(self) -> None:
        """End it."""
        self._store = None


def _agent_failure(text: str) -> Failure:
    last_line = text.rstrip().rpartition("\n")[2]
    return Failure(
        type_name="GangError",
        message=f"the agent that watches its ranks failed: {last_line}",
        traceback=text,
        pickled=None,
        time=time.time(),
        is_consequence=False,
    )


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
