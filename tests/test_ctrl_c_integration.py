"""Ctrl-C in a script with a gang: the gang ends first, and the same script continues from its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import MAX_SECONDS, until

SCRIPT = """
import sys, time
from distributed import Client
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

def train(last):
    rank = current_rank()
    start = (rank.checkpoint.load() or {"step": -1})["step"] + 1
    for step in range(start, last):
        rank.checkpoint.save({"step": step}, step)
        rank.log({"step": step})
        time.sleep(0.05)
    return [start, last]

if __name__ == "__main__":
    how = dict(n_workers=1, threads_per_worker=1, dashboard_address=None, processes=False)
    with Client(**how) as client:
        print(dispatch.run(client, train, int(sys.argv[1]), gang=Gang(checkpoint_uri="kept")).result())
"""


def test_a_script_that_ctrl_c_has_ended_keeps_its_checkpoint_says_where_and_goes_on_from_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    log, manifest = tmp_path / "log", tmp_path / "kept" / "train-1" / "manifest.json"
    command = [sys.executable, script]
    with log.open("wb") as file:
        first = subprocess.Popen([*command, "100000"], cwd=tmp_path, stdout=file, stderr=file, start_new_session=True)
        try:
            until(manifest.exists, "the first checkpoint")
            time.sleep(0.2)
            os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
            first.wait(MAX_SECONDS)
        finally:
            first.kill()
    told = log.read_text()
    assert first.returncode == -signal.SIGINT, told
    kept = f" is in {manifest.parent}, and the same call goes on from it\n"
    [line] = [line for line in told.splitlines(keepends=True) if line.endswith(kept)]
    begin = "train was ended: Ctrl-C; the checkpoint of step "
    assert line.startswith(begin), told
    assert "scheduler was lost" not in told
    step = int(line.removeprefix(begin).split()[0])
    second = subprocess.run(
        [*command, str(step + 3)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=MAX_SECONDS
    )
    assert second.stdout == f"[[{step + 1}, {step + 3}]]\n", second.stderr
    assert f"train: going on from the checkpoint of step {step} in {manifest.parent}\n" in second.stderr
