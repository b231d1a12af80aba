"""`daskpytorch attach` lists the ranks of a Dask cluster, and opens a rank's debugger, for those who know the token."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from flytekitplugins.daskpytorch.protocol import framing
from flytekitplugins.daskpytorch.protocol.attaching import find_contacts
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
        until(lambda: "Attach by: daskpytorch attach 1" in log.read_text(), log.read_text)
        listed = attach("--scheduler", cluster.address)
        [id_] = re.findall(r"^\S+ \((\S+)\), 2 ranks\n", listed.stdout)
        assert attach("--gang", id_).stdout.splitlines()[0] == listed.stdout.splitlines()[0]
        assert re.search(r"\n0 +\S+ +1 +runs +\S+/script.py:13 ", listed.stdout), listed
        assert re.search(r"\n1 +\S+ +1 +stops at \S+/script.py:13 .* \S+/script.py:13 ", listed.stdout), listed
        stack = attach("0")
        assert re.search(r"all_reduce\n.*script.py\", line 13", stack.stdout, re.DOTALL), stack
        assert "(Pdb" not in attach("1").stdout  # standard input is no terminal
        assert "no gang has a rank 7" in attach("7").stderr

        [contact] = find_contacts()
        with socket.create_connection(contact.address) as sock:
            stranger = framing.Connection(sock)
            stranger.recv_frame(framing.CHALLENGE_SIZE)
            stranger.send_frame(os.urandom(framing.ANSWER_SIZE))
            with pytest.raises((EOFError, ConnectionError)):  # in place of the driver's proof and the list of ranks
                stranger.recv_frame()

        first = terminal("1")
        first.expect_exact("(Pdb rank 1) ")
        assert repr(id_) in said(first, "p __import__('os').environ['TORCHELASTIC_RUN_ID']")
        assert "\r\n101\r\n" in said(first, "p secret")
        first.sendcontrol("]")
        first.expect_exact("detached; the rank waits on for a terminal")
        first.expect(pexpect.EOF)
        second = terminal("--scheduler", cluster.address, "1")
        second.expect_exact("\r\n101\r\n(Pdb rank 1) ")  # the prompt that the first terminal has left
        assert "\r\n42\r\n" in said(second, "p 7 * 6")
        interrupt(second, "--KeyboardInterrupt--")  # at the prompt, as pdb does anywhere
        second.expect_exact("(Pdb rank 1) ")
        second.sendline("print('sle' + 'eps'); import time; time.sleep(600)")
        second.expect_exact("sleeps")
        interrupt(second, "KeyboardInterrupt")
        second.expect_exact("(Pdb rank 1) ")
        second.sendline("continue")
        second.expect_exact("the rank has left the debugger")
        second.expect_exact("the gang has ended")
        second.expect(pexpect.EOF)
        assert run.wait(100) == 0
    finally:
        end(run)
    assert "[rank 1] total 2" in log.read_text()
    assert [folder.name for folder in logs.iterdir()] == [id_]
    assert "no gang runs" in attach().stderr
