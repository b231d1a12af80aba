"""The output of real ranks: objects only with JSON logs, and files by the names of `torchrun --log-dir`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangError, current_rank, dispatch
from processes import SCRIPTS, nothing_left_behind, run_program

# ---- JSON logs


TASK = """
import os
import signal
from pathlib import Path

import torch.distributed as dist
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, Gang, Keep, current_rank


@task(task_config=DaskDDP(gang=Gang(hints=False, log_dir="logs", keep=Keep(best=1, metric="loss"))))
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
    assert [events.count(event) for event in ("placed", "formed", "restarted", "ended", "concluded")] == [
        2,
        2,
        1,
        1,
        1,
    ]
    outputs = {(line["attempt"], line["rank"], line["text"]) for line in lines if line["event"] == "output"}
    assert outputs == {(0, rank, "from step 0") for rank in (0, 1)} | {(1, rank, "from step 3") for rank in (0, 1)}
    [restarted] = [line for line in lines if line["event"] == "restarted"]
    assert "SIGKILL" in restarted["reason"]
    assert (restarted["level"], restarted["step"]) == ("WARNING", 3)
    steps = [(line["attempt"], line["record"]["step"]) for line in lines if line["event"] == "logged"]
    assert steps == [(0, 1), (0, 2), (0, 3), (1, 4)]
    assert {line["gang"] for line in lines if "gang" in line} == {
        folder.name for folder in (tmp_path / "logs").iterdir()
    }


# ---- Files


def gathered() -> float:
    """The sum over a formed gang."""
    import torch.distributed as dist

    total = torch.tensor(10.0 ** current_rank().rank)
    dist.all_reduce(total)
    return total.item()


def fail_twice() -> None:
    """Rank 0 fails in the first attempt, after its checkpoint is written, and both ranks in the second."""
    rank = current_rank()
    began = rank.checkpoint.load()
    total = gathered()
    print(f"rank {rank.rank} has {total:g}")
    print(f"warning of rank {rank.rank}", file=sys.stderr)
    rank.checkpoint.save({"step": 1}, 1)
    if began is not None:
        raise ValueError("bad data")
    if rank.is_main:
        rank.checkpoint.flush()
        raise OSError("once")
    gathered()


def files_in(folder: Path) -> dict[str, str]:
    [gang] = folder.iterdir()
    return {str(file.relative_to(gang)): file.read_text() for file in sorted(gang.rglob("*.log"))}


def test_each_rank_and_attempt_has_files_of_both_streams_on_its_worker_which_the_error_names(
    client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gang = Gang(log_dir=str(tmp_path / "logs"), checkpoint_uri=str(tmp_path / "kept"), max_restarts=1)
    with pytest.raises(ValueError, match="bad data") as caught:
        dispatch.run(client, fail_twice, gang=gang).result()
    found = files_in(tmp_path / "logs")
    names = [f"attempt_{n}/{rank}/{stream}.log" for n in (0, 1) for rank in (0, 1) for stream in ("stderr", "stdout")]
    assert sorted(found) == names
    for rank in (0, 1):
        assert found[f"attempt_1/{rank}/stdout.log"] == f"rank {rank} has 11\n"
        assert f"warning of rank {rank}\n" in found[f"attempt_1/{rank}/stderr.log"]
    shown = capfd.readouterr()
    assert "[rank 1] rank 1 has 11" in shown.out + shown.err
    assert "[rank 1] warning of rank 1" in shown.out + shown.err
    blame = caught.value.__cause__
    assert isinstance(blame, GangError)
    assert f"rank {blame.rank} has 11" in blame.log_tail
    assert f"warning of rank {blame.rank}" in blame.log_tail
    [folder] = (tmp_path / "logs").iterdir()
    assert f"and in {folder / 'attempt_1' / str(blame.rank)} on its host" in str(blame)
