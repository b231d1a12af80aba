"""Run all benchmarks by one command, and write the table of `README.md`.

    python benchmarks/all.py                              # everything on the CPU, three hours
    python benchmarks/all.py --only launch.py many.py     # only these, while the other rows stay unchanged
    python benchmarks/all.py --gpu                        # also the benchmarks that need GPUs
    python benchmarks/all.py --quick                      # everything in its smallest size, as a trial

The benchmarks run one after the other, as their own pages of help describe. When a benchmark ends, its rows go into the
table, with the machine, the day and the versions. A failed benchmark leaves its old rows. The output names failed
benchmarks at the end, and the exit code is 1. With `--quick`, the table does not change, since the figures come from
one small round.

The file `figures.json` beside the table holds the figures, and the table is made from that file alone.

This process imports only the standard library. Other processes run the measured programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import FILE, HEAD, Figure, Goal, gpu_models, machine, rows
from gpu import HEAD_OF_RESULTS, Result, run

BENCHMARKS = Path(__file__).resolve().parent
KEPT, PAGE = BENCHMARKS / "figures.json", BENCHMARKS / "README.md"
BEGIN, END = "<!-- figures: written by all.py -->", "<!-- end of figures -->"
TIME_LIMIT = 3600.0
"""Timeout for each benchmark, in seconds."""


COMMANDS = (
    ("launch.py",),
    ("calls.py",),
    ("evaluation.py",),
    ("commands.py",),
    ("recovery.py",),
    ("chaos.py", "--schedules", "100"),
    ("chaos.py", "--staying", "20"),
    ("many.py",),
    ("stores.py",),
    ("training.py",),
    ("recipe.py",),
    ("s3.py",),
    ("checkpoints.py", "--only", "disk", "near"),
    ("arguments.py",),
    ("compile_cache.py",),
    ("memory.py",),
    ("scale.py",),
)
"""Scripts with their options for the table."""
ON_GPUS = ("gpu.py", "--part", "speed", "--minutes", "30")


Kept = dict[str, dict[str, Any]]
"""Measurements by script, or by the GPUs for benchmarks on GPUs, each with `command`, `figures` and machine (`on`)."""


def figures_of(measurement: dict[str, Any]) -> list[Figure]:
    """Return the figures of a measurement from their JSON form."""
    return [Figure(**(kept | {"goals": [Goal(**goal) for goal in kept["goals"]]})) for kept in measurement["figures"]]


# ---- Measuring ------------------------------------------------------------------------------------------------------


def measure(command: tuple[str, ...], *, quick: bool) -> tuple[Result, dict[str, Any] | None]:
    """Run a benchmark, and return its result and the JSON form of its figures. None: no figures."""
    on = machine()
    line = [command[0], "--quick"] if quick else list(command)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FILE] = file = str(Path(folder) / "figures")
        result = run(line, TIME_LIMIT)
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    if result.outcome == "failed" or not lines:
        return result, None
    command, found = f"python benchmarks/{result.what}", [json.loads(line) for line in lines]
    return result, {"command": command, "on": on, "figures": found}


def key_of(command: tuple[str, ...]) -> str:
    """Return the key of a command's figures in the file. Benchmarks on GPUs have their models in the key."""
    return f"gpu.py, {gpu_models()}" if command is ON_GPUS else " ".join(command)


def replace(kept: Kept, key: str, measurement: dict[str, Any]) -> None:
    """Add a measurement, and remove older rows with the same names."""
    names = {figure["what"] for figure in measurement["figures"]}
    for other in list(kept):
        kept[other]["figures"] = [figure for figure in kept[other]["figures"] if figure["what"] not in names]
        if not kept[other]["figures"]:
            del kept[other]
    kept[key] = measurement


# ---- The table ------------------------------------------------------------------------------------------------------


def table(kept: Kept) -> Iterator[str]:
    """Yield the lines between the marks of the page."""
    places = list(dict.fromkeys(without_load(each["on"]) for each in kept.values()))
    yield f"{HEAD[0]} where | command |"
    yield f"{HEAD[1]}---|---|"
    for each in kept.values():
        where, command = places.index(without_load(each["on"])) + 1, each["command"].removeprefix("python benchmarks/")
        yield from (f"{row} [{where}] | `{command}` |" for row in rows(figures_of(each)))
    yield ""
    yield from (f"{index}. {place}" for index, place in enumerate(places, 1))


def without_load(on: str) -> str:
    """Return the machine without its load."""
    return re.sub(r", load [\d.]+ before the start", "", on)


def write_page(kept: Kept) -> None:
    """Write these measurements to the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *table(kept), "", f"{END}{after}"]))


def chosen(arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the commands to run."""
    commands = [each for each in COMMANDS if not arguments.only or each[0] in arguments.only]
    return [*commands, *([ON_GPUS] if arguments.gpu else [])]


def main() -> None:
    """Measure and update the table after each benchmark, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices={each[0] for each in COMMANDS}, metavar="SCRIPT")
    parser.add_argument("--gpu", action="store_true", help="also run gpu.py, which needs GPUs")
    parser.add_argument("--quick", action="store_true", help="run all in the smallest size, and print the table")
    arguments = parser.parse_args()
    kept: Kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: Kept = {}
    results = []
    for command in chosen(arguments):
        result, measurement = measure(command, quick=arguments.quick)
        results.append(result)
        print(result.text, flush=True)
        if measurement is None:
            continue
        found[key_of(command)] = measurement
        if not arguments.quick:
            replace(kept, key_of(command), measurement)
            KEPT.write_text(f"{json.dumps(kept, indent=1, ensure_ascii=False)}\n")
            write_page(kept)
    print(*table(found), "", *HEAD_OF_RESULTS, *(result.row for result in results), sep="\n")
    sys.exit(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    main()
