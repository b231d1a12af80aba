"""A training whose result is known, and ways to break it: what the tests of faults run, and how they watch it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch import Gang, Observer, current_rank, dispatch
from processes import until

if TYPE_CHECKING:
    from distributed import Client

    from flytekitplugins.daskpytorch.task.run import RunFutures

STEPS = 10
SAVED_AT = 4
"""The step whose checkpoint is safe before anything breaks; the next one is that of step 8."""
BREAKS_AT = 6


class SpoiltError(Exception):
    """A user's own exception."""


# ---- What the ranks run


def train(folder: str, fault: str | None = None, at_rank: int = 1, *, pace: float = 0.0) -> float:
    """Ten steps, each with an all-reduce, a checkpoint at every fourth; the result is the same however often it broke.

    Args:
        folder: Where the ranks leave traces, and the test its own.
        fault: What goes wrong, the first time round.
        at_rank: On which rank.
        pace: Seconds per step.
    """
    import torch
    import torch.distributed as dist

    rank = current_rank()
    state = rank.checkpoint.load() or {"step": 0, "value": torch.zeros(1, dtype=torch.float64)}
    value = state["value"]
    _leave(folder, f"start-{rank.rank}", str(state["step"]))
    for step in range(state["step"] + 1, STEPS + 1):
        time.sleep(pace)
        if _has(folder, f"gate-{step}"):
            _await(folder, f"open-{step}")
        if step == BREAKS_AT and fault is not None and at_rank == rank.rank and not _has(folder, "broken"):
            _await(folder, f"kept-{(step - 1) // SAVED_AT * SAVED_AT}")
            _leave(folder, "broken", f"{os.getpid()} {time.time()}")
            print(f"about to fail: {fault}")
            FAULTS[fault]()
        total = contribution(rank.rank, step)
        dist.all_reduce(total)
        value = 0.5 * value + total
        rank.log({"value": value}, step=step)
        if step % SAVED_AT == 0:
            rank.checkpoint.save({"step": step, "value": value}, step)
            if rank.is_main:
                _leave(folder, "saved", str(step))
    return float(value)


def contribution(rank: int, step: int) -> Any:
    """What a rank adds at a step."""
    import torch

    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.rand(1, generator=generator, dtype=torch.float64)


def expected(world_sizes: dict[int, int] | int = 2) -> float:
    """The result of an undisturbed run; for another number of ranks from some step on: {first step: ranks}."""
    import torch

    sizes = {1: world_sizes} if isinstance(world_sizes, int) else world_sizes
    value = torch.zeros(1, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        size = sizes[max(first for first in sizes if first <= step)]
        value = 0.5 * value + sum(contribution(rank, step) for rank in range(size))
    return float(value)


def _leave(folder: str, name: str, line: str) -> None:
    with Path(folder, name).open("a") as file:
        file.write(f"{line}\n")


def _has(folder: str, name: str) -> bool:
    return Path(folder, name).exists()


def _await(folder: str, name: str) -> None:
    until(lambda: _has(folder, name), name)


# ---- Ways to break it


def _close_group_and_raise() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(0.2)  # the others' connection errors come first
    raise SpoiltError("the batch is spoilt")


def _shout_and_raise() -> None:
    for _ in range(500):
        sys.stdout.write("\u2026" * 10_000)
    raise SpoiltError("the batch is " + "very " * 1_000_000 + "spoilt")


def _ignore_sigterm_and_raise() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SpoiltError("the batch is spoilt")


def _hold_the_interpreter() -> None:
    holding, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # zeros are a mutex of C's, which nobody has
    for _ in range(2):  # it waits for itself, in C code that never gives the interpreter away
        holding.pthread_mutex_lock(lock)


def _deadlock_in_a_loader() -> None:
    from torch.utils.data import DataLoader

    next(iter(DataLoader(_Stuck(), num_workers=1)))


class _Stuck:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


FAULTS: dict[str, Callable[[], Any]] = {
    "shout": _shout_and_raise,
    "close and raise": _close_group_and_raise,
    "os._exit": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "ignore SIGTERM": _ignore_sigterm_and_raise,
    "hold the interpreter": _hold_the_interpreter,
    "wait": lambda: time.sleep(600),  # for what the test does
    "loader": _deadlock_in_a_loader,
}


# ---- Watching it


@dataclass
class Watched:
    """One gang under test, and the traces it leaves."""

    folder: Path
    futures: RunFutures
    notes: list[str] = field(default_factory=list)
    formed_at: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def starts(self, rank: int = 0) -> list[int]:
        """From which step each attempt of this rank started."""
        return [int(line.split()[0]) for line in self._lines(f"start-{rank}")]

    def broke_at(self) -> float:
        return float(self._lines("broken")[-1].split()[1])

    def broken_pid(self) -> int:
        return int(self._lines("broken")[-1].split()[0])

    def open(self, step: int) -> None:
        """Let the ranks through the gate before a step."""
        (self.folder / f"open-{step}").touch()

    def wait_for(self, name: str) -> None:
        until(lambda: self._lines(name) or self.futures.done(), name)

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


Launch = Callable[..., Watched]
"""Launches a gang of `train`: a client, or None for this node; `train`'s own arguments, and the gang's settings."""


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[Callable[..., Watched]]:
    """Launch gangs whose every event is seen."""
    folder.mkdir(exist_ok=True, parents=True)

    class Watcher(Observer):
        watched: Watched

        def on_checkpoint(self, step: int) -> None:
            self.watched.kept.append(step)
            _leave(str(folder), f"kept-{step}", "")

        def on_note(self, text: str) -> None:
            self.watched.notes.append(text)

        def on_formed(self, seconds: float) -> None:
            self.watched.formed_at.append(time.time())

    def launch(client: Client | None, *args: Any, gang: Gang | None = None, **kwargs: Any) -> Watched:
        watcher, settings = Watcher(), gang or Gang()
        watcher.watched = Watched(folder, None)  # type: ignore[arg-type]
        settings = replace(settings, observers=(*settings.observers, lambda: watcher))
        watcher.watched.futures = dispatch.run(client, train, str(folder), *args, gang=settings, **kwargs)
        return watcher.watched

    yield launch
