"""Evaluates a gang's checkpoints beside its training: decides which, runs a gang for each, and returns the metrics.

    kept checkpoint ──▶ Evaluator ──▶ a gang of its own ──▶ metrics ──▶ observers, checkpoint, rank 0

Runs in the driver. All but the evaluation's gang runs in the thread of the training's gang.
"""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from flytekitplugins.daskpytorch.driver.part import Moment, Part, Stage
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.protocol import host, journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.records import LogRecord

RETRY_INTERVAL = 2.0
MAX_LACK = 60.0
"""Seconds without a free worker after which the training no longer waits for an evaluation."""
CLOSE_TIMEOUT = 15.0


class Relay(Observer):
    def __init__(self, what: str, tell: Callable[[journal.Event], object]) -> None:
        self._what = what
        self._tell = tell

    def on_event(self, event: journal.Event) -> None:
        if isinstance(event, journal.Wrote):
            self._tell(replace(event, lines=[f"({self._what}) {line}" for line in event.lines]))
        elif isinstance(event, journal.Noted):
            self._tell(replace(event, text=event.line, gang=self._what))


class EvaluationGang(Protocol):
    received: ReceivedResults

    def run(self) -> list[Any]:
        """Return the ranks' results at the gang's end."""

    def cancel(self) -> None:
        """End the gang."""


MakeGang = Callable[[Request, host.AgentLauncher], EvaluationGang]


class Evaluator(Part):
    """Evaluates the newest of each n-th checkpoint. Checkpoints that run or wait for their evaluation must stay."""

    def __init__(self, state: GangState, vault: Vault, make: MakeGang) -> None:
        self._state = state
        self._template = state.request.evaluation
        settings = state.request.settings.evaluate
        self._every, self._timeout = (settings.every, settings.timeout) if settings is not None else (1, 0.0)
        self._vault = vault
        self._observers = state.observers
        self._make = make
        self._now = state.now
        self._seen: set[str] = set()
        self._running: CheckpointEntry | None = None
        self._waiting: CheckpointEntry | None = None
        self._num_kept = 0
        self._is_closed = False
        self._code: Code | None = None
        self._records: list[LogRecord] = []
        self._gang: EvaluationGang | None = None
        self._thread: threading.Thread | None = None
        self._lacks_since = math.inf
        self._deadline = self._try_at = 0.0

    # ---- what the training's gang tells

    def prepare(self, code: Code | None, start: CheckpointEntry | None) -> None:
        self._code = code
        if start is not None:
            self._seen.add(start.name)
            if not start.is_evaluated:
                self._make_wait(start)

    def enter(self, stage: Stage) -> None:
        if stage == "training":
            self._tell_trackers()

    def note_kept(self, entry: CheckpointEntry) -> None:
        if entry.name in self._seen:
            return
        self._seen.add(entry.name)
        self._num_kept += 1
        if self._num_kept % self._every == 0:
            self._make_wait(entry)

    def _make_wait(self, entry: CheckpointEntry) -> None:
        if self._template is not None and not self._is_closed:
            self._waiting = entry
            self._hold()

    def blocks(self, moment: Moment) -> bool:
        attempt, now = self._state.attempt, self._now()
        if attempt is None or self._template is None or self._is_closed:
            return False
        has_worker = now < self._lacks_since + MAX_LACK
        is_awaited = self._waiting is not None and has_worker
        is_awaited |= self._running is not None and now < self._deadline + CLOSE_TIMEOUT
        if moment is not Moment.CHOICE and (moment is not Moment.LEAVE or attempt.has_stopped_early):
            return False
        if is_awaited:
            self._observers.remind("waiting for evaluations of checkpoints")
        return is_awaited

    def orders(self, now: float) -> None:
        if self._gang is not None and now >= self._deadline:
            self._gang.cancel()
            self._gang = None
        if self._template is not None and self._waiting is not None and self._running is None and now >= self._try_at:
            self._begin(self._template, self._waiting)

    def close(self) -> None:
        """Cancel the running evaluation, whose checkpoint stays until its ranks have ended, and begin no other."""
        self._waiting, self._is_closed = None, True
        if self._gang is not None:
            self._gang.cancel()
        self._hold()

    def end(self) -> None:
        """Cancel the running evaluation, wait until its ranks have ended, and leave all checkpoints to the policy."""
        self.close()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)
        self._running = None
        self._hold()

    def conclude(self) -> None:
        if self._template is None:
            return
        if not self._seen:
            self._observers.note(
                "Gang(evaluate=...): no checkpoint was kept, so none was evaluated. Save checkpoints by "
                "current_rank().checkpoint.save(state, step)",
            )
        if (unfinished := self._running or self._waiting) is not None:
            why = "" if self._running is not None else ": no worker was there for it"
            self._observers.note(f"the evaluation of the checkpoint of step {unfinished.step} was given up{why}")

    # ---- one evaluation

    def _hold(self) -> None:
        self._vault.hold([entry.name for entry in (self._running, self._waiting) if entry is not None])

    def _begin(self, template: Request, entry: CheckpointEntry) -> None:
        launcher = None
        with contextlib.suppress(OSError):  # a busy scheduler. The training's gang itself notices a lost one
            launcher = self._state.agents.launcher.beside()
        if launcher is None:
            self._lacks_since = min(self._lacks_since, self._now())
            self._try_at = self._now() + RETRY_INTERVAL
            self._observers.remind("a checkpoint waits for a worker to be evaluated on")
            return
        self._lacks_since, self._running, self._waiting = math.inf, entry, None
        start = entry if entry.is_sharded else replace(entry, folder=str(self._vault.path_of(entry).parent))
        relay = Relay(f"evaluation of step {entry.step}", self._tell_later)
        request = replace(template, start=start, code=self._code, observers=[relay])
        self._gang = gang = self._make(request, launcher)
        self._deadline = self._now() + self._timeout
        self._thread = threading.Thread(
            target=self._run, args=(gang, entry), name="daskpytorch-evaluation", daemon=True
        )
        self._thread.start()

    def _tell_later(self, event: journal.Event) -> None:
        self._state.agents.post(functools.partial(self._observers.tell, event))

    def _run(self, gang: EvaluationGang, entry: CheckpointEntry) -> None:
        metrics: Mapping[str, float] | BaseException
        try:
            metrics = gang.received.take_returned(0, gang.run()[0])()
        except BaseException as error:  # the training goes on, whatever the user's function raises
            metrics = error
        finally:
            gang.received.drop_returned()
        self._state.agents.post(functools.partial(self._note_end, entry, metrics))

    def _note_end(self, entry: CheckpointEntry, metrics: Mapping[str, float] | BaseException) -> None:
        has_timed_out, self._gang, self._running = self._gang is None, None, None
        if self._is_closed:
            self._hold()
            return
        if isinstance(metrics, BaseException):
            self._try_at = self._now() + RETRY_INTERVAL  # Dask's scheduler may still list a lost worker
            limit = f"it took longer than {self._timeout:g} s. Raise Evaluate(timeout=...)"
            self._observers.note(
                f"the evaluation of the checkpoint of step {entry.step} failed, and the training goes on: "
                f"{limit if has_timed_out else _described(metrics)}"
            )
        else:
            record = LogRecord(
                rank=0, step=entry.step, num_steps=None, time=time.time(), metrics=metrics, is_evaluation=True
            )
            self._records.append(record)
            self._observers.tell(journal.Logged(record=record))
            self._vault.note_evaluated(entry.name, metrics)
        self._hold()  # afterwards, as the metrics may be the best
        self._tell_trackers()
        for part in self._state.parts:
            part.note_evaluated()

    def _tell_trackers(self) -> None:
        attempt = self._state.attempt
        if attempt is not None and 0 in attempt.ready and 0 not in attempt.exits:
            records, self._records = self._records, []
            for record in records if attempt.has_observers else ():
                attempt.tell(messages.Tell(record))


def _described(error: BaseException) -> str:
    blamed = error.__cause__ if isinstance(error.__cause__, GangError) else error
    kind = "" if isinstance(blamed, GangError) else f"{type(blamed).__name__}: "
    detail = (blamed.rank_traceback or blamed.log_tail or "") if isinstance(blamed, GangError) else ""
    return f"{kind}{str(blamed).partition(chr(10))[0]}\n{detail}".rstrip()
