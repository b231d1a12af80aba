"""Scripts at Ctrl-C, and at signals to all their processes."""

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pages import REPOSITORY
from processes import end, nothing_left_behind, until, warm_python
from warm import Program

SCRIPT = REPOSITORY / "tests/support/driving.py"


def interrupt(process: Program) -> None:
    """As a terminal does at Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)


def terminate_all(process: Program) -> None:
    """SIGTERM to every process there is."""
    driver = psutil.Process(process.pid)
    for one in [*driver.children(recursive=True), driver]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()


def driven(how: str, folder: Path, until_when: str, *acts: Callable[[Program], None]) -> tuple[int, str]:
    """What becomes of the script where these are done to it while it trains: its exit code, and all it has said."""
    trains, said = [folder / f"trains-{rank}" for rank in range(2)], folder / "said"
    with nothing_left_behind():
        with said.open("w") as output:
            command = [SCRIPT, how, folder, until_when]
            process = warm_python().start(
                command, cwd=folder, env=os.environ, stdout=output, stderr=output, new_session=True
            )
        try:
            until(lambda: all(path.exists() for path in trains) or process.poll() is not None, "the training")
            for act in acts:
                act(process)
            process.wait()
        finally:
            end(process)
    return process.returncode, said.read_text()


OURS = re.compile(r'/(daskpytorch/.*|driving)\.py", line ')
SCRIPTS_OWN = re.compile(r'/driving\.py", line \d+, in main\n')


def tracebacks(said: str) -> list[str]:
    """The frames of each, those among them that Dask logs of its own at a second Ctrl-C."""
    parts = said.split("Traceback (most recent call last):\n")[1:]
    return ["".join(re.findall(r'^  File ".*\n', part, re.MULTILINE)) for part in parts]


@pytest.mark.parametrize(("how", "times"), [("threads", 2), ("processes", 2), ("task", 2)])
def test_at_ctrl_c_nobody_but_the_script_has_a_traceback(how: str, times: int, tmp_path: Path) -> None:
    code, said = driven(how, tmp_path, "stopped", *[interrupt] * times)
    # Flytekit has a handler of its own; of two that come at once a process may see one.
    assert code in ((1, 130) if how == "task" else (-signal.SIGINT,)), said
    assert not [frames for frames in tracebacks(said) if OURS.search(frames) and not SCRIPTS_OWN.search(frames)], said
    assert "Exception in thread" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize("act", [interrupt, terminate_all])
def test_48_the_last_step_is_saved_at_a_signal_to_all_processes(act: Callable[[Program], None], tmp_path: Path) -> None:
    _, said = driven("processes", tmp_path, "preempted", act)
    [step] = {(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)}
    assert "PreemptedError: " in said
    assert f"the newest checkpoint (step {step}) is deleted" in said
