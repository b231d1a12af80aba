"""Records chosen steps of a rank with `torch.profiler`. Runs in the rank, in the thread that makes the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import Profile

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfiler:
    """Records chosen optimizer steps. A failure gives the user a line and does not end the training."""

    def __init__(
        self,
        asked: Profile,
        rank: int,
        scratch: Path,
        submit: Callable[[str, bytes], None],
        note: Callable[[str], None],
    ) -> None:
        """Prepare the profile of a rank.

        Args:
            asked: The gang's `profile`, with the first and last step.
            rank: This process's rank.
            scratch: Folder for the trace until it is submitted.
            submit: Sends a result to the driver, by its path.
            note: Sends a line to the user.
        """
        self._asked = asked
        self._rank = rank
        self._scratch = scratch
        self._submit = submit
        self._note = note
        self._profile: profile | None = None
        """The running profiler. None before `watching`, after the trace and after a failure."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the block's steps, and write the trace of the chosen steps. A shorter block has a shorter trace."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._guarded(self._begin)
        hook = register_optimizer_step_post_hook(lambda *_: self._guarded(self._step))
        try:
            yield
        finally:
            hook.remove()
        self._guarded(self._end)

    def _begin(self) -> None:
        from torch.profiler import profile, schedule

        first, last = self._asked.steps
        warmup = min(1, first - 1)  # a step for the profiler's own start
        phases = schedule(skip_first=first - 1 - warmup, wait=0, warmup=warmup, active=last - first + 1, repeat=1)
        self._profile = profile(schedule=phases, on_trace_ready=self._keep)
        self._profile.start()

    def _step(self) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._profile.step_num == self._asked.steps[1]:  # the last step: `_keep` has written the trace
                self._end()

    def _end(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()  # calls `_keep` if some steps were recorded

    def _keep(self, profile: profile) -> None:
        first, last = self._asked.steps[0], profile.step_num
        name = f"rank-{self._rank}-steps-{first}-{last}.pt.trace.json.gz"  # TensorBoard's plugin needs this suffix
        path = self._scratch / name
        profile.export_chrome_trace(str(path))
        where = self._put(name, path.read_bytes())
        path.unlink()
        self._note(f"has recorded its steps {first} to {last}: {where} (open it at ui.perfetto.dev)")

    def _put(self, name: str, data: bytes) -> str:
        folder = self._asked.folder
        if folder is None:
            self._submit(f"profiles/{name}", data)
            return f"profiles/{name} among the results"
        files, where = current_execution().filesystem(folder), f"{folder.rstrip('/')}/{name}"
        files.makedirs(folder, exist_ok=True)
        files.pipe_file(where, data)
        return where

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # by the profiler, the disk or storage
            self._profile = None
            self._note(f"could not be profiled ({type(error).__name__}: {error})")
