"""Disturb trainings by random faults, and check that each ends as required.

    python benchmarks/chaos.py                            # 20 faults in one training, about five minutes
    python benchmarks/chaos.py --quick                    # 4 faults, as a trial
    python benchmarks/chaos.py --faults 100 --seed 7
    python benchmarks/chaos.py --schedules 200            # 200 trainings, about forty minutes, prints the seed
    python benchmarks/chaos.py --schedules 200 --seed 7
    python benchmarks/chaos.py --seed 7 --only 31         # repeats one of these trainings
    python benchmarks/chaos.py --staying 20               # 20 gangs that stay, about four minutes

`--faults`: one gang trains a model of names under many faults. Ranks are killed (SIGKILL), crash (SIGSEGV) or are
suspended (SIGSTOP, for the hang detector), and workers are killed. The gang must blame all faults rightly. The weights
must equal those of an undisturbed training, bit for bit. The gang's account of its time must add up to the wall time.

`--schedules`: many gangs with many settings, each with one to three faults of many kinds at random moments.
`verdicts.py` draws the schedules and judges the results, and `schedules.py` runs them. A seed decides all schedules.

`--staying`: gangs that stay, whose calls fail, hang or are interrupted, or lose a rank, a worker or the driver. See
`staying.py`.

The exit code is 0 if all trainings ended as required, and 1 otherwise.
"""

from __future__ import annotations

import os
import random
import sys

import schedules
import staying
from figures import Figure, at_least, report
from running import asked, nothing_left
from verdicts import draw, draw_chain


def figure(first: schedules.Schedule | staying.Schedule, count: int, ended: schedules.Ended) -> Figure:
    """Return the row, with the number of right endings, of `count`. A long schedule counts its faults instead."""
    what, right = "random schedules of faults that ended as they must", len(ended.stories) - len(ended.failed)
    if isinstance(first, staying.Schedule):
        what = "random schedules of calls in gangs that stay that ended as they must"
    elif first.setting.trains_model:
        wrong = sum("no rank was blamed" in what for found in ended.failed.values() for what in found)
        what, right, count = "random faults blamed rightly", len(ended.stories[0].made) - wrong, len(first.faults)
    return Figure(what=f"{what}, of {count}", here=[right], unit="", goals=at_least(count, "here"))


def main() -> None:
    """Draw the schedules, run them, and print the results."""
    arguments = asked(
        __doc__,
        faults=(20, 4, "how many faults in one training"),
        schedules=(0, 0, "instead: how many random schedules"),
        seed=(-1, -1, "decides what is drawn; -1 for any"),
        only=([-1], [-1], "instead: these of the seed's schedules"),
        staying=(0, 0, "instead: how many random schedules of gangs that stay"),
    )
    only = [index for index in arguments.only if index >= 0]
    if only and arguments.seed < 0:
        sys.exit("--only needs the --seed whose schedules these are")
    seed = random.randrange(10_000) if arguments.seed < 0 else arguments.seed
    drawn: list[schedules.Schedule] | list[staying.Schedule]
    if arguments.staying:
        drawn = [staying.draw(seed, index) for index in range(arguments.staying)]
    elif only or arguments.schedules:
        drawn = [draw(seed, index) for index in only or range(arguments.schedules)]
    else:
        drawn = [draw_chain(seed, arguments.faults)]
    print(arguments.on, f"seed {seed}", sep="\n", flush=True)
    with nothing_left("chaos") as folder:
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        ended = staying.run_all(drawn, folder) if arguments.staying else schedules.run_all(drawn, folder)
    report([figure(drawn[0], len(drawn), ended)], arguments.on)
    sys.exit(bool(ended.failed) or len(ended.stories) < len(drawn))


if __name__ == "__main__":
    main()
