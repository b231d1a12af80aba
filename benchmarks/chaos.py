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
from collections.abc import Iterator

import schedules
import staying
from figures import Figure, at_least, report
from running import asked, nothing_left
from verdicts import draw, draw_chain


def figures(drawn: list[schedules.Schedule], ended: schedules.Ended) -> Iterator[Figure]:
    """Yield the rows."""
    if not drawn[0].setting.trains_model:
        goals, right = at_least(len(drawn), "here"), len(ended.stories) - len(ended.failed)
        what = f"random schedules of faults that ended as they must, of {len(drawn)}"
        yield Figure(what=what, here=[right], unit="", goals=goals)
        return
    [story], faults = ended.stories, drawn[0].faults
    wrong = sum("no rank was blamed" in what for found in ended.failed.values() for what in found)
    what, goals = f"random faults blamed rightly, of {len(faults)}", at_least(len(faults), "here")
    yield Figure(what=what, here=[len(story.made) - wrong], unit="", goals=goals)


def _run_staying(seed: int, count: int, on: str) -> int:
    """Run schedules of gangs that stay, and print the results. Return the exit code."""
    print(on, f"seed {seed}", sep="\n", flush=True)
    with nothing_left("chaos") as folder:
        (folder / "tmp").mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        failed = staying.run_all([staying.draw(seed, index) for index in range(count)], folder)
    what = f"random schedules of calls in gangs that stay that ended as they must, of {count}"
    report([Figure(what=what, here=[count - len(failed)], unit="", goals=at_least(count, "here"))], on)
    return int(bool(failed))


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
    if arguments.staying:
        sys.exit(_run_staying(seed, arguments.staying, arguments.on))
    if only or arguments.schedules:
        drawn = [draw(seed, index) for index in only or range(arguments.schedules)]
    else:
        drawn = [draw_chain(seed, arguments.faults)]
    print(arguments.on, f"seed {seed}", sep="\n", flush=True)
    with nothing_left("chaos") as folder:
        ended = schedules.run_all(drawn, folder)
    report(figures(drawn, ended), arguments.on)
    sys.exit(bool(ended.failed) or len(ended.stories) < len(drawn))


if __name__ == "__main__":
    main()
