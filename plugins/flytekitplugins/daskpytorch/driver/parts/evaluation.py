"""Evaluates a gang's checkpoints beside its training: decides which, runs a gang for each, and returns the metrics.

    kept checkpoint ──▶ Agenda ──▶ Evaluator ──▶ a gang of its own ──▶ metrics ──▶ observers, checkpoint, rank 0

Runs in the driver. All but the evaluation's gang runs in the thread of the training's gang.
"""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Moment, Part, Stage
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangError, WorkerLostError
from flytekitplugins.daskpytorch.protocol import host, journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.records import LogRecord

RETRY_INTERVAL = 2.0
MAX_LACK = 60.0
"""Seconds after the training's end for which the gang waits for a worker that can evaluate."""
CLOSE_TIMEOUT = 15.0


@dataclass
class Agenda:
    """Decides which checkpoint is evaluated next: the newest of each n-th one."""

    every: int = 1
    running: CheckpointEntry | None = None
    waiting: CheckpointEntry | None = None
    num_found: int = 0
    num_kept: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    is_closed: bool = False
    seen: set[str] = field(default_factory=set)

    def note_found(self, entry: CheckpointEntry) -> None:
        self.seen.add(entry.name)
        if not entry.is_evaluated:
            self.num_found += 1
            self._make_wait(entry)

    def note_kept(self, entry: CheckpointEntry) -> None:
        if entry.name in self.seen:
            return
        self.seen.add(entry.name)
        self.num_kept += 1
        if self.num_kept % self.every == 0:
            self._make_wait(entry)

    def _make_wait(self, entry: CheckpointEntry) -> None:
        if not self.is_closed:
            self.num_skipped += self.waiting is not None
            self.waiting = entry

    @property
    def due(self) -> CheckpointEntry | None:
        return self.waiting if self.running is None else None

    def note_begun(self) -> None:
        self.running, self.waiting = self.due, None

    def note_end(self, *, has_failed: bool) -> None:
        self.running = None
        self.num_failed += has_failed
        self.num_done += not has_failed

    def close(self) -> None:
        self.waiting, self.is_closed = None, True

    @property
    def held(self) -> frozenset[str]:
        """Identities of the checkpoints that must stay: the running and the waiting one."""
        return frozenset(entry.name for entry in (self.running, self.waiting) if entry is not None)

    @property
    def is_outstanding(self) -> bool:
        return not self.is_closed and bool(self.held)


class Relay(Observer):
    def __init__(self, what: str, tell: Callable[[journal.Event], object]) -> None:
        self._what = what
        self._tell = tell

    def on_event(self, event: journal.Event) -> None:
        if isinstance(event, journal.Wrote):
            self._tell(replace(event, lines=[f"({self._what}) {line}" for line in event.lines]))
        elif isinstance(event, journal.Noted):
            self._tell(replace(event, text=event.line, gang=self._what, is_hint=False))


class EvaluationGang(Protocol):
    received: ReceivedResults

    def run(self) -> list[Any]:
        """Return the ranks' results at the gang's end."""

    def cancel(self) -> None:
        """End the gang."""


MakeGang = Callable[[Request, host.AgentLauncher], EvaluationGang]


class Evaluator(Part):
    def __init__(self, state: GangState, vault: Vault, make: MakeGang) -> None:
        request = state.request
        self._state = state
        self._settings = request.settings.evaluate if request.evaluation is not None else None
        self._template = request.evaluation
        self._vault = vault
        self._observers = state.observers
        self._make = make
        self._now = state.now
        self._agenda = Agenda(self._settings.every if self._settings is not None else 1)
        self._code: Code | None = None
        self._records: list[LogRecord] = []
        self._gang: EvaluationGang | None = None
        self._thread: threading.Thread | None = None
        self._deadline = math.inf
        self._try_at = 0.0
        self._lacks_worker = False
        self._waits_since: dict[Moment, float] = {}
        """Time since which the core puts off each decision for evaluations."""

    # ---- what the training's gang tells

    def prepare(self, code: Code | None, start: CheckpointEntry | None) -> None:
        self._code = code
        if self._settings is not None and start is not None:
            self._agenda.note_found(start)
            self._hold()

    def begin(self, attempt: Attempt) -> None:
        self._waits_since.clear()

    def enter(self, stage: Stage) -> None:
        if stage == "training":
            self._tell_trackers()

    def note_kept(self, entry: CheckpointEntry) -> None:
        if self._settings is not None:
            self._agenda.note_kept(entry)
            self._hold()

    def blocks(self, moment: Moment) -> bool:
        attempt = self._state.attempt
        if attempt is None or self._settings is None or moment not in (Moment.LEAVE, Moment.CHOICE):
            return False
        since = self._waits_since.setdefault(moment, self._now())
        if moment is Moment.LEAVE:
            more_come = self._state.blocks(Moment.RESTART)
            return self._is_awaited(since, more_come=more_come) and not attempt.has_stopped_early
        if not (is_awaited := self._is_awaited(since)):
            del self._waits_since[moment]  # ranks may ask for the best again
        return is_awaited

    def orders(self, now: float) -> None:
        if self._gang is not None and now >= self._deadline:
            self._deadline = math.inf
            self._gang.cancel()
        if (entry := self._agenda.due) is not None and now >= self._try_at:
            self._begin(entry)

    def _is_awaited(self, since: float, *, more_come: bool = False) -> bool:
        agenda, settings, waited = self._agenda, self._settings, self._now() - since
        if settings is None or agenda.is_closed or not (agenda.is_outstanding or more_come):
            return False
        rest = (MAX_LACK if self._lacks_worker and agenda.running is None else settings.timeout) - waited
        if rest > 0 and agenda.is_outstanding:
            self._observers.remind(f"waiting for evaluations of checkpoints, for at most {rest:.0f} s more")
        return rest > 0

    def close(self) -> None:
        """Cancel the running evaluation, whose checkpoint stays until its ranks have ended, and begin no other."""
        self._agenda.close()
        if self._gang is not None:
            self._gang.cancel()
        self._hold()

    def end(self) -> None:
        """Cancel the running evaluation, wait until its ranks have ended, and leave all checkpoints to the policy."""
        self.close()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)
        self._agenda.running = None
        self._hold()

    def conclude(self) -> None:
        agenda, settings = self._agenda, self._settings
        if settings is None:
            return
        if not agenda.seen:
            self._observers.hint(
                "evaluate",
                "Gang(evaluate=...): no checkpoint was kept, so none was evaluated. Save checkpoints by "
                "current_rank().checkpoint.save(state, step)",
            )
        if not (num_known := agenda.num_found + agenda.num_kept):
            return
        text = f"{agenda.num_done} of {num_known} checkpoints evaluated"
        text += f"; {agenda.num_skipped} skipped, since newer ones had come" if agenda.num_skipped else ""
        text += f"; {agenda.num_failed} failed" if agenda.num_failed else ""
        if unfinished := agenda.running or agenda.waiting:
            why = f"it had not ended {settings.timeout:g} s after the training. Raise Evaluate(timeout=...)"
            if agenda.is_closed:
                why = "the training was told to end"
            elif agenda.running is None and self._lacks_worker:
                why = "no worker was there for it"
            text += f"; that of step {unfinished.step} was given up: {why}"
        self._observers.note(text)

    # ---- one evaluation

    def _hold(self) -> None:
        if self._settings is not None:
            self._vault.hold(self._agenda.held)

    def _begin(self, entry: CheckpointEntry) -> None:
        assert self._template is not None  # noqa: S101 - without `Gang(evaluate=...)`, no checkpoint waits
        assert self._settings is not None  # noqa: S101
        launcher = None
        with contextlib.suppress(OSError):  # a busy scheduler. The training's gang itself notices a lost one
            launcher = self._state.agents.launcher.beside()
        self._lacks_worker = launcher is None
        if launcher is None:
            self._try_at = self._now() + RETRY_INTERVAL
            self._observers.remind("a checkpoint waits for a worker to be evaluated on")
            return
        self._agenda.note_begun()
        start = entry if entry.is_sharded else replace(entry, folder=str(self._vault.path_of(entry).parent))
        relay = Relay(f"evaluation of step {entry.step}", self._tell_later)
        request = replace(self._template, start=start, code=self._code, observers=[relay])
        self._gang = gang = self._make(request, launcher)
        self._deadline = self._now() + self._settings.timeout
        self._thread = threading.Thread(
            target=self._run, args=(gang, entry), name="daskpytorch-evaluation", daemon=True
        )
        self._thread.start()

    def _tell_later(self, event: journal.Event) -> None:
        self._state.agents.post(functools.partial(self._observers.tell, event))

    def _run(self, gang: EvaluationGang, entry: CheckpointEntry) -> None:
        metrics: Mapping[str, float] | BaseException
        try:
            metrics = gang.received.load_returned(0, gang.run()[0])
        except BaseException as error:  # the training goes on, whatever the user's function raises
            metrics = error
        finally:
            gang.received.drop_returned()
        self._state.agents.post(functools.partial(self._note_end, entry, metrics))

    def _note_end(self, entry: CheckpointEntry, metrics: Mapping[str, float] | BaseException) -> None:
        self._gang = None
        self._agenda.note_end(has_failed=isinstance(metrics, BaseException))
        if self._agenda.is_closed:
            self._hold()
            return
        if isinstance(metrics, BaseException):
            if isinstance(metrics, WorkerLostError):  # Dask's scheduler may still list the lost worker
                self._try_at = self._now() + RETRY_INTERVAL
            self._tell_failure(entry, metrics)
        else:
            record = LogRecord(
                rank=0, step=entry.step, num_steps=None, time=time.time(), metrics=metrics, is_evaluation=True
            )
            self._records.append(record)
            self._observers.tell(journal.Logged(record=record))
            self._vault.note_evaluated(entry.name, metrics)
        self._hold()  # afterwards, as the metrics may be the best
        self._tell_trackers()
        self._state.note_evaluated()

    def _tell_trackers(self) -> None:
        attempt = self._state.attempt
        if attempt is not None and 0 in attempt.ready and 0 not in attempt.exits:
            records, self._records = self._records, []
            for record in records if attempt.has_observers else ():
                attempt.tell(messages.Tell(record))

    def _tell_failure(self, entry: CheckpointEntry, error: BaseException) -> None:
        what = f"the evaluation of the checkpoint of step {entry.step} failed, and the training goes on"
        if self._settings is not None and self._deadline == math.inf:
            limit = self._settings.timeout
            self._observers.note(f"{what}: it took longer than {limit:g} s. Raise Evaluate(timeout=...)")
            return
        blamed = error.__cause__ if isinstance(error.__cause__, GangError) else error
        kind = "" if isinstance(blamed, GangError) else f"{type(blamed).__name__}: "
        detail = (blamed.rank_traceback or blamed.log_tail or "") if isinstance(blamed, GangError) else ""
        self._observers.note(f"{what}: {kind}{str(blamed).partition(chr(10))[0]}\n{detail}".rstrip())
