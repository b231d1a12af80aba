"""Records flame graphs of this rank with py-spy. Runs in the rank, in a thread of its own.

A request is a file in the scratch folder of the rank's agent. The rank checks the folder every two seconds.
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
"""Option of `prctl` that lets py-spy, a child, trace the rank. Yama's ptrace_scope 1 allows only ancestors."""
MAX_COMPLAINT = 500
"""Maximum number of characters of py-spy's error output that the user gets."""
NEEDS = 'needs py-spy where the ranks run: pip install "flytekitplugins-daskpytorch[profile]"'


def request_name(rank: int, seconds: int | str, token: str) -> str:
    """Return the name of the file that requests a flame graph of a rank. Each requester has a token of its own."""
    return f"flame-graph-of-{rank}-for-{seconds}-{token}"


def take_requests(rank: int, scratch: Path) -> list[int]:
    """Remove the requests for this rank. Return the requested seconds of each."""
    requests = list(scratch.glob(request_name(rank, "*", "*")))
    for request in requests:
        request.unlink(missing_ok=True)
    return [int(request.name.rsplit("-", 2)[1]) for request in requests]


def record(
    rank: int, seconds: int, scratch: Path, submit: Callable[[str, bytes], None], note: Callable[[str], None]
) -> None:
    """Start a thread that records a flame graph, submits the picture, and tells the user its path or the error.

    Args:
        rank: This process's rank.
        seconds: Duration of the record.
        scratch: Folder for the picture until it is submitted.
        submit: Sends a result to the driver, by its path.
        note: Sends a line to the user.
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
            f"py-spy ended with exit code {process.returncode}: {told} (a container may lack CAP_SYS_PTRACE)"
        )
    data = path.read_bytes()
    path.unlink()
    return data
