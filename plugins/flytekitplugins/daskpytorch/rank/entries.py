"""Reports when this rank enters collectives, so that the driver finds a slow rank. Runs in a rank."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES, NOT_THE_USERS
from flytekitplugins.daskpytorch.protocol.reports import Entered, Timed
from flytekitplugins.daskpytorch.rank import flight_recorder, nvml
from flytekitplugins.daskpytorch.rank.usage import INTERVAL, Ledger

WINDOW = 10.0
"""Seconds between two reports. All ranks report at the same times, since a flight recorder forgets within a second."""
TIMING = 7.0
"""Maximum number of seconds for which ends of collectives are timed. The order comes up to two seconds after the
beginning of the ten seconds, so that timing ends before the next report."""
RESOLUTION = 0.002
"""Seconds between two looks at which collectives have ended. A look takes 0.5 ms of the interpreter."""
MAX_LOOK = 0.005
"""Maximum processor time of a look, in seconds. A longer look ends the timing, as ends would be known too roughly. With
`TORCH_FR_BUFFER_SIZE=2000`, a look takes 22 ms of the interpreter."""
MAX_WORLD_SIZE = 500
"""Maximum number of ranks of a gang whose ranks report. Larger gangs read what their ranks use at different times."""
MIN_SAMPLES = 0.5
"""Minimum share of a window's samples at a line, for a report that names the line."""


class Entries:
    """Reads the flight recorder every ten seconds, and the line at which the main thread is every two seconds."""

    def __init__(self, ledger: Ledger, send: Callable[[Entered], None], gpu_uuid: str = "") -> None:
        """Begin in the thread that runs the user's function.

        Args:
            ledger: Account of the rank's time.
            send: Reports the times.
            gpu_uuid: UUID of the rank's own GPU. Empty without a GPU, or if the UUID is unknown.
        """
        self._ledger, self._send, self._gpu_uuid = ledger, send, gpu_uuid
        self._thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        self._lines: Counter[str] = Counter()
        self._timed: dict[int, Timed] = {}
        self._timing: threading.Thread | None = None

    def time_ends(self) -> None:
        """Time the ends of the next collectives in a thread, for the next report. Only one such thread runs."""
        if self._timing is None or not self._timing.is_alive():
            self._timing = threading.Thread(target=self._time_ends, name="daskpytorch-ends", daemon=True)
            self._timing.start()

    def _time_ends(self) -> None:
        timed: dict[int, Timed] = {}
        ends_at, seen_in, before = time.monotonic() + TIMING, time.time(), flight_recorder.newest()
        while before is not None and len(timed) < MAX_COLLECTIVES and time.monotonic() < ends_at:
            time.sleep(RESOLUTION)
            looked_at, used, found = time.time(), time.thread_time(), flight_recorder.newest()
            if found is None or time.thread_time() - used > MAX_LOOK:
                break
            new = found.ended - before.ended
            timed |= {number: Timed(found.entered[number], seen_in, time.time()) for number in new}
            before, seen_in = found, looked_at
        self._timed = timed

    def look(self) -> None:
        """Note the main thread's line, and report at the beginning of each ten seconds. Called every two seconds."""
        now = time.time()
        if (frame := sys._current_frames().get(self._thread)) is not None:  # noqa: SLF001 - Python documents it
            self._lines[_line_of(frame)] += 1
        if now % WINDOW >= INTERVAL:
            return
        lines, self._lines = self._lines, Counter()
        if (found := flight_recorder.newest()) is None:
            return
        [(line, count)] = lines.most_common(1) or [("", 0)]
        timed, self._timed = self._timed, {}
        clock, temperature = _of_gpu(self._gpu_uuid)
        self._send(
            Entered(
                window=int(now // WINDOW),
                time=time.time(),
                times=found.entered,
                is_partial=found.is_partial,
                num_steps=self._ledger.num_steps,
                data=self._ledger.seconds()["data"],
                line=line if count >= MIN_SAMPLES * lines.total() else "",
                queued=_queued(self._native_thread),
                timed=timed,
                gpu_clock=clock,
                gpu_temperature=temperature,
            )
        )


def _queued(thread: int) -> float:
    """Return the seconds that a thread of this process has waited for a core. 0 if the kernel keeps no account."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _of_gpu(uuid: str) -> tuple[int | None, int | None]:
    """Return clock and temperature of this rank's GPU. None for unknown values, or before CUDA is initialised."""
    import torch

    is_used = uuid and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return nvml.clock_and_temperature(uuid) if is_used else (None, None)


def _line_of(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame that is the user's own. Empty without such a frame."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not NOT_THE_USERS.match(file):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""
