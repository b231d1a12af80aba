"""Starts, watches and kills the ranks of one node; the driver does the thinking. Knows no Dask.

Runs in a thread of a Dask worker (or of the task's own process) for as long as the gang lives. It dials the driver,
says what its node has, and then relays: orders to the ranks; their reports, output and exits to the driver.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import psutil
from dask.system import cpu_count  # knows containers' limits; the only thing taken from Dask

from flytekitplugins.daskpytorch import forkserver, ship
from flytekitplugins.daskpytorch.placement import Node, Place
from flytekitplugins.daskpytorch.rank import STOPPED, Job, RankOrder, environment

__all__ = ["AgentOrder", "Broken", "Close", "End", "Exited", "Hello", "Lines", "Reported", "Start", "Stop", "local_versions", "run"]

STOP_GRACE = 0.5
"""Seconds a rank gets to leave by itself once it is told to stop."""
TRACKED_STOP_GRACE = 10.0
"""The same for the rank that has a Weights & Biases run to close."""
TAIL_LINES = 40
"""How much of a rank's log goes into an error."""
DIAL_TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class AgentOrder:
    """How an agent finds its driver."""

    worker: str
    """The address of the worker that it should run on."""
    driver: tuple[str, int]
    """Host and port."""
    token: bytes
    """Proves to the driver that it is this gang's agent; the first bytes on the connection."""


# ---- Messages: from the agent ...


@dataclass(frozen=True)
class Hello:
    """The agent is there."""

    node: Node


@dataclass(frozen=True)
class Reported:
    """A rank's own report, unopened: a pickled pair of kind and value."""

    rank: int
    report: bytes


@dataclass(frozen=True)
class Lines:
    """What a rank wrote to its standard output and error."""

    rank: int
    lines: list[str]


@dataclass(frozen=True)
class Exited:
    """A rank ended."""

    rank: int
    exitcode: int
    stopped: bool
    """It was told to."""
    out_of_memory: bool
    log_tail: str
    time: float


@dataclass(frozen=True)
class Broken:
    """The agent itself failed, and its ranks with it."""

    traceback: str


# ---- ... and to it


@dataclass(frozen=True)
class Start:
    """Start these ranks."""

    job: Job
    code: ship.Code
    places: list[Place]


@dataclass(frozen=True)
class Stop:
    """End all ranks: something failed."""


@dataclass(frozen=True)
class End:
    """Let all ranks leave: everyone has finished."""


@dataclass(frozen=True)
class Close:
    """The gang is over."""


def run(order: AgentOrder) -> None:
    """Serve the driver until the gang is over, or the driver is gone; then no rank is left.

    Raises:
        ConnectionError: The driver cannot be reached from here.
    """
    connection, interface = _dial(order)
    # The connection closes last: its end tells the driver that nothing is left here.
    with connection, contextlib.closing(forkserver.connect()) as server, _scratch(server) as scratch:
        with contextlib.suppress(EOFError, ConnectionError):
            try:
                connection.send(Hello(describe_node(order.worker, interface)))
                _Agent(connection, server, scratch, interface).serve()
            except (EOFError, ConnectionError):  # the driver, or the fork server with all ranks
                raise
            except Exception:
                connection.send(Broken(traceback.format_exc()))
                raise


def describe_node(worker: str, interface: str | None) -> Node:
    """Say what this node has to offer."""
    gpus = _visible_gpus()
    return Node(
        worker=worker,
        host=socket.gethostname(),
        num_cores=cpu_count(),
        gpus=tuple(gpus),
        gpu_names=tuple(gpus.values()),
        interface=interface,
        versions=local_versions(),
    )


def local_versions() -> dict[str, str]:
    """The versions that driver and workers must share."""
    packages = ("flytekitplugins-daskpytorch", "torch")
    return {"python": ".".join(map(str, sys.version_info[:2]))} | {name: version(name) for name in packages}


@dataclass
class _Rank:
    place: Place
    channel: Connection
    output: int | None
    """Read end of its standard output and error; None once it has closed them."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    unfinished: bytes = b""
    """A line without its end."""
    kill_at: float | None = None
    """It was told to stop; on the monotonic clock."""


class _Agent:
    def __init__(
        self, driver: Connection, server: forkserver.ForkServerClient, scratch: Path, interface: str | None
    ) -> None:
        self._driver = driver
        self._server = server
        self._scratch = scratch
        self._interface = interface
        self._ranks: dict[int, _Rank] = {}
        self._job: Job | None = None
        self._num_kills_for_memory = _num_kills_for_memory()
        self._open = True

    def serve(self) -> None:
        while self._open:
            channels = {rank.channel: rank for rank in self._ranks.values() if not rank.channel.closed}
            outputs = {rank.output: rank for rank in self._ranks.values() if rank.output is not None}
            for ready in wait([self._driver, self._server, *channels, *outputs], self._patience()):
                if ready is self._driver:
                    self._follow(self._driver.recv())
                elif ready is self._server:
                    self._note_exit()
                elif (rank := outputs.get(ready)) and rank.output is not None:
                    self._relay_output(rank)
                elif (rank := channels.get(ready)) and not rank.channel.closed:
                    self._relay_report(rank)
            self._kill_the_late()

    def _follow(self, order: object) -> None:
        match order:
            case Start():
                self._start(order)
            case Stop():
                self._stop()
            case End():
                for rank in self._ranks.values():
                    self._tell(rank, "end")
            case Close():
                self._open = False

    def _start(self, order: Start) -> None:
        self._job = order.job
        code = ship.unpack_code(order.code, self._scratch)
        for place in order.places:
            mine, theirs = Pipe()
            output, output_of_rank = os.pipe()
            os.set_blocking(output, False)
            self._server.spawn(place.rank, theirs.fileno(), output_of_rank)
            theirs.close()
            os.close(output_of_rank)
            self._ranks[place.rank] = _Rank(place=place, channel=mine, output=output)
            mine.send(
                RankOrder(
                    place=place,
                    job=order.job,
                    code=str(code),
                    directory=os.getcwd(),
                    environment=environment(os.environ, place, order.job, self._interface),
                )
            )

    def _stop(self) -> None:
        for rank in self._ranks.values():
            has_run_to_close = rank.place.rank == 0 and self._job is not None and self._job.tracking is not None
            rank.kill_at = time.monotonic() + (TRACKED_STOP_GRACE if has_run_to_close else STOP_GRACE)
            self._tell(rank, "stop")

    def _kill_the_late(self) -> None:
        for rank in self._ranks.values():
            if rank.kill_at is not None and time.monotonic() >= rank.kill_at:
                self._server.kill(rank.place.rank, signal.SIGKILL)

    def _patience(self) -> float | None:
        deadlines = [rank.kill_at for rank in self._ranks.values() if rank.kill_at is not None]
        return max(0.01, min(deadlines) - time.monotonic()) if deadlines else None

    @staticmethod
    def _tell(rank: _Rank, word: str) -> None:
        with contextlib.suppress(OSError):  # it is already ending
            rank.channel.send(word)

    def _relay_report(self, rank: _Rank) -> None:
        try:
            report = rank.channel.recv_bytes()
        except (EOFError, OSError):
            rank.channel.close()  # its exit follows
            return
        self._driver.send(Reported(rank.place.rank, report))

    def _relay_output(self, rank: _Rank) -> None:
        assert rank.output is not None
        try:
            data = os.read(rank.output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            os.close(rank.output)
            rank.output = None
        # A carriage return ends a line too: each state of a progress bar is one.
        *whole, rank.unfinished = (rank.unfinished + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if not data and rank.unfinished:
            whole, rank.unfinished = [rank.unfinished], b""
        lines = [line.decode(errors="replace") for line in whole if line.strip()]
        if lines:
            rank.tail.extend(lines)
            self._driver.send(Lines(rank.place.rank, lines))

    def _note_exit(self) -> None:
        key, exitcode = self._server.next_exit()
        rank = self._ranks.pop(key)
        while not rank.channel.closed and rank.channel.poll():
            self._relay_report(rank)
        while rank.output is not None and wait([rank.output], 0):
            self._relay_output(rank)
        self._driver.send(
            Exited(
                rank=key,
                exitcode=exitcode,
                stopped=rank.kill_at is not None and exitcode in (STOPPED, -signal.SIGKILL),
                out_of_memory=exitcode == -signal.SIGKILL and _num_kills_for_memory() > self._num_kills_for_memory,
                log_tail="\n".join(rank.tail),
                time=time.time(),
            )
        )
        rank.channel.close()
        if rank.output is not None:
            os.close(rank.output)
            rank.output = None


@contextlib.contextmanager
def _scratch(server: forkserver.ForkServerClient) -> Iterator[Path]:
    """A folder that goes with the agent; should this process be killed, the fork server removes it."""
    with tempfile.TemporaryDirectory(prefix="daskpytorch-", ignore_cleanup_errors=True) as folder:
        server.own(folder)
        yield Path(folder)


def _dial(order: AgentOrder) -> tuple[Connection, str | None]:
    """Connect to the driver; the connection, and the interface it goes through."""
    host, port = order.driver
    try:
        sock = socket.create_connection((host, port), timeout=DIAL_TIMEOUT)
    except OSError as error:
        raise ConnectionError(
            f"the worker at {order.worker} cannot reach the driver at {host}:{port} ({error}). Workers must be able to "
            "open connections to the machine that runs the task: check network policies and firewalls."
        ) from error
    sock.settimeout(None)
    watch_peer(sock)
    interface = _interface_of(sock.getsockname()[0])
    connection = Connection(sock.detach())
    connection.send_bytes(order.token)
    return connection, interface


def watch_peer(sock: socket.socket) -> None:
    """Have the kernel notice within seconds that the other host has gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


def _interface_of(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


@functools.cache
def _visible_gpus() -> dict[str, str]:
    """The GPUs this process may use: id -> model.

    torch is asked in a process of its own, since neither this one nor the fork server may touch CUDA.
    """
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return {}
    question = (
        "import json, torch; n = torch.cuda.device_count(); "
        "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", question], capture_output=True, text=True, check=False)
    names = json.loads(answer.stdout) if answer.returncode == 0 else []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [gpu.strip() for gpu in listed.split(",")] if listed else [str(i) for i in range(len(names))]
    return dict(zip(ids, names, strict=False))


def _num_kills_for_memory() -> int:
    """How often the kernel has killed for memory in this container (control groups, version 2)."""
    with contextlib.suppress(OSError):
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
