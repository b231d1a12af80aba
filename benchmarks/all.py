"""Every number of this project by one command, which writes the table of `README.md` itself.

    python benchmarks/all.py                              # everything on the CPU, two and a half hours
    python benchmarks/all.py --only launch.py many.py     # these alone; the other rows stay as they are
    python benchmarks/all.py --gpu                        # what GPUs are needed for, too
    python benchmarks/all.py --quick                      # everything in its smallest size: does it still run?
    python benchmarks/all.py --compare                    # measures nothing: how do the rows differ from those in git?

The benchmarks run one after the other, each as its own page of help says. As soon as one is done its rows are in the
table, with the machine, the day and the versions; what fails leaves the rows that were there, is named at the end, and
makes the exit code 1. What `--quick` finds is printed and goes into no table, since it is one round of little work.

The figures are kept in `figures.json` beside the table, which is made from that file and nothing else.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from figures import FILE, Figure, Goal, number
from gpu import Outcome, run
from launch import gpu_models, machine

BENCHMARKS = Path(__file__).resolve().parent
KEPT, PAGE = BENCHMARKS / "figures.json", BENCHMARKS / "README.md"
BEGIN, END = "<!-- figures: written by all.py -->", "<!-- end of figures -->"
TIME_LIMIT = 3600.0
"""Seconds for any one benchmark."""


@dataclass(frozen=True)
class Command:
    """A benchmark as it is run for the table."""

    script: str
    options: tuple[str, ...] = ()
    has_ray: bool = False
    """Whether it takes `--skip ray`, which it needs where Ray is not installed."""

    def line(self, *, quick: bool) -> list[str]:
        """Its script and all of its options."""
        skipped = ["--skip", "ray"] if self.has_ray and find_spec("ray") is None else []
        return [self.script, *(["--quick"] if quick else self.options), *skipped]


COMMANDS = (
    Command("launch.py", has_ray=True),
    Command("editing.py"),
    Command("ending.py"),
    Command("recovery.py"),
    Command("chaos.py"),
    Command("many.py", has_ray=True),
    Command("efficiency.py"),
    Command("overhead.py"),
    Command("recorder.py"),
    Command("recipe.py"),
    Command("sampling.py"),
    Command("s3.py"),
    Command("decoding.py"),
    Command("checkpoint.py"),
    Command("sharded.py", ("--skip", "gathered", "dcp process", "ray")),  # no row is about them
    Command("arguments.py", has_ray=True),
    Command("scale.py"),
)
ON_GPUS = Command("gpu.py", ("--minutes", "30"))


@dataclass(frozen=True)
class Measurement:
    """What one benchmark found, as it is kept."""

    command: str
    on: str
    """The machine, the day and the versions."""
    figures: list[Figure]

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> Measurement:
        """The one that was kept."""
        return cls(kept["command"], kept["on"], [figure_of(each) for each in kept["figures"]])


Kept = dict[str, dict[str, Any]]
"""Measurements by their script, and by the GPUs where there are any."""


def figure_of(kept: dict[str, Any]) -> Figure:
    """The one that was kept."""
    return Figure(**(kept | {"goals": [Goal(**goal) for goal in kept["goals"]]}))


# ---- Measuring ------------------------------------------------------------------------------------------------------


def measure(command: Command, *, quick: bool) -> tuple[Outcome, dict[str, Any] | None]:
    """Run a benchmark; what became of it, and what is kept of it, if it has found anything."""
    on = machine()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FILE] = file = str(Path(folder) / "figures")
        outcome = run(command.line(quick=quick), TIME_LIMIT)
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    if outcome.failure or not lines:
        return outcome, None
    return outcome, {"command": outcome.command, "on": on, "figures": [json.loads(line) for line in lines]}


def key_of(command: Command) -> str:
    """Under which its figures are kept: those of another kind of machine are others."""
    return f"{command.script}, {gpu_models()}" if command is ON_GPUS else command.script


# ---- The table ------------------------------------------------------------------------------------------------------


def table(kept: Kept) -> Iterator[str]:
    """The lines between the marks of the page."""
    measurements = [Measurement.from_json(each) for each in kept.values()]
    places = list(dict.fromkeys(without_load(each.on) for each in measurements))
    yield "| what | here | peer | ratio | goal | where | command |"
    yield "|---|---|---|---|---|---|---|"
    for each in measurements:
        where = f"[{places.index(without_load(each.on)) + 1}]"
        for figure in each.figures:
            yield f"| {' | '.join([*figure.cells(), where])} | `{each.command.removeprefix('python benchmarks/')}` |"
    yield ""
    yield from (f"{index}. {place}" for index, place in enumerate(places, 1))


def without_load(on: str) -> str:
    """The machine without what else it did."""
    return re.sub(r", load [\d.]+ before the start", "", on)


def write_page(kept: Kept) -> None:
    """Have the page show these."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *table(kept), "", f"{END}{after}"]))


# ---- Comparing ------------------------------------------------------------------------------------------------------


def changes(old: Kept, new: Kept) -> Iterator[str]:
    """How each row differs from what it was: as a ratio of medians, and whether the two spreads overlap."""
    rows = {(key, figure.what): figure for key, each in old.items() for figure in Measurement.from_json(each).figures}
    yield "| what | before | now | now / before | |"
    yield "|---|---|---|---|---|"
    for key, each in new.items():
        for figure in Measurement.from_json(each).figures:
            before = rows.pop((key, figure.what), None)
            if before is None:
                yield f"| {figure.what} | - | {figure.measured('here')} | - | new |"
            elif list(before.here) != list(figure.here):
                yield changed(before, figure)
    yield from (f"| {figure.what} | {figure.measured('here')} | - | - | gone |" for figure in rows.values())


def changed(before: Figure, now: Figure) -> str:
    """The row of one that was measured again."""
    was, became = statistics.median(before.here), statistics.median(now.here)
    factor = f"{number(became / was)} x" if was else "-"
    overlap = min(before.here) <= max(now.here) and min(now.here) <= max(before.here)
    said = "within the spread" if overlap else "**beyond the spread**"
    return f"| {now.what} | {before.measured('here')} | {now.measured('here')} | {factor} | {said} |"


def in_git() -> Kept:
    """The figures of the last commit; none where there were none."""
    command = ["git", "-C", str(BENCHMARKS), "show", "HEAD:./figures.json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(shown.stdout) if not shown.returncode else {}


def chosen(arguments: argparse.Namespace) -> list[Command]:
    """What is to be run."""
    commands = [each for each in COMMANDS if not arguments.only or each.script in arguments.only]
    return [*commands, *([ON_GPUS] if arguments.gpu else [])]


def main() -> None:
    """Measure, writing the table as it grows; or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=[each.script for each in COMMANDS], metavar="SCRIPT")
    parser.add_argument("--gpu", action="store_true", help="also what needs GPUs: gpu.py")
    parser.add_argument("--quick", action="store_true", help="all in the smallest size; prints its table")
    parser.add_argument("--compare", action="store_true", help="measure nothing; show what differs from git's table")
    arguments = parser.parse_args()
    kept: Kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if arguments.compare:
        print(*changes(in_git(), kept), sep="\n")
        return

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: Kept = {}
    outcomes = []
    for command in chosen(arguments):
        outcome, measurement = measure(command, quick=arguments.quick)
        outcomes.append(outcome)
        print(outcome.output, flush=True)
        if measurement is None:
            continue
        found[key_of(command)] = measurement
        if not arguments.quick:
            kept[key_of(command)] = measurement
            KEPT.write_text(f"{json.dumps(kept, indent=1, ensure_ascii=False)}\n")
            write_page(kept)
    print(*table(found), "", "| command | took | |", "|---|---|---|", *(each.row for each in outcomes), sep="\n")
    sys.exit(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    main()
