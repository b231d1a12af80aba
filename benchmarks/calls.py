"""Measure calls with an all-reduce in a gang of two ranks that stays, beside actors of Monarch, and look for leaks.

    pip install '.[bench]'                                # Monarch
    python benchmarks/calls.py                            # 25 rounds of 50 calls, then 1,000 calls; two minutes
    python benchmarks/calls.py --quick --only gang

gang       `gang.call(...).result()` of `dispatch.gang(gang=Gang(ranks_per_worker=2))`
Monarch    an endpoint's `call(...).get()` of actors in two processes of `this_host()`, in a process group (gloo)

A call's time is the median of a round. The gang's function is a module's, and travels by name, as an endpoint does.
Between call 100 and call 1,100 of a gang, memory (PSS), descriptors and threads of the driver, the fork server and the
ranks must not grow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from figures import Figure, at_most, report
from memory import memory_of
from running import SERVE, Program, asked, family, nothing_left, take_turns
from schedules import census_of

TOTAL = f"""{SERVE}
import os, statistics, time, torch
from torch import distributed

def total():
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    return ones.item()

def timed(call, count):
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        values = call()
        seconds.append(time.perf_counter() - began)
        if list(values) != [2.0, 2.0]:
            raise ValueError(f"the all-reduce of two ranks gave {{values}}")
    return 1000 * statistics.median(seconds)
"""

GANG = f"""{TOTAL}
from flytekitplugins.daskpytorch import Gang, dispatch

if __name__ == "__main__":
    from program import total  # a function of a module travels by name

    with dispatch.gang(gang=Gang(ranks_per_worker=2)) as gang:
        serve(lambda count: timed(lambda: gang.call(total).result(), count))
"""

MONARCH = f"""{TOTAL}
from monarch.actor import Actor, current_rank, endpoint, this_host

class Rank(Actor):
    @endpoint
    def join(self, store):
        distributed.init_process_group("gloo", init_method=store, rank=current_rank().rank, world_size=2)

    @endpoint
    def total(self):
        return total()

if __name__ == "__main__":
    ranks = this_host().spawn_procs({{"ranks": 2}}).spawn("ranks", Rank)
    ranks.join.call("file://" + os.path.abspath("store")).get()
    serve(lambda count: timed(lambda: ranks.total.call().get().values(), count))
"""

WAYS = {"gang": GANG, "Monarch": MONARCH}


def growth(program: Program, calls: int) -> list[float]:
    """Return by how much a gang's processes grow in so many calls: megabytes of memory, descriptors and threads."""
    counts = []
    for number in (100, calls):
        program.call(number)
        pids = set(family(program.pid))
        kinds = [{**census_of(pid), "memory": 0} for pid in pids]
        counts.append((memory_of(pids), float(sum(sum(each.values()) for each in kinds))))
    return [after - before for before, after in zip(*counts, strict=True)]


def figures(times: dict[str, list[float]], grown: list[float], calls: int) -> Iterator[Figure]:
    """Yield the rows."""
    what = "a call with an all-reduce, 2 ranks that stay"
    if len(times) > 1:
        yield Figure.beside(
            "Monarch", times["Monarch"], what=what, here=times["gang"], unit="ms", goals=at_most(3, "here")
        )
    what = f"{calls:,} calls in one gang:"
    yield Figure(
        what=f"{what} memory (PSS) of all processes, more", here=grown[:1], unit="MB", goals=at_most(5, "here")
    )
    yield Figure(what=f"{what} descriptors and threads, more", here=grown[1:], unit="", goals=at_most(0, "here"))


def main() -> None:
    """Measure, and print the table."""
    options = {"rounds": (25, 1, "rounds that count"), "calls": (1000, 100, "calls between the two looks for leaks")}
    arguments = asked(__doc__, WAYS, **options)
    with nothing_left("calls") as folder:
        os.environ["TMPDIR"] = str(folder)
        programs = {way: Program.serving(WAYS[way], folder / way) for way in arguments.ways}
        times = take_turns({way: partial(it.call, 50) for way, it in programs.items()}, arguments.rounds)
        grown = growth(Program.serving(WAYS["gang"], folder / "again" / "gang"), arguments.calls)
    report(figures(times, grown, arguments.calls), arguments.on)


if __name__ == "__main__":
    main()
