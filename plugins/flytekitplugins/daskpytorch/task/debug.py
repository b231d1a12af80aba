"""Debug mode: the function runs in the calling process, as the only rank of no gang. Runs in the driver.

Breakpoints of an editor, profilers and `pytest --pdb` work as in any program.

    run_here ─▶ variables of torchrun, process group of one rank, current_rank() ─▶ the user's function
                  a rank's own session, whose reports go straight to observers, results and the gang's storage
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.state import Deadlines
from flytekitplugins.daskpytorch.driver.storage import claimed, start_of
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangCancelledError
from flytekitplugins.daskpytorch.node.fork_server import set_environment
from flytekitplugins.daskpytorch.node.hardware import describe_node
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import Written
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.host import AgentOrder, StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.job import Job, RankOrder, environment
from flytekitplugins.daskpytorch.protocol.journal import Shape, Training
from flytekitplugins.daskpytorch.protocol.observer import Observer, Observers
from flytekitplugins.daskpytorch.protocol.placement import place_ranks
from flytekitplugins.daskpytorch.protocol.script import completed
from flytekitplugins.daskpytorch.rank import process_group
from flytekitplugins.daskpytorch.rank.link import GangLink, unwrapped
from flytekitplugins.daskpytorch.rank.session import Session
from flytekitplugins.daskpytorch.rank.usage import profiled
from flytekitplugins.daskpytorch.records import LogRecord
from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE, Gang


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
    told = Observers(observers, name=name)
    error: Exception | None = None
    told.tell(journal.Began(training=training))
    told.note(f"debugging ({DEBUG_VARIABLE}, Gang(debug=True)): one rank, in this process")
    if settings.evaluate is not None:
        told.note("debugging: Gang(evaluate=...) has no effect, since there is one process")
    try:
        with ExitStack() as stack:
            storage = stack.enter_context(claimed(storage, name))
            folder = stack.enter_context(scratch_folder("daskpytorch-checkpoints-"))
            vault = Vault(settings, storage, folder, current_execution().filesystem)
            order = _order(name, settings, vault, folder, told)
            link = stack.enter_context(contextlib.closing(_Link(order, vault, told, received)))
            link.folder = results_folder
            _tell_start(told, storage, settings, link)
            stack.enter_context(_ranked(Session(order, link).rank, order, told))
            link.observers.open(told.for_rank())
            link.observers.call("on_begin")
            stack.push(lambda kind, *_: link.observers.call("on_end", int(kind is not None)))
            stack.enter_context(profiled(settings.profile, 0, folder, link.submit, link.note))
            return unwrapped(completed(function))
    except BaseException as caught:
        is_cancelled = isinstance(caught, KeyboardInterrupt)
        error = GangCancelledError(f"{name} was cancelled") if is_cancelled else raisable(caught, name)
        raise
    finally:
        told.tell(journal.Ended.by(error))


def _order(name: str, settings: Gang, vault: Vault, folder: Path, told: Observers) -> RankOrder:
    start = vault.restore()
    vault.lend(start)
    vault.begin()
    job = Job(
        gang=name,
        attempt=0,
        call=None,
        backend="gloo",
        settings=settings,
        checkpoint=start,
        sharding=vault.shards.sharding(vault.sharded),
        kept=vault.saved(),
        storage=vault.own,
        environment=settings.environment,
    )
    [[place]] = places = place_ranks([node := describe_node(socket.gethostname(), None)], 1)
    told.tell(journal.Placed(shape=Shape(name=name, backend=job.backend, nodes=[node], places=places)))
    agent = AgentOrder(driver=("", 0), token=b"")
    return RankOrder(place=place, job=job, scratch=str(folder), agent=agent, driver_folder=str(folder))


def _tell_start(told: Observers, storage: StoragePaths | None, settings: Gang, link: GangLink) -> None:
    step = max((saved.step for saved in link.kept), default=None)
    if step is not None:
        told.tell(journal.Resumed(step=step))
    if (text := start_of(storage, settings, step)) is not None:
        told.note(text)


@contextlib.contextmanager
def _ranked(rank: context.RankContext, order: RankOrder, told: Observers) -> Iterator[None]:
    begun_at, before, outside = time.monotonic(), dict(os.environ), context.current_rank()
    changed = environment(before, order.place, order.job, None, Path(order.scratch))
    del changed["CUDA_VISIBLE_DEVICES"]  # stays, as the calling process may already use its GPUs
    try:
        os.environ.update(changed)
        process_group.install()
        process_group.expect(process_group.Membership(order.place, order.job, lambda: None))
        process_group.join()
        context.enter(rank)
        told.tell(journal.Formed(seconds=time.monotonic() - begun_at))
        yield
    finally:
        context.enter(outside)
        process_group.leave()
        set_environment(before)


class _Link(GangLink):
    """Takes the rank's reports in this process, in place of agent and driver."""

    def __init__(self, order: RankOrder, vault: Vault, told: Observers, received: ReceivedResults) -> None:
        super().__init__(Pipe()[0], order)
        self._vault, self._told, self._received = vault, told, received
        self._limit = Deadlines(order.job.settings.grace_period).storage

    def log(self, record: LogRecord) -> None:
        self.show(record)
        self._told.tell(journal.Logged(record=record.sent()))
        if self._told.stopped_early is not None:
            raise self._told.stopped_early

    def _send_piece(self, piece: messages.Piece) -> None:
        self._received.add(self._received.keep(0, piece))

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Wait until the checkpoint is kept: observers hear from one thread at a time."""
        yield
        context.current_rank().checkpoint.flush()

    def send(self, report: messages.ShortReport) -> None:
        match report:
            case Written(entry, None):
                self._vault.add(entry)
                self._told.tell(journal.Checkpointed(step=entry.step))
                self._tell_kept()
            case Written(entry, problem):
                self.note(f"has not kept the checkpoint of step {entry.step} ({problem})")
            case messages.Ask(_, number, (is_sharded, step)):
                self.take(messages.Answer(number, self._vault.choose(step, is_sharded=is_sharded)))
            case messages.Noted(text, adapts=False):
                self._told.note(f"rank 0 {text}")

    def close(self) -> None:
        """Wait until storage has the checkpoints, for a part of the grace period, and end the thread that writes."""
        self._vault.finish(self._limit)
        self._vault.close()
        self._tell_kept()

    def _tell_kept(self) -> None:
        self.kept = self._vault.saved()
        self._told.tell(journal.Listed(checkpoints=self.kept))
