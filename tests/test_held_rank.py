"""A rank that is held after its exception reports that exception, whatever comes meanwhile, and obeys Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

RANK = """
    import os
    import signal
    import sys
    from types import SimpleNamespace

    from flytekitplugins.daskpytorch.protocol.attaching import Attach, Shown, Typed
    from flytekitplugins.daskpytorch.protocol.failure import Failure
    from flytekitplugins.daskpytorch.rank.debugger import Prompt, watch_pdb


    class Driver:
        "Does the next thing at each prompt of the rank."

        def __init__(self):
            self.shown = b""
            self.todo = THINGS

        def look(self):
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self.shown += b"SIGINT raises KeyboardInterrupt"

        def send(self, report):
            if isinstance(report, Shown):
                self.shown += report.data
                if self.todo and b"(Pdb rank 0) " in self.shown.rpartition(b"#")[2]:
                    self.shown += b"#"
                    self.todo.pop(0)()


    def fail(*_):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


    def type_in(keys):
        prompt.obey(Attach(0, (40, 80)))
        prompt.obey(Typed(0, keys))


    signal.signal(signal.SIGINT, usual := lambda *_: None)  # as between the calls of a gang that stays
    signal.signal(signal.SIGALRM, fail)
    settings = SimpleNamespace(attach_timeout=60.0)
    job = SimpleNamespace(debugging=SimpleNamespace(terminal=None, attach="daskpytorch attach"), settings=settings)
    driver = Driver()
    prompt = Prompt(0, job, driver.send)
    watch_pdb(prompt)
    try:
        raise ValueError("bad value")
    except ValueError as error:
        prompt.hold(error, Failure.of(error, 0.0))
    assert prompt.failure is None
    assert signal.getsignal(signal.SIGINT) is usual
    print(driver.shown.decode())
    print("left", driver.todo)
"""


# The signal comes with a key: a signal just before the read of keys does not wake the main thread.
@pytest.mark.parametrize(
    ("things", "expected"),
    [
        (r"[lambda: (os.kill(os.getpid(), signal.SIGALRM), type_in(b'\r'))]", "left []"),
        ("[lambda: prompt.note_call(is_ending=True)]", "left []"),
        (r"[lambda: (driver.look(), type_in(b'q\r'))]", "SIGINT raises KeyboardInterrupt"),
    ],
    ids=["exception of a signal", "end of the call", "Ctrl-C"],
)
def test_held_rank_leaves_the_prompt_without_another_exception(things: str, expected: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RANK).replace("THINGS", things)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=40,  # less than the 60 s for which the rank waits for a terminal
    )
    assert ran.returncode == 0, ran
    assert expected in ran.stdout, ran
