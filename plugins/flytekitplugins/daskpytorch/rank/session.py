"""One rank in one attempt of its gang: its context, its answers to orders, and its end. Runs in a rank."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from flytekitplugins.daskpytorch.context import RankAttempt, RankContext
from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Located, Question
from flytekitplugins.daskpytorch.rank import process_group, usage
from flytekitplugins.daskpytorch.rank.checkpoint import RankCheckpoint
from flytekitplugins.daskpytorch.rank.compile_cache import CompileCache
from flytekitplugins.daskpytorch.rank.link import GangLink
from flytekitplugins.daskpytorch.rank.usage import Gauge
from flytekitplugins.daskpytorch.records import Goodput, LogRecord

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.rank.program import Server


class Session:
    def __init__(self, order: RankOrder, link: GangLink) -> None:
        place = order.place
        self._order = order
        self._link = link
        self._is_over = False
        self._compiled = CompileCache(order, link.note)
        self.server: Server | None = None
        self.checkpoint = RankCheckpoint(order.job, order.place.rank, link)
        self.rank = RankContext(
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            device_index=place.device_index or 0,
            checkpoint=self.checkpoint,
            progress=link.progress,
            link=link,
            attempt=RankAttempt(order.job.attempt, order.job.num_after_memory, link),
        )

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        link, order = self._link, self._order
        self._begin_pulse()
        link.observers.call("on_begin")  # directly before the call: they see the same process state as the function
        self._compiled.open()
        link.send(messages.Ready())
        link.ledger.begin()
        place = order.place
        gauge = Gauge(place.rank, link.ledger, place.gpu_uuid)
        usage.watch(link.ledger)
        with usage.profiled(order.job.settings.profile, place.rank, Path(order.scratch), link.submit, link.note):
            with gauge.reporting(place.world_size, link.send):
                yield
            link.send(messages.Spent(link.ledger.close(), is_last=True))
        self.checkpoint.flush()

    def see_out(self) -> None:
        """Wait until all ranks have finished, then give observers the account of time.

        A rank whose program has ended before leaves: collectives of peers that wait for it must fail. Rank 0's process
        stays, with the rendezvous store and the observers. With NCCL, a rank waits for the others' ends: they may still
        read its GPU's memory. The driver asks such a rank for its collectives.
        """
        self._compiled.close()
        link, order = self._link, self._order
        is_stopped = self.rank.stop_signal.has_fired
        self._is_over = not is_stopped and order.place.world_size > 1 and leaves_early(link)
        if self._is_over and order.job.backend != "nccl":
            send_collectives(link)
            if order.place.rank:
                return
            close_connections(order.job.store[1] if order.job.store is not None else None)
        link.ended.wait()
        if link.account is not None:
            link.observers.call("on_goodput", link.account)

    def follow(self, order: messages.OrderToAll) -> None:
        """Follow an order, in the receiving thread: a collective may block the main thread."""
        link, rank = self._link, self.rank
        match order:
            case messages.Leave():
                link.ended.set()
            case Ask():
                self._answer(order)
            case messages.Release(last_call, number):
                rank.stop_signal.release(last_call)
                if number is not None:
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
            case messages.Kept() | Answer() | LogRecord() | Goodput():
                link.take(order)
            case messages.NextCall() | messages.Forget() | messages.Finish():
                if self.server is not None:  # else a gang of one call
                    self.server.orders.put(order)
            case _:
                assert_never(order)

    def _begin_pulse(self) -> None:
        pulse, link = self._order.job.pulse, self._link
        if pulse is None:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: link.progress.move())

        def report() -> None:
            reported = -1
            while True:
                if (num_moves := link.progress.num_moves) != reported:
                    reported = num_moves
                    link.send_moves(reported)
                time.sleep(pulse)

        threading.Thread(target=report, name="daskpytorch-pulse", daemon=True).start()

    def _answer(self, asked: Ask) -> None:
        value: object = None
        match asked.question:
            case Question.STACKS:
                num_moves, stacks = self._link.progress.num_moves, _stacks()
                if asked.about:
                    ending.tell(f"\n{stacks}")
                value = Located(stacks, num_moves)
            case Question.COLLECTIVES:
                value = process_group.recall(is_over=self._is_over)
            case Question.HOLD:
                is_handled = asked.about is not None and ending.is_handled(asked.about)
                value = self.rank.stop_signal.hold(), is_handled
        self._link.send(Answer(asked.number, value))


def failure_of(error: BaseException, at: float, link: GangLink, *, is_final: bool) -> Failure:
    """`at`: Unix seconds, by which the driver takes the earliest failure for the cause."""
    position = link.progress.step, link.progress.num_moves_since
    failure = Failure.of(error, at, position, is_final=is_final)
    return replace(failure, recalled=process_group.recall()) if failure.is_consequence else failure


# ---- Collectives, and stacks


def send_collectives(link: GangLink) -> None:
    if (recalled := process_group.recall()) is not None:
        link.send(recalled)


def expect_questions() -> None:
    """Also, SIGQUIT writes the main thread's stack to the log, a crash in C all stacks."""
    global _stacks_file
    faulthandler.enable()
    # A signal handler that reads other threads' frames while they change may crash (python/cpython#116008).
    faulthandler.register(signal.SIGQUIT, all_threads=False)
    _stacks_file = os.memfd_create("stacks")


def _stacks() -> str:
    """Return all threads' stacks, or "" outside a rank's own process. Holds the GIL, so that they do not change."""
    if _stacks_file is None:
        return ""
    os.truncate(_stacks_file, 0)
    os.lseek(_stacks_file, 0, os.SEEK_SET)
    faulthandler.dump_traceback(_stacks_file, all_threads=True)
    return os.pread(_stacks_file, MAX_STACKS, 0).decode(errors="replace")


MAX_STACKS = 64 << 10
_stacks_file: int | None = None
"""Descriptor, opened early: a rank that hangs may have too many. None outside a rank's own process."""


# ---- The rank's end


GRACE = 2.0
"""Seconds after a program's end until its peers lose their connections. The system sends what is in the sockets."""
LOOK_INTERVAL = 0.1


def leaves_early(link: GangLink) -> bool:
    while ending.has_work():
        if link.ended.wait(LOOK_INTERVAL):
            return False
    return not link.ended.wait(GRACE)


def close_connections(store_port: int | None) -> None:
    """Have collectives of peers that wait for this rank fail, while this process goes on.

    Ends TCP connections but those of Python's sockets and the rendezvous store. gloo has no other way: `abort` and
    `shutdown` leave them open, and a group that a variable holds outlives `destroy_process_group` (torch 2.15).
    """
    pythons = {each.fileno() for each in ending.instances_of(socket.socket)}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or a socket that listens
            if int(file.name) not in pythons and str(file.readlink()).startswith("socket:"):
                _close(int(file.name), store_port)


def _close(descriptor: int, store_port: int | None) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        if store_port not in (sock.getsockname()[1], sock.getpeername()[1]):
            sock.shutdown(socket.SHUT_WR)


def wind_up(rank: int, link: GangLink, outcome: int) -> None:
    """Close the observers (0: success, 1: failed or stopped), and do what Python does at its exit.

    `os._exit` would skip threads, executors, exit functions and open files. After `ending.MAX_WAIT` the rank ends
    regardless, with the exit code `ending.LATE`.
    """
    link.observers.call("on_end", outcome)
    link.has_closed_observers.set()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # without torch's handler, which raises when loader workers end
    with ending.watched(f"rank {rank}", ending.MAX_WAIT):
        threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - executors, then other threads: 3.11 to 3.14
        atexit._run_exitfuncs()  # noqa: SLF001 - multiprocessing's children among them
        if link.has_failed or link.has_returned:  # a rank that ends with another one must not delay the restart
            ending.flush_files()
    sys.stdout.flush()
    sys.stderr.flush()
