"""`breakpoint()` in ranks of a real `pyflyte run`, with and without a terminal, and editors that attach."""

import re
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from dap import Editor
from processes import SCRIPTS, nothing_left_behind, run_program, running
from seaweed import free_ports

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


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[pexpect.spawn]:
    """A shell in a terminal, in the program's folder."""
    (tmp_path / "train.py").write_text(PROGRAM)
    shell = pexpect.spawn("bash --norc", cwd=tmp_path, timeout=200, encoding="utf-8", dimensions=(40, 200))
    shell.sendline("PS1='shell''> '; bind 'set enable-bracketed-paste off'")
    shell.expect("shell> ")
    yield shell
    shell.close(force=True)


def start(terminal: pexpect.spawn, *debugged: int) -> None:
    terminal.sendline(f"{SCRIPTS}/pyflyte run train.py train --debugged '{list(debugged)}'")


def said(terminal: pexpect.spawn, line: str, rank: int) -> str:
    """The answer of a rank's debugger."""
    terminal.sendline(line)
    terminal.expect_exact(f"(Pdb rank {rank}) ")
    return str(terminal.before)


def interrupt(terminal: pexpect.spawn, answer: str) -> None:
    """Press Ctrl-C, again where Python misses it: a signal between its prompt and its wait for a key waits for that."""
    for _ in range(10):
        terminal.sendintr()
        if terminal.expect_exact([answer, pexpect.TIMEOUT], timeout=20) == 0:
            return
    raise AssertionError(f"no {answer}: {terminal.before}")


def test_one_rank_at_a_time_talks_to_the_terminal(terminal: pexpect.spawn) -> None:
    start(terminal, 0, 1)
    terminal.expect(r"\(Pdb rank (\d)\) ")
    first = int(terminal.match[1])
    assert f"[rank {first}] here comes {first}" in terminal.before
    assert f"\r\n{10 + first}\r\n" in said(terminal, "p weight", first)
    interrupt(terminal, "--KeyboardInterrupt--")
    terminal.expect_exact(f"(Pdb rank {first}) ")
    terminal.sendline("import time; print('sle' + 'eps'); time.sleep(600)")
    terminal.expect_exact("sleeps")  # a Ctrl-C before the line is read takes it away
    interrupt(terminal, "KeyboardInterrupt")
    terminal.expect_exact(f"(Pdb rank {first}) ")
    assert "all_reduce" in said(terminal, "next", first)
    second = 1 - first
    assert f"\r\n{10 + second}\r\n" in said(terminal, "next", second) + said(terminal, "p weight", second)
    for _ in range(4):  # two prompts are left, of which either may come first
        terminal.sendline("continue")
        if terminal.expect([r"\(Pdb rank \d\) ", "shell> "]) == 1:
            break
    assert "train: done" in terminal.before
    assert "2.0" in terminal.before


def test_quitting_ends_the_run_once_and_leaves_the_terminal_as_it_was(terminal: pexpect.spawn) -> None:
    start(terminal, 1)
    terminal.expect_exact("(Pdb rank 1) ")
    terminal.sendline("q")
    terminal.expect_exact("shell> ")
    said = re.sub(r"\x1b\[[\d;]*m", "", terminal.before)
    assert "rank 1 was quit in its debugger, and all others with it" in said
    assert "Not started again, because another attempt would end in the same way." in said
    assert "(Pdb" not in said
    terminal.sendline("stty -a")
    terminal.expect_exact("shell> ")
    assert re.search(r"\sicanon\s.*\secho\s", terminal.before, re.DOTALL)


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
    environment = {"DASKPYTORCH_DEBUGPY": f"1:{port}", "PYTHONPATH": str(tmp_path)}
    with running(command, cwd=tmp_path, log=tmp_path / "log", env=environment) as run:
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
    assert f"rank 1 waits for a debugger at 127.0.0.1:{port}" in (tmp_path / "log").read_text()
