"""Has py-spy watch this rank for a while, and draw where its time went. Runs in the rank, in a thread of its own.

A request is a file in the folder of the rank's agent, which the rank looks into every two seconds.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PTRACER = 0x59616D61
"""Of `prctl`: where only ancestors may look into a process (Yama's ptrace_scope 1), so may this child."""
MAX_COMPLAINT = 500
NEEDS = 'needs py-spy where the ranks run: pip install "flytekitplugins-daskpytorch[profile]"'


def request_name(rank: int, seconds: int | str, token: str) -> str:
    """Return the name of the file that asks for a flame graph of a rank; the token is the asker's own."""
    return f"flame-graph-of-{rank}-for-{seconds}-{token}"


def take_requests(rank: int, scratch: Path) -> list[int]:
    """Remove the requests for this rank; return how many seconds each asks for."""
    requests = list(scratch.glob(request_name(rank, "*", "*")))
    for request in requests:
        request.unlink(missing_ok=True)
    return [int(request.name.rsplit("-", 2)[1]) for request in requests]


def record(
    rank: int, seconds: int, scratch: Path, submit: Callable[[str, bytes], None], note: Callable[[str], None]
) -> None:
    """Start watching; what comes of it is submitted and noted once the seconds are over.

    Args:
        rank: This one.
        seconds: For how long.
        scratch: A folder for the picture on its way.
        submit: Sends a result, by its path.
        note: Tells the user.
    """

    def watch() -> None:
        try:
            name = f"rank-{rank}-flame-graph-{time.strftime('%H%M%S')}.svg"
            submit(f"profiles/{name}", _drawn(seconds, scratch / name))
            note(f"was watched by py-spy for {seconds} s: profiles/{name} among the results")
        except (OSError, RuntimeError) as error:
            note(f"was not watched by py-spy: {error}")

    threading.Thread(target=watch, name="daskpytorch-flame-graph", daemon=True).start()


def _drawn(seconds: int, path: Path) -> bytes:
    command = shutil.which("py-spy", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")
    if command is None:
        raise RuntimeError(f"that {NEEDS}")
    whom = ["--pid", str(os.getpid()), "--duration", str(seconds)]
    arguments = ["record", "--nonblocking", *whom, "--output", str(path)]
    with subprocess.Popen(
        [command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, process.pid, 0, 0, 0)
        _, complaint = process.communicate()
    if process.returncode != 0 or not path.exists():
        told = complaint.decode(errors="replace").strip()[-MAX_COMPLAINT:]
        raise RuntimeError(f"it ended with code {process.returncode}: {told} (a container may lack CAP_SYS_PTRACE)")
    data = path.read_bytes()
    path.unlink()
    return data
