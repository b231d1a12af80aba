"""Ctrl-C during a task ends the gang in good order. A second Ctrl-C ends the process at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flytekitplugins.daskpytorch.process import ending as module
from flytekitplugins.daskpytorch.process.ending import CtrlC


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """The handler that Python has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_raised_only_after_the_gangs_end() -> None:
    def run() -> None:
        press()
        seen.append("cleared up")
        raise RuntimeError("cancelled")

    ctrl_c, seen = CtrlC(), list[str]()
    with pytest.raises(KeyboardInterrupt) as raised, ctrl_c.heeded(), ctrl_c.ends(lambda: seen.append("told")):
        run()
    assert seen == ["told", "cleared up"]
    assert raised.value.__suppress_context__


def test_a_gang_that_ended_by_itself_raises_what_it_raises() -> None:
    ctrl_c = CtrlC()
    with pytest.raises(RuntimeError, match="its own"), ctrl_c.heeded(), ctrl_c.ends(lambda: None):
        raise RuntimeError("its own")
    assert not ctrl_c.was_pressed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_users_own_handler_is_called() -> None:
    def exit_instead(*_: object) -> None:
        raise SystemExit(1)

    signal.signal(signal.SIGINT, exit_instead)
    with pytest.raises(SystemExit), CtrlC().heeded():
        press()


def test_a_second_one_in_a_notebook_is_raised_and_the_handler_is_the_usual_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        press()
        with pytest.raises(KeyboardInterrupt):
            press()

    monkeypatch.setattr(module, "is_interactive", lambda: True)
    ctrl_c = CtrlC()
    with pytest.raises(KeyboardInterrupt), ctrl_c.heeded(), ctrl_c.ends(lambda: None):
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_a_process_ignores_stays_ignored(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with CtrlC().heeded():
        assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("where", ["within", "after"])
def test_a_second_one_ends_the_process_at_once(where: str) -> None:
    program = f"""
import contextlib, os, signal, time
from flytekitplugins.daskpytorch.process.ending import CtrlC
ctrl_c = CtrlC()
def press(): os.kill(os.getpid(), signal.SIGINT)
with contextlib.suppress(KeyboardInterrupt), ctrl_c.heeded(), ctrl_c.ends(lambda: print("told", flush=True)):
    press()
    if {where == "within"}: press()
print("waiting", flush=True)
press()
time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 130
    assert done.stdout == ("told\n" if where == "within" else "told\nwaiting\n")
