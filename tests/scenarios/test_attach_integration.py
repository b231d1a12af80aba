"""`daskpytorch attach` lists the ranks of its user on a machine, and opens the debugger of one that waits.

`Gang(on_error="hold")` keeps a rank in post-mortem mode after its exception, and the gang still, for a set time.
"""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pexpect
import pytest
import torch
import torch.distributed as dist

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from gangs import Notes, on_this_machine
from processes import nothing_left_behind, run_program, running, until
from test_debugger_integration import interrupt, said
from warm import Program

COMMAND = ("-m", "flytekitplugins.daskpytorch")
STOPS = """
    import torch
    import torch.distributed as dist
    from flytekitplugins.daskpytorch import current_rank

    dist.init_process_group()
    rank = current_rank()
    for step in range(3):
        secret = 100 + rank.rank
        rank.log({"loss": 1.0}, step=step)
        if rank.rank == 1 and step == 1:
            breakpoint()
        dist.all_reduce(total := torch.ones(1))
    print("total", int(total), flush=True)
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(temporary))  # this test's gangs alone
    with nothing_left_behind():
        yield


@contextlib.contextmanager
def started(text: str, *options: str) -> Iterator[tuple[Program, Path]]:
    """Run a script in ranks, without a terminal. Yield the command and its log, once rank 1 waits."""
    Path("script.py").write_text(textwrap.dedent(text))
    log = Path("run.log").absolute()
    with running([*COMMAND, "run", *options, "script.py"], cwd=Path.cwd(), log=log) as run:
        until(lambda: ": daskpytorch attach 1" in log.read_text(), log.read_text)
        yield run, log


def attach(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    return run_program([*COMMAND, "attach", *words], cwd=Path.cwd())


def terminal(*words: str) -> pexpect.spawn:
    """Run the command in a terminal."""
    return pexpect.spawn(
        sys.executable, [*COMMAND, "attach", *words], timeout=100, encoding="utf-8", dimensions=(40, 200)
    )


def test_rank_without_a_terminal_waits_until_one_attaches(tmp_path: Path) -> None:
    with started(STOPS, "--nproc", "2", "--hang-timeout", "5") as (run, log):
        listed = attach().stdout
        [id_] = re.findall(r"^rank 0 of (\S+) \(pid \d+\) runs$", listed, re.MULTILINE)
        [pid] = re.findall(r"^rank 1 of \S+ \(pid (\d+)\) waits: it stops at \S+/script.py:13 ", listed, re.MULTILINE)
        assert attach("--gang", id_).stdout == listed
        assert "is in no debugger that this command opens. Its stacks: py-spy dump --pid" in attach("0").stderr
        assert "needs a terminal" in attach("1").stderr
        assert "no rank 7 of this user runs on this machine" in attach("7").stderr

        first = terminal("1")
        first.expect_exact("(Pdb rank 1) ")
        assert f"\r\n{pid}\r\n" in said(first, "import os; os.getpid()", 1)
        assert "\r\n101\r\n" in said(first, "p secret", 1)
        first.sendcontrol("]")
        first.expect_exact("detached")
        first.expect(pexpect.EOF)
        second = terminal("1")
        second.expect_exact("(Pdb rank 1) ")  # the prompt that the first terminal has left
        second.setwinsize(50, 99)
        assert "columns=99" in said(second, "p os.get_terminal_size()", 1)
        second.close(force=True)  # as its window may
        third = terminal("1")
        third.expect_exact("(Pdb rank 1) ")
        interrupt(third, "--KeyboardInterrupt--")  # at the prompt, as pdb does anywhere
        third.expect_exact("(Pdb rank 1) ")
        third.sendline("print('sle' + 'eps'); import time; time.sleep(600)")
        third.expect_exact("sleeps")
        interrupt(third, "KeyboardInterrupt")
        third.expect_exact("(Pdb rank 1) ")
        fourth = terminal("1")
        fourth.expect_exact("A terminal that is attached already keeps it until then.")
        third.sendcontrol("]")
        fourth.expect_exact("(Pdb rank 1) ")
        assert "here\r\n" in said(fourth, "print('he' + 're')", 1)
        fourth.sendline("continue")
        fourth.expect_exact("the rank has ended")
        fourth.expect(pexpect.EOF)
        assert run.wait(100) == 0
    assert "[rank 1] total 2" in log.read_text()
    assert "no rank of this user runs on this machine" in attach().stderr


# ---- Ranks that are held


HELD = "rank 1 .* raised ValueError: bad value 31, and waits up to .* The gang holds its 2 ranks meanwhile"
RAISES = """
    import torch
    import torch.distributed as dist
    from flytekitplugins.daskpytorch import current_rank

    def step(number, rank):
        value = 10 * number + rank
        if value == 31:
            raise ValueError(f"bad value {value}")

    dist.init_process_group()
    for number in range(5):
        step(number, current_rank().rank)
        dist.all_reduce(torch.ones(1))
"""


def fail(folder: str) -> None:
    Path(folder, str(current_rank().rank)).write_text(str(os.getpid()))
    for number in range(5):
        value = 10 * number + current_rank().rank
        if value == 31:
            raise ValueError(f"bad value {value}")
        dist.all_reduce(torch.ones(1))


def test_held_rank_is_looked_at_and_then_its_error_is_the_gangs() -> None:
    options = ["--nproc", "2", "--on-error", "hold", "--hang-timeout", "2.5", "--max-restarts", "0"]
    with started(RAISES, *options) as (run, log):
        attached = terminal("1")
        attached.expect_exact("raised ValueError: bad value 31")
        attached.expect_exact("(Pdb rank 1) ")
        attached.sendline("p value * 2")
        attached.expect_exact("\r\n62\r\n(Pdb rank 1) ")
        attached.sendline("q")
        attached.expect_exact("the rank has ended")
        attached.expect(pexpect.EOF)
        assert run.wait(100) == 1
    assert "\nValueError: bad value 31" in log.read_text()


def test_error_of_a_held_rank_is_the_cause_of_what_comes_later(tmp_path: Path) -> None:
    notes = Notes()
    futures = on_this_machine(fail, str(tmp_path), observers=[notes], on_error="hold", max_restarts=0)
    until(lambda: notes.told(HELD), lambda: str(notes.texts))
    os.kill(int((tmp_path / "0").read_text()), 9)
    with pytest.raises(ValueError, match="bad value 31"):
        futures.result(timeout=200)


def test_gang_that_stays_goes_on_after_a_held_call() -> None:
    def call(rank: int) -> int:
        if current_rank().rank == rank:
            raise ValueError("bad value")
        return current_rank().rank

    with dispatch.gang(gang=Gang(ranks_per_worker=2, on_error="hold", attach_timeout=4.0, hang_timeout=2.0)) as gang:
        with pytest.raises(TypeError, match="cannot be called with the arguments given"):  # holds no rank
            gang.call(call)
        with pytest.raises(ValueError, match="bad value"):
            gang.call(call, 1).result(timeout=200)
        assert gang.call(call, 7).result(timeout=200) == [0, 1]


def test_cancel_ends_the_gang_of_a_call_in_which_a_rank_waits_for_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def raise_alone() -> None:
        raise ValueError("bad value")

    def is_waiting() -> bool:
        said.append(capfd.readouterr().err)
        return ": daskpytorch attach 0" in "".join(said)

    with dispatch.gang(gang=Gang(ranks_per_worker=1, on_error="hold", attach_timeout=600.0)) as gang:
        futures = gang.call(raise_alone)
        until(is_waiting, lambda: "".join(said))
        assert futures.cancel()
        with pytest.raises(CancelledError):
            futures.result(timeout=200)
