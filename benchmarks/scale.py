"""What a gang costs its driver as it grows: gangs of up to 2,000 ranks, on one machine.

    python benchmarks/scale.py                            # four sizes, three rounds, some four minutes
    python benchmarks/scale.py --sizes 100 10000          # sizes of your own
    python benchmarks/scale.py --quick                    # one small gang: does it still run?

The driver is the real one. Its agents are simulated, one rank each, all in one process without torch: they dial in,
prove who they are, take their orders, beat and say that their rank moves every second, deliver or fail, and clean up,
in the real ones' messages over real connections. Each round has one gang of every size that delivers 1 KiB per rank,
and one in which a rank fails.

start      from the call to the last order: the agents dial in, the ranks are placed, each agent gets its order
form       from there until the driver knows that all ranks have met
live       the share of a core that the driver takes for the signs of life of ranks that just train
results    from the moment all ranks deliver until `run` returns them, agents dismissed
abort      from one rank's failure until all the others have ended and the error is raised

Each phase is given twice, in milliseconds per rank: by the clock, and what the driver's threads took of the
processor. Driver and agents share the machine's cores, so the agents' own work is part of the former, and not of the
latter. Where a phase grows in proportion to the number of ranks, both are the same in every row.

This process imports nothing but the standard library; what is measured runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator

from figures import Figure, Goal, reported
from launch import machine
from running import Program, nothing_left

PHASES = ("start", "form", "results", "abort")
Seconds = tuple[float, float]
"""Of the clock, and of processor time that the driver took."""
LARGE = 10_000
"""The number of ranks for which there are goals."""
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
import selectors
from flytekitplugins.daskpytorch.node.agent import HEARTBEAT_INTERVAL, dial
from flytekitplugins.daskpytorch.protocol import orders, reports
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.protocol.placement import Node

class Agent:
    rank = None
    num_moves = 0

    def __init__(self, order):
        node = {{"worker": order.worker, "host": order.worker, "num_cores": 1, "gpus": (), "gpu_names": ()}}
        self.connection = dial(order)
        self.connection.send(Hello(Node(**node, interface=None, versions=versions)))
        poll.register(self.connection, selectors.EVENT_READ, self.hear)

    def hear(self):
        match self.connection.recv():
            case Start(places=[place]):
                self.rank = place.rank
                self.report(reports.Ready())
            case Tell(orders.Leave()):
                self.exit(0)
            case Stop() if self.rank is not None:
                self.exit(-9, stopped=True)
            case Close():
                agents.remove(self)
                poll.unregister(self.connection)
                self.connection.close()

    def live(self):
        self.connection.send(Heartbeat())
        if self.rank is not None:
            self.num_moves += 1
            self.report(reports.Moved(self.num_moves))

    def report(self, report):
        self.connection.send(Reported(self.rank, pickle.dumps(report)))

    def fail(self):
        happened = {{"type_name": "ValueError", "message": "told to", "traceback": "", "pickled": None}}
        self.report(Failure(**happened, time=time.time(), is_consequence=False))
        self.exit(1)

    def exit(self, code, stopped=False):
        self.connection.send(Exited(self.rank, code, stopped, False, "", time.time()))
        self.rank = None

def follow():
    match json.loads(commands.readline() or '["end"]'):
        case ["end"]:
            sys.exit()
        case ["launch", count, host, port, token]:
            for address in addresses(count):
                order = {{"worker": address, "driver": (host, port), "token": bytes.fromhex(token)}}
                agents.append(Agent(AgentOrder(num_ranks=1, **order)))
        case ["deliver"]:
            for agent in agents:
                agent.report(reports.Returned(os.urandom(1024)))
        case ["fail"]:
            agents[len(agents) // 2].fail()

versions = local_versions()
agents = []
commands = os.fdopen(0, "rb", buffering=0)
poll = selectors.DefaultSelector()
poll.register(commands, selectors.EVENT_READ, follow)
turn, due = 0, time.monotonic()
while True:
    for key, _ in poll.select(max(0.0, due - time.monotonic())):
        key.data()
    while agents and time.monotonic() >= due:
        agents[turn % len(agents)].live()
        turn, due = turn + 1, due + HEARTBEAT_INTERVAL / len(agents)
    due = max(due, time.monotonic() - HEARTBEAT_INTERVAL) if agents else time.monotonic() + HEARTBEAT_INTERVAL
"""

DRIVER = f"""{SETUP}
import subprocess
import threading
import torch.distributed
from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.protocol.observer import Observer

agents = subprocess.Popen([sys.executable, "agents.py"], stdin=subprocess.PIPE)

def tell(*command):
    agents.stdin.write(json.dumps(command).encode() + b"\\n")
    agents.stdin.flush()

class Launcher:
    host = "127.0.0.1"

    def __init__(self, count):
        self.workers = addresses(count)
        self.num_wanted = count

    def launch(self, orders, on_failure):
        if orders:
            tell("launch", len(orders), *orders[0].driver, orders[0].token.hex())

    def present(self):
        return self.workers

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

def run(count, ending):
    times = Times()
    settings = Gang(max_restarts=0, hang_timeout=60, start_timeout={TIME_LIMIT})
    supervisor = Supervisor(request_for(print, [], {{}}, settings), Launcher(count), [times])

    def end():
        times.has_formed.wait()
        time.sleep({LIVE_SECONDS})
        times.told_at = now()
        tell(ending)

    threading.Thread(target=end, daemon=True).start()
    began_at = now()
    try:
        what = f"{{len(supervisor.run())}} results"
    except ValueError as error:
        what = str(error)
    ended_at = now()
    assert what == {{"deliver": f"{{count}} results", "fail": "told to"}}[ending]
    phases = ["start", "form", "live", "results" if ending == "deliver" else "abort"]
    moments = [began_at, times.placed_at, times.formed_at, times.told_at, ended_at]
    spans = zip(moments, moments[1:])
    return {{phase: [b - a for a, b in zip(*span)] for phase, span in zip(phases, spans, strict=True)}}

print("@ready", flush=True)
for line in sys.stdin:
    print("@done", json.dumps(run(*json.loads(line))), flush=True)
"""


def measure(driver: Program, sizes: list[int], rounds: int) -> dict[int, dict[str, list[Seconds]]]:
    """For each size and phase, what every gang took."""
    taken: dict[int, dict[str, list[Seconds]]] = {size: {} for size in sizes}
    for number in range(1, rounds + 1):
        for size in sizes:
            for ending in ("deliver", "fail"):
                driver.tell(json.dumps([size, ending]))
                times = json.loads(driver.hear("done", TIME_LIMIT))
                for phase, seconds in times.items():
                    taken[size].setdefault(phase, []).append(seconds)
                shown = ", ".join(f"{phase} {clock:.2f} ({own:.2f})" for phase, (clock, own) in times.items())
                print(f"round {number}: {size} ranks, {shown}", file=sys.stderr)
    return taken


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[250, 500, 1000, 2000], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one small gang")
    asked = parser.parse_args()
    if asked.quick:
        asked.sizes, asked.rounds = [50], 1
    with nothing_left("scale") as folder:
        (folder / "driver").mkdir()
        (folder / "driver" / "agents.py").write_text(AGENTS)
        driver = Program.of(DRIVER, folder / "driver")
        driver.hear("ready")
        measure(driver, [10], 1)  # imports what is imported late
        taken = measure(driver, asked.sizes, asked.rounds)
    print(machine())
    print(f"| ranks | {' | '.join(f'{phase}, ms per rank: clock; driver' for phase in PHASES)} | live |")
    print(f"|{'---|' * (len(PHASES) + 2)}")
    for size, phases in taken.items():
        cells = [
            "; ".join(spread(1000 * each / size for each in part) for part in zip(*phases[it], strict=True))
            for it in PHASES
        ]
        live = statistics.median(own / clock for clock, own in phases["live"])
        print(f"| {size} | {' | '.join(cells)} | {100 * live:.0f} % |")
    print("", *reported(figures(taken)), sep="\n")


def figures(taken: dict[int, dict[str, list[Seconds]]]) -> Iterator[Figure]:
    """What was to be reached, and what was."""
    for size, phases in taken.items():
        starts = [clock for clock, _ in phases["start"]]
        yield Figure(what=f"{size} simulated ranks, the driver: from the call to the last order", here=starts)
        live = [100 * own / clock for clock, own in phases["live"]]
        what = f"{size} simulated ranks, the driver: of one core for heartbeats"
        goals = [Goal(bound=20, of="here", at_most=True)] if size >= LARGE else []
        yield Figure(what=what, here=live, unit="%", goals=goals)


def spread(values: Iterable[float]) -> str:
    """Median, least and greatest."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f}–{ordered[-1]:.2f})"


if __name__ == "__main__":
    main()
