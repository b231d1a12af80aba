"""A rank's link to its driver, by way of its agent: sends reports, and receives answers. Runs in a rank."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from flytekitplugins.daskpytorch.context import Link, Progress
from flytekitplugins.daskpytorch.process.folders import locked
from flytekitplugins.daskpytorch.protocol import framing, messages, pickling
from flytekitplugins.daskpytorch.protocol.checkpoints import LENT, CheckpointEntry, digest_of, take_file
from flytekitplugins.daskpytorch.protocol.job import LargeCall, RankOrder
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Question
from flytekitplugins.daskpytorch.protocol.observer import RankObservers
from flytekitplugins.daskpytorch.protocol.torch_parts import sharded_classes
from flytekitplugins.daskpytorch.rank.usage import Ledger
from flytekitplugins.daskpytorch.records import Goodput, LogRecord, SavedCheckpoint

INTERVAL = 0.2
"""Seconds that a log record of rank 0 waits at most. A killed rank loses its waiting records."""
INTERVAL_OF_OTHERS = 1.0
MAX_MESSAGES = 500
MAX_ADAPTED = 8
MAX_WAITING = 1 << 10
"""Records at which the logging thread sends all itself, and so waits for the agent."""


class Records:
    """Sends log records, and other reports that may wait, in groups, but the first after a pause at once.

    Code that sends between two steps finds cold caches and takes ten times as long.
    """

    def __init__(self, send: Callable[[], None], interval: float) -> None:
        self._send = send
        self._interval = interval
        self._waiting: deque[LogRecord | messages.Spent] = deque()
        self._send_at = 0.0
        self._sender: threading.Thread | None = None

    def add(self, record: LogRecord | messages.Spent) -> None:
        self._waiting.append(record)
        if time.monotonic() >= self._send_at or len(self._waiting) >= MAX_WAITING:
            self._send()
        elif self._sender is None:
            self._sender = threading.Thread(target=self._keep_sending, name="daskpytorch-log", daemon=True)
            self._sender.start()

    def take(self) -> list[LogRecord | messages.Spent]:
        """Remove all waiting records, without metrics of the user's classes.

        Only one thread at a time may call this.
        """
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if waiting:
            self._send_at = time.monotonic() + self._interval
        return [each.sent() if isinstance(each, LogRecord) else each for each in waiting]

    def _keep_sending(self) -> None:
        while True:
            time.sleep(self._patience() or self._interval)
            if self._waiting and not self._patience():
                self._send()

    def _patience(self) -> float:
        return max(0.0, self._send_at - time.monotonic())


class GangLink(Link):
    """A rank's connection to its driver. All methods are safe in any thread."""

    takes_results = True

    def __init__(self, channel: Connection, order: RankOrder) -> None:
        place, job = order.place, order.job
        self.worker_data = order.data
        self.progress = Progress()
        self.ledger = Ledger()
        self.observers = RankObservers()
        self._observers_lock = threading.RLock()
        """Metrics of evaluations arrive in another thread than the function's."""
        self.folder: Callable[[], object] | None = None
        """Returns the Flyte task's folder for submitted files. None outside a task."""
        self.ended = threading.Event()
        self.account: Goodput | None = None
        self.kept: Sequence[SavedCheckpoint] = job.kept
        self._channel = channel
        self._is_main = place.rank == 0
        self.transfers = Transfers(order, self.progress.move)
        self._lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._answers: dict[int, Future[Answer]] = {}
        self._num_asked = 0
        self._adapted: set[str] = set()
        self.has_returned = False
        self.has_delivered = False
        self.has_failed = False
        self.has_reported = False
        self.has_closed_observers = threading.Event()
        others_interval = max(INTERVAL_OF_OTHERS, place.world_size / MAX_MESSAGES)
        self.records = Records(self.send_records, INTERVAL if self._is_main else others_interval)
        os.register_at_fork(after_in_child=functools.partial(_fall_silent, weakref.ref(self)))

    def fall_silent(self) -> None:
        """Called in a process that the rank has forked."""
        self._lock, self._submit_lock = threading.Lock(), threading.Lock()  # the fork may have copied locked locks
        self._observers_lock = threading.RLock()
        self._channel.close()

    # ---- methods that `RankContext` calls

    def log(self, record: LogRecord) -> None:
        self.ledger.mark()
        self.show(record)
        self.records.add(record)

    def show(self, record: LogRecord) -> None:
        with self._observers_lock:
            self.observers.call("on_log", record)

    def submit(self, path: str, data: bytes) -> None:
        """Other reports may be sent between two pieces."""
        with self._submit_lock:
            pieces = messages.PieceWriter(path, self._send_piece)
            pieces.write(data)
            pieces.end()

    def results_folder(self) -> Any:
        if self.folder is None:
            return None
        self.submit("", b"")
        return self.folder()

    def spending(self, part: str) -> contextlib.AbstractContextManager[None]:
        return self.ledger.spending(part)

    def adapt(self, text: str) -> None:
        said = text if self._is_main else ""
        if said not in self._adapted and len(self._adapted) < MAX_ADAPTED:
            self._adapted.add(said)
            self.send(messages.Noted(said, adapts=True))

    # ---- reports

    def send(self, report: messages.ShortReport) -> None:
        data = pickle.dumps(report)  # no objects of the user's but plain values and bytes
        self.has_delivered |= isinstance(report, messages.Returned)
        with contextlib.suppress(OSError):
            self._send_in_turn(data)

    def send_moves(self, num_moves: int) -> None:
        with contextlib.suppress(OSError):
            self._send_in_turn(messages.NUM_MOVES.pack(num_moves))

    def send_records(self) -> None:
        with contextlib.suppress(OSError):
            self._send_in_turn(b"")

    def _send_in_turn(self, data: bytes) -> None:
        with self._lock:
            if records := self.records.take():
                self._channel.send_bytes(pickle.dumps(records))
            if data:
                self._channel.send_bytes(data)

    def note(self, text: str) -> None:
        self.send(messages.Noted(text))

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Rank 0 then reports its account of time."""
        with self.ledger.spending("saving"):
            yield
        if self._is_main:
            self.records.add(messages.Spent(self.ledger.seconds(), step))

    def send_returned(self, value: Any) -> bytes | None:
        pieces = messages.PieceWriter(None, self._send_piece)
        dump_returned(value, pieces)
        return pieces.end()

    def _send_piece(self, piece: messages.Piece) -> None:
        self._send_in_turn(pickle.dumps(piece))

    # ---- questions, and their answers

    def opened(self, call: bytes | LargeCall) -> IO[bytes]:
        """Return a file of the pickled call. OSError: the transfer of a large one has failed."""
        if isinstance(call, bytes):
            return io.BytesIO(call)
        try:
            return self.transfers.arguments(call).open("rb")
        except (OSError, EOFError) as error:
            raise OSError(
                f"the function's large arguments did not arrive on this node: {type(error).__name__}: {error}. If the "
                "disk is full here, give the worker more, or load the data inside the function."
            ) from error

    def ask(self, question: Question, about: object = None) -> Future[Answer]:
        self._num_asked += 1
        self.send(Ask(question, self._num_asked, about))
        return self._answer(self._num_asked)

    def _answer(self, number: int) -> Future[Answer]:
        return self._answers.setdefault(number, Future())

    def take(self, told: Answer | messages.Kept | LogRecord | Goodput) -> None:
        match told:
            case messages.Kept(checkpoints):
                self.kept = checkpoints
            case LogRecord():
                self.show(told)
            case Goodput():
                self.account = told
            case Answer(number):
                future = self._answer(number)
                if not future.done():  # another rank of this node has asked, too
                    future.set_result(told)


def _fall_silent(link: weakref.ref[GangLink]) -> None:
    if (here := link()) is not None:
        here.fall_silent()


# ---- Return values for the driver, which has no GPU and no process group

MAX_DEPTH = 2


def unwrapped(value: Any) -> Any:
    """Unwrap models in tuples, lists and dicts, too."""
    from torch.nn.parallel import DistributedDataParallel

    sharded = sharded_classes()

    def bare(value: Any, depth: int) -> Any:
        _refuse_sharded(value, sharded)
        if isinstance(value, DistributedDataParallel):
            return value.module
        if depth and type(value) is dict:
            return {key: bare(part, depth - 1) for key, part in value.items()}
        if depth and (type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields"))):
            parts = [bare(part, depth - 1) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    return bare(value, MAX_DEPTH)


def dump_returned(value: Any, file: messages.PieceWriter) -> None:
    """CUDA tensors are pickled on the CPU, a `DistributedDataParallel` as its model."""
    try:
        _pickler(sharded_classes())(file).dump(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled: {error}. "
            "Return plain data or tensors, such as a state_dict instead of a model."
        ) from error


@functools.cache
def _pickler(sharded: tuple[type, ...]) -> type[pickling.Pickler]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class ReturnPickler(pickling.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            _refuse_sharded(obj, sharded)
            if isinstance(obj, DistributedDataParallel):
                return _as_it_is, (obj.module,)
            # The pickle of a parameter calls this method again, for the plain tensor of the parameter's data.
            if isinstance(obj, torch.Tensor) and obj.is_cuda and not isinstance(obj, torch.nn.Parameter):
                return obj.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
            return super().reducer_override(obj)

    return ReturnPickler


def _as_it_is(value: Any) -> Any:
    return value


def _refuse_sharded(value: object, kinds: tuple[type, ...]) -> None:
    if isinstance(value, kinds):
        raise TypeError(
            f"a {type(value).__name__} belongs to all ranks together. On all ranks call get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
            "torch.distributed.checkpoint.state_dict, or tensor.full_tensor(), and return the result. Only in a "
            "DistributedDataParallel are model.module and model.module.state_dict() whole"
        )


# ---- Files between the driver and the ranks of a node: whole checkpoints, and a call's large arguments
#
# On the driver's machine, ranks write and read checkpoints in the driver's folder. Elsewhere rank 0 uploads them. The
# first rank that needs another file downloads it to the agent's folder, where the node's other ranks find it.

UNWRITTEN = "saving-"
"""Prefix of the name of a checkpoint's file that is being written."""
ARGUMENTS = "arguments-"
LOCK = "downloads.lock"


class Transfers:
    def __init__(self, order: RankOrder, moved: Callable[[], object] = lambda: None) -> None:
        """`moved` is called as a sign of life while bytes flow."""
        self._agent = order.agent
        self.scratch = Path(order.scratch)
        self._shared = Path(order.driver_folder) if order.driver_folder is not None else None
        self.folder = self._shared or self.scratch
        """Where rank 0 writes its checkpoints."""
        self._moved = moved

    def tidy(self) -> None:
        """Remove what a killed rank 0 of an earlier attempt has left unfinished."""
        for unfinished in self.folder.glob(f"{UNWRITTEN}*"):
            unfinished.unlink(missing_ok=True)

    def deliver(self, file: CheckpointEntry) -> None:
        """Bring a checkpoint's file from `folder` to the driver. OSError or EOFError: it did not arrive."""
        if self._shared is not None:
            return
        with contextlib.closing(framing.dial(self._agent)) as connection:
            connection.send(messages.Upload(file))
            connection.send_file(self.scratch / file.name, self._moved)
            _check(connection)
        for old in self.scratch.glob("step-*.pt"):  # the driver has all that may still be loaded
            if old.name != file.name:
                old.unlink(missing_ok=True)

    def fetch(self, file: CheckpointEntry) -> Path:
        """Return the path of a checkpoint's file that the driver lends. OSError, EOFError or ValueError: none came."""
        if self._shared is not None:
            return self._shared / LENT / file.name
        path = self.scratch / file.name
        with locked(self.scratch / LOCK):
            if not path.exists() or digest_of(path) != file.digest:
                self._download(file.name, path, file.size, f"the checkpoint of step {file.step}", file.digest)
        return path

    def arguments(self, call: LargeCall) -> Path:
        """Return the path of a large call. OSError or EOFError: none came."""
        path = self.scratch / f"{ARGUMENTS}{call.number}"
        with locked(self.scratch / LOCK):
            if not path.exists():
                for old in self.scratch.glob(f"{ARGUMENTS}*"):  # an ended call's
                    old.unlink(missing_ok=True)
                self._download(messages.CALL, path, call.size, "the call's large arguments")
        return path

    def _download(self, name: str, path: Path, size: int, what: str, digest: str | None = None) -> None:
        with contextlib.closing(framing.dial(self._agent)) as connection:
            connection.send(messages.Download(name))
            _check(connection)
            take_file(connection.pieces(size, what, self._moved), path, what, digest)


def _check(connection: framing.Connection) -> None:
    if (refusal := connection.recv()) is not None:
        raise OSError(refusal)
