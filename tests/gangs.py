"""Gangs of real processes without a driver, whose checkpoints a test can lay its hands on."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.context import RankContext, current_rank
from processes import MARK


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


def run_ranks(run: Callable[[Path], dict[str, Any]], world_size: int, directory: Path) -> list[dict[str, Any]]:
    """What `run` returns on each rank of a gang."""
    _start_fork_server()
    arguments = (run, world_size, directory, dict(os.environ))
    ranks = mp.start_processes(_run_rank, arguments, nprocs=world_size, join=False, start_method="forkserver")
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


@functools.cache
def _start_fork_server() -> None:
    """Python's own: it imports once what would take each rank most of its time, and ends with this process."""
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK, raising=False)  # it is none of a test's processes
        forkserver.ensure_running()


def _run_rank(
    rank: int, run: Callable[[Path], dict[str, Any]], world_size: int, directory: Path, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # the fork server's own is older
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    context.enter(RankContext(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size))
    torch.save(run(directory), directory / f"{rank}.pt")
    dist.destroy_process_group()
