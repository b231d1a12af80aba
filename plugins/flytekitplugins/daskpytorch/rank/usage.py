"""Accounts for a rank's time, and samples its use of processor, memory and GPU. Runs in a rank.

The ledger counts the main thread's time under one part at any moment, such as a loader or a save. Other time is open
until the next step ends, and then belongs to the step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from wrapt import wrap_function_wrapper

from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.rank.libraries import after_import
from flytekitplugins.daskpytorch.records import RankUsage

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.settings import Profile


INTERVAL = 2.0
"""Minimum seconds between two samples."""
END_TIMEOUT = 10.0
MAX_SAMPLES = 100


@dataclass(slots=True)
class _Page:
    """State of a `Ledger`. Each entry creates a new page, so that other threads read consistent values."""

    part: str
    since: float
    seconds: dict[str, float]
    has_begun: bool

    def until(self, now: float) -> dict[str, float]:
        return {**self.seconds, self.part: self.seconds[self.part] + now - self.since}


class Ledger:
    """Account of one thread's time, by parts such as stepping and saving. An entry takes one or two microseconds.

    Of nested parts, the outer one counts: the wait for an evaluation's batches is evaluation.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._owner = threading.get_ident()
        self.num_steps = 0
        parts = ("preparing", "stepping", "data", "compiling", "evaluation", "saving", "waiting", "open")
        self._page = _Page("open", self._clock(), dict.fromkeys(parts, 0.0), has_begun=False)

    def step(self) -> None:
        self.num_steps += 1
        self.mark()

    def mark(self) -> None:
        if self._is_open():
            self._turn_to("open", ends_step=True)

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        if not self._is_open():
            yield
            return
        self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to("open", ends_step=part == "data" and not self._page.has_begun)

    def begin_compiling(self) -> None:
        if self._is_open():
            self._turn_to("compiling")

    def end_compiling(self) -> None:
        if self._page.part == "compiling" and threading.get_ident() == self._owner:
            self._turn_to("open")

    def seconds(self) -> dict[str, float]:
        page = self._page
        seconds = page.until(self._clock())
        seconds["stepping" if page.has_begun else "preparing"] += seconds.pop("open")
        return seconds

    def close(self) -> dict[str, float]:
        """Return the seconds by part. Time after the last step counts as `waiting`.

        Without any step or call of `log`, it counts as `stepping`.
        """
        seconds = self._page.until(self._clock())
        if self.num_steps or seconds["stepping"]:
            seconds["waiting"] += seconds.pop("open")
        else:  # without a reported step, all open time counts as one step
            seconds["stepping"] += seconds.pop("open")
        return seconds

    def _is_open(self) -> bool:
        return self._page.part == "open" and threading.get_ident() == self._owner

    def _turn_to(self, part: str, *, ends_step: bool = False) -> None:
        page, now = self._page, self._clock()
        seconds = page.until(now)
        if ends_step:
            seconds["stepping" if page.has_begun else "preparing"] += seconds["open"]
            seconds["open"] = 0.0
        self._page = _Page(part, now, seconds, page.has_begun or ends_step)


def watch(ledger: Ledger) -> None:
    with optional("Counting the waits for batches"):
        _count_batches(ledger)
    after_import("torch._dynamo.callback", "on_compile_start", functools.partial(_count_compilations, ledger))
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: ledger.step())


def _count_compilations(ledger: Ledger, callback: Any) -> None:
    callback.on_compile_start(lambda *_: ledger.begin_compiling())  # without an argument before torch 2.8
    callback.on_compile_end(lambda *_: ledger.end_compiling())


def _count_batches(ledger: Ledger) -> None:
    def wait_counted(wait: Callable[[], Any], *_: Any) -> Any:
        with ledger.spending("data"):
            return wait()

    wrap_function_wrapper(torch_parts.loader_iterator(), "__next__", wait_counted)


class Gauge:
    def __init__(self, rank: int, ledger: Ledger, gpu_uuid: str = "") -> None:
        self._rank = rank
        self._ledger = ledger
        self._gpu_uuid = gpu_uuid
        self._read_at, self._used = time.monotonic(), time.process_time()

    def read(self) -> RankUsage:
        before, self._read_at = self._read_at, time.monotonic()
        used_before, self._used = self._used, time.process_time()
        import torch

        memory, utilization = None, None
        if self._gpu_uuid and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # By the driver's library: many calls of CUDA spoil another thread's capture of a CUDA graph.
            memory, utilization = gpu_vendor.usage(self._gpu_uuid)
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
        """Send usage samples in a thread, in large gangs fewer."""
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
        thread.join(END_TIMEOUT)  # the driver's library hangs with some broken GPUs


# ---- Traces


@contextlib.contextmanager
def profiled(
    asked: Profile | None, rank: int, scratch: Path, submit: Callable[[str, bytes], None], note: Callable[[str], None]
) -> Iterator[None]:
    """Record the steps that `asked` names. Failures of the profiler, the disk or storage cost a log line alone."""
    if asked is None or rank not in asked.ranks:
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import profile, schedule

    def keep(done: profile) -> None:
        name = f"rank-{rank}-steps-{first}-{done.step_num}.pt.trace.json.gz"  # TensorBoard's plugin needs this suffix
        done.export_chrome_trace(str(scratch / name))
        submit(f"profiles/{name}", (scratch / name).read_bytes())
        (scratch / name).unlink()
        where = f"profiles/{name} among the results (open it at ui.perfetto.dev)"
        note(f"has recorded its steps {first} to {done.step_num}: {where}")

    first, last = asked.steps
    warmup = min(1, first - 1)  # a step for the profiler's own start
    phases = schedule(skip_first=first - 1 - warmup, wait=0, warmup=warmup, active=last - first + 1, repeat=1)
    recorder = profile(schedule=phases, on_trace_ready=keep)
    what = f"Profiling rank {rank}"

    def step(*_: Any) -> None:
        with optional(what):
            recorder.step()

    with contextlib.ExitStack() as stack:
        with optional(what):
            recorder.start()
            stack.callback(register_optimizer_step_post_hook(step).remove)
        yield
    with optional(what):
        recorder.stop()  # keeps the trace of a function that has returned before the last step
