"""A rank that is held after its exception reports that exception, whatever comes meanwhile."""

import subprocess
import sys
import textwrap
from pathlib import Path

RANK = r"""
    import contextlib
    import os
    import signal
    import socket
    import sys
    import threading
    from pathlib import Path
    from types import SimpleNamespace

    from flytekitplugins.daskpytorch.protocol.failure import Failure
    from flytekitplugins.daskpytorch.rank.debugger import Prompt, watch_pdb

    folder = Path(sys.argv[1])
    todo = [lambda terminal: (os.kill(os.getpid(), signal.SIGALRM), os.write(terminal, b'\r'))]


    def attend():
        "Do the next thing at each prompt of the rank."
        shown = b""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"{folder}/debugger-0")
        _, [keyboard], *_ = socket.recv_fds(connection, 1, 1)
        with contextlib.suppress(OSError):  # the rank leaves its prompt
            while True:
                shown += os.read(keyboard, 1000)
                if todo and b"(Pdb rank 0) " in shown:
                    shown = b""
                    todo.pop(0)(keyboard)


    def fail(*_):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


    def send(report):
        if report.needs_terminal:
            threading.Thread(target=attend, daemon=True).start()


    signal.signal(signal.SIGALRM, fail)
    job = SimpleNamespace(gang="train-1", settings=SimpleNamespace(attach_timeout=60.0))
    prompt = Prompt(SimpleNamespace(place=SimpleNamespace(rank=0), scratch=str(folder), job=job), send)
    watch_pdb(prompt)
    try:
        raise ValueError("bad value")
    except ValueError as error:
        prompt.hold(error, Failure.of(error, 0.0))
    assert prompt.failure is None
    print("left", todo)
"""


# The signal comes with a key: a signal just before the read of keys does not wake the main thread.
def test_held_rank_leaves_the_prompt_without_another_exception(tmp_path: Path) -> None:
    assert "left []" in said_by(RANK, tmp_path)


def said_by(program: str, folder: Path) -> str:
    """Run a rank whose agent has a folder there, and return its output."""
    (folder / "agent").mkdir(mode=0o700)
    words = [sys.executable, "-c", textwrap.dedent(program), str(folder / "agent")]
    how = {"stdin": subprocess.DEVNULL, "timeout": 40}  # less than the 60 s for which the rank waits for a terminal
    ran = subprocess.run(words, capture_output=True, text=True, check=False, **how)
    assert ran.returncode == 0, ran
    return ran.stdout


LOADER = """
    import bdb
    import os
    import pdb
    import sys
    from types import SimpleNamespace

    from flytekitplugins.daskpytorch.rank.debugger import Prompt, watch_pdb

    job = SimpleNamespace(gang="train-1", settings=SimpleNamespace(attach_timeout=60.0))
    order = SimpleNamespace(place=SimpleNamespace(rank=0), scratch=sys.argv[1], job=job)
    watch_pdb(Prompt(order, print))
    if (child := os.fork()) == 0:
        try:
            pdb.set_trace()
            print("went on")
        except bdb.BdbQuit:
            os._exit(7)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_debugger_in_a_loaders_worker_quits(tmp_path: Path) -> None:
    assert said_by(LOADER, tmp_path).splitlines()[-1] == "exit code 7"
