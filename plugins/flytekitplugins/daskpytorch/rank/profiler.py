"""Profiles of a rank: chosen steps by `torch.profiler`, and flame graphs by py-spy. Runs in the rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.protocol.host import current_execution

if TYPE_CHECKING:
    from torch.profiler import profile

    from flytekitplugins.daskpytorch.settings import Profile

PR_SET_PTRACER = 0x59616D61
"""Option of `prctl` that lets py-spy, a child process, trace the rank. By default, some Linux systems forbid this
(Yama's ptrace_scope 1)."""
MAX_COMPLAINT = 500
"""Maximum number of characters of py-spy's error output that are shown to the user."""
NEEDS = 'needs py-spy where the ranks run: pip install "flytekitplugins-daskpytorch[profile]"'


@dataclass
class Profiler:
    """Records this rank's profiles. A failure is shown to the user, and does not end the training."""

    rank: int
    scratch: Path
    """Folder for profiles until they are sent to the driver, and for files that request flame graphs."""
    submit: Callable[[str, bytes], None]
    """Function that sends the driver a result file: first its path in the results folder, then its content."""
    note: Callable[[str], None]
    """Function that sends a line to the driver, to show it to the user."""
    _profile: profile | None = field(default=None, init=False)
    """The running profiler of steps. None before `watching`, after the trace and after a failure."""

    # ---- chosen steps, in the thread that makes the steps

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

    def _put(self, path: Path, folder: str | None = None) -> str:
        """Move a profile to this folder or, if None, to the gang's results. Return the new place in words."""
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

    # ---- flame graphs, each in a thread of its own

    def draw_flame_graphs(self) -> None:
        """Record the flame graphs that users on this host have requested by files in the scratch folder."""
        for seconds in self.take_requests():
            threading.Thread(target=self._draw, args=(seconds,), name="daskpytorch-flame-graph", daemon=True).start()

    def take_requests(self) -> list[int]:
        """Remove the files that request flame graphs of this rank. Return the requested durations, in seconds."""
        requests = list(self.scratch.glob(request_name(self.rank, "*", "*")))
        for request in requests:
            request.unlink(missing_ok=True)
        return [int(request.name.rsplit("-", 2)[1]) for request in requests]

    def _draw(self, seconds: int) -> None:
        path = self.scratch / f"rank-{self.rank}-flame-graph-{time.strftime('%H%M%S')}.svg"
        try:
            _sample(seconds, path)
            self.note(f"was watched by py-spy for {seconds} s: {self._put(path)}")
        except (OSError, RuntimeError) as error:
            self.note(f"was not watched by py-spy: {error}")


def request_name(rank: int, seconds: int | str, token: str) -> str:
    """Return the name of the file that requests a flame graph of a rank over some seconds.

    `token` is different in each request. "*" for `seconds` and `token` gives a pattern for all requests.
    """
    return f"flame-graph-of-{rank}-for-{seconds}-{token}"


def _sample(seconds: int, path: Path) -> None:
    """Let py-spy watch this process for some seconds, and write a flame graph to a file.

    Raises:
        RuntimeError: py-spy is missing or has failed.
    """
    command = shutil.which("py-spy", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")
    if command is None:
        raise RuntimeError(f"py-spy was not found. A flame graph {NEEDS}")
    whom = ["--pid", str(os.getpid()), "--duration", str(seconds)]
    arguments = ["record", "--nonblocking", *whom, "--output", str(path)]
    with subprocess.Popen(
        [command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, process.pid, 0, 0, 0)
        _, complaint = process.communicate()
    if process.returncode != 0 or not path.exists():
        told = complaint.decode(errors="replace").strip()[-MAX_COMPLAINT:]
        raise RuntimeError(
            f"py-spy ended with exit code {process.returncode}: {told}. In a container, add the capability SYS_PTRACE "
            "to its security context"
        )
