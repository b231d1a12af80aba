"""What a rank's time goes into, and what it uses of its machine. Runs in a rank.

The rank's main thread has a ledger: at any moment it is in one part of its work (a loader, an evaluation, a save), or
in the open, and what is open belongs to the step that ends it.
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from flytekitplugins.daskpytorch.goodput import RankUsage
from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.reports import Spent

INTERVAL = 2.0
"""Seconds between two samples of a rank."""
MAX_SAMPLES = 200
"""Of all ranks together, which the driver reads in a second."""


@dataclass(slots=True)
class _Page:
    """All that a ledger says. Each entry makes a new page, so that other threads read what was true at one moment."""

    part: str
    """What the time since then goes into; `open`: that is decided by what comes."""
    since: float
    seconds: dict[str, float]
    has_begun: bool
    """A batch has come, or a step is over: from here on what is open is part of a step."""

    def until(self, now: float) -> dict[str, float]:
        """Return the seconds of each part until now."""
        return {**self.seconds, self.part: self.seconds[self.part] + now - self.since}


class Ledger:
    """What the time of the thread that makes it goes into. An entry costs a microsecond or two.

    Preparing lasts until the first batch comes from a loader, or without any until the first step is over. Of parts
    within parts the outer one counts: waiting for an evaluation's batches is evaluation.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self._owner = threading.get_ident()
        self.num_steps = 0
        """Steps of optimizers so far."""
        parts = ("preparing", "stepping", "data", "evaluation", "saving", "waiting", "open")
        self._page = _Page("open", self._clock(), dict.fromkeys(parts, 0.0), has_begun=False)

    def step(self) -> None:
        """An optimizer has made a step."""
        self.num_steps += 1
        self.mark()

    def mark(self) -> None:
        """A step is over: an optimizer has made it, or it was logged."""
        page = self._page
        if page.part != "open" or threading.get_ident() != self._owner:
            return
        now = self._clock()
        seconds = page.until(now)
        seconds["stepping" if page.has_begun else "preparing"] += seconds["open"]
        seconds["open"] = 0.0
        self._page = _Page("open", now, seconds, has_begun=True)

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """What the owner does here is this part of its work, unless it is part of another."""
        page = self._page
        if page.part != "open" or threading.get_ident() != self._owner:
            yield
            return
        self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to("open")

    def seconds(self) -> dict[str, float]:
        """What all the time has gone into so far; what is open counts as part of a step that will be over."""
        page = self._page
        seconds = page.until(self._clock())
        seconds["stepping" if page.has_begun else "preparing"] += seconds.pop("open")
        return seconds

    def close(self) -> dict[str, float]:
        """The same when the work is done: of a function that made steps, the last one was over before."""
        seconds = self._page.until(self._clock())
        if self.num_steps or seconds["stepping"]:
            seconds["waiting"] += seconds.pop("open")
        else:  # all of it was one step, as far as can be seen
            seconds["stepping"] += seconds.pop("open")
        return seconds

    def _turn_to(self, part: str) -> None:
        page, now = self._page, self._clock()
        seconds, has_begun = page.until(now), page.has_begun
        if page.part == "data" and not has_begun:
            has_begun = True
            seconds["preparing"] += seconds["open"]
            seconds["open"] = 0.0
        self._page = _Page(part, now, seconds, has_begun)


@contextlib.contextmanager
def saving(ledger: Ledger, report: Callable[[Spent], None] | None, step: int) -> Iterator[None]:
    """What is done here is a save; the driver hears what the time had gone into by then."""
    with ledger.spending("saving"):
        yield
    if report is not None:
        report(Spent(ledger.seconds(), step))


@contextlib.contextmanager
def watched(ledger: Ledger) -> Iterator[None]:
    """Have torch's loaders and optimizers make entries of their own."""
    with contextlib.ExitStack() as stack:
        with optional("Counting the waits for batches"):
            stack.enter_context(_counted_batches(ledger))
        with optional("Counting the optimizers' steps"):
            from torch.optim.optimizer import register_optimizer_step_post_hook

            stack.callback(register_optimizer_step_post_hook(lambda *_: ledger.step()).remove)
        yield


@contextlib.contextmanager
def _counted_batches(ledger: Ledger) -> Iterator[None]:
    iterator = torch_parts.loader_iterator()
    wait = iterator.__next__

    @functools.wraps(wait)
    def wait_counted(self: Any) -> Any:
        with ledger.spending("data"):
            return wait(self)

    iterator.__next__ = wait_counted
    try:
        yield
    finally:
        iterator.__next__ = wait


class Gauge:
    """Reads off what this process uses."""

    def __init__(self, rank: int, ledger: Ledger, gpu: int) -> None:
        self._rank = rank
        self._ledger = ledger
        self._gpu = gpu
        """The index of the rank's own, where it has one."""
        self._read_at, self._used = time.monotonic(), time.process_time()

    def read(self) -> RankUsage:
        """What it uses now."""
        before, self._read_at = self._read_at, time.monotonic()
        used_before, self._used = self._used, time.process_time()
        memory, utilization = _of_gpu(self._gpu)
        return RankUsage(
            rank=self._rank,
            time=time.time(),
            num_steps=self._ledger.num_steps,
            seconds=self._ledger.seconds(),
            cpu=(self._used - used_before) / max(self._read_at - before, 1e-9),
            memory=psutil.Process().memory_info().rss,
            gpu_memory=memory,
            gpu_utilization=utilization,
        )

    @contextlib.contextmanager
    def reporting(
        self, world_size: int, send: Callable[[RankUsage], None], look: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Send a sample every two seconds during the block, in a thread; ranks of large gangs send fewer.

        Where a sample was sent, another is sent at the end, so that the last word on a rank is of all its steps.

        Args:
            world_size: The number of ranks in the gang.
            send: Reports a sample.
            look: Called every two seconds.
        """
        every, is_over, has_sent = (
            max(1, round(world_size / MAX_SAMPLES / INTERVAL)),
            threading.Event(),
            threading.Event(),
        )

        def go_on() -> None:
            for turn in itertools.count(1):
                if is_over.wait(INTERVAL):
                    return
                with optional("Reading what this rank uses"):
                    look()
                    if turn % every == 0:
                        send(self.read())
                        has_sent.set()

        thread = threading.Thread(target=go_on, name="daskpytorch-usage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
        thread.join()
        with optional("Reading what this rank uses"):
            if has_sent.is_set():
                send(self.read())


def _of_gpu(index: int) -> tuple[int | None, float | None]:
    """Bytes that are taken of it, and how busy it is; nothing of one that this process has not used."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None, None
    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:  # it has failed, and the rank will say so
        return None, None
    try:
        return total - free, torch.cuda.utilization(index) / 100
    except Exception:  # NVIDIA's library for it is not there, or may not look
        return total - free, None
