"""Measure the driver's cost for gangs of 1,000 ranks on one machine.

    python benchmarks/scale.py                            # 1,000 ranks, three rounds, a minute
    python benchmarks/scale.py --sizes 500 1000 5000 --per-agent 8
    python benchmarks/scale.py --quick                    # small gangs, as a trial

The driver is the real one, with the Deck's observer. One process without torch simulates its agents. The agents connect
and authenticate, take their orders, send heartbeats and the ranks' states and usage at the usual rates, deliver or
fail, and clean up. Messages and connections are real. Each round has two gangs of every size: one delivers 1 KiB per
rank, and in the other a rank fails.

start      from the call to the last order: agents connect, ranks are placed, and each agent gets its order
form       from then until the driver knows that all ranks have met
live       share of a core that the driver spends on the heartbeats of ranks that just train
results    from the delivery by all ranks until `run` returns, agents dismissed
abort      from one rank's failure until all other ranks have ended and the error is raised

The output has the wall time of each phase and the processor time of the driver's threads. Driver and agents share the
machine's cores, so the wall time includes the agents' work. If a phase grows in proportion to the number of ranks, its
processor time per rank is the same for all sizes.

This process imports only the standard library. Other processes run the measured programs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from figures import Figure, at_most, report
from running import SERVE, Program, asked, nothing_left

Seconds = tuple[float, float]
"""Seconds of wall time, and of the driver's processor time."""
LIVE_SECONDS = 4.0
TIME_LIMIT = 900.0
"""Timeout for one gang, in seconds."""

SETUP = """
import json
import os
import resource
import sys
import time
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.messages import *

resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

def addresses(count):
    return [f"tcp://10.{index >> 16}.{index >> 8 & 255}.{index & 255}:8786" for index in range(count)]
"""

AGENTS = f"""{SETUP}
import pickle
import random
import selectors
from flytekitplugins.daskpytorch.records import RankUsage
from flytekitplugins.daskpytorch.node.agent import HEARTBEAT_INTERVAL, dial, heartbeat_interval
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit
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
                    self.report(rank, messages.Ready())
            case Tell(messages.Leave()):
                self.exit(self.num_moves, 0)
            case Stop():
                self.exit(self.num_moves, -9, stopped=True)
            case Close():
                agents.remove(self)
                poll.unregister(self.connection)
                self.connection.close()

    def live(self):
        self.num_moves = {{rank: count + 1 for rank, count in self.num_moves.items()}}
        self.connection.send(messages.Beat(self.num_moves))
        if self.num_moves and time.monotonic() >= self.usage_at:
            self.usage_at += self.usage_interval
            for rank, count in self.num_moves.items():
                told = {{"rank": rank, "num_steps": count, "seconds": {{"stepping": 1.0, "data": 0.1}}, "cpu": 1.0}}
                usage = RankUsage(**told, time=time.time(), memory=1 << 30, gpu_memory=None, gpu_utilization=None)
                self.report(rank, usage)

    def report(self, rank, report):
        self.connection.send(Reported(rank, pickle.dumps(report)))

    def deliver(self):
        for rank in self.num_moves:
            self.report(rank, messages.Returned(os.urandom(1024)))

    def fail(self):
        happened = {{"type_name": "ValueError", "message": "told to", "traceback": "", "pickled": None}}
        rank = min(self.num_moves)
        self.report(rank, Failure(**happened, time=time.time(), is_consequence=False))
        self.exit([rank], 1)

    def exit(self, ranks, code, stopped=False):
        for rank in list(ranks):
            self.connection.send(RankExit(rank=rank, exitcode=code, stopped=stopped))
            del self.num_moves[rank]

def follow():
    global interval
    match json.loads(commands.readline() or '["end"]'):
        case ["end"]:
            sys.exit()
        case ["launch", count, host, port, token]:
            for address in addresses(count):
                order = {{"worker": address, "driver": (host, port), "token": bytes.fromhex(token)}}
                agents.append(Agent(AgentOrder(**order)))
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

DRIVER = f"""{SETUP}{SERVE}
import subprocess
import threading
from dataclasses import replace
from flytekitplugins.daskpytorch import Gang, GangError
from flytekitplugins.daskpytorch.display.run_state import RunState
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.protocol.observer import Observer

class Agents:
    def start(self):
        self.process = subprocess.Popen([sys.executable, "agents.py"], stdin=subprocess.PIPE)

    def tell(self, *command):
        self.process.stdin.write(json.dumps(command).encode() + b"\\n")
        self.process.stdin.flush()

class Launcher:
    host = "127.0.0.1"
    scheduler = None

    def __init__(self, count):
        self.workers = addresses(count)
        self.num_wanted = count

    def launch(self, orders, on_failure):
        if orders:
            agents.tell("launch", len(orders), *orders[0].driver, orders[0].token.hex())

    def present(self):
        return self.workers

    def title(self, worker):
        return worker

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

    def on_start(self, shape):
        self.placed_at = now()

    def on_formed(self, seconds):
        self.formed_at = now()
        self.has_formed.set()

def run(num_ranks, per_agent, ending):
    times = Times()
    settings = Gang(ranks_per_worker=per_agent, max_restarts=0, hang_timeout=60, start_timeout={TIME_LIMIT})
    launcher = Launcher(num_ranks // per_agent)
    request = replace(request_for(print, [], {{}}, settings), observers=[times, RunState(name="scale")])
    supervisor = Supervisor(request, launcher)

    def end():
        times.has_formed.wait()
        time.sleep({LIVE_SECONDS})
        times.told_at = now()
        agents.tell(ending)

    threading.Thread(target=end, daemon=True).start()
    began_at = now()
    try:
        what = f"{{len(supervisor.run())}} results"
    except GangError as error:
        what = str(error)
    ended_at = now()
    assert {{"deliver": f"{{num_ranks}} results", "fail": "told to"}}[ending] in what, what
    phases = ["start", "form", "live", "results" if ending == "deliver" else "abort"]
    moments = [began_at, times.placed_at, times.formed_at, times.told_at, ended_at]
    spans = zip(moments, moments[1:])
    return {{phase: [b - a for a, b in zip(*span)] for phase, span in zip(phases, spans, strict=True)}}

if __name__ == "__main__":
    agents = Agents()
    agents.start()
    serve(run)
"""


@dataclass(frozen=True)
class Size:
    """Size of a gang."""

    num_ranks: int
    per_agent: int

    def __str__(self) -> str:
        """Return the size in the words of the rows."""
        return f"{self.num_ranks} simulated ranks" + (f", {self.per_agent} per agent" if self.per_agent > 1 else "")


Taken = dict[Size, dict[str, list[Seconds]]]


def measure(driver: Program, sizes: Sequence[Size], rounds: int) -> Taken:
    """Return the times of every gang, by size and phase."""
    taken: Taken = {size: {} for size in sizes}
    for number in range(1, rounds + 1):
        for size in sizes:
            for ending in ("deliver", "fail"):
                times = driver.call(size.num_ranks, size.per_agent, ending, timeout=TIME_LIMIT)
                for phase, seconds in times.items():
                    taken[size].setdefault(phase, []).append(seconds)
                shown = ", ".join(f"{phase} {clock:.2f} ({own:.2f})" for phase, (clock, own) in times.items())
                print(f"round {number}: {size}, {shown}", file=sys.stderr)
    return taken


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(
        __doc__,
        rounds=(3, 1, "rounds that count"),
        sizes=([1_000], [48], "numbers of ranks"),
        per_agent=(1, 1, "ranks of an agent"),
    )
    sizes = [Size(count, arguments.per_agent) for count in arguments.sizes]
    with nothing_left("scale") as folder:
        (folder / "driver").mkdir()
        (folder / "driver" / "agents.py").write_text(AGENTS)
        driver = Program.serving(DRIVER, folder / "driver")
        measure(driver, [Size(8, 1)], 1)  # loads late imports
        taken = measure(driver, sizes, arguments.rounds)
    report(of_gangs(taken), arguments.on)


def of_gangs(taken: Taken) -> Iterator[Figure]:
    """Yield the row of each gang."""
    for size, phases in taken.items():
        live = [100 * own / clock for clock, own in phases["live"]]
        yield Figure(
            what=f"{size}, the driver: of one core for heartbeats", here=live, unit="%", goals=at_most(5, "here")
        )


if __name__ == "__main__":
    main()
