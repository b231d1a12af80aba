"""Scripts at Ctrl-C."""

import os
import re
import signal
from pathlib import Path

import pytest

from pages import REPOSITORY
from processes import end, nothing_left_behind, until, warm_python

SCRIPT = REPOSITORY / "tests/support/driving.py"


def interrupted_twice(how: str, folder: Path) -> tuple[int, str]:
    """Press Ctrl-C twice while the script trains, and return its exit code and its output."""
    trains, said = [folder / f"trains-{rank}" for rank in range(2)], folder / "said"
    with nothing_left_behind():
        with said.open("w") as output:
            process = warm_python().start(
                [SCRIPT, how, folder], cwd=folder, env=os.environ, stdout=output, stderr=output, new_session=True
            )
        try:
            until(lambda: all(path.exists() for path in trains) or process.poll() is not None, "the training")
            for _ in range(2):  # as a terminal does
                os.killpg(process.pid, signal.SIGINT)
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


@pytest.mark.parametrize("how", ["threads", "processes", "task"])
def test_at_ctrl_c_nobody_but_the_script_has_a_traceback(how: str, tmp_path: Path) -> None:
    code, said = interrupted_twice(how, tmp_path)
    # Flytekit has a handler of its own; of two that come at once a process may see one.
    assert code in ((1, 130) if how == "task" else (-signal.SIGINT,)), said
    assert not [frames for frames in tracebacks(said) if OURS.search(frames) and not SCRIPTS_OWN.search(frames)], said
    assert "Exception in thread" not in said
    assert "Exception ignored" not in said
