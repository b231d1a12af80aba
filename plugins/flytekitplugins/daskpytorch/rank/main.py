"""What runs in a rank: environment, process group, the user's function, its result. A child of the fork server."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, NoReturn, assert_never

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.context import LogRecord, Progress, RankContext, SavedCheckpoint
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.process.system import optional, show_as
from flytekitplugins.daskpytorch.protocol import orders, program, reports, result_frames, torch_settings
from flytekitplugins.daskpytorch.protocol.code import Call, completed, ending_as_program, unpack_call
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.host import RankHost, provide
from flytekitplugins.daskpytorch.protocol.observer import Observers
from flytekitplugins.daskpytorch.protocol.orders import DUMP_SIGNAL, MAX_STACKS, STOPPED, Job, RankOrder, stacks_path
from flytekitplugins.daskpytorch.protocol.returned_file import FileWriter
from flytekitplugins.daskpytorch.protocol.worker_data import WorkerData
from flytekitplugins.daskpytorch.rank import (
    debugger,
    ending,
    flame_graph,
    flight_recorder,
    hints,
    imports,
    libraries,
    numa,
    process_group,
    sources,
    standstill,
    usage,
)
from flytekitplugins.daskpytorch.rank.checkpoint import RankCheckpoint
from flytekitplugins.daskpytorch.rank.profiler import StepProfiler
from flytekitplugins.daskpytorch.rank.records import Records, interval_of
from flytekitplugins.daskpytorch.rank.returned import dump_returned, unwrapped
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints
from flytekitplugins.daskpytorch.rank.usage import Gauge, Ledger

if TYPE_CHECKING:
    import torch


ACCOUNT_TIMEOUT = 2.0
"""Seconds at the end for the driver to say where the time went, where somebody here wants to record it."""


def main(channel: Connection) -> int:
    """Run one rank from its first message to its exit code."""
    order: RankOrder = channel.recv()
    listener = _take_listener(channel) if order.serves_store else None
    link = _link(channel, order)
    observers = Observers()
    progress, ledger = Progress(), Ledger()
    has_returned = False
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until here: now its error can be reported
        _settle_in(order)
        with _host_of(order.job) as host:  # before there are other threads: it may import what does not bear them
            rank = _context(order, link, observers, progress, ledger, host)
            prompt = debugger.Prompt(order.place.rank, order.job.debugging, link.send)
            link.obey(rank, observers, prompt)
            debugger.watch_pdb(prompt)
            if order.data is not None:
                imports.call_after("distributed", functools.partial(_show_dask_the_way, order.data))
            debugger.wait_for_editor(order, link.send)
            process_group.expect(order.place, order.job, functools.partial(_take_device, order), listener)
            context.enter(rank)  # before the user's modules, of which some ask at their tops who they are
            call = _unpack(order, link, observers)
            process_group.join()
            flight_recorder.call_before_abort(link.send_collectives)
            _say_ready(link, observers)
            ledger.begin()
            _watch_progress(order, link, progress)
            profiler = _profiler(order, link)
            if link.sharded is not None:
                link.sharded.reach_ahead()
            returned = None
            with (
                _hinting(order, link),
                usage.watched(ledger),
                _reported_usage(order, link, ledger),
                _ending_forks(),
                ending_as_program(),
            ):
                returned = completed(call.function(*call.args, **_keywords(order, call, host)))
            link.send(reports.Spent(ledger.close(), is_last=True))
            if profiler is not None:
                profiler.finish()
            rank.checkpoint.flush()
            has_returned = True
            _report_returned(order, returned, host, link, is_stopped=rank.stop_signal.has_fired)
    except BaseException as error:
        sources.explain(error, order.sources)
        debugger.explain(error, order.place.rank)
        link.send(_failure(error, progress, is_final=has_returned and not _is_of_storage(error)))
        _wind_up(order, observers, 1)
        return 1
    link.see_out(is_over=not rank.stop_signal.has_fired)
    if observers:
        with contextlib.suppress(TimeoutError):
            observers.tell("accounted", link.ask_for_account().result(ACCOUNT_TIMEOUT))
    _wind_up(order, observers, 1 if rank.stop_signal.has_fired else 0, exit_code=0)
    return 0


@contextlib.contextmanager
def _hinting(order: RankOrder, link: _Link) -> Iterator[None]:
    """Report what looks forgotten in the block, once it has ended well; nothing where the gang wants no hints."""
    if not order.job.hints:
        yield
        return
    import torch

    state, has_trained = torch.get_rng_state(), hints.watch_optimizers()
    nccl_variables = process_group.nccl_variables()
    with hints.watching_samplers(link.hint):
        yield
    num_exchanges = process_group.num_exchanges()
    link.hint(hints.of_exchange(num_exchanges, order.place.world_size, has_trained=has_trained()))
    link.hint(hints.of_seed(order.program.torch.seed, state))
    link.hint(hints.of_nccl(nccl_variables, process_group.nccl_variables()))


@contextlib.contextmanager
def _ending_forks() -> Iterator[None]:
    """End a process that the block has forked where that comes back from the block: it is not the rank."""
    rank = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != rank:
            _end_fork(sys.exception())


def _end_fork(error: BaseException | None) -> NoReturn:
    """End this process as `multiprocessing` ends its children: without the exit functions of the rank."""
    code: object = None
    if isinstance(error, SystemExit):
        code = error.code
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _say_ready(link: _Link, observers: Observers) -> None:
    """Report that the rank's function is about to be called, once its observers have what that is to find."""
    observers.tell("begins")
    link.send(reports.Ready())


def _link(channel: Connection, order: RankOrder) -> _Link:
    interval = interval_of(order.place.rank, order.place.world_size)
    return _Link(channel, order.job.attempt, Path(order.scratch), interval, hints=order.job.hints)


def _take_listener(channel: Connection) -> int:
    listener = recv_handle(channel)
    os.set_inheritable(listener, False)  # a program that outlives the rank is not to keep others waiting at its door
    return listener


def _failure(error: BaseException, progress: Progress, *, is_final: bool) -> Failure:
    failure = Failure.of(error, time.time(), (progress.step, progress.num_moves_since), is_final=is_final)
    return replace(failure, recalled=flight_recorder.recall()) if failure.is_consequence else failure


def _report_returned(order: RankOrder, returned: Any, host: RankHost | None, link: _Link, *, is_stopped: bool) -> None:
    if is_stopped:
        link.send(reports.StoppedEarly())
        link.send(reports.Returned())  # what it returned is unfinished, and nobody's to use
    else:
        link.send(reports.Returned(_payload(order, returned, host, link)))


def _unpack(order: RankOrder, link: _Link, observers: Observers) -> Call:
    """The user's call, for which their modules are imported, and then what observers have in rank 0.

    These import in threads of their own, and two threads that import one package at once may wait for each other: where
    a module of the user's imports parts of wandb, its run was lost to such an error, and the training might have been.
    """
    try:
        return unpack_call(order.job.call, link.large() if order.job.large is not None else ())
    finally:  # a call that cannot be imported is seen to fail
        if order.place.rank == 0:
            observers.open(order.job.observers)


class _Link:
    """The rank's end of its channel: reports go out, orders come in."""

    def __init__(
        self, channel: Connection, attempt: int, scratch: Path, interval: float, *, hints: bool = True
    ) -> None:
        """Records are to go within this interval, in seconds."""
        self._channel = channel
        self._scratch = scratch
        self._attempt = attempt
        self._lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self.ended = threading.Event()
        """Set when every rank of the gang has finished."""
        self.provided: Future[orders.Provided | orders.NotProvided] = Future()
        """Whether the checkpoint to start from is here, once that is known."""
        self._large: Future[orders.Large] = Future()
        self.sharded: ShardedCheckpoints | None = None
        """Hears of what the driver has done with the rank's shards."""
        self.kept: Sequence[SavedCheckpoint] = ()
        """All that the driver keeps, as far as it has told."""
        self._chosen: dict[int, Future[orders.Chosen]] = {}
        self._accounts: dict[int, Future[Goodput]] = {}
        self._num_accounts = 0
        self._has_delivered = False
        self._hinted: set[str] = set()
        self.records = Records(self.send_records, interval, hints=hints)
        """What is logged goes here."""
        os.register_at_fork(after_in_child=self._fall_silent)

    def _fall_silent(self) -> None:
        """Report nothing from a process that the rank has forked, whatever of the rank that process still holds."""
        self._lock, self._submit_lock = threading.Lock(), threading.Lock()  # a thread of the rank may have held them
        self._channel.close()

    def send(self, report: reports.ShortReport) -> None:
        """Report to the driver. Where nobody listens any more, the rank is about to be ended."""
        data = pickle.dumps(report)  # nothing of the user's is in it but plain values and bytes
        self._has_delivered |= isinstance(report, reports.Returned)
        with self._lock, contextlib.suppress(OSError):
            self._send_in_turn(data)

    def send_moves(self, num_moves: int) -> None:
        """Report how many signs of life there have been."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send_bytes(reports.NUM_MOVES.pack(num_moves))

    def send_records(self) -> None:
        """Report what has been logged."""
        with self._lock, contextlib.suppress(OSError):
            self._send_in_turn(b"")

    def _send_in_turn(self, data: bytes) -> None:
        """Send all records that were there before, and then these bytes."""
        if records := self.records.take():
            self._channel.send_bytes(pickle.dumps(records))
        if data:
            self._channel.send_bytes(data)

    def send_collectives(self) -> None:
        """Report the last collectives."""
        self.send(reports.Remembered(flight_recorder.recall()))

    def draw_flame_graph(self, rank: int, seconds: int) -> None:
        """Submit, once the seconds are over, where the time went."""
        flame_graph.record(rank, seconds, self._scratch, functools.partial(self.submit, ""), self.note)

    def note(self, text: str) -> None:
        """Report something that a user should read."""
        self.send(reports.Noted(text))

    def hint(self, hint: reports.Hint | None) -> None:
        """Report what looks forgotten, each kind once."""
        if hint is not None and hint.kind not in self._hinted:
            self._hinted.add(hint.kind)
            self.send(hint)

    def large(self) -> list[memoryview]:
        """What is large in the call, once it is here, mapped from memory that all of the node's ranks share.

        Raises:
            OSError: It will not come.
        """
        told = self._large.result()
        if told.address is None:
            raise OSError(f"the large arguments of the call did not come: {told.failure}")
        return told.address.mapped()

    def ask(self, wanted: reports.Wanted) -> Future[orders.Chosen]:
        """Ask for a checkpoint; which it is, once it is here."""
        self.send(wanted)
        return self._choice(wanted.number)

    def _choice(self, number: int) -> Future[orders.Chosen]:
        return self._chosen.setdefault(number, Future())

    def ask_for_account(self) -> Future[Goodput]:
        """Ask where the gang's time has gone."""
        self._num_accounts += 1
        account = self._accounts.setdefault(self._num_accounts, Future())
        self.send(reports.GoodputWanted(self._num_accounts))
        return account

    def submit(self, key: str, path: str, data: bytes) -> None:
        """Send a result; its pieces go one after the other, with other reports between them.

        Raises:
            OSError: The agent has gone, and with it the way to the driver.
        """
        with self._submit_lock:
            for piece in result_frames.cut(key, path, data):
                self._send_piece(piece)

    def send_returned(self, value: Any, driver_folder: str | None) -> bytes | None:
        """Pickle what the function returned; the bytes of something small, anything else has then gone before.

        By a file where the driver can open it, else in pieces, as also where the disk takes no more.
        """
        with self._submit_lock:
            if driver_folder is not None:
                file = FileWriter(Path(driver_folder), self._send_piece)
                try:
                    dump_returned(value, file, file.takes)
                    return file.close()
                except Exception as error:
                    file.abandon()
                    if not isinstance(error.__cause__ or error, OSError):
                        raise
            writer = result_frames.Writer(self._send_piece)
            dump_returned(value, writer)
            return writer.close()

    def _send_piece(self, piece: result_frames.Piece) -> None:
        data = pickle.dumps(piece)
        with self._lock:
            self._send_in_turn(data)

    def ask_for_folder(self, host: RankHost) -> object:
        """Have the task's driver make sure that its results' folder is there when it ends; the folder."""
        self.send(reports.FolderWanted())
        return host.results_folder()

    def see_out(self, *, is_over: bool) -> None:
        """Wait until all ranks have finished: they may be talking to this one. `is_over`: nobody goes on later."""
        self.ended.wait()
        if self.sharded is not None and is_over:
            self.sharded.drop_copies()

    def obey(self, rank: RankContext, observers: Observers, prompt: debugger.Prompt) -> None:
        """Follow orders from now on, in a thread, since the main thread may be inside a collective."""
        how = (rank, observers, prompt)
        threading.Thread(target=self._obey, args=how, name="daskpytorch-orders", daemon=True).start()

    def _obey(self, rank: RankContext, observers: Observers, prompt: debugger.Prompt) -> None:
        order: orders.Order
        try:
            while not isinstance(order := self._channel.recv(), orders.Quit):
                self._follow(rank, order, prompt)
        except (EOFError, OSError):  # the agent died
            os._exit(STOPPED)
        if self.sharded is not None:
            self.sharded.close()
        rank.checkpoint.flush(0.6 * order.grace)
        self.send_records()
        observers.tell("close", 1 if order.reason is None else 0, None if self._has_delivered else order.reason)
        os._exit(STOPPED)

    def _follow(  # noqa: C901, PLR0912 - a case for each order
        self,
        rank: RankContext,
        order: orders.OrderToAll
        | orders.Provided
        | orders.NotProvided
        | orders.Large
        | orders.Chosen
        | orders.DrawFlameGraph,
        prompt: debugger.Prompt,
    ) -> None:
        match order:
            case orders.Leave():
                self.ended.set()
            case orders.Hold():
                self.send(reports.Held(rank.stop_signal.hold()))
            case orders.Release(last_call):
                rank.stop_signal.release(last_call)
            case orders.Settled(number):
                if self.sharded is not None:
                    self.sharded.settle(number)
            case orders.Locate(look):
                num_moves, num_collectives = rank.progress.num_moves, process_group.num_collectives()
                located = reports.Located(
                    stacks=_stacks(),
                    num_collectives=num_collectives,
                    num_moves=num_moves,
                    look=look,
                    num_bytes=standstill.received_bytes() if look else None,
                )
                self.send(located)
                self.send_collectives()
            case orders.ShowStacks():
                _show(_stacks())
            case orders.Prompt() | orders.Interrupt():
                prompt.obey(order)
            case orders.Provided(attempt) | orders.NotProvided(attempt):
                if attempt == self._attempt:
                    self.provided.set_result(order)
            case orders.Large(attempt):
                if attempt == self._attempt:
                    self._large.set_result(order)
            case orders.DrawFlameGraph(seconds):
                self.draw_flame_graph(rank.rank, seconds)
            case orders.Chosen(attempt, number):
                if attempt == self._attempt and not self._choice(number).done():  # another rank here has asked, too
                    self._choice(number).set_result(order)
            case orders.Kept(checkpoints):
                self.kept = checkpoints
            case orders.Accounted(number, goodput):
                if not (account := self._accounts.setdefault(number, Future())).done():  # another here has asked, too
                    account.set_result(goodput)
            case _:
                assert_never(order)


def _stacks() -> str:
    """What all threads do, written down while this one holds the interpreter, so that they stand still."""
    if _stacks_file is None:
        return ""
    _stacks_file.truncate(0)
    faulthandler.dump_traceback(_stacks_file, all_threads=True)
    stacks = os.pread(_stacks_file.fileno(), MAX_STACKS, 0).decode(errors="replace")
    _stacks_file.truncate(0)  # it is told; what is found there later was asked for by hand
    return stacks


def _show(text: str) -> None:
    """Write to standard error, past `sys.stderr`, whose lock a thread that hangs may hold."""
    with contextlib.suppress(OSError):  # it may be closed
        os.write(2, f"\n{text}".encode())


def _watch_progress(order: RankOrder, link: _Link, progress: Progress) -> None:
    pulse = order.job.pulse
    if order.place.world_size > 1:
        standstill.watch(progress, link.send)
    if pulse is None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: progress.move())

    def report() -> None:
        reported = -1
        while True:
            if progress.num_moves != reported:
                reported = progress.num_moves
                link.send_moves(reported)
            time.sleep(pulse)

    threading.Thread(target=report, name="daskpytorch-pulse", daemon=True).start()


def _profiler(order: RankOrder, link: _Link) -> StepProfiler | None:
    asked, rank = order.job.profile, order.place.rank
    if asked is None or rank not in asked.ranks:
        return None
    submit = functools.partial(link.submit, "")
    profiler = StepProfiler(asked, rank, Path(order.scratch), submit, link.note)
    profiler.watch()
    return profiler


def _reported_usage(order: RankOrder, link: _Link, ledger: Ledger) -> AbstractContextManager[None]:
    gauge = Gauge(order.place.rank, ledger, order.place.device_index or 0)
    return gauge.reporting(order.place.world_size, lambda usage: link.send(reports.Used(usage)))


def _settle_in(order: RankOrder) -> None:
    show_as(f"rank {order.place.rank}/{order.place.world_size}")
    given = order.environment
    for name in set(os.environ).difference(given):
        del os.environ[name]
    for name, value in given.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    import torch  # a spawned rank has not imported it, so that it starts with the variables above

    from flytekitplugins.daskpytorch.rank import loaders

    loaders.shield()
    process_group.install()
    libraries.guide()
    os.chdir(order.directory)
    sys.path[:] = order.path
    sources.enter(order.sources)
    program.enter(order.program, order.sources.script)
    faulthandler.enable()  # a rank that crashes in C code says where, in its log
    global _stacks_file
    _stacks_file = stacks_path(Path(order.scratch), order.place).open("a+")
    # Of the other threads a signal handler may read frames that they are changing, and crash: python/cpython#116008.
    faulthandler.register(DUMP_SIGNAL, _stacks_file, all_threads=False)
    threads = order.environment["OMP_NUM_THREADS"].partition(",")[0]  # OpenMP's lists have one for each level
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else order.place.num_threads)
    torch_settings.enter(order.program.torch)


def _show_dask_the_way(way: WorkerData, distributed: ModuleType) -> None:
    import_module(way.guide).enter(distributed, way)


def _take_device(order: RankOrder) -> torch.device | None:
    """Make the rank's own GPU the current one; where its GPU collectives run, None where it has none."""
    index = order.place.device_index
    has_own = order.job.backend == "nccl"
    if index is None or not (has_own or index):  # without need nothing touches CUDA, which no child may then use
        return None
    import torch

    torch.cuda.set_device(index)
    if not has_own:
        return None
    with optional("Staying on the cores beside the GPU"):  # torch < 2.8 does not tell the GPU's address
        numa.stay_beside(index)
    return torch.device("cuda", index)


def _context(
    order: RankOrder,
    link: _Link,
    observers: Observers,
    progress: Progress,
    ledger: Ledger,
    host: RankHost | None,
) -> RankContext:
    def sink(record: LogRecord) -> None:
        ledger.mark()
        observers.tell("logged", record)
        link.records.add(record)

    place = order.place
    if (sharding := order.job.sharding) is not None:
        link.sharded = ShardedCheckpoints(
            sharding, attempt=order.job.attempt, rank=place.rank, report=link.send, moved=progress.move
        )
    link.kept = order.job.kept
    checkpoint = RankCheckpoint(
        folder=Path(order.scratch),
        attempt=order.job.attempt,
        start=order.job.checkpoint,
        is_main=place.rank == 0,
        progress=progress,
        announce=lambda file: link.send(reports.Saved(file)),
        provided=link.provided,
        sharded=link.sharded,
        timeout=order.job.timeout,
        ask=link.ask,
        kept=lambda: link.kept,
        storage=order.job.storage,
        best_by=order.job.best_by,
        saving=functools.partial(usage.saving, ledger, link.records.add if place.rank == 0 else None),
    )

    def account() -> Goodput:
        link.send(reports.Spent(ledger.seconds()))
        return link.ask_for_account().result(order.job.timeout)

    return RankContext(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        device_index=place.device_index or 0,
        checkpoint=checkpoint,
        sink=sink,
        watcher=functools.partial(observers.tell, "watch"),
        submit=link.submit,
        ask_for_folder=functools.partial(link.ask_for_folder, host) if host is not None else None,
        progress=progress,
        worker_data=order.data,
        spend=ledger.spending,
        account=account,
    )


@contextlib.contextmanager
def _host_of(job: Job) -> Iterator[RankHost | None]:
    if job.host is None:
        if job.execution is not None:  # made when it is asked for: it imports the host
            provide(functools.cache(functools.partial(pickle.loads, job.execution)), is_last=True)
        yield None
        return
    host: RankHost = pickle.loads(job.host)  # noqa: S301 - from our own driver, by our agent's pipe
    with host.entered():
        yield host


def _keywords(order: RankOrder, call: Call, host: RankHost | None) -> dict[str, Any]:
    keywords = dict(call.kwargs)
    if host is not None:
        keywords |= host.arguments()
    if order.job.pass_local_rank:
        keywords["local_rank"] = order.place.local_rank
    return keywords


def _payload(order: RankOrder, returned: Any, host: RankHost | None, link: _Link) -> object:
    """What the driver needs of the return value: in a task what it makes of rank 0's, else every rank's value."""
    if host is None:
        return link.send_returned(returned, order.driver_folder)
    return link.send_returned(host.outputs(unwrapped(returned)), order.driver_folder) if order.place.rank == 0 else None


def _is_of_storage(error: BaseException) -> bool:
    """Whether it was storage that failed rather than what was to be stored there: that may go well another time."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # flytekit's, which need not be imported here
    is_missing = isinstance(error.__cause__ or error, FileNotFoundError)  # what was to be stored
    return (isinstance(error, OSError) or "FlyteUploadDataException" in kinds) and not is_missing


_stacks_file: IO[str] | None = None
"""Stays open for as long as the signal may come."""


def _wind_up(order: RankOrder, observers: Observers, outcome: int, exit_code: int = 1) -> None:
    """Close what observers have open, and end the program; the outcome of a rank that was stopped is 1, too."""
    observers.tell("close", outcome)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # that workers of DataLoaders end now is nothing to torch
    ending.end_as_program(order.place.rank, exit_code)
