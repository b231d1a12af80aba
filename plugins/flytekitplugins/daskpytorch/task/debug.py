"""Debug mode: the function runs in the calling process, as the only rank of no gang. Runs in the driver.

Breakpoints of an editor, profilers and `pytest --pdb` work as in any program.

    run_here ─▶ variables of torchrun, process group of one rank, current_rank() ─▶ the user's function
                  log, submit  ─▶ observers, trackers and results, in this process
                  checkpoint   ─▶ a local folder, and from there the gang's storage
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.context import Checkpoint, Link, RankContext
from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.committer import Committed, Committer
from flytekitplugins.daskpytorch.driver.state import Deadlines
from flytekitplugins.daskpytorch.driver.storage import claimed, start_of
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangCancelledError
from flytekitplugins.daskpytorch.node.fork_server import set_environment
from flytekitplugins.daskpytorch.node.hardware import describe_node
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Written
from flytekitplugins.daskpytorch.protocol.host import StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.job import Job, environment
from flytekitplugins.daskpytorch.protocol.journal import Shape, Training
from flytekitplugins.daskpytorch.protocol.messages import PieceWriter
from flytekitplugins.daskpytorch.protocol.observer import Observer, Observers, RankObservers
from flytekitplugins.daskpytorch.protocol.placement import place_ranks
from flytekitplugins.daskpytorch.protocol.script import completed, describe_exit
from flytekitplugins.daskpytorch.rank import process_group
from flytekitplugins.daskpytorch.rank.checkpoint import check_best, copy_of, read_checkpoint, write_checkpoint
from flytekitplugins.daskpytorch.rank.link import unwrapped
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints
from flytekitplugins.daskpytorch.rank.usage import profiled
from flytekitplugins.daskpytorch.records import LogRecord, SavedCheckpoint, numbers
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE, Gang

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.driver.received import ReceivedResults


ATTEMPT = 1
DEVICES = "CUDA_VISIBLE_DEVICES"
"""Stays unchanged, as the calling process may already use its GPUs."""


def run_here(
    function: Callable[[], Any],
    settings: Gang,
    received: ReceivedResults,
    results_folder: Callable[[], object] = lambda: None,
    *,
    observers: Sequence[Observer],
    training: Training,
    storage: StoragePaths | None,
) -> Any:
    """Call a function as the only rank, in this thread, and return its result.

    `received` gets the files that the function submits. `results_folder` returns None outside a task. The function's
    exception is raised with its traceback, `SystemExit` with a code other than 0, too.
    """
    name = training.name
    if settings.evaluate is not None:
        say(f"{name}: debugging: Gang(evaluate=...) has no effect, since there is one process")
    told = Observers(observers, name=name)
    error: Exception | None = None
    told.tell(journal.Began(training=training))
    told.note(f"debugging ({DEBUG_VARIABLE}, Gang(debug=True)): one rank, in this process")
    try:
        with ExitStack() as stack:
            if (claim := stack.enter_context(claimed(storage, name))) is not None:
                storage = claim.paths
            folder = stack.enter_context(scratch_folder("daskpytorch-checkpoints-"))
            checkpoint = _LocalCheckpoint(settings, storage, folder, told)
            stack.callback(checkpoint.close)
            link = _Link(told, received, results_folder)
            _become_rank(RankContext(checkpoint=checkpoint, link=link), name, settings, checkpoint, told, stack)
            link.trackers.open(told.for_rank())
            link.trackers.call("on_begin")
            stack.push(lambda kind, *_: link.trackers.call("on_end", int(kind is not None)))
            stack.enter_context(
                profiled(settings.profile, 0, folder, link.submit, lambda text: told.note(f"rank 0 {text}"))
            )
            return unwrapped(completed(function))
    except KeyboardInterrupt:
        error = GangCancelledError(f"{name} was cancelled")
        raise
    except SystemExit as ended:
        error = RuntimeError(f"{name} ended with {describe_exit(ended)}")
        raise
    except Exception as caught:
        error = caught
        raise
    finally:
        told.tell(journal.Ended.by(error))


def _become_rank(
    rank: RankContext,
    name: str,
    settings: Gang,
    checkpoint: _LocalCheckpoint,
    told: Observers,
    stack: ExitStack,
) -> None:
    begun_at, node = time.monotonic(), describe_node(socket.gethostname(), None)
    [[place]] = places = place_ranks([node], 1)
    job = Job(
        gang=name,
        attempt=ATTEMPT,
        call=None,
        backend="gloo",
        settings=settings,
        sharding=checkpoint.sharding,
        environment=settings.environment,
    )
    stack.callback(set_environment, dict(os.environ))
    changed = environment(os.environ, place, job, None, checkpoint.folder)
    os.environ.update({name: value for name, value in changed.items() if name != DEVICES})
    stack.callback(process_group.leave)
    stack.callback(context.enter, context.current_rank())
    process_group.install()
    process_group.expect(place, job, lambda: None)
    process_group.join()
    context.enter(rank)
    told.tell(journal.Placed(shape=Shape(name=name, backend="gloo", nodes=[node], places=places)))
    told.tell(journal.Formed(seconds=time.monotonic() - begun_at))


class _LocalCheckpoint(Checkpoint):
    loaded: SavedCheckpoint | None = None

    def __init__(self, settings: Gang, storage: StoragePaths | None, folder: Path, told: Observers) -> None:
        self.folder = folder
        self._told = told
        self._keep = settings.keep
        self._timeout = settings.start_timeout
        self._end_timeout = Deadlines(settings.grace_period).storage
        self._vault = Vault(storage, settings.keep, folder)
        filesystem = current_execution().filesystem
        self._committer = Committer(settings, storage, self._vault, folder, filesystem, self._note_commit)
        self._start = self._vault.restore()
        self._committer.begin()
        self.sharding = self._committer.sharding()
        self._sharded = ShardedCheckpoints(self.sharding, attempt=ATTEMPT, rank=0, report=self._commit)
        if self._start is not None:
            self._vault.hold([self._start.name])  # `load` reads the file, perhaps after other saves
        step = max((saved.step for saved in self.list()), default=None)
        if step is not None:
            told.tell(journal.Resumed(step=step))
            told.tell(journal.Listed(checkpoints=self.list()))
        if (text := start_of(storage, settings, step)) is not None:
            told.note(text)

    def save(self, state: Any, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        step, plain = int(step), numbers(metrics)
        self._vault.add(write_checkpoint(self.folder, ATTEMPT, copy_of(state), step, plain))
        self._note_kept(step)

    def load(self, *, best: bool = False, step: int | None = None) -> Any | None:
        check_best("load", self._keep.metric, best, step)
        chosen = self._find(self._vault.intact(), step) if best or step is not None else self._start
        self.loaded = chosen.saved(self._vault.own) if chosen is not None else None
        return read_checkpoint(self._vault.path_of(chosen)) if chosen is not None else None

    def save_sharded(self, state: dict[str, Any], step: int, metrics: Mapping[str, Any] | None = None) -> None:
        self._sharded.save(state, int(step), numbers(metrics))
        self._sharded.flush()
        self._committer.flush(self._timeout)

    def load_sharded(self, state: dict[str, Any], *, best: bool = False, step: int | None = None) -> int | None:
        check_best("load_sharded", self._keep.metric, best, step)
        if not best and step is None:
            return self._sharded.load(state)
        chosen = self._find(self._vault.sharded, step)
        self.loaded = chosen.saved(None) if chosen is not None else None
        return self._sharded.load(state, chosen) if chosen is not None else None

    def list(self) -> Sequence[SavedCheckpoint]:
        return self._vault.saved()

    def close(self) -> None:
        """Wait until storage has the checkpoints, for a part of the grace period, and end the thread that writes."""
        self._vault.hold([])
        self._vault.flush(self._end_timeout)
        self._committer.flush(self._end_timeout)
        self._committer.close()
        self._told.tell(journal.Listed(checkpoints=self.list()))

    def _find(self, entries: Sequence[CheckpointEntry], step: int | None) -> CheckpointEntry | None:
        found = manifest.find(entries, self._keep, step)
        if found is None and step is not None:
            steps = ", ".join(str(kept.step) for kept in self.list()) or "none"
            raise LookupError(f"the checkpoint of step {step} is not kept. Steps of kept checkpoints: {steps}")
        return found

    def _commit(self, said: Written) -> None:
        if said.failure is None:
            self._committer.commit(said.entry)
        else:
            self._settle(said.entry, said.failure)

    def _note_commit(self, commit: Committed) -> None:
        self._settle(commit.entry, None if commit.error is None else f"{commit.error!r}")

    def _settle(self, entry: CheckpointEntry, problem: str | None) -> None:
        if problem is None:
            self._note_kept(entry.step)
        else:
            self._told.note(f"the sharded checkpoint of step {entry.step} was not kept ({problem})")

    def _note_kept(self, step: int) -> None:
        self._told.tell(journal.Checkpointed(step=step))
        self._told.tell(journal.Listed(checkpoints=self.list()))


class _Link(Link):
    takes_results = True

    def __init__(self, told: Observers, received: ReceivedResults, results_folder: Callable[[], object]) -> None:
        self._told = told
        self._received = received
        self._results_folder = results_folder
        self.trackers = RankObservers()

    def log(self, record: LogRecord) -> None:
        self.trackers.call("on_log", record)
        self._told.tell(journal.Logged(record=record.sent()))
        if self._told.stopped_early is not None:
            raise self._told.stopped_early

    def submit(self, path: str, data: bytes) -> None:
        pieces = PieceWriter(path, lambda piece: self._received.add(self._received.keep(0, piece)))
        pieces.write(data)
        pieces.end()

    def results_folder(self) -> Any:
        self.submit("", b"")
        return self._results_folder()
