"""Run a thousand gangs in one driver, and check for leaks of descriptors, threads, memory and processes.

    python benchmarks/soak.py                             # 1,000 gangs
    python benchmarks/soak.py --quick                     # 60 gangs, as a trial
    python benchmarks/soak.py --gangs 3000 --seed 7

The soak has one driver, and two Dask workers with their nannies. Most gangs run one after the other, and some run two
at once. A seed decides the kind of each gang:

    runs      reaches its results
    early     is cancelled during its start, within the first 60 ms
    late      is cancelled during the training
    raises    raises in one rank
    killed    loses a rank (SIGKILL), and restarts
    left      ends by itself, while no code waits for it or keeps it
    worker    loses a worker (SIGKILL), and restarts on its nanny's next worker. 2 % of the gangs of the first half
              have this kind, so that later leaks have time to grow

The soak counts the resources of driver, workers and fork servers after a tenth of the gangs, and at the end. Before
each count, all gangs have ended and the numbers have become steady. The numbers of descriptors, by kind, and of the
driver's threads, by name, must not grow. Workers may have four more threads, as Dask's pools start some late. Memory
may grow by 5 % or 24 MiB, whichever is more. A replaced worker is compared with its predecessor. No rank and no folder
may remain.

This process imports only the standard library. At its end, also after Ctrl-C, all its processes end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from running import Cluster, Program, asked, nothing_left, started_here, worker_below, worker_of
from schedules import census_of, is_rank, is_server

MEMORY_SHARE = 0.05
MEMORY_SLACK = 24 << 20
WORKER_THREADS = 4
"""Number of threads that Dask's pools may start late."""
STILL = 3
"""Number of equal counts in a row, half a second apart, that make a steady count."""

DRIVER = """
import collections, gc, json, os, random, signal, sys, threading, time
from concurrent.futures import CancelledError
from distributed import Client
from flytekitplugins.daskpytorch import Gang, Observer, current_rank, dispatch

class SpoiltError(Exception):
    pass

def work(what, seconds, folder):
    import torch
    from torch import distributed

    rank = current_rank()
    state = rank.checkpoint.load()
    total = torch.ones(1)
    distributed.all_reduce(total)
    if state is None and what in ("killed", "worker", "late"):
        rank.checkpoint.save({"begun": True}, 1)
        with open(os.path.join(folder, f"pid-{rank.rank}"), "w") as file:
            file.write(f"{os.getpid()}\\n")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.005)
    if what == "raises" and rank.rank == 1:
        raise SpoiltError("the batch is spoilt")
    time.sleep(seconds)
    return int(total)

class Watcher(Observer):
    def __init__(self):
        self.has_kept = threading.Event()

    def on_checkpoint(self, step):
        self.has_kept.set()

KINDS = {"runs": 48, "early": 16, "late": 10, "raises": 10, "killed": 10, "left": 4, "worker": 2}

def pid_of(folder, rank):
    path = os.path.join(folder, f"pid-{rank}")
    while True:
        try:
            with open(path) as file:
                if (text := file.read()).endswith("\\n"):
                    return int(text)
        except FileNotFoundError:
            pass
        time.sleep(0.002)

class Soak:
    def __init__(self, settings):
        self.client = Client(scheduler_file=settings["cluster"])
        self.folder = settings["folder"]
        self.rng = random.Random(settings["seed"])
        self.num_gangs = settings["gangs"]
        self.counts = collections.Counter()
        self.left = []

    def gang(self, what, number, moment, rank):
        folder = os.path.join(self.folder, str(number))
        os.mkdir(folder)
        watcher = Watcher()
        settings = Gang(max_restarts=3, start_timeout=60, observers=(lambda: watcher,))
        gang = dispatch.run(self.client, work, what, moment / 4, folder, gang=settings)
        if what == "left":
            self.left.append(gang[0])
            return lambda: None
        def end():
            expected = [2, 2]
            if what == "early":
                time.sleep(moment)
                gang.cancel()
            elif what == "late":
                pid_of(folder, 0)
                pid_of(folder, 1)
                gang.cancel()
            elif what in ("killed", "worker"):
                pids = [pid_of(folder, 0), pid_of(folder, 1)]
                watcher.has_kept.wait(60)
                if what == "killed":
                    os.kill(pids[rank], signal.SIGKILL)
                else:
                    print("@kill", pids[rank], flush=True)
            try:
                results = gang.result(120)
            except CancelledError:
                return what in ("early", "late")
            except SpoiltError:
                return what == "raises"
            return results == expected and what not in ("raises", "late")
        return end

    def run(self, first, last):
        number = first
        while number < last:
            several = 2 if self.rng.random() < 0.15 and number + 1 < last else 1
            ends = []
            for _ in range(several):
                what = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
                if what == "worker" and (several == 2 or number > self.num_gangs / 2):
                    what = "killed"
                self.counts[what] += 1
                moment, rank = self.rng.random() * 0.06, self.rng.randrange(2)
                ends.append((what, number, self.gang(what, number, moment, rank)))
                number += 1
            for what, which, end in ends:
                if end() is False:
                    print("@amiss", f"gang {which} ({what}) ended otherwise", flush=True)
            if what == "worker":
                self.client.wait_for_workers(2, timeout=60)
                while len(self.client.scheduler_info()["workers"]) != 2:
                    time.sleep(0.05)
        for future in self.left:
            future.result(60)
        self.left.clear()

soak = Soak(json.loads(sys.argv[1]))
print("@ready", flush=True)
for line in sys.stdin:
    match line.split():
        case ["run", first, last]:
            soak.run(int(first), int(last))
            print("@ran", json.dumps(soak.counts), flush=True)
        case ["census"]:
            gc.collect()
            print("@census", json.dumps([thread.name for thread in threading.enumerate()]), flush=True)
"""

Census = dict[str, dict[str, int]]
"""Resource counts of each process, by name of the process and of the resource."""


def count(driver: Program, cluster: Cluster) -> Census:
    """Return the resource counts once they are steady."""
    deadline = time.monotonic() + 30.0
    seen: list[Census] = []
    while True:
        seen = [*seen, _count_now(driver, cluster)][-STILL:]
        steady = [{who: {k: v for k, v in what.items() if k != "memory"} for who, what in one.items()} for one in seen]
        is_still = len(steady) == STILL and all(one == steady[0] for one in steady)
        is_left = any(seen[-1]["all"][kind] for kind in ("ranks", "folders"))  # on a busy machine, for a while
        if (is_still and not is_left) or time.monotonic() > deadline:
            return seen[-1]
        time.sleep(0.5)


def _count_now(driver: Program, cluster: Cluster) -> Census:
    driver.tell("census")
    names = Counter(f"thread {name.rstrip('0123456789-_')}" for name in json.loads(driver.hear("census")))
    found = {"driver": {**census_of(driver.pid), **names}}
    del found["driver"]["threads"]  # counted by name
    for number, nanny in enumerate(cluster.nannies, 1):
        found[f"worker {number}"] = census_of(worker_below(nanny))
    servers = [pid for pid in started_here() if is_server(pid)]
    for number, pid in enumerate(sorted(servers), 1):
        found[f"fork server {number}"] = census_of(pid)
    found["all"] = {"fork servers": len(servers), "ranks": sum(map(is_rank, started_here()))}
    found["all"]["folders"] = len(list(Path(os.environ["TMPDIR"]).glob("daskpytorch-*")))
    return found


def compare(before: Census, after: Census) -> Iterator[str]:
    """Yield the resources whose count has grown by more than allowed."""
    for who, what in after.items():
        for kind, number in what.items():
            old = before.get(who, {}).get(kind, 0)
            allowed = max(MEMORY_SHARE * old, MEMORY_SLACK) if kind == "memory" else 0
            allowed = WORKER_THREADS if kind == "threads" and who.startswith("worker") else allowed
            if number > old + allowed:
                yield f"{who}: {kind} {old} -> {number}"
    for kind in ("ranks", "folders"):
        if after["all"][kind]:
            yield f"{kind} are left: {after['all'][kind]}"


def serve(driver: Program, began_at: float) -> tuple[dict[str, int], list[str]]:
    """Serve a stretch of gangs, kill the workers that the driver names, and return the numbers of gangs by kind."""
    amiss: list[str] = []
    while True:
        word, _, rest = driver.hear_any().partition(" ")
        match word:
            case "@kill":
                os.kill(worker_of(int(rest)), signal.SIGKILL)
            case "@amiss":
                amiss.append(rest)
                print(f"{time.monotonic() - began_at:6.1f} s  {rest}", flush=True)
            case "@ran":
                return json.loads(rest), amiss


def main() -> None:
    """Run the gangs, count the resources, and compare the counts."""
    options = {"gangs": (1000, 60, "how many gangs"), "seed": (0, 0, "decides what becomes of each")}
    arguments = asked(__doc__, **options)
    num_gangs = arguments.gangs
    if num_gangs < 20:
        sys.exit("--gangs must be 20 or more")
    print(arguments.on, f"seed {arguments.seed}", sep="\n", flush=True)
    first = max(10, num_gangs // 10)
    with nothing_left("soak") as folder:
        for name in ("tmp", "gangs"):
            (folder / name).mkdir()
        os.environ["TMPDIR"] = str(folder / "tmp")
        cluster = Cluster(folder / "cluster", 2)
        settings = {"cluster": cluster.contact, "folder": str(folder / "gangs"), "seed": arguments.seed}
        settings["gangs"] = num_gangs
        driver = Program.serving(DRIVER, folder / "driver", json.dumps(settings))
        began_at = time.monotonic()
        censuses: dict[int, Census] = {}
        amiss: list[str] = []
        for start, end in ((0, first), (first, num_gangs)):
            driver.tell(f"run {start} {end}")
            counts, wrong = serve(driver, began_at)
            amiss += wrong
            censuses[end] = count(driver, cluster)
        took = time.monotonic() - began_at
        grown = list(compare(*censuses.values()))
        print(*(f"after {number:,} gangs: {found}" for number, found in censuses.items()), sep="\n")
        told = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
        print(f"- {num_gangs} gangs in {took:.0f} s: {told}; ended otherwise: {len(amiss)}")
        print(*(f"- MORE: {what}" for what in grown), sep="\n", flush=True)
        print(f"- {'something has piled up' if grown else 'nothing has piled up'}", flush=True)
    sys.exit(int(bool(grown or amiss)))


if __name__ == "__main__":
    main()
