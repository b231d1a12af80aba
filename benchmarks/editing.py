"""The edit-run loop: from Enter to the first step of a file that has just been changed.

    python benchmarks/editing.py               # five rounds, two minutes, a table at the end
    python benchmarks/editing.py --quick       # one round: does it still run?

Two ranks on the CPU, a model in `DistributedDataParallel` and an optimizer, by `torchrun --standalone` and by local
`pyflyte run`s of the same function, on the own node and on Dask. Before every run a line of its file is changed, so
that nothing that was compiled or packed of it before can be used. The seconds begin with the command, and end when
rank 0 has done its first optimizer step. Every round does each once, in turn; the first does not count.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ending import MARK, PYFLYTE, TIME_LIMIT, TORCHRUN
from launch import console_script, machine


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    command: tuple[str, ...]


def rows() -> list[Row]:
    """What is measured, `torchrun` first."""
    pyflyte = (console_script("pyflyte"), "run", "program.py")
    return [
        Row("`torchrun --standalone`", (console_script("torchrun"), "--standalone", "--nproc-per-node=2", "script.py")),
        Row("`pyflyte run`, `SpawnDDP`", (*pyflyte, "node_deck", "--num_steps", "1")),
        Row("`pyflyte run`, `DaskDDP`", (*pyflyte, "dask", "--num_steps", "1")),
    ]


def seconds_of(row: Row, folder: Path) -> float:
    """Seconds from the command to the end of the first step."""
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    (folder / "script.py").write_text(TORCHRUN.replace("train(20)", "train(1)") + changed())
    (folder / "program.py").write_text(PYFLYTE + changed())
    began = time.time()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            row.command, cwd=folder, env=os.environ | {MARK: str(mark)}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(TIME_LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise SystemExit(f"{row.label} ended with {code}:\n{(folder / 'log').read_text()}")
    return float(mark.read_text()) - began


def changed() -> str:
    """A line that no run had before."""
    return f"\nEDITED = {time.time_ns()}\n"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    times: dict[Row, list[float]] = {row: [] for row in rows()}
    on_what = machine()
    with tempfile.TemporaryDirectory(prefix="editing-", ignore_cleanup_errors=True) as name:
        for number in range((1 if arguments.quick else arguments.rounds) + 1):
            for row, measured in times.items():
                seconds = seconds_of(row, Path(name))
                print(f"round {number}: {row.label}: {seconds:.2f} s", flush=True)
                if number:
                    measured.append(seconds)
    torchrun = next(iter(times.values()))
    print(f"\n{on_what}\n\n| to the first step | median | min-max | of `torchrun`'s |\n|---|---|---|---|")
    for row, measured in times.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(measured, torchrun, strict=True))
        spread = f"{min(measured):.2f}-{max(measured):.2f} s"
        print(f"| {row.label} | {statistics.median(measured):.2f} s | {spread} | {ratio:.2f} x |")


if __name__ == "__main__":
    main()
