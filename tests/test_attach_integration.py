"""`daskpytorch attach` lists the ranks of its user on a machine, and opens the debugger of one that waits."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from processes import Cluster, dask_cluster, end, nothing_left_behind, until
from test_debugger_integration import interrupt

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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two workers, whose agents are all that use their folder for temporary files."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with nothing_left_behind(), dask_cluster(tmp_path, hosts=["127.0.0.2", "127.0.0.3"], is_warm=False) as running:
        yield running


def start(text: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Run a script in ranks, without a terminal. Return the command and its log."""
    Path("script.py").write_text(textwrap.dedent(text))
    log = Path("run.log").absolute()
    words = [sys.executable, *COMMAND, "run", *options, "script.py"]
    with log.open("wb") as file:
        run = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    return run, log


def attach(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    return subprocess.run(
        [sys.executable, *COMMAND, "attach", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def terminal(*words: str) -> pexpect.spawn:
    """Run the command in a terminal."""
    return pexpect.spawn(
        sys.executable, [*COMMAND, "attach", *words], timeout=100, encoding="utf-8", dimensions=(40, 200)
    )


def said(terminal: pexpect.spawn, line: str) -> str:
    terminal.sendline(line)
    terminal.expect_exact("(Pdb rank 1) ")
    return str(terminal.before)


def test_rank_without_a_terminal_waits_until_one_attaches(cluster: Cluster, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run, log = start(STOPS, "--scheduler", cluster.address, "--hang-timeout", "5", "--log-dir", str(logs))
    try:
        until(lambda: ": daskpytorch attach 1" in log.read_text(), log.read_text)
        listed = attach().stdout
        [id_] = re.findall(r"^rank 0 of (\S+) \(pid \d+\) runs$", listed, re.MULTILINE)
        [pid] = re.findall(r"^rank 1 of \S+ \(pid (\d+)\) waits: it stops at \S+/script.py:13 ", listed, re.MULTILINE)
        assert attach("--gang", id_).stdout == listed
        assert "is in no debugger that this command opens. Its stacks: py-spy dump --pid" in attach("0").stderr
        assert "needs a terminal" in attach("1").stderr
        assert "no rank 7 of this user runs on this machine" in attach("7").stderr

        first = terminal("1")
        first.expect_exact("(Pdb rank 1) ")
        assert f"\r\n{pid}\r\n" in said(first, "import os; os.getpid()")
        assert "\r\n101\r\n" in said(first, "p secret")
        first.sendcontrol("]")
        first.expect_exact("detached")
        first.expect(pexpect.EOF)
        second = terminal("1")
        second.expect_exact("\r\n101\r\n(Pdb rank 1) ")  # the prompt that the first terminal has left
        second.setwinsize(50, 99)
        assert "columns=99" in said(second, "p os.get_terminal_size()")
        second.close(force=True)  # as its window may
        third = terminal("1")
        third.expect_exact("lines=50)\r\n(Pdb rank 1) ")
        interrupt(third, "--KeyboardInterrupt--")  # at the prompt, as pdb does anywhere
        third.expect_exact("(Pdb rank 1) ")
        third.sendline("print('sle' + 'eps'); import time; time.sleep(600)")
        third.expect_exact("sleeps")
        interrupt(third, "KeyboardInterrupt")
        third.expect_exact("(Pdb rank 1) ")
        fourth = terminal("1")
        third.expect_exact("another terminal was attached to it")
        third.expect(pexpect.EOF)
        fourth.sendline("print('he' + 're')")
        fourth.expect_exact("here\r\n(Pdb rank 1) ")
        fourth.sendline("continue")
        fourth.expect_exact("the rank has ended")
        fourth.expect(pexpect.EOF)
        assert run.wait(100) == 0
    finally:
        end(run)
    assert "[rank 1] total 2" in log.read_text()
    assert [folder.name for folder in logs.iterdir()] == [id_]
    assert "no rank of this user runs on this machine" in attach().stderr
