"""Gangs of real ranks on this machine: with this process as their driver, or without a driver."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flytekitplugins.daskpytorch import Gang, Observer, context
from flytekitplugins.daskpytorch.context import Link, RankContext, current_rank
from flytekitplugins.daskpytorch.dask.agents import DaskAgents
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.storage import storage_of
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.agent import OwnNode
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.checkpoints import Sharding
from flytekitplugins.daskpytorch.protocol.host import AgentOrder, OnFailure, current_execution
from flytekitplugins.daskpytorch.protocol.job import Job, RankOrder
from flytekitplugins.daskpytorch.protocol.messages import Piece, PieceWriter
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.records import LogRecord
from processes import nothing_left_behind

JOB = {"gang": "g", "attempt": 0, "call": b"", "backend": "gloo"} | {
    "sharding": Sharding(base="", nonce=""),
    "settings": Gang(start_timeout=1.0),
}


def pieces_of(path: str | None, data: bytes) -> list[Piece]:
    """In which a submitted file, or a large return value, travels."""
    pieces: list[Piece] = []
    writer = PieceWriter(path, pieces.append)
    writer.write(data)
    writer.end()
    return pieces


class Notes(Observer):
    """Keeps the notes of a gang, and the steps of its checkpoints and restarts."""

    def __init__(self) -> None:
        self.kept_steps: list[int] = []
        self.resumed_steps: list[int | None] = []
        self.texts: list[str] = []

    def on_checkpoint(self, step: int) -> None:
        self.kept_steps.append(step)

    def on_restart(self, reason: str, step: int | None) -> None:
        self.resumed_steps.append(step)

    def on_note(self, text: str) -> None:
        self.texts.append(text)

    def on_event(self, event: journal.Event) -> None:
        super().on_event(event)
        if isinstance(event, journal.Resumed):
            self.resumed_steps.append(event.step)
        elif isinstance(event, journal.Wrote):
            self.texts.extend(event.lines)

    def told(self, pattern: str) -> list[str]:
        return [text for text in self.texts if re.search(pattern, text)]


def driver_of(
    function: Callable[..., Any], *args: Any, num_ranks: int = 2, observers: Sequence[Observer] = (), **settings: Any
) -> Supervisor:
    """The driver of a gang of so many ranks on this machine."""
    request = request_for(function, args, {}, Gang(ranks_per_worker=num_ranks, **settings))
    storage = storage_of(current_execution(), "gang", request.settings)
    observers = [*observers, *request.observers]
    return Supervisor(replace(request, key="gang", storage=storage, observers=observers), OwnNode())


def on_this_machine(function: Callable[..., Any], *args: Any, num_ranks: int = 2, **how: Any) -> GangFutures:
    """The futures of such a gang, which runs."""
    return GangFutures(driver_of(function, *args, num_ranks=num_ranks, **how), num_ranks)


class KilledError(Exception):
    """What the fake checkpoint raises in place of a lost worker."""


class FakeCheckpoint(context.Checkpoint):
    """Keeps rank 0's newest state in a file, as a gang does."""

    def __init__(self, path: Path, *, die_after: int | None = None) -> None:
        self.path = path
        self.die_after = die_after
        self.steps: list[int] = []

    def save(self, state: Any, step: int) -> None:
        self.steps.append(step)
        if current_rank().is_main:
            torch.save(state, self.path)
        if len(self.steps) == self.die_after:
            raise KilledError

    def load(self) -> Any | None:
        if current_rank().world_size > 1:
            dist.barrier()  # the gang waits until rank 0 has written
        return torch.load(self.path, map_location="cpu", weights_only=False) if self.path.exists() else None


class Logged(Link):
    """Keeps what is logged."""

    def __init__(self, records: list[LogRecord]) -> None:
        self.records = records

    def log(self, record: LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def logging_to(records: list[LogRecord], **changes: Any) -> Iterator[None]:
    """During the block, keep what this process logs as a rank; `changes` are other parts of its context."""
    outside = current_rank()
    context.enter(replace(outside, link=Logged(records), **changes))
    try:
        yield
    finally:
        context.enter(outside)


def order_for(settings: Gang | None = None, **job: Any) -> RankOrder:
    """Return the order for the only rank of a gang."""
    node = Node(worker="w", host="h", num_cores=1, gpus=(), gpu_names=(), interface=None, versions={})
    [[place]] = place_ranks([node], 1)
    return RankOrder(
        place=place,
        job=Job(**JOB | ({"settings": settings} if settings is not None else {}) | job),
        scratch="/nowhere",
        agent=AgentOrder(driver=("127.0.0.1", 1), token=b""),
    )


def put_driver_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of this process's gangs do not see the driver's folder, as on another machine."""

    def launch(self: Any, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        launches[type(self)](self, [replace(order, folder=None) for order in orders], on_failure)

    launches: dict[type, Any] = {launcher: launcher.launch for launcher in (DaskAgents, OwnNode)}
    for launcher in launches:
        monkeypatch.setattr(launcher, "launch", launch)


def run_ranks(run: Callable[[Path], dict[str, Any]], world_size: int, directory: Path) -> list[dict[str, Any]]:
    """What `run` returns on each rank of a gang."""
    resource_tracker.ensure_running()  # Python's own, which stays as long as the test process
    with nothing_left_behind():
        ranks = mp.spawn(_run_rank, (run, world_size, directory), nprocs=world_size, join=False)
        try:
            while not ranks.join():
                pass
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_rank(rank: int, run: Callable[[Path], dict[str, Any]], world_size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    context.enter(RankContext(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size))
    torch.save(run(directory), directory / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # as ranks end: torch's threads may abort the exit of Python (pytorch#190489)
