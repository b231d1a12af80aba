"""`breakpoint()` in ranks of a real `pyflyte run`, with and without `daskpytorch attach`, and editors that attach."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from dap import Editor
from processes import SCRIPTS, end, nothing_left_behind, run_program, until
from seaweed import free_ports
from test_attach_integration import terminal
from warm import warm_python

PROGRAM = """
import pdb
import torch
import torch.distributed as dist
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, Gang, WorkerGroup, current_rank


@task(task_config=DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(hang_timeout=2.5, attach_timeout=3.0)))
def train(debugged: list[int]) -> float:
    rank = current_rank()
    weight = 10 + rank.rank
    rank.checkpoint.save({}, step=0)
    if rank.rank in debugged:
        print("here comes", rank.rank)
        breakpoint()
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank.rank in debugged:
        pdb.set_trace()
    return float(total)
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left_behind():
        yield


def test_two_ranks_step_over_a_collective_and_quitting_one_ends_the_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))  # this test's gang alone
    (tmp_path / "train.py").write_text(PROGRAM.replace("attach_timeout=3.0", "attach_timeout=200.0"))
    log = tmp_path / "log"
    with log.open("wb") as file:
        command = [SCRIPTS / "pyflyte", "run", "train.py", "train", "--debugged", "[0, 1]"]
        run = warm_python().start(command, cwd=tmp_path, stdout=file, stderr=file, env=os.environ)
    try:
        terminals = []
        for rank in (0, 1):
            until(lambda: f": daskpytorch attach {rank}" in log.read_text(), log.read_text)  # noqa: B023
            terminals.append(attached := terminal(str(rank)))
            attached.expect_exact(f"(Pdb rank {rank}) ")
            attached.sendline("p weight")
            attached.expect_exact(f"\r\n{10 + rank}\r\n(Pdb rank {rank}) ")
            attached.sendline("next")
            attached.expect_exact("-> dist.all_reduce(total)")
        for attached in terminals:
            attached.sendline("next")
        for rank, attached in enumerate(terminals):
            attached.expect_exact("-> if rank.rank in debugged:")
            attached.expect_exact(f"(Pdb rank {rank}) ")
        terminals[1].sendline("q")
        for attached in terminals:
            attached.expect(pexpect.EOF)
        assert run.wait() == 1
    finally:
        end(run)
    told = " ".join(re.sub(r"[│╭╰─]", "", log.read_text()).split())
    assert "[rank 0] here comes 0" in told
    assert "rank 1 was quit in its debugger, and all others with it" in told
    assert "Not started again, because another attempt would end in the same way." in told


def test_without_a_terminal_the_rank_waits_and_then_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run_program([SCRIPTS / "pyflyte", "run", "train.py", "train", "--debugged", "[1]"], cwd=tmp_path)
    told = " ".join(re.sub(r"[│╭╰─]", "", done.stderr + done.stdout).split())
    assert done.returncode == 1
    assert "up to 3 s for a terminal. The gang holds its 2 ranks meanwhile. Attach on that machine by:" in told
    assert "for 3 s (Gang(attach_timeout=...)) no terminal was attached to its debugger, as by `daskpytorch" in told
    assert "DASKPYTORCH_DEBUGPY=1:5678" in told
    assert "starting again" not in told
    assert told.count("starting 2 ranks") == 1


MODULE = """
import torch
import torch.distributed as dist
from flytekitplugins.daskpytorch import current_rank


def step(number):
    total = torch.ones(1)
    dist.all_reduce(total)
    return total  # here an editor has its breakpoint
"""
HERE = 1 + [line.endswith("breakpoint") for line in MODULE.splitlines()].index(True)
STEPS = """
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, Gang
from package.module import step

@task(task_config=DaskDDP(gang=Gang(hang_timeout=1.0)))
def train() -> int:
    return sum(int(step(number)) for number in range(3))
"""


def test_an_editors_breakpoint_in_the_users_own_file_is_hit_in_a_rank(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    module = tmp_path / "package/module.py"
    module.write_text(MODULE)
    (tmp_path / "workflow.py").write_text(STEPS)
    port = free_ports(1)[0]
    command = [SCRIPTS / "pyflyte", "run", "workflow.py", "train"]
    environment = os.environ | {"DASKPYTORCH_DEBUGPY": f"1:{port}", "PYTHONPATH": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        run = warm_python().start(command, cwd=tmp_path, stdout=log, stderr=log, env=environment)
    try:
        editor = Editor(port)
        [found] = editor.break_at(module, HERE)
        assert found["verified"], found
        editor.begin()
        thread, frame = editor.stop()
        assert (frame["name"], frame["line"], frame["source"]["path"]) == ("step", HERE, str(module))
        assert editor.evaluate(frame, "(current_rank().rank, int(total))") == "(1, 2)"
        editor.break_at(module)
        editor.ask("continue", threadId=thread)
        assert run.wait() == 0, (tmp_path / "log").read_text()
        editor.close()
    finally:
        end(run)
    assert f"rank 1 waits for a debugger at 127.0.0.1:{port}" in (tmp_path / "log").read_text()
