"""Runs a rank, a child of the fork server: environment, process group, the user's function, its result."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.process.system import show_as
from flytekitplugins.daskpytorch.protocol import messages, script
from flytekitplugins.daskpytorch.protocol.failure import Failure, is_of_group, with_causes
from flytekitplugins.daskpytorch.protocol.function import Metrics, unpack_call
from flytekitplugins.daskpytorch.protocol.host import RankHost, know
from flytekitplugins.daskpytorch.protocol.job import STOPPED, Job, RankOrder
from flytekitplugins.daskpytorch.rank import debugger, libraries, process_group, program
from flytekitplugins.daskpytorch.rank.link import GangLink, unwrapped
from flytekitplugins.daskpytorch.rank.own_gpu import GpuCheck
from flytekitplugins.daskpytorch.rank.session import Session, expect_questions, failure_of, send_collectives, wind_up

if TYPE_CHECKING:
    import torch


EXIT_TIME = 1.0
"""Seconds for a failed rank's threads and exit functions after the order to quit, for which a restart waits."""
EXIT_RESERVE = 0.45
EXIT_SHARE = 0.7
"""Share of the grace period after which a failed rank ends, if `EXIT_RESERVE` is more than the rest."""
FIRST_FLUSH = 0.1
"""Seconds from the order to quit until a failed rank's open files are first written. Most have ended by then."""
FLUSH_SHARE = 0.6
"""Share of the grace period for the newest checkpoint, after the order to quit."""


def main(channel: Connection) -> int:
    order: RankOrder = channel.recv()
    listener = _take_listener(channel) if order.serves_store else None
    link = GangLink(channel, order)
    prompt = debugger.Prompt(order, link.send)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the handlers below report its error
        _settle_in(order)
        with _host_of(order.job) as host:  # before other threads start: its imports may not be thread-safe
            link.folder = host.results_folder if host is not None else None
            session = Session(order, link)
            threading.Thread(
                target=_obey, args=(channel, session, link, prompt), name="daskpytorch-orders", daemon=True
            ).start()
            _expect(order, link, listener, prompt)
            context.enter(session.rank)  # before the import of the user's modules, which may call `current_rank`
            call = _unpack(order, link, session, prompt)
            process_group.meet() if isinstance(call.func, script.Script) else process_group.join()
            with session.at_work():
                returned = script.completed(lambda: call(**_keywords(order, host)))
                # A Ctrl-C from now on must not fail the finished function. Child programs would inherit SIG_IGN.
                signal.signal(signal.SIGINT, lambda *_: None)
            link.has_returned = True
            is_stopped = session.rank.stop_signal.has_fired  # then the training is unfinished, and has no return value
            value = None if is_stopped else _payload(order, returned, host, link)
            link.send(messages.Returned(value, stopped_early=is_stopped))
    except BaseException as error:
        _report(order, link, prompt, error)
        wind_up(order.place.rank, link, 1)
        return 1
    session.see_out()
    wind_up(order.place.rank, link, int(is_stopped))
    return 0


def _expect(order: RankOrder, link: GangLink, listener: int | None, prompt: debugger.Prompt) -> None:
    debugger.watch_pdb(prompt)
    debugger.wait_for_editor(order, link.send)
    take_device = functools.partial(_take_sound_device, order, GpuCheck(order))
    report = functools.partial(send_collectives, link)
    on_formed = functools.partial(process_group.call_before_abort, report)
    process_group.expect(process_group.Membership(order.place, order.job, take_device, listener, on_formed))


def _report(order: RankOrder, link: GangLink, prompt: debugger.Prompt, error: BaseException) -> None:
    link.has_failed = not any(map(is_of_group, with_causes(error)))  # the order to quit may come during the report
    failure = _explained(order, link, prompt, error)
    link.has_failed = not failure.is_consequence
    link.send(failure)
    link.has_reported = True


def _explained(order: RankOrder, link: GangLink, prompt: debugger.Prompt, error: BaseException) -> Failure:
    at = time.time()  # the notes may take seconds, in which other ranks fail as a consequence
    program.explain(error, order.sources)
    debugger.explain(error, order.place.rank)
    failure = failure_of(error, at, link, is_final=link.has_returned and not _is_of_storage(error))
    if not link.has_returned and order.job.settings.on_error == "hold":
        prompt.hold(error, failure)
    return failure


def _obey(channel: Connection, session: Session, link: GangLink, prompt: debugger.Prompt) -> None:
    order: messages.Order
    try:
        while not isinstance(order := channel.recv(), messages.Quit):
            session.follow(order)
    except (EOFError, OSError):  # the agent died
        os._exit(STOPPED)
    if (held := prompt.failure) is not None:  # another rank has ended the wait
        link.send(held)
    latest = time.monotonic() + max(order.grace - EXIT_RESERVE, EXIT_SHARE * order.grace)
    session.checkpoint.flush(FLUSH_SHARE * order.grace)
    link.send_records()
    if link.has_failed and held is None:
        for seconds in (FIRST_FLUSH, EXIT_TIME):
            time.sleep(max(0.0, min(seconds, latest - time.monotonic())))
            ending.flush_files()
            link.has_closed_observers.wait(latest - time.monotonic())  # the main thread closes them
        if link.has_reported:
            os._exit(STOPPED)
    link.observers.call("on_end", 1 if order.reason is None else 0, None if link.has_delivered else order.reason)
    os._exit(STOPPED)


def _take_listener(channel: Connection) -> int:
    listener = recv_handle(channel)
    os.set_inheritable(listener, False)  # a child program that outlives the rank must not keep the socket open
    return listener


def _unpack(order: RankOrder, link: GangLink, session: Session, prompt: debugger.Prompt) -> functools.partial[Any]:
    """Unpickle the user's call, then open rank 0's observers. A rank that stays calls its server.

    Observers import packages in threads, and two threads that import one package at once may deadlock: a run of wandb
    was lost because a user's module imported parts of wandb at the same time.
    """
    try:
        if order.job.call is None:
            explained = functools.partial(_explained, order, link, prompt)
            session.server = program.Server(link, session.rank.stop_signal, explained)
            return functools.partial(session.server.serve)
        with link.opened(order.job.call) as data:
            return unpack_call(data)
    finally:  # observers also see a call fail whose modules cannot be imported
        if order.place.rank == 0:
            link.observers.open(order.job.observers)


def _settle_in(order: RankOrder) -> None:
    show_as(f"rank {order.place.rank}/{order.place.world_size}")
    import torch

    libraries.shield()
    process_group.install()
    libraries.guide()
    os.chdir(order.directory)
    sys.path[:] = order.path
    program.import_first_from(order.sources)
    program.set_up_program(order.program, order.sources.script)
    script.set_place(order.sources.script, order.sources.originals, process_group.set_aside)
    expect_questions()
    threads = os.environ["OMP_NUM_THREADS"].partition(",")[0]  # OpenMP's lists have a number per level
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else order.place.num_threads)


def _take_sound_device(order: RankOrder, check: GpuCheck) -> torch.device | None:
    check.await_driver()
    device = _take_device(order)
    check.compute(device)
    return device


def _take_device(order: RankOrder) -> torch.device | None:
    index = order.place.device_index
    has_own = order.job.backend == "nccl"
    if index is None or not (has_own or index):  # CUDA stays uninitialised if possible, as a fork cannot use it after
        return None
    import torch

    torch.cuda.set_device(index)
    if not has_own:
        return None
    return torch.device("cuda", index)


@contextlib.contextmanager
def _host_of(job: Job) -> Iterator[RankHost | None]:
    if job.host is None:
        if job.execution is not None:  # unpickled at its first use, as that imports the host
            know(functools.cache(functools.partial(pickle.loads, job.execution)))
        yield None
        return
    host: RankHost = pickle.loads(job.host)  # noqa: S301 - from our own driver, by our agent's pipe
    with host.entered():
        yield host


def _keywords(order: RankOrder, host: RankHost | None) -> dict[str, Any]:
    keywords = host.arguments() if host is not None else {}
    if order.job.pass_local_rank:
        keywords["local_rank"] = order.place.local_rank
    return keywords


def _payload(order: RankOrder, returned: Any, host: RankHost | None, link: GangLink) -> object:
    """In a Flyte task only rank 0 sends a value, the task's outputs. Ranks of an evaluation send their metrics."""
    if host is None or isinstance(returned, Metrics):
        return link.send_returned(returned)
    return link.send_returned(host.outputs(unwrapped(returned))) if order.place.rank == 0 else None


def _is_of_storage(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__}  # flytekit's, which need not be imported here
    is_missing = isinstance(error.__cause__ or error, FileNotFoundError)  # the file to be stored
    return (isinstance(error, OSError) or "FlyteUploadDataException" in kinds) and not is_missing
