"""`dispatch.run` on real workers: its display at a terminal, Ctrl-C and the same command again, a number of workers."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangStartError, current_rank, dispatch
from flytekitplugins.daskpytorch.dask.agents import DaskAgents
from processes import Cluster, dask_cluster, nothing_left_behind, run_program, until

SCRIPT = """
import os, sys, time
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def train(last):
    rank = current_rank()
    start = (rank.checkpoint.load() or {"step": -1})["step"] + 1
    for step in range(start, last):
        rank.log({"loss": 1.0}, step=step, num_steps=last)
        rank.checkpoint.save({"step": step}, step)
        time.sleep(0.05)
    return start, os.environ["NAME"]

if __name__ == "__main__":
    with Client(sys.argv[1]) as client:
        futures = dispatch.run(client, train, int(sys.argv[2]), gang=Gang(workers=int(sys.argv[3])))
        print("began at", futures.result(), "newest", futures.newest_checkpoint.step)
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three workers, each of which has its own NAME."""
    names = {index: {"NAME": str(index)} for index in range(3)}
    with nothing_left_behind():
        folder = tmp_path_factory.mktemp("three")
        with dask_cluster(folder, num_workers=3, worker_environments=names) as cluster:
            yield cluster


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_at_a_terminal_it_is_shown_and_after_ctrl_c_the_same_command_goes_on(three: Cluster, script: Path) -> None:
    command = [str(script), three.address, "100000", "2"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    terminal = pexpect.spawn(sys.executable, command, env=env, timeout=200, encoding="utf-8", dimensions=(40, 160))
    try:
        terminal.expect(r"train: starting 2 ranks on 2 workers \(CPU, gloo\)")
        terminal.expect(r"train: all ranks have met after \S+ s")
        terminal.expect(r"train\S* \S+ +step \d+/100000  loss 1  \d+ steps/s")  # the live line, with its bar
        until(lambda: [*script.parent.glob("kept/script.train/*/gang/manifest.json")], "a checkpoint that is kept")
        terminal.sendintr()
        terminal.expect(
            r"train: interrupted after \S+ s, step (\d+)/100000  loss 1; the checkpoint of step (\d+) is kept, "
            r"DASKPYTORCH_RESUME=1 and the same command go on from it"
        )
        assert terminal.match is not None
        step, newest = map(int, terminal.match.groups())
        assert 0 <= newest <= step
        terminal.expect(r"  checkpoints: \S+")
        terminal.expect(r"KeyboardInterrupt")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    [run] = script.parent.glob("kept/script.train/*")
    again = [script, three.address, str(newest + 3), "2"]
    done = run_program(again, cwd=script.parent, env={"DASKPYTORCH_RESUME": "1"})
    began, ended = newest + 1, newest + 2
    assert re.fullmatch(rf"began at \[\({began}, '.'\), \({began}, '.'\)\] newest {ended}\n", done.stdout), done.stderr
    assert f"DASKPYTORCH_RESUME is set: going on from the run in {run}" in done.stderr
    assert re.search(r"^train: done after \S+ s, step \d+/\d+  loss 1\n  checkpoints: ", done.stderr, re.MULTILINE)


def name_when(folder: str, own: str, *others: str) -> str:
    """The worker's name, once the other gangs train at the same time."""
    Path(folder, own).write_text(os.environ["NAME"])
    print("I am", own)
    while not all(Path(folder, other).exists() for other in others):
        current_rank().log({"waiting": 1.0})
        time.sleep(0.05)
    return os.environ["NAME"]


def test_runs_with_a_number_of_workers_train_side_by_side(
    three: Cluster, script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = Gang(workers=1)
    with Client(three.address) as client:
        others_task = client.get({("x", 0): (time.sleep, 5)}, [("x", 0)], sync=False)  # as a Dask collection's
        first = dispatch.run(client, name_when, str(tmp_path), "first", "second", "end", gang=one)
        second = dispatch.run(client, name_when, str(tmp_path), "second", "first", "end", gang=one)
        until(lambda: (tmp_path / "first").exists() and (tmp_path / "second").exists(), "both gangs at once")
        others = run_program([script, three.address, "1", "1"], cwd=tmp_path)  # another process
        (tmp_path / "end").touch()
        [a], [b] = first.result(), second.result()
        [c] = {"0", "1", "2"} - {a, b}
        assert others.stdout == f"began at [(0, '{c}')] newest 0\n", others.stderr
        with pytest.raises(GangStartError, match=r"has 3 workers, but needs 4\. Start workers") as kept:
            dispatch.run(client, name_when, str(tmp_path), "x", gang=Gang(workers=4))
        with contextlib.closing(DaskAgents(client, 1)) as another:
            assert len(another.present()) == 3, kept  # the failed call holds no worker
        assert len(dispatch.run(client, name_when, str(tmp_path), "x", gang=Gang(workers=2)).result()) == 2
        del others_task
    said = capfd.readouterr().err.splitlines()
    assert "name_when: starting 1 rank (CPU, gloo)" in said
    assert "[rank 0] I am first" in said
    assert "name_when-2: starting 1 rank (CPU, gloo)" in said
    assert "[name_when-2, rank 0] I am second" in said
