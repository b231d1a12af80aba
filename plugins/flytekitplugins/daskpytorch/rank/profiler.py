"""Records chosen steps of a rank with `torch.profiler`. Runs in that rank, in the thread that takes the steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.settings import Profile

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfiler:
    """Counts the optimizers' steps, and has some of them recorded. What fails here costs a line, not the training."""

    def __init__(
        self,
        asked: Profile,
        rank: int,
        scratch: Path,
        submit: Callable[[str, bytes], None],
        note: Callable[[str], None],
    ) -> None:
        """Wait for the first of the steps.

        Args:
            asked: Which steps.
            rank: Whose.
            scratch: A folder for the trace on its way.
            submit: Sends a result, by its path.
            note: Tells the user.
        """
        self._asked = asked
        self._rank = rank
        self._scratch = scratch
        self._submit = submit
        self._note = note
        self._num_steps = 0
        self._profile: profile | None = None
        self._is_over = False

    def watch(self) -> None:
        """Count from here."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._count)
        self._go_on()

    def finish(self) -> None:
        """The function has returned: keep what there is."""
        if self._profile is not None:
            self._guarded(self._end)

    def _count(self, *_: Any) -> None:
        if not self._is_over:
            self._num_steps += 1
            self._go_on()

    def _go_on(self) -> None:
        first, last = self._asked.steps
        if self._profile is None:
            # One step before: it goes to what the profiler does for the first time.
            if self._num_steps == max(0, first - 2):
                self._guarded(self._begin)
        elif self._num_steps == last:
            self._guarded(self._end)
        else:
            self._guarded(self._profile.step)

    def _begin(self) -> None:
        from torch.profiler import profile, schedule

        first, last = self._asked.steps
        phases = schedule(wait=0, warmup=first - 1 - self._num_steps, active=last - first + 1, repeat=1)
        self._profile = profile(schedule=phases, with_stack=self._asked.with_stack, on_trace_ready=self._keep)
        self._profile.start()

    def _end(self) -> None:
        profile, self._profile, self._is_over = self._profile, None, True
        if profile is not None:
            profile.stop()  # has the trace kept

    def _keep(self, profile: profile) -> None:
        first, last = self._asked.steps[0], self._num_steps
        name = f"rank-{self._rank}-steps-{first}-{last}.pt.trace.json.gz"  # TensorBoard's plugin asks for that ending
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
        except Exception as error:  # of the profiler, of the disk, of storage
            self._profile, self._is_over = None, True
            self._note(f"could not be profiled ({type(error).__name__}: {error})")
