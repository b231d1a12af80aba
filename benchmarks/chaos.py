"""Disturb trainings by random faults, and check that each ends as required.

    python benchmarks/chaos.py                            # 20 trainings, about four minutes, prints the seed
    python benchmarks/chaos.py --quick                    # 4 trainings, as a trial
    python benchmarks/chaos.py --schedules 200 --seed 7   # about forty minutes
    python benchmarks/chaos.py --seed 7 --only 31         # repeats one of these trainings
    python benchmarks/chaos.py --storage 1                # also disturbs the storage of the checkpoints
    python benchmarks/chaos.py --staying 20               # 20 gangs that stay, about four minutes

`--schedules`: many gangs with many settings, each with one to three faults of many kinds at random moments.
`verdicts.py` draws the schedules and judges the results, and `schedules.py` runs them. A seed decides all schedules.

`--storage`: the same schedules, whose gangs save whole and sharded checkpoints to a folder that is away for a while,
once to three times. In the end the manifest must name only undamaged checkpoints with the right values, and the newest.

`--staying`: gangs that stay, whose calls fail, hang or are interrupted, or lose a rank, a worker or the driver. See
`staying.py`.

The exit code is 0 if all trainings ended as required, and 1 otherwise.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence

import schedules
import staying
from figures import Figure, at_least, report
from running import asked, nothing_left
from verdicts import draw


def figure(drawn: Sequence[object], ended: schedules.Ended) -> Figure:
    """Return the row, with the number of right endings."""
    kind = "calls in gangs that stay" if isinstance(drawn[0], staying.Schedule) else "faults"
    what = f"random schedules of {kind} that ended as they must, of {len(drawn)}"
    return Figure(what=what, here=[len(ended.stories) - len(ended.failed)], unit="", goals=at_least(len(drawn), "here"))


def main() -> None:
    """Draw the schedules, run them, and print the results."""
    arguments = asked(
        __doc__,
        schedules=(20, 4, "how many random schedules"),
        seed=(-1, -1, "decides what is drawn; -1 for any"),
        only=([-1], [-1], "instead: these of the seed's schedules"),
        staying=(0, 0, "instead: how many random schedules of gangs that stay"),
        storage=(0, 0, "1: disturb the storage of the checkpoints, too"),
    )
    only = [index for index in arguments.only if index >= 0]
    if only and arguments.seed < 0:
        sys.exit("--only needs the --seed whose schedules these are")
    seed = random.randrange(10_000) if arguments.seed < 0 else arguments.seed
    drawn: list[schedules.Schedule] | list[staying.Schedule]
    if arguments.staying:
        drawn = [staying.draw(seed, index) for index in range(arguments.staying)]
    else:
        drawn = [draw(seed, index, storage=bool(arguments.storage)) for index in only or range(arguments.schedules)]
    print(arguments.on, f"seed {seed}", sep="\n", flush=True)
    with nothing_left("chaos") as folder:
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        ended = schedules.run_all(drawn, folder, staying.play if arguments.staying else schedules.judged)
    report([figure(drawn, ended)], arguments.on)
    sys.exit(bool(ended.failed) or len(ended.stories) < len(drawn))


if __name__ == "__main__":
    main()
