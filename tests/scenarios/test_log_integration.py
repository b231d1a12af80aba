"""The output of real ranks: objects only with JSON logs."""

import json
from pathlib import Path

from processes import SCRIPTS, nothing_left_behind, run_program

TASK = """
import os
import signal
from pathlib import Path

import torch.distributed as dist
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, Gang, Keep, current_rank


@task(task_config=DaskDDP(gang=Gang(keep=Keep(best=1, metric="loss"))))
def train(folder: str) -> int:
    rank, died = current_rank(), Path(folder, "died")
    state = rank.checkpoint.load() or {"step": 0}
    print(f"from step {state['step']}")
    rank.checkpoint.load(best=True)  # its answer shows that the driver has heard from this rank
    dist.barrier()
    for step in range(state["step"] + 1, 5):
        rank.log({"loss": 1.0 / step}, step=step)
        rank.checkpoint.save({"step": step}, step)
        rank.checkpoint.flush()
        if step == 3 and rank.is_main and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return step
"""


def test_a_task_with_a_fault_says_objects_only(tmp_path: Path) -> None:
    (tmp_path / "logged.py").write_text(TASK)
    command = [SCRIPTS / "pyflyte", "run", "logged.py", "train", "--folder", str(tmp_path)]
    with nothing_left_behind():
        done = run_program(command, cwd=tmp_path, env={"DASKPYTORCH_LOG": "json"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"time", "level", "event", "host"} <= line.keys() for line in lines)
    events = [line["event"] for line in lines]
    assert events[0] == "began"
    assert [events.count(event) for event in ("placed", "formed", "restarted", "ended", "concluded")] == [2, 2, 1, 1, 1]
    outputs = {(line["attempt"], line["rank"], line["text"]) for line in lines if line["event"] == "output"}
    assert outputs == {(0, rank, "from step 0") for rank in (0, 1)} | {(1, rank, "from step 3") for rank in (0, 1)}
    [restarted] = [line for line in lines if line["event"] == "restarted"]
    assert "SIGKILL" in restarted["reason"]
    assert (restarted["level"], restarted["step"]) == ("WARNING", 3)
    steps = [(line["attempt"], line["record"]["step"]) for line in lines if line["event"] == "logged"]
    assert steps == [(0, 1), (0, 2), (0, 3), (1, 4)]
    assert len({line["gang"] for line in lines if "gang" in line}) == 1
