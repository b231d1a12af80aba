"""What a gang costs its driver as it grows: gangs of up to 10,000 ranks, on one machine; and a million log records.

    python benchmarks/scale.py                            # four sizes, three rounds, some six minutes
    python benchmarks/scale.py --sizes 100 5000           # sizes of your own
    python benchmarks/scale.py --ranks-per-agent 1 4 8    # the largest size with more ranks on each worker, too
    python benchmarks/scale.py --quick                    # small gangs: does it still run?

The driver is the real one, with the Deck's observer. Its agents are simulated, all in one process without torch: they
dial in, prove who they are, take their orders, beat as often and say how their ranks fare and what these use,
deliver or fail, and clean up, in the real ones' messages over real connections. Each round has one gang of every size
that delivers 1 KiB per rank, and one in which a rank fails.

start      from the call to the last order: the agents dial in, the ranks are placed, each agent gets its order
form       from there until the driver knows that all ranks have met
live       the share of a core that the driver takes for the heartbeats of ranks that just train
results    from the moment all ranks deliver until `run` returns them, agents dismissed
abort      from one rank's failure until all the others have ended and the error is raised

Each phase is given twice, in milliseconds per rank: by the clock, and what the driver's threads took of the
processor. Driver and agents share the machine's cores, so the agents' own work is part of the former, and not of the
latter. Where a phase grows in proportion to the number of ranks, both are the same in every row.

Then a thousand workers with eight GPUs each are given their ranks: how long that takes. And a real rank on this node
logs as fast as it can, by its agent to the driver and there to the Deck and a terminal: how much memory the driver has
after a tenth of the records, and after all.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from figures import Figure, Goal, reported
from launch import machine
from running import Program, nothing_left

PHASES = ("start", "form", "results", "abort")
Seconds = tuple[float, float]
"""Of the clock, and of processor time that the driver took."""
LARGE = 10_000
"""The number of ranks for which there are goals."""
NUM_WORKERS, NUM_GPUS = 1_000, 8
"""That are given their ranks, so many each."""
NUM_PLACEMENTS = 7
LIVE_SECONDS = 4.0
TIME_LIMIT = 900.0
"""Seconds for one gang."""

SETUP = """
import json
import os
import resource
import sys
import time
from flytekitplugins.daskpytorch.protocol.messages import *

resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

def addresses(count):
    return [f"tcp://10.{index >> 16}.{index >> 8 & 255}.{index & 255}:8786" for index in range(count)]
"""

AGENTS = f"""{SETUP}
import pickle
import random
import selectors
from flytekitplugins.daskpytorch.goodput import RankUsage
from flytekitplugins.daskpytorch.node.agent import HEARTBEAT_INTERVAL, dial, heartbeat_interval
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.protocol import heartbeat, orders, reports
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.placement import Node
from flytekitplugins.daskpytorch.rank.usage import INTERVAL, MAX_SAMPLES

class Agent:
    def __init__(self, order):
        self.num_moves = {{}}
        node = {{"worker": order.worker, "host": order.worker, "num_cores": 1, "gpus": (), "gpu_names": ()}}
        self.connection = dial(order)
        self.connection.send(Hello(Node(**node, interface=None, versions=versions), ("127.0.0.1", 1)))
        poll.register(self.connection, selectors.EVENT_READ, self.hear)

    def hear(self):
        match self.connection.recv():
            case Start(job, _, places):
                global interval
                interval = heartbeat_interval(places[0], job.pulse)
                self.usage_interval = max(INTERVAL, places[0].world_size / MAX_SAMPLES)
                self.usage_at = time.monotonic() + random.random() * self.usage_interval
                self.num_moves = {{place.rank: 0 for place in places}}
                for rank in self.num_moves:
                    self.report(rank, reports.Ready())
            case Tell(orders.Leave()):
                self.exit(self.num_moves, 0)
            case Stop():
                self.exit(self.num_moves, -9, stopped=True)
            case Close():
                agents.remove(self)
                poll.unregister(self.connection)
                self.connection.close()

    def live(self):
        self.num_moves = {{rank: count + 1 for rank, count in self.num_moves.items()}}
        self.connection.send_frame(heartbeat.packed(self.num_moves))
        if self.num_moves and time.monotonic() >= self.usage_at:
            self.usage_at += self.usage_interval
            for rank, count in self.num_moves.items():
                told = {{"rank": rank, "num_steps": count, "seconds": {{"stepping": 1.0, "data": 0.1}}, "cpu": 1.0}}
                usage = RankUsage(**told, time=time.time(), memory=1 << 30, gpu_memory=None, gpu_utilization=None)
                self.report(rank, reports.Used(usage))

    def report(self, rank, report):
        self.connection.send(Reported(rank, pickle.dumps(report)))

    def deliver(self):
        for rank in self.num_moves:
            self.report(rank, reports.Returned(os.urandom(1024)))

    def fail(self):
        happened = {{"type_name": "ValueError", "message": "told to", "traceback": "", "pickled": None}}
        rank = min(self.num_moves)
        self.report(rank, Failure(**happened, time=time.time(), is_consequence=False))
        self.exit([rank], 1)

    def exit(self, ranks, code, stopped=False):
        for rank in list(ranks):
            self.connection.send(Exited(rank, code, stopped, False, "", time.time()))
            del self.num_moves[rank]

def follow():
    global interval
    match json.loads(commands.readline() or '["end"]'):
        case ["end"]:
            sys.exit()
        case ["launch", count, host, port, token]:
            for address in addresses(count):
                order = {{"worker": address, "driver": (host, port), "token": bytes.fromhex(token)}}
                agents.append(Agent(AgentOrder(num_ranks=1, **order)))
            interval = HEARTBEAT_INTERVAL
        case ["deliver"]:
            for agent in agents:
                agent.deliver()
        case ["fail"]:
            agents[len(agents) // 2].fail()

versions = local_versions()
agents = []
interval = HEARTBEAT_INTERVAL
commands = os.fdopen(0, "rb", buffering=0)
poll = selectors.DefaultSelector()
poll.register(commands, selectors.EVENT_READ, follow)
turn, due = 0, time.monotonic()
while True:
    for key, _ in poll.select(max(0.0, due - time.monotonic())):
        key.data()
    while agents and time.monotonic() >= due:
        agents[turn % len(agents)].live()
        turn, due = turn + 1, due + interval / len(agents)
    due = max(due, time.monotonic() - interval) if agents else time.monotonic() + interval
"""

DRIVER = f"""{SETUP}
import subprocess
import threading
import psutil
import torch.distributed
from rich.console import Console
from flytekitplugins.daskpytorch import Gang, current_rank
from flytekitplugins.daskpytorch.display.deck import Recorder
from flytekitplugins.daskpytorch.display.terminal import ProgressDisplay
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.own_node import OwnNode
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.protocol.placement import Node, choose_backend, place_ranks, worker_order

class Agents:
    def start(self):
        self.process = subprocess.Popen([sys.executable, "agents.py"], stdin=subprocess.PIPE)

    def tell(self, *command):
        self.process.stdin.write(json.dumps(command).encode() + b"\\n")
        self.process.stdin.flush()

class Launcher:
    host = "127.0.0.1"

    def __init__(self, count):
        self.workers = addresses(count)
        self.num_wanted = count

    def launch(self, orders, on_failure):
        if orders:
            agents.tell("launch", len(orders), *orders[0].driver, orders[0].token.hex())

    def present(self):
        return self.workers

    def hindrance(self):
        return ""

    def is_connected(self):
        return True

    def close(self):
        pass

def now():
    return time.monotonic(), time.process_time()

class Times(Observer):
    def __init__(self):
        self.has_formed = threading.Event()

    def placed(self, shape):
        self.placed_at = now()

    def formed(self, seconds):
        self.formed_at = now()
        self.has_formed.set()

def run(num_ranks, per_agent, ending):
    times = Times()
    settings = Gang(ranks_per_worker=per_agent, max_restarts=0, hang_timeout=60, start_timeout={TIME_LIMIT})
    launcher = Launcher(num_ranks // per_agent)
    supervisor = Supervisor(request_for(print, [], {{}}, settings), launcher, [times, Recorder("scale")])

    def end():
        times.has_formed.wait()
        time.sleep({LIVE_SECONDS})
        times.told_at = now()
        agents.tell(ending)

    threading.Thread(target=end, daemon=True).start()
    began_at = now()
    try:
        what = f"{{len(supervisor.run())}} results"
    except ValueError as error:
        what = str(error)
    ended_at = now()
    assert what == {{"deliver": f"{{num_ranks}} results", "fail": "told to"}}[ending], what
    phases = ["start", "form", "live", "results" if ending == "deliver" else "abort"]
    moments = [began_at, times.placed_at, times.formed_at, times.told_at, ended_at]
    spans = zip(moments, moments[1:])
    return {{phase: [b - a for a, b in zip(*span)] for phase, span in zip(phases, spans, strict=True)}}

def place(num_workers, num_gpus):
    gpus = tuple(map(str, range(num_gpus)))
    what = {{"num_cores": 64, "gpus": gpus, "gpu_names": gpus, "interface": None, "versions": {{}}}}
    nodes = [Node(worker=address, host=address, **what) for address in reversed(addresses(num_workers))]
    began_at = time.perf_counter()
    nodes.sort(key=lambda node: worker_order(node.worker))
    places = place_ranks(nodes, num_gpus)
    assert choose_backend("auto", nodes, places) == "nccl"
    return time.perf_counter() - began_at

def log_records(count):
    for step in range(count):
        current_rank().log({{"loss": 1 / (1 + step), "accuracy": 0.5, "epoch": step // 10_000}}, step=step)

class Memory(Observer):
    def __init__(self, *moments):
        self.moments, self.count, self.found = moments, 0, []

    def logged(self, record):
        self.count += 1
        if self.count in self.moments:
            self.found.append([psutil.Process().memory_info().rss, *now()])

def log(count):
    memory = Memory(count // 10, count)
    screen = Console(file=open(os.devnull, "w"), force_terminal=True, width=120)
    observers = [Recorder("log"), ProgressDisplay(screen, "log"), memory]
    Supervisor(request_for(log_records, [count], {{}}, Gang()), OwnNode(), observers).run()
    return memory.found

if __name__ == "__main__":
    agents = Agents()
    agents.start()
    print("@ready", flush=True)
    for line in sys.stdin:
        what, *how = json.loads(line)
        print("@done", json.dumps(globals()[what](*how)), flush=True)
"""


@dataclass(frozen=True)
class Size:
    """Of a gang."""

    num_ranks: int
    per_agent: int

    def __str__(self) -> str:
        """As rows name it."""
        return f"{self.num_ranks} simulated ranks" + (f", {self.per_agent} per agent" if self.per_agent > 1 else "")


Taken = dict[Size, dict[str, list[Seconds]]]


def told(driver: Program, *order: object) -> Any:
    """What the driver finds when it is told to do something."""
    driver.tell(json.dumps(order))
    return json.loads(driver.hear("done", TIME_LIMIT))


def measure(driver: Program, sizes: Sequence[Size], rounds: int) -> Taken:
    """For each size and phase, what every gang took."""
    taken: Taken = {size: {} for size in sizes}
    for number in range(1, rounds + 1):
        for size in sizes:
            for ending in ("deliver", "fail"):
                times = told(driver, "run", size.num_ranks, size.per_agent, ending)
                for phase, seconds in times.items():
                    taken[size].setdefault(phase, []).append(seconds)
                shown = ", ".join(f"{phase} {clock:.2f} ({own:.2f})" for phase, (clock, own) in times.items())
                print(f"round {number}: {size}, {shown}", file=sys.stderr)
    return taken


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500, 1000, 2000, LARGE], help="numbers of ranks")
    parser.add_argument("--ranks-per-agent", type=int, nargs="+", default=[1, 8], help="of the largest size")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--records", type=int, default=1_000_000, help="that a rank logs (default: 1,000,000)")
    parser.add_argument("--quick", action="store_true", help="small gangs")
    asked = parser.parse_args()
    if asked.quick:
        asked.sizes, asked.rounds, asked.records = [48], 1, 20_000
    sizes = [Size(count, 1) for count in asked.sizes]
    sizes += [Size(max(asked.sizes), per_agent) for per_agent in asked.ranks_per_agent if per_agent > 1]
    with nothing_left("scale") as folder:
        (folder / "driver").mkdir()
        (folder / "driver" / "agents.py").write_text(AGENTS)
        driver = Program.of(DRIVER, folder / "driver")
        driver.hear("ready")
        measure(driver, [Size(8, 1)], 1)  # imports what is imported late
        placements = [told(driver, "place", NUM_WORKERS, NUM_GPUS) for _ in range(NUM_PLACEMENTS)]
        memory = told(driver, "log", asked.records)
        print(f"placed in {spread(placements)} s; memory, clock and processor by records: {memory}", file=sys.stderr)
        taken = measure(driver, sizes, asked.rounds)
    print(machine())
    print(f"| ranks | per agent | {' | '.join(f'{phase}, ms per rank: clock; driver' for phase in PHASES)} | live |")
    print(f"|{'---|' * (len(PHASES) + 3)}")
    for size, phases in taken.items():
        cells = [
            "; ".join(spread(1000 * each / size.num_ranks for each in part) for part in zip(*phases[it], strict=True))
            for it in PHASES
        ]
        live = statistics.median(own / clock for clock, own in phases["live"])
        print(f"| {size.num_ranks} | {size.per_agent} | {' | '.join(cells)} | {100 * live:.1f} % |")
    print("", *reported([*of_gangs(taken), of_placement(placements), *of_records(asked.records, memory)]), sep="\n")


def of_gangs(taken: Taken) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    for size, phases in taken.items():
        starts = [clock for clock, _ in phases["start"]]
        yield Figure(what=f"{size}, the driver: from the call to the last order", here=starts)
        live = [100 * own / clock for clock, own in phases["live"]]
        goals = [Goal(bound=20, of="here", at_most=True)] if size.num_ranks >= LARGE else []
        yield Figure(what=f"{size}, the driver: of one core for heartbeats", here=live, unit="%", goals=goals)
    first, *others = [size for size in taken if size.per_agent == 1]
    if others:
        yield Figure.beside(
            what=f"{others[-1]}, the driver: processor time per rank for forming, results and abort",
            here=per_rank(others[-1], taken[others[-1]]),
            peer=f"{first.num_ranks} ranks",
            theirs=per_rank(first, taken[first]),
            unit="ms",
            share=True,
            goals=[Goal(bound=1.25, at_most=True)],
        )


def per_rank(size: Size, phases: dict[str, list[Seconds]]) -> list[float]:
    """By round, milliseconds of the driver's processor time in all phases that end."""
    starts, forms = (
        [statistics.mean(pair) for pair in zip(it[::2], it[1::2], strict=True)]  # of two gangs in each round
        for it in ([own for _, own in phases[phase]] for phase in ("start", "form"))
    )
    results, aborts = ([own for _, own in phases[phase]] for phase in ("results", "abort"))
    return [1000 * sum(each) / size.num_ranks for each in zip(starts, forms, results, aborts, strict=True)]


def of_placement(seconds: Sequence[float]) -> Figure:
    """How long it takes to say who gets which rank."""
    return Figure(
        what=f"{NUM_WORKERS * NUM_GPUS:,} ranks placed on {NUM_WORKERS:,} workers of {NUM_GPUS} GPUs",
        here=[1000 * each for each in seconds],
        unit="ms",
        goals=[Goal(bound=100, of="here", at_most=True)],
    )


def of_records(count: int, memory: Sequence[tuple[float, float, float]]) -> Iterator[Figure]:
    """What becomes of a driver to which a rank logs without end."""
    (before, began_at, _), (after, ended_at, _) = memory
    yield Figure(
        what=f"{count:,} log records: the driver's memory, more than after {count // 10:,}",
        here=[(after - before) / (1 << 20)],
        unit="MiB",
        goals=[Goal(bound=5, of="here", at_most=True)],
    )
    rate = 0.9 * count / (ended_at - began_at)
    yield Figure(what="log records of one rank that the driver shows per second", here=[rate], unit="records/s")


def spread(values: Iterable[float]) -> str:
    """Median, least and greatest."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f}–{ordered[-1]:.2f})"


if __name__ == "__main__":
    main()
