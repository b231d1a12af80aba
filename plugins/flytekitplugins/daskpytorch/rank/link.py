"""A rank's link to its driver, through its agent: reports go out, answers to what it asks come in. Runs in a rank."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from flytekitplugins.daskpytorch.context import Link, LogRecord, Progress, SavedCheckpoint
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.protocol import orders, reports, result_frames
from flytekitplugins.daskpytorch.protocol.observer import Observers
from flytekitplugins.daskpytorch.protocol.segments import Address, send_by_file
from flytekitplugins.daskpytorch.rank import flight_recorder, usage
from flytekitplugins.daskpytorch.rank.records import Records, interval_of
from flytekitplugins.daskpytorch.rank.returned import dump_returned
from flytekitplugins.daskpytorch.rank.usage import Ledger

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


class Channel(Protocol):
    """The sending half of a pipe to the agent."""

    def send_bytes(self, buf: bytes, /) -> None:
        """Send a message."""

    def close(self) -> None:
        """Close this process's end."""


class GangLink(Link):
    """The link of a gang's rank. Any thread of the rank may use it."""

    takes_results = True

    def __init__(self, channel: Channel, order: orders.RankOrder) -> None:
        place, job = order.place, order.job
        self.worker_data = order.data
        self.progress = Progress()
        self.ledger = Ledger()
        self.observers = Observers()
        """Observers in rank 0, which hear each log record at once."""
        self.folder: Callable[[], object] | None = None
        """Returns the folder of the task's results; None where the function is not that of a task."""
        self.ended = threading.Event()
        """Set when every rank of the gang has finished."""
        self.is_over = False
        """True if the rank is to end; only in a process that outlives the rank."""
        self.kept: Sequence[SavedCheckpoint] = job.kept
        """All checkpoints that the driver keeps, as far as it has told."""
        self._channel = channel
        self._is_main = place.rank == 0
        self._driver_folder = order.driver_folder
        self._attempt = job.attempt
        self._timeout = job.timeout
        self._lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._arrivals: dict[int, Future[orders.Arrived]] = {}
        self._accounts: dict[int, Future[Goodput]] = {}
        self._num_accounts = 0
        self._hinted: set[str] = set()
        self.has_delivered = False
        """True once the rank has reported that its function returned."""
        interval = interval_of(place.rank, place.world_size)
        self.records = Records(self.send_records, interval, hints=job.hints)
        """Log records, and what can wait for them."""
        here = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _fall_silent(here()))

    def fall_silent(self) -> None:
        """Report nothing more: this is a process that the rank has forked, whatever of the rank it still holds."""
        self._lock, self._submit_lock = threading.Lock(), threading.Lock()  # a thread of the rank may have held them
        self._channel.close()

    # ---- what `RankContext` calls

    def log(self, record: LogRecord) -> None:
        """Report a log record: to observers here at once, to the driver soon.

        Raises:
            SystemExit: The gang has ended, and this process, which is not the rank's own, was not killed.
        """
        if self.is_over:
            raise SystemExit(orders.STOPPED)
        self.ledger.mark()
        self.observers.tell("logged", record)
        self.records.add(record)

    def watch(self, model: torch.nn.Module, log_freq: int) -> None:
        """Have the trackers in rank 0 record the gradients of a model."""
        self.observers.tell("watch", model, log_freq)

    def submit(self, key: str, path: str, data: bytes) -> None:
        """Send a result; its pieces go one after the other, with other reports between them.

        Raises:
            OSError: The agent has gone, and with it the way to the driver.
        """
        with self._submit_lock:
            for piece in result_frames.cut(key, path, data):
                self._send_piece(piece)

    def results_folder(self) -> Any:
        """Return the folder of the task's results, which the driver then makes in any case; None outside a task."""
        if self.folder is None:
            return None
        self.send(reports.FolderWanted())
        return self.folder()

    def spending(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Count the time in a `with` block as this part of the rank's work."""
        return self.ledger.spending(part)

    def goodput(self) -> Goodput:
        """Return where the gang's time has gone so far.

        Raises:
            TimeoutError: The driver has not answered within the gang's `start_timeout`.
        """
        self.send(reports.Spent(self.ledger.seconds()))
        return self.ask_for_account().result(self._timeout)

    # ---- reports

    def send(self, report: reports.ShortReport) -> None:
        """Report to the driver. Where nobody listens any more, the rank is about to be ended."""
        data = pickle.dumps(report)  # nothing of the user's is in it but plain values and bytes
        self.has_delivered |= isinstance(report, reports.Returned)
        with contextlib.suppress(OSError):
            self._send_in_turn(data)

    def send_moves(self, num_moves: int) -> None:
        """Report how many signs of life there have been."""
        with contextlib.suppress(OSError):
            self._send_in_turn(reports.NUM_MOVES.pack(num_moves))

    def send_records(self) -> None:
        """Report what has been logged."""
        with contextlib.suppress(OSError):
            self._send_in_turn(b"")

    def _send_in_turn(self, data: bytes) -> None:
        """Send all records that were there before, and then these bytes."""
        with self._lock:
            if records := self.records.take():
                self._channel.send_bytes(pickle.dumps(records))
            if data:
                self._channel.send_bytes(data)

    def send_collectives(self) -> None:
        """Report the last collectives."""
        self.send(reports.Remembered(flight_recorder.recall()))

    def note(self, text: str) -> None:
        """Report something that a user should read."""
        self.send(reports.Noted(text))

    def hint(self, hint: reports.Hint | None) -> None:
        """Report what looks forgotten, each kind once."""
        if hint is not None and hint.kind not in self._hinted:
            self._hinted.add(hint.kind)
            self.send(hint)

    def saving(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Count the time in a `with` block as a save; rank 0's driver hears what the time before has gone into."""
        return usage.saving(self.ledger, self.records.add if self._is_main else None, step)

    def send_returned(self, value: Any) -> bytes | None:
        """Pickle what the function returned; the bytes of something small, anything else has then gone before.

        By a file where the driver can open it, else in pieces, as also where the disk takes no more.
        """
        with self._submit_lock:
            if self._driver_folder is not None:
                dump = functools.partial(dump_returned, value)
                with contextlib.suppress(OSError):  # the disk is full, say
                    return send_by_file(dump, Path(self._driver_folder), self._send_piece)
            writer = result_frames.Writer(self._send_piece)
            dump_returned(value, writer)
            return writer.close()

    def _send_piece(self, piece: result_frames.Piece) -> None:
        self._send_in_turn(pickle.dumps(piece))

    # ---- questions, and their answers

    def large(self) -> list[memoryview]:
        """Return what is large in the call, once it is here, mapped from memory that all of the node's ranks share.

        Raises:
            OSError: It will not come.
        """
        arrived = self.arrival(orders.LARGE_ARGUMENTS).result()
        if not isinstance(arrived.value, Address):
            raise OSError(f"the large arguments of the call did not come: {arrived.failure}")
        return arrived.value.mapped()

    def arrival(self, number: int) -> Future[orders.Arrived]:
        """Return what will be settled when what has this number arrives, see `orders.START`, or will not come."""
        return self._arrivals.setdefault(number, Future())

    def ask_for_account(self) -> Future[Goodput]:
        """Ask the driver where the gang's time has gone."""
        self._num_accounts += 1
        account = self._accounts.setdefault(self._num_accounts, Future())
        self.send(reports.GoodputWanted(self._num_accounts))
        return account

    def take(self, answer: orders.Arrived | orders.Accounted) -> None:
        """Hand an answer to whoever waits for it; one to an earlier attempt, or given before, is passed over."""
        if isinstance(answer, orders.Accounted):
            _settle(self._accounts.setdefault(answer.number, Future()), answer.goodput)
        elif answer.attempt == self._attempt:
            _settle(self.arrival(answer.number), answer)


def _fall_silent(link: GangLink | None) -> None:
    if link is not None:
        link.fall_silent()


def _settle(future: Future[T], value: T) -> None:
    if not future.done():  # another rank here has asked, too
        future.set_result(value)
