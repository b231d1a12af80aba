"""Accounts for a rank's time, and samples its use of processor, memory and GPU. Runs in a rank.

The ledger counts the main thread's time under one part at any moment: for example a loader, an evaluation or a save.
All other time is open until the next step ends, and then belongs to the step.
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

from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.rank import nvml
from flytekitplugins.daskpytorch.records import RankUsage

INTERVAL = 2.0
"""Minimum number of seconds between two samples of a rank's processor, memory and GPU use."""
END_TIMEOUT = 10.0
"""Timeout, in seconds, for a rank's last usage sample."""
MAX_SAMPLES = 200
"""Maximum number of usage samples per second that the driver gets from all ranks together."""


@dataclass(slots=True)
class _Page:
    """State of a `Ledger`. Each entry creates a new page, so that other threads read consistent values."""

    part: str
    """Part that the time since the newest entry counts under, such as `saving`. `open`: a later entry decides."""
    since: float
    """Time of the newest entry, in seconds on the ledger's clock."""
    seconds: dict[str, float]
    """Main thread's seconds by kind of work, such as `stepping`, up to the ledger's last change."""
    has_begun: bool
    """True once the first batch has come or the first step is over. Time without a part then counts as `stepping`,
    before that as `preparing`."""

    def until(self, now: float) -> dict[str, float]:
        """Return the seconds by part, up to the time `now` on the ledger's clock."""
        return {**self.seconds, self.part: self.seconds[self.part] + now - self.since}


class Ledger:
    """Account of one thread's time, by parts such as stepping and saving. An entry takes one or two microseconds.

    Preparing lasts until a loader gives the first batch, or until the first step ends. If parts are nested, the outer
    part counts: the wait for an evaluation's batches is evaluation.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Reset all counts. From now on, the ledger counts the time of the calling thread."""
        self._owner = threading.get_ident()
        self.num_steps = 0
        """Number of optimizer steps so far."""
        parts = ("preparing", "stepping", "data", "evaluation", "saving", "waiting", "open")
        self._page = _Page("open", self._clock(), dict.fromkeys(parts, 0.0), has_begun=False)

    def step(self) -> None:
        """Count an optimizer's step, and end the current step."""
        self.num_steps += 1
        self.mark()

    def mark(self) -> None:
        """End the current step.

        The step's time under no other part, such as `data` or `saving`, counts as `stepping`. If no batch or step came
        before, that time counts as `preparing`.
        """
        if self._is_open():
            self._turn_to("open", ends_step=True)

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time of the block under this part, unless the block is within another part's or another thread."""
        if not self._is_open():
            yield
            return
        self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to("open", ends_step=part == "data" and not self._page.has_begun)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part so far.

        Time under no other part, such as `data`, counts as `stepping`. Before the first batch or step, that time counts
        as `preparing`.
        """
        page = self._page
        seconds = page.until(self._clock())
        seconds["stepping" if page.has_begun else "preparing"] += seconds.pop("open")
        return seconds

    def close(self) -> dict[str, float]:
        """Return the main thread's seconds by kind of work, at the end of the user's function.

        Time after the last step counts as `waiting`. Without any step or call of `log`, that time is
        `stepping` or `preparing`.
        """
        seconds = self._page.until(self._clock())
        if self.num_steps or seconds["stepping"]:
            seconds["waiting"] += seconds.pop("open")
        else:  # without a reported step, all open time counts as one step
            seconds["stepping"] += seconds.pop("open")
        return seconds

    def _is_open(self) -> bool:
        """Return True if the calling thread is the ledger's, outside all parts."""
        return self._page.part == "open" and threading.get_ident() == self._owner

    def _turn_to(self, part: str, *, ends_step: bool = False) -> None:
        page, now = self._page, self._clock()
        seconds = page.until(now)
        if ends_step:
            seconds["stepping" if page.has_begun else "preparing"] += seconds["open"]
            seconds["open"] = 0.0
        self._page = _Page(part, now, seconds, page.has_begun or ends_step)


@contextlib.contextmanager
def watched(ledger: Ledger) -> Iterator[None]:
    """During the block, record waits for batches of DataLoaders, and steps of optimizers, in the ledger."""
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
    """Samples this process's use of processor, memory and GPU."""

    def __init__(self, rank: int, ledger: Ledger, gpu: int, gpu_uuid: str = "") -> None:
        self._rank = rank
        self._ledger = ledger
        self._gpu = gpu
        """CUDA index of the rank's own GPU. Not used by a rank without a GPU."""
        self._gpu_uuid = gpu_uuid
        """UUID of the rank's own GPU. Empty if unknown."""
        self._read_at, self._used = time.monotonic(), time.process_time()

    def read(self) -> RankUsage:
        """Return a usage sample. Its processor use is the mean since the previous sample."""
        before, self._read_at = self._read_at, time.monotonic()
        used_before, self._used = self._used, time.process_time()
        memory, utilization = _of_gpu(self._gpu, self._gpu_uuid)
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
    def reporting(self, world_size: int, send: Callable[[RankUsage], None]) -> Iterator[None]:
        """Send a usage sample every two seconds during the block, in a thread. Ranks of large gangs send fewer samples.

        A block with at least one sample sends a final sample at its end, which counts all steps of the rank.

        Args:
            world_size: Number of ranks in the gang.
            send: Reports a sample.
        """
        every = max(1, round(world_size / MAX_SAMPLES / INTERVAL))
        has_returned, is_over = threading.Event(), threading.Event()

        def go_on() -> None:
            has_sent = False
            for turn in itertools.count(1):
                wait = INTERVAL - time.time() % INTERVAL  # all ranks at the same moments
                if is_over.wait(wait if wait > INTERVAL / 2 else wait + INTERVAL):
                    break
                with optional("Reading what this rank uses"):
                    if (turn + self._rank) % every == 0:  # not all ranks of a large gang at once
                        send(self.read())
                        has_sent = True
            if has_sent and has_returned.is_set():
                with optional("Reading what this rank uses"):
                    send(self.read())

        thread = threading.Thread(target=go_on, name="daskpytorch-usage", daemon=True)
        thread.start()
        try:
            yield
            has_returned.set()
        finally:
            is_over.set()
        thread.join(END_TIMEOUT)  # NVML hangs with some broken GPUs


def _of_gpu(index: int, uuid: str) -> tuple[int | None, float | None]:
    """Return the GPU's used memory in bytes and its utilisation from 0 to 1, or None for an unknown value.

    Both are None if this process has not initialised CUDA.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None, None
    # NVML first: many calls of CUDA spoil another thread's capture of a CUDA graph.
    used, utilization = nvml.usage(uuid) if uuid else (None, None)
    return _used_by_cuda(index) if used is None else used, utilization


def _used_by_cuda(index: int) -> int | None:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError:  # the GPU has failed, and the rank will report the failure
        return None
    return total - free
