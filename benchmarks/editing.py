"""The edit-run loop: from Enter to the first step of a file that has just been changed.

    python benchmarks/editing.py               # five rounds, two minutes, a table at the end
    python benchmarks/editing.py --quick       # one round: does it still run?

Two ranks on the CPU, a model in `DistributedDataParallel` and an optimizer, by `torchrun --standalone` and by local
`pyflyte run`s of the same function, on the own node and on Dask. Before every run a line of its file is changed, so
that nothing that was compiled or packed of it before can be used. The seconds begin with the command, and end when
rank 0 has done its first optimizer step. Every round does each once, in turn; the first does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from ending import PYFLYTE, TIME_LIMIT, TORCHRUN, Row, measured, spread, started
from figures import Figure, Goal, reported
from launch import console_script, machine


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
    (folder / "script.py").write_text(TORCHRUN.replace("train(20)", "train(1)") + changed())
    (folder / "program.py").write_text(PYFLYTE + changed())
    began = time.time()
    with started(row.command, folder) as process:
        code = process.wait(TIME_LIMIT)
    if code:
        raise SystemExit(f"{row.label} ended with {code}:\n{(folder / 'log').read_text()}")
    return float((folder / "mark").read_text()) - began


def changed() -> str:
    """A line that no run had before."""
    return f"\nEDITED = {time.time_ns()}\n"


def main() -> None:
    """Measure, and print the table."""
    on_what = machine()
    times = measured(rows(), seconds_of, __doc__)
    torchrun = next(iter(times.values()))
    print(f"\n{on_what}\n\n| to the first step | median | min-max | of `torchrun`'s |\n|---|---|---|---|")
    for row, taken in times.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(taken, torchrun, strict=True))
        print(f"| {row.label} | {spread(taken)} | {ratio:.2f} x |")
    print("", *reported(figures(times)), sep="\n")


def figures(times: dict[Row, list[float]]) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    (_, theirs), *others = times.items()
    for row, taken in others:
        what = f"Enter to the first step of a file just changed, two ranks, {row.label}"
        goals = [Goal(bound=1.0, at_most=True)]
        yield Figure.beside("`torchrun`", theirs, share=True, what=what, here=taken, goals=goals)


if __name__ == "__main__":
    main()
