"""Traces of chosen steps of a rank by `torch.profiler`. Runs in the rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.protocol.host import current_execution

if TYPE_CHECKING:
    from torch.profiler import profile

    from flytekitplugins.daskpytorch.settings import Profile


@dataclass
class Profiler:
    """Records this rank's steps. A failure is shown to the user, and does not end the training."""

    rank: int
    scratch: Path
    """Folder for the trace until it is sent to the driver."""
    submit: Callable[[str, bytes], None]
    """Function that sends the driver a result file: first its path in the results folder, then its content."""
    note: Callable[[str], None]
    """Function that sends a line to the driver, to show it to the user."""
    _profile: profile | None = field(default=None, init=False)
    """The running profiler of steps. None before `watching`, after the trace and after a failure."""

    @contextlib.contextmanager
    def watching(self, asked: Profile | None) -> Iterator[None]:
        """Write a trace of the chosen steps in the block, if this rank is chosen. A short block gives a short trace.

        Args:
            asked: The user's choice of steps, ranks and folder. None: no trace.
        """
        if asked is None or self.rank not in asked.ranks:
            yield
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._guarded(lambda: self._begin(asked))
        hook = register_optimizer_step_post_hook(lambda *_: self._guarded(lambda: self._step(asked)))
        try:
            yield
        finally:
            hook.remove()
        self._guarded(self._end)

    def _begin(self, asked: Profile) -> None:
        from torch.profiler import profile, schedule

        first, last = asked.steps
        warmup = min(1, first - 1)  # a step for the profiler's own start
        phases = schedule(skip_first=first - 1 - warmup, wait=0, warmup=warmup, active=last - first + 1, repeat=1)
        self._profile = profile(schedule=phases, on_trace_ready=lambda done: self._keep(done, asked))
        self._profile.start()

    def _step(self, asked: Profile) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._profile.step_num == asked.steps[1]:  # the last step: `_keep` has written the trace
                self._end()

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()  # calls `_keep` if some steps were recorded

    def _keep(self, profile: profile, asked: Profile) -> None:
        first, last = asked.steps[0], profile.step_num
        name = f"rank-{self.rank}-steps-{first}-{last}.pt.trace.json.gz"  # TensorBoard's plugin needs this suffix
        path = self.scratch / name
        profile.export_chrome_trace(str(path))
        where = self._put(path, asked.folder)
        self.note(f"has recorded its steps {first} to {last}: {where} (open it at ui.perfetto.dev)")

    def _put(self, path: Path, folder: str | None) -> str:
        """Move a trace to this folder or, if None, to the gang's results. Return the new place in words."""
        data = path.read_bytes()
        path.unlink()
        if folder is None:
            self.submit(f"profiles/{path.name}", data)
            return f"profiles/{path.name} among the results"
        files, where = current_execution().filesystem(folder), f"{folder.rstrip('/')}/{path.name}"
        files.makedirs(folder, exist_ok=True)
        files.pipe_file(where, data)
        return where

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # by the profiler, the disk or storage
            self._profile = None
            self.note(f"could not be profiled ({type(error).__name__}: {error}); the training goes on without a trace")
