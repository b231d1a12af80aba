"""Ctrl-C during a Flyte 2 task at a terminal: the gang ends, logs it, and leaves the terminal intact."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pexpect
import pytest

pytest.importorskip("flyteplugins.dask")

from processes import SCRIPTS, nothing_left_behind, until

TRAINING = """
import time
from pathlib import Path

import flyte
from flyteplugins.daskpytorch import SpawnDDP, current_rank

env = flyte.TaskEnvironment("training", plugin_config=SpawnDDP(nproc=2))


@env.task(retries=2)
def train(steps: int) -> int:
    rank = current_rank()
    for step in range(steps):
        rank.log({"loss": 1.0}, step=step, num_steps=steps)
        rank.checkpoint.save({"step": step}, step)
        time.sleep(0.05)
    return steps


if __name__ == "__main__":
    flyte.init()
    flyte.with_runcontext(mode="local").run(train, steps=100_000)
"""
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"
"""The cursor."""
KEPT = re.compile(
    r"(?:^|\^C)train: interrupted after \S+ s, step (\d+)/100000 loss 1; the checkpoint of step (\d+) is kept, "
    r"DASKPYTORCH_RESUME=1 and the same command go on from it$".replace(" ", r"\s+"),  # a terminal breaks long lines
    re.MULTILINE,
)
OF_FLYTE = [str(SCRIPTS / "flyte"), "run", "--local", "training.py"]


def test_at_ctrl_c_the_gang_ends_and_the_terminal_is_as_before(tmp_path: Path) -> None:
    code, said = interrupted([*OF_FLYTE, "train", "--steps", "100000"], tmp_path)
    assert code == 1, said
    assert "Traceback" not in said
    assert "Aborted" in said
    kept = KEPT.search(said)
    assert kept, said
    assert 0 <= int(kept[2]) <= int(kept[1]) + 1
    assert said.count("interrupted") == 1, said  # the task has retries


@pytest.mark.slow
def test_at_ctrl_c_a_scripts_ranks_end_with_it(tmp_path: Path) -> None:
    code, said = interrupted([sys.executable, "training.py"], tmp_path)
    assert code == -signal.SIGINT, said
    assert said.lower().count("traceback (most recent call last)") == 1, said  # of the script's own call


def interrupted(command: list[str], folder: Path) -> tuple[int, str]:
    """What becomes of it, as exit code, and what was on the terminal."""
    (folder / "training.py").write_text(TRAINING)
    env = os.environ | {"DASKPYTORCH_CHECKPOINTS": str(folder / "kept"), "TERM": "xterm"}
    with nothing_left_behind(), (folder / "said").open("wb") as log:
        terminal = pexpect.spawn(
            command[0], command[1:], cwd=str(folder), env=env, timeout=None, dimensions=(40, 200), logfile=log
        )

        def has_checkpoint() -> bool:
            with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):  # or it waits for somebody to read
                terminal.read_nonblocking(1 << 16, timeout=0)
            return bool([*folder.glob("kept/*/*/gang/manifest.json")]) or not terminal.isalive()

        try:
            until(has_checkpoint, "a checkpoint")
            terminal.sendintr()
            terminal.expect_exact(pexpect.EOF)
            terminal.wait()
        finally:
            terminal.close(force=True)
    said = (folder / "said").read_text().replace("\r", "")
    assert said.rfind(HIDDEN) <= said.rfind(SHOWN), said
    code = terminal.exitstatus if terminal.signalstatus is None else -terminal.signalstatus
    return code, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
