"""The agent: starts, watches and kills the ranks of one node, as the driver decides.

Runs in a thread of a Dask worker, or in the task's own process, and does not import Dask.
"""

import contextlib
import functools
import os
import pickle
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import assert_never

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.hardware import describe_node, interface_of, num_kills_for_memory
from flytekitplugins.daskpytorch.node.ranks import Output, Rank
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.process.system import path_here
from flytekitplugins.daskpytorch.protocol import framing, job, messages
from flytekitplugins.daskpytorch.protocol.code import place_code
from flytekitplugins.daskpytorch.protocol.failure import RankExit, raisable
from flytekitplugins.daskpytorch.protocol.framing import Connection, dial
from flytekitplugins.daskpytorch.protocol.host import AgentLauncher, AgentOrder, OnFailure
from flytekitplugins.daskpytorch.protocol.job import RankOrder, WorkerData
from flytekitplugins.daskpytorch.protocol.placement import Place

HEARTBEAT_INTERVAL = 1.0
MAX_HEARTBEATS = 200
"""Heartbeats per second that a driver gets from all agents together (`scale.py` has their cost)."""
MAX_HEARTBEAT_INTERVAL = 5.0
"""Seconds in a very large gang. The driver counts an agent as lost after three times as long."""


def run(order: AgentOrder, leaving: int | None = None, data: WorkerData | None = None) -> None:
    """Run an agent until its gang or driver ends, and kill the remaining ranks before the return.

    The descriptor `leaving` becomes readable when the Dask worker is closing.
    """
    with (
        contextlib.ExitStack() as at_last,
        scratch_folder("daskpytorch-") as scratch,
        contextlib.closing(_Agent(order, scratch, leaving, data)) as agent,
    ):
        connection = dial(order)
        at_last.callback(connection.close)  # the closed connection tells the driver that no rank is left
        try:
            agent.serve(connection, at_last.enter_context(framing.listen_at(connection.own_address)))
        except (EOFError, ConnectionError):  # the driver has ended, or the fork server with all ranks
            return
        except Exception:
            with contextlib.suppress(OSError):  # the driver has ended, too
                connection.send(messages.Broken(traceback.format_exc()))
            raise


class OwnNode(AgentLauncher):
    num_wanted = 1
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.workers: Sequence[str] = [socket.gethostname()]

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        for order in orders:
            serve = functools.partial(self._serve, order, on_failure)
            threading.Thread(target=serve, name="daskpytorch-agent", daemon=True).start()

    def _serve(self, order: AgentOrder, on_failure: OnFailure) -> None:
        try:
            run(order)
        except BaseException as error:  # the driver waits for the agent
            on_failure(order.worker, raisable(error, "the agent"))


class _Agent:
    def __init__(self, order: AgentOrder, scratch: Path, leaving: int | None, data: WorkerData | None) -> None:
        self._order = order
        self._data = data
        self._scratch = scratch
        self._server = fork_client.connect()
        self._leaving = leaving
        self._ranks: dict[int, Rank] = {}
        self._stays = False  # until a gang that stays has started
        self._open = True
        self._heartbeat_interval = HEARTBEAT_INTERVAL

    def close(self) -> None:
        self._server.close()
        for rank in self._ranks.values():
            rank.close()

    def serve(self, driver: Connection, meeting: socket.socket) -> None:
        """Rank 0 serves the rendezvous store at the socket `meeting`."""
        self._driver, self._meeting = driver, meeting
        self._interface = interface_of(driver.own_address)
        node = describe_node(self._order.worker, self._interface, self._order.num_gpus)
        host, port, *_ = self._meeting.getsockname()
        self._await_server()
        self._driver.send(messages.Hello(node, (host, port)))
        self._heartbeat_at = time.monotonic() + HEARTBEAT_INTERVAL
        while self._open:
            for handle in self._due():
                handle()
            self._keep_time()

    def _await_server(self) -> None:
        """The driver refuses a worker whose agent fails during this wait."""
        if self._driver.fileno() in wait([self._server.fileno(), self._driver.fileno()]):
            raise EOFError("the driver has closed the connection")
        with contextlib.suppress(fork_client.ForkServerLostError):  # `serve` notes the loss after the `Hello`
            self._server.next_event()

    def _due(self) -> list[Callable[[], None]]:
        """Wait for descriptors that are readable, at most until the next deadline, and return their handlers."""
        handlers: dict[int, Callable[[], None]] = {
            self._driver.fileno(): self._follow,
            self._server.fileno(): self._note_exit,
        }
        if self._leaving is not None:
            handlers[self._leaving] = self._say_leaving
        for rank in self._ranks.values():
            if not rank.channel.closed:
                handlers[rank.channel.fileno()] = functools.partial(self._relay_reports, rank)
            if rank.output.is_open:
                handlers[rank.output.descriptor] = functools.partial(self._note_output, rank)
        poll = select.poll()  # cheaper than `multiprocessing.connection.wait`, on cores that the ranks train on
        for file in handlers:
            poll.register(file, select.POLLIN)
        return [handlers[file] for file, _ in poll.poll(1000 * self._patience())]

    def _follow(self) -> None:
        message: messages.ToAgent = self._driver.recv()
        match message:
            case messages.Start():
                self._start(message)
            case messages.Stop():
                self._stop(message)
            case messages.Tell(order):
                self._tell(order)
            case messages.Close():
                self._open = False
            case _:
                assert_never(message)

    def _start(self, order: messages.Start) -> None:
        self._num_kills_for_memory, self._stays = num_kills_for_memory(), order.job.call is None
        sources = place_code(order.code, self._scratch)
        self._heartbeat_interval = heartbeat_interval(order.places[0], order.job.pulse)
        self._heartbeat_at = min(self._heartbeat_at, time.monotonic() + self._heartbeat_interval)
        folder = self._order.folder
        for place in order.places:
            rank = self._fork(place)
            environment = job.environment(os.environ, place, order.job, self._interface, self._scratch)
            asked = RankOrder(
                place=place,
                job=order.job,
                sources=sources,
                program=order.code.program,
                scratch=str(self._scratch),
                agent=self._order,
                driver_folder=str(folder) if folder is not None and os.access(folder, os.W_OK) else None,
                directory=str(Path.cwd()),
                path=[*filter(None, order.job.environment.get("PYTHONPATH", "").split(os.pathsep)), *path_here()],
                data=self._data,
            )
            with contextlib.suppress(OSError):  # the rank has just ended, and its exit is handled later
                rank.channel.send(environment)
                rank.channel.send(asked)
                if asked.serves_store:
                    send_handle(rank.channel, self._meeting.fileno(), None)

    def _fork(self, place: Place) -> Rank:
        mine, theirs = Pipe()
        output, output_of_rank = os.pipe()
        rank = Rank(place=place, channel=mine, output=Output(output))
        self._ranks[place.local_rank] = rank  # closed with the agent in any case
        try:
            self._server.spawn(place.local_rank, theirs.fileno(), output_of_rank)
        finally:
            theirs.close()
            os.close(output_of_rank)
        return rank

    def _stop(self, asked: messages.Stop) -> None:
        for rank in self._ranks.values():
            grace = asked.grace if rank.place.rank else asked.main_grace
            rank.kill_at = time.monotonic() + grace
            self._tell(messages.Quit(asked.reason, grace), rank)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for key, rank in self._ranks.items():
            if rank.kill_at is not None and now >= rank.kill_at:
                self._server.kill(key, signal.SIGKILL)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._heartbeat_interval
            told = {rank.place.rank: rank.num_moves for rank in self._ranks.values() if rank.num_moves is not None}
            self._driver.send(messages.Beat(told))

    def _patience(self) -> float:
        deadlines = [rank.kill_at for rank in self._ranks.values() if rank.kill_at is not None]
        return max(0.01, min([*deadlines, self._heartbeat_at]) - time.monotonic())

    def _say_leaving(self) -> None:
        self._leaving = None
        self._driver.send(messages.Leaving())

    # ---- the ranks' channels

    def _tell(self, order: messages.Order, *ranks: Rank) -> None:
        data = pickle.dumps(order)
        for rank in ranks or self._ranks.values():
            with contextlib.suppress(OSError):  # the rank is already ending
                rank.channel.send_bytes(data)

    def _relay_reports(self, rank: Rank) -> None:
        try:
            report = rank.channel.recv_bytes()
        except (EOFError, OSError):  # also if the rank's exit was handled a moment ago
            rank.channel.close()
            return
        if len(report) == messages.NUM_MOVES.size:
            (rank.num_moves,) = messages.NUM_MOVES.unpack(report)
            return
        if self._stays:  # the output of a call comes before its end
            self._note_output(rank)
        self._driver.send(messages.Reported(rank.place.rank, report))

    def _note_output(self, rank: Rank) -> None:
        if lines := rank.output.read_lines():
            rank.note(lines)
            self._driver.send(messages.Lines(rank.place.rank, lines))

    def _note_exit(self) -> None:
        key, exitcode = self._server.next_event()
        with contextlib.closing(self._ranks.pop(key)) as rank:  # also if the driver has ended
            self._tell_exit(rank, exitcode)

    def _tell_exit(self, rank: Rank, exitcode: int) -> None:
        while not rank.channel.closed and rank.channel.poll():
            self._relay_reports(rank)
        while rank.output.has_more():
            self._note_output(rank)
        self._driver.send(
            RankExit(
                rank=rank.place.rank,
                exitcode=exitcode,
                stopped=rank.kill_at is not None and exitcode in (job.STOPPED, -signal.SIGKILL),
                out_of_memory=exitcode == -signal.SIGKILL and num_kills_for_memory() > self._num_kills_for_memory,
                log_tail=rank.log_tail,
                watchdog=rank.watchdog if exitcode == -signal.SIGABRT else "",
            )
        )


def heartbeat_interval(place: Place, pulse: float | None) -> float:
    num_agents = place.world_size // place.local_world_size
    wanted = min(HEARTBEAT_INTERVAL, pulse or HEARTBEAT_INTERVAL)
    return max(wanted, min(num_agents / MAX_HEARTBEATS, MAX_HEARTBEAT_INTERVAL))
