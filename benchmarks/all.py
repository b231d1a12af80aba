"""Every number of this project by one command, which writes the table of `README.md` itself.

    python benchmarks/all.py                              # everything on the CPU, three hours
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
from pathlib import Path
from typing import Any

from figures import FILE, HEAD, Figure, Goal, gpu_models, machine, number, rows
from gpu import Outcome, run

BENCHMARKS = Path(__file__).resolve().parent
KEPT, PAGE = BENCHMARKS / "figures.json", BENCHMARKS / "README.md"
BEGIN, END = "<!-- figures: written by all.py -->", "<!-- end of figures -->"
TIME_LIMIT = 3600.0
"""Seconds for any one benchmark."""


COMMANDS = (
    ("launch.py",),
    ("commands.py", "--skip", "late"),
    ("recovery.py",),
    ("chaos.py",),
    ("chaos.py", "--schedules", "100"),
    ("many.py",),
    ("training.py",),
    ("recipe.py",),
    ("s3.py",),
    ("decoding.py",),
    ("checkpoints.py", "--only", "disk", "near"),
    ("arguments.py", "--skip", "scatter"),
    ("memory.py",),
    ("scale.py",),
)
"""Scripts, and the options with which they are run for the table."""
ON_GPUS = ("gpu.py", "--minutes", "30")


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


def measure(command: tuple[str, ...], *, quick: bool) -> tuple[Outcome, dict[str, Any] | None]:
    """Run a benchmark; return its outcome, and what is kept of the figures that it has found."""
    on = machine()
    line = [command[0], "--quick"] if quick else list(command)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FILE] = file = str(Path(folder) / "figures")
        outcome = run(line, TIME_LIMIT)
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    if outcome.failure or not lines:
        return outcome, None
    return outcome, {"command": outcome.command, "on": on, "figures": [json.loads(line) for line in lines]}


def key_of(command: tuple[str, ...]) -> str:
    """Return the key of a command's figures in the file; those of GPUs are kept by their models."""
    return f"gpu.py, {gpu_models()}" if command is ON_GPUS else " ".join(command)


def replace(kept: Kept, key: str, measurement: dict[str, Any]) -> None:
    """Keep a measurement, in place of all rows of the same names."""
    names = {figure["what"] for figure in measurement["figures"]}
    for other in list(kept):
        kept[other]["figures"] = [figure for figure in kept[other]["figures"] if figure["what"] not in names]
        if not kept[other]["figures"]:
            del kept[other]
    kept[key] = measurement


# ---- The table ------------------------------------------------------------------------------------------------------


def table(kept: Kept) -> Iterator[str]:
    """The lines between the marks of the page."""
    measurements = [Measurement.from_json(each) for each in kept.values()]
    places = list(dict.fromkeys(without_load(each.on) for each in measurements))
    yield f"{HEAD[0]} where | command |"
    yield f"{HEAD[1]}---|---|"
    for each in measurements:
        where, command = places.index(without_load(each.on)) + 1, each.command.removeprefix("python benchmarks/")
        yield from (f"{row} [{where}] | `{command}` |" for row in rows(each.figures))
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


def chosen(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the commands to be run."""
    commands = [each for each in COMMANDS if not arguments.only or each[0] in arguments.only]
    return [*commands, *([ON_GPUS] if arguments.gpu else [])]


def main() -> None:
    """Measure, writing the table as it grows; or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices={each[0] for each in COMMANDS}, metavar="SCRIPT")
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
            replace(kept, key_of(command), measurement)
            KEPT.write_text(f"{json.dumps(kept, indent=1, ensure_ascii=False)}\n")
            write_page(kept)
    print(*table(found), "", "| command | took | |", "|---|---|---|", *(each.row for each in outcomes), sep="\n")
    sys.exit(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    main()
