"""A gang of one rank that is the calling process, for debugging: no fork, no Dask. Runs in the driver, the rank.

Breakpoints of an editor, profilers and `pytest --pdb` work in it as in any program.
"""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.context import LogRecord, Progress, RankContext, SavedCheckpoint
from flytekitplugins.daskpytorch.driver.checkpoints import Checkpoints
from flytekitplugins.daskpytorch.driver.claim import claimed
from flytekitplugins.daskpytorch.driver.committer import Committer
from flytekitplugins.daskpytorch.driver.events import Committed
from flytekitplugins.daskpytorch.driver.goodput import Accountant
from flytekitplugins.daskpytorch.driver.manifest import Manifest
from flytekitplugins.daskpytorch.driver.preemption import Deadlines
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import start_of
from flytekitplugins.daskpytorch.driver.retention import listed
from flytekitplugins.daskpytorch.driver.upload import StorageUpload
from flytekitplugins.daskpytorch.errors import GangError, StoppedEarlyError
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.node.hardware import describe_node
from flytekitplugins.daskpytorch.process.scratch import scratch_folder
from flytekitplugins.daskpytorch.protocol import orders, reports, result_frames
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.failure import describe_exit
from flytekitplugins.daskpytorch.protocol.host import StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, Observers, Shape, Training
from flytekitplugins.daskpytorch.protocol.placement import Place, place_ranks
from flytekitplugins.daskpytorch.rank import process_group, usage
from flytekitplugins.daskpytorch.rank.checkpoint import RankCheckpoint
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints
from flytekitplugins.daskpytorch.rank.usage import Ledger
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE, Gang

DEVICES = "CUDA_VISIBLE_DEVICES"
"""Left as it is: this process may have used its GPUs before."""


class _Shards:
    """The driver's side of sharded checkpoints, and beside it the rank's."""

    def __init__(
        self,
        settings: Gang,
        paths: StoragePaths | None,
        manifest: Manifest | None,
        folder: Path,
        observers: Observers,
        checkpoints: Checkpoints,
        accountant: Accountant,
    ) -> None:
        filesystem = current_execution().filesystem
        self.committer = Committer.of(settings, paths, manifest, folder, filesystem, self._note_committed)
        self.committer.begin()
        self.rank = ShardedCheckpoints(self.committer.sharding(), attempt=0, rank=0, report=self._hear)
        self._observers = observers
        self._checkpoints = checkpoints
        self._accountant = accountant

    def give_up(self) -> None:
        """Write nothing more where another gang's checkpoints lie."""
        self._checkpoints.close()
        self.committer.close()

    def saved(self) -> tuple[SavedCheckpoint, ...]:
        """What a user is told of all that are kept, of both kinds."""
        return listed(self._checkpoints.saved(), self.committer.saved())

    def _hear(self, said: reports.ShardsWritten | reports.ShardsNotWritten) -> None:
        if isinstance(said, reports.ShardsWritten):
            self.committer.commit([said.shards])
        else:
            self._settle(said.number, f"the sharded checkpoint of step {said.step} was not kept: {said.reason}")

    def _note_committed(self, commit: Committed) -> None:
        if commit.error is None:
            self._accountant.keep(commit.step)
            self._observers.tell("kept", commit.step)
            self._observers.tell("keeps", self.saved())
            self._settle(commit.number)
        else:
            self._settle(commit.number, f"the sharded checkpoint of step {commit.step} was not kept ({commit.error!r})")

    def _settle(self, number: int, failure: str | None = None) -> None:
        if failure is not None:
            self._observers.tell("noted", failure)
        self.committer.sweep(0, number)
        self.rank.settle(number)


class InProcess:
    """One training, whose rank 0 of 1 is whoever enters it."""

    def __init__(
        self,
        name: str,
        settings: Gang,
        observers: Sequence[Observer],
        received: ReceivedResults,
        *,
        training: Training | None = None,
        storage: StoragePaths | None = None,
        ask_for_folder: Callable[[], Any] | None = None,
    ) -> None:
        self._name = name
        self._training = training
        self._settings = settings
        self._observers = Observers(observers)
        self._rank_observers = Observers()
        self._received = received
        self._storage = storage
        self._ask_for_folder = ask_for_folder
        self._accountant = Accountant(time.monotonic())
        self._ledger = Ledger()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Make this process the rank: environment, process group, `current_rank()`; and undo it at the end."""
        error: Exception | None = None
        try:
            with contextlib.ExitStack() as stack:
                if self._training is not None:
                    self._observers.tell("begins", self._training)
                claim = stack.enter_context(claimed(self._storage, self._name))
                folder = stack.enter_context(scratch_folder("daskpytorch-debug-"))
                checkpoints, shards = self._checkpoints(folder, stack)
                claim.on_loss = shards.give_up
                [[place]] = self._placed()
                job = self._job()
                stack.enter_context(_changed(orders.environment(os.environ, place, job, None, folder)))
                process_group.install()
                stack.callback(process_group.leave)
                process_group.expect(place, job, lambda: None)
                process_group.join()
                stack.enter_context(_entered(rank := self._context(folder, checkpoints, shards)))
                self._observers.tell("formed", 0.0)
                self._accountant.enter("training")
                self._ledger.begin()
                try:
                    with _exits_as_errors(), usage.watched(self._ledger):
                        yield
                    self._accountant.hear(reports.Spent(self._ledger.close(), is_last=True))
                    rank.checkpoint.flush()
                    shards.committer.flush(self._settings.start_timeout)
                except Exception:
                    self._accountant.hear(reports.Spent(self._ledger.seconds(), is_last=True))
                    rank.checkpoint.flush()
                    limit = Deadlines(self._settings.grace_period).storage
                    checkpoints.flush(limit)
                    shards.committer.flush(limit)
                    raise
        except Exception as caught:
            error = caught
            raise
        finally:
            self._accountant.close(is_lost=error is not None and not isinstance(error, StoppedEarlyError))
            self._rank_observers.tell("accounted", self._accountant.goodput())
            self._rank_observers.tell("close", int(error is not None), None)
            self._observers.tell("accounted", self._accountant.goodput())
            self._observers.tell("ended", error)

    def _checkpoints(self, folder: Path, stack: contextlib.ExitStack) -> tuple[Checkpoints, _Shards]:
        keep = self._settings.keep
        storage = StorageUpload(self._storage, keep) if self._storage else None
        checkpoints = Checkpoints(folder, storage, keep)
        stack.callback(checkpoints.close)
        start = checkpoints.restore()
        manifest = storage.manifest if storage is not None else None
        told = (self._observers, checkpoints, self._accountant)
        shards = _Shards(self._settings, self._storage, manifest, folder, *told)
        stack.callback(shards.committer.close)
        if steps := [found.step for found in (start, shards.committer.newest()) if found is not None]:
            self._observers.tell("resumed", max(steps))
            self._observers.tell("keeps", shards.saved())
        if (text := start_of(self._storage, self._settings, steps)) is not None:
            self._observers.tell("noted", f"{self._name.rpartition('.')[2]}: {text}")
        return checkpoints, shards

    def _placed(self) -> list[list[Place]]:
        name = self._name.rpartition(".")[2]
        how = f"debugging ({DEBUG_VARIABLE}, Gang(debug=True)): one rank, in this process"
        self._observers.tell("noted", f"{name}: {how}")
        node = describe_node(socket.gethostname(), None)
        places = place_ranks([node], 1)
        self._observers.tell("placed", Shape(name=self._name, backend="gloo", nodes=[node], places=places))
        self._rank_observers.open(self._observers.for_rank())
        self._rank_observers.tell("begins")
        return places

    def _job(self) -> orders.Job:
        return orders.Job(gang="debug", attempt=0, call=b"", backend="gloo", timeout=self._settings.start_timeout)

    def _context(self, folder: Path, checkpoints: Checkpoints, shards: _Shards) -> RankContext:
        provided: Future[orders.Provided | orders.NotProvided] = Future()
        provided.set_result(orders.Provided(0))
        progress = Progress()

        def keep(file: CheckpointFile) -> None:
            checkpoints.keep(file)
            self._accountant.keep(file.step)
            self._observers.tell("kept", file.step)
            self._observers.tell("keeps", shards.saved())

        def ask(wanted: reports.Wanted) -> Future[orders.Chosen]:
            chosen: Future[orders.Chosen] = Future()
            if wanted.is_sharded:
                shards.committer.flush(self._settings.start_timeout)
                found = shards.committer.find(wanted.step)
                chosen.set_result(orders.Chosen(0, wanted.number, None, sharded=found))
            else:
                chosen.set_result(orders.Chosen(0, wanted.number, checkpoints.find(wanted.step)))
            return chosen

        checkpoint = RankCheckpoint(
            folder=folder,
            attempt=0,
            start=checkpoints.newest(),
            is_main=True,
            progress=progress,
            announce=keep,
            provided=provided,
            sharded=shards.rank,
            timeout=self._settings.start_timeout,
            ask=ask,
            kept=shards.saved,
            storage=self._storage.own if self._storage else None,
            best_by=self._settings.keep.metric,
            saving=functools.partial(usage.saving, self._ledger, self._accountant.hear),
        )
        return RankContext(
            checkpoint=checkpoint,
            progress=progress,
            sink=self._log,
            watcher=lambda *how: self._rank_observers.tell("watch", *how),
            submit=self._submit,
            ask_for_folder=self._ask_for_folder,
            spend=self._ledger.spending,
            account=self._account,
        )

    def _account(self) -> Goodput:
        self._accountant.hear(reports.Spent(self._ledger.seconds()))
        return self._accountant.goodput()

    def _log(self, record: LogRecord) -> None:
        self._ledger.mark()
        if self._accountant.is_due():
            self._observers.tell("accounted", self._account())
        self._rank_observers.tell("logged", record)
        if (wish := self._observers.tell("logged", record.sent())) is not None:
            raise wish

    def _submit(self, key: str, path: str, data: bytes) -> None:
        for piece in result_frames.cut(key, path, data):
            self._received.add(self._received.keep(0, piece))


@contextlib.contextmanager
def _exits_as_errors() -> Iterator[None]:
    """Make an exit code that is not 0 the error of the gang, which this process outlives."""
    try:
        yield
    except SystemExit as error:
        how = describe_exit(error)
        raise GangError(f"rank 0 of 1 failed: {how}", rank=0, cause=how) from error


@contextlib.contextmanager
def _changed(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name: value for name, value in environment.items() if name != DEVICES})
    try:
        yield
    finally:
        for name in environment:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


@contextlib.contextmanager
def _entered(rank: RankContext) -> Iterator[None]:
    outer = context.current_rank()
    context.enter(rank)
    try:
        yield
    finally:
        context.enter(outer)
