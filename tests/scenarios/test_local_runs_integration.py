"""After SIGKILL of a local run, the next run continues from its checkpoint. test_run_integration.py has Ctrl-C."""

import os
import re
import signal
from pathlib import Path

from processes import end, nothing_left_behind, run_program, until, warm_python

SCRIPT = """
import sys
import time
from pathlib import Path

from flytekit import task
from flytekitplugins.daskpytorch import SpawnDDP, current_rank


@task(task_config=SpawnDDP(nproc=2))
def train(steps: int) -> int:
    rank = current_rank()
    state = rank.checkpoint.load()
    first = 0 if state is None else state["step"] + 1
    for step in range(first, steps):
        rank.log({"loss": 1.0}, step=step, num_steps=steps)
        rank.checkpoint.save({"step": step}, step)
        time.sleep(0.05)
    return first


if __name__ == "__main__":
    print("began at", train(steps=int(sys.argv[1])))
"""


def command(folder: Path, steps: int) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    return ["script.py", str(steps)]


def test_14_a_run_goes_on_from_the_one_that_was_killed(tmp_path: Path) -> None:
    env = {"DASKPYTORCH_CHECKPOINTS": str(tmp_path / "kept"), "TMPDIR": str(tmp_path)}
    with nothing_left_behind():
        process = warm_python().start(command(tmp_path, 100_000), cwd=tmp_path, env=os.environ | env, new_session=True)
        try:
            until(lambda: [*tmp_path.glob("kept/*/*/gang/manifest.json")], "a checkpoint that is kept")
            process.kill()
            assert process.wait() == -signal.SIGKILL
        finally:
            end(process)
    [run] = tmp_path.glob("kept/*/*")
    newest = max(int(path.name.split("-")[1]) for path in run.glob("gang/step-*"))
    with nothing_left_behind():
        done = run_program(command(tmp_path, newest + 3), cwd=tmp_path, env=env | {"DASKPYTORCH_RESUME": "1"})
    assert done.returncode == 0, done.stderr
    assert f"going on from the run in {run}" in done.stderr
    began_at = re.search(r"^began at (\d+)$", done.stdout, re.MULTILINE)
    assert began_at, done.stdout + done.stderr
    assert newest <= int(began_at[1]) <= newest + 1  # of a file that was killed before it was named in the manifest
    assert re.search(r"^  checkpoints: \S+$", done.stderr, re.MULTILINE), done.stderr
