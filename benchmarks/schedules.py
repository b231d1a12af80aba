"""Disturb gangs by random schedules of faults, and observe their behaviour.

`chaos.py` is the command. Each schedule has its own driver, which trains on real Dask processes. A cluster that no
fault has hit also serves the next schedule. `verdicts.py` draws the schedules and judges the results.

The training is exact. Each step adds up integers over all ranks, so the result depends only on the number of steps. The
ranks and the number of restarts have no effect. A training continues until the order to finish, so that every fault
finds a gang to disturb.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from running import (
    Cluster,
    Program,
    children_of,
    entries,
    family,
    is_running,
    kill,
    parent_of,
    read,
    started_here,
    state_of,
    worker_below,
    worker_of,
)
from verdicts import (
    GRACE_AFTER_DRIVER,
    MAX_MEMORY_GROWTH,
    PRIME,
    SAMPLES,
    TAIL,
    Fault,
    Made,
    Note,
    Outage,
    Schedule,
    Story,
    expected,
    judge,
    must_end,
)

PACE = 0.03
"""Duration of a step, in seconds."""
PATIENCE = 75.0
"""Default timeout of a schedule in seconds, longer than all regular waits."""
SETTLE_TIME = 12.0
"""Timeout in seconds for the disappearance of processes, folders, descriptors and threads."""
PROGRESS = 3
"""Number of steps that every rank takes before a gang counts as trained again."""

DRIVER = f"""
import gc, json, os, signal, sys, threading, time
from distributed import Client
from flytekitplugins.daskpytorch import Gang, Observer, current_rank, dispatch

def train(folder, pace, save_interval, ballast, saves_shards):
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    rank = current_rank()
    checkpoint = rank.checkpoint
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    state = checkpoint.load() or {{"step": 0, "value": 0, "last": None}}
    step, value, last = state["step"], state["value"], state["last"]
    shards = torch.zeros(2, dtype=torch.int64)
    if saves_shards and checkpoint.load_sharded({{"shards": shards}}) is not None:
        assert shards[1] == expected(int(shards[0])), f"wrong shards: {{shards}}"
    notes = open(os.path.join(folder, f"rank-{{rank.rank}}"), "a", buffering=1)

    def note(kind):
        notes.write(f"{{attempt}} {{kind}} {{step}} {{time.time()!r}} {{os.getpid()}}\\n")

    def save():
        note("save")
        padding = torch.full((ballast << 17,), step, dtype=torch.int64)
        checkpoint.save({{"step": step, "value": value, "last": last, "padding": padding}}, step)
        if saves_shards:
            checkpoint.save_sharded({{"shards": torch.tensor([step, value])}}, step)

    note("start")
    while step != last:
        step += 1
        time.sleep(pace)
        samples = range(rank.rank, {SAMPLES}, rank.world_size)
        total = sum((step * 7919 + sample * 104729) % 65536 for sample in samples)
        is_last_call = rank.is_main and os.path.exists(os.path.join(folder, "finish"))
        sums = torch.tensor([total, int(is_last_call)])
        distributed.all_reduce(sums)
        value = (value * 31 + int(sums[0])) % {PRIME}
        if last is None and sums[1]:
            last = step + {TAIL}
        note("step")
        rank.log({{"value": value}}, step=step)
        if rank.should_stop():
            save()
            note("stopped")
            return [step, value]
        if step % save_interval == 0:
            save()
    note("returning")
    time.sleep(0.25 if rank.is_main else 0.1)
    return [step, value]

def expected(steps):
    value = 0
    for step in range(1, steps + 1):
        total = sum((step * 7919 + sample * 104729) % 65536 for sample in range({SAMPLES}))
        value = (value * 31 + total) % {PRIME}
    return value

class Watcher(Observer):
    def __init__(self, folder):
        self._events = open(os.path.join(folder, "events"), "a", buffering=1)

    def _write(self, kind, **what):
        self._events.write(json.dumps({{"kind": kind, "at": time.time(), **what}}) + "\\n")

    def on_start(self, shape):
        workers = [node.worker for node, here in zip(shape.nodes, shape.places) for _ in here]
        self._write("placed", workers=workers)

    def on_formed(self, seconds):
        self._write("formed", seconds=seconds)

    def on_checkpoint(self, step):
        self._write("kept", step=step)

    def on_restart(self, reason, step):
        self._write("restarting", text=reason, step=step)

    def on_note(self, text):
        self._write("noted", text=text)

    def on_end(self, error):
        self._write("ended", text=f"{{type(error).__name__}}: {{error}}" if error else "")
        self._events.close()

def say(word, what=None):
    print(f"@{{word}}", json.dumps(what), flush=True)

def heed(*_):
    from flytekitplugins.daskpytorch.protocol.host import preempt_all

    preempt_all("the task was told to end (SIGTERM)")

def main(settings):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
    folder = settings["folder"]
    client = Client(scheduler_file=settings["cluster"])
    if settings["is_warm"]:
        for _ in range(2):
            dispatch.run(client, os.getpid).result(120)
    if settings["heeds_sigterm"]:
        signal.signal(signal.SIGTERM, heed)
    gc.collect()
    say("ready")
    sys.stdin.readline()
    gang = Gang(**settings["gang"], observers=(lambda: Watcher(folder),))
    results, outcome, message = [], "finished", ""
    try:
        futures = dispatch.run(client, train, folder, *settings["train"], gang=gang)
        say("launched")
        results = futures.result()
    except Exception as error:
        outcome, message = type(error).__name__, str(error)
    say("outcome", [outcome, message, results])
    futures = results = None
    for line in sys.stdin:
        if line.strip() == "census":
            gc.collect()
            say("census", [thread.name for thread in threading.enumerate()])
        else:
            break
    client.close(timeout=3)
    say("closed")

if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
"""

STORE = "store"
SERVER = "daskpytorch.node.fork_server"
"""Text in the command line of a fork server, and of its ranks."""


# ---- Looking at processes -------------------------------------------------------------------------------------------


def is_server(pid: int) -> bool:
    """Return True if the process is a fork server."""
    return SERVER in read(f"/proc/{pid}/cmdline") and not is_rank(pid)


def is_rank(pid: int) -> bool:
    """Return True if the process is a rank, forked by a fork server, with or without its orders."""
    _, parent, session = state_of(pid)
    return session == pid and all(SERVER in read(f"/proc/{each}/cmdline") for each in (pid, parent))


def pod_of(nanny: int) -> list[int]:
    """Return all processes of a pod: the nanny, its worker, the fork server and the ranks."""
    return family(nanny)


def addresses_of(pid: int) -> set[str]:
    """Return the addresses at which a Dask worker listens, in Dask's notation. Empty if the worker is gone."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {f"tcp://127.0.0.1:{it.laddr.port}" for it in connections if it.status == psutil.CONN_LISTEN}


def census_of(pid: int) -> dict[str, int]:
    """Return a process's descriptors by kind, its number of threads, and its memory in bytes."""
    kinds: Counter[str] = Counter()
    for entry in entries(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the descriptor is closed now
            link = str(entry.readlink())
            kinds["file" if link.startswith("/") else link.partition("[")[0].rstrip(":")] += 1
    return {**kinds, "threads": len(entries(f"/proc/{pid}/task")), "memory": memory_of(pid)}


def memory_of(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    return int((read(f"/proc/{pid}/statm").split() or ["0", "0"])[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- A gang as seen from outside ------------------------------------------------------------------------------------


class LostPatienceError(Exception):
    """An expected event did not come in time."""


@dataclass
class Watched:
    """A gang with its driver and its cluster. Every wait also runs the chores that are due."""

    driver: Program
    cluster: Cluster
    folder: Path
    story: Story = field(default_factory=Story)
    num_wanted: int = 0
    chores: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Chores, each with its time on the monotonic clock: resume a process, or start a worker."""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        """Read new events and notes, and run the chores that are due."""
        now = time.monotonic()
        due = [chore for chore in self.chores if chore[0] <= now]
        self.chores = [chore for chore in self.chores if chore[0] > now]
        for _, work in due:
            work()
        self.story.events += [json.loads(line) for line in self._new_lines(self.folder / "events")]
        for path in sorted(self.folder.glob("rank-*")):
            rank = int(path.name.partition("-")[2])
            for line in self._new_lines(path):
                attempt, kind, step, at, pid = line.split()
                self.story.notes.append(Note(rank, int(attempt), kind, int(step), float(at), int(pid)))

    def _new_lines(self, path: Path) -> list[str]:
        if not path.exists():
            return []
        with path.open() as file:
            file.seek(self._offsets.get(path, 0))
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, whole))
        return whole

    def has_ended(self) -> bool:
        """Return True if the driver has reported its outcome, or has ended."""
        return self.driver.has_spoken()

    def wait(self, condition: Callable[[], object], what: str, patience: float = PATIENCE) -> bool:
        """Wait for a condition, and return True if it came before the gang's end.

        Raises:
            LostPatienceError: The condition did not come in time.
        """
        deadline = time.monotonic() + patience
        while True:
            self.look()
            if condition():
                return True
            if self.has_ended():
                return False
            if time.monotonic() > deadline:
                raise LostPatienceError(f"waited {patience:.0f} s for {what}")
            time.sleep(0.005)

    def pause(self, seconds: float) -> None:
        """Wait for some seconds, and read events and run chores meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.look()
            time.sleep(min(left, 0.02))

    # ---- what the gang does

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, from 0. -1 before the first."""
        return len(self.story.of_kind("placed")) - 1

    @property
    def workers(self) -> list[str]:
        """Worker of each rank of the newest attempt."""
        placed = self.story.of_kind("placed")
        return list(placed[-1]["workers"]) if placed else []

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks that have begun to train, by rank."""
        return {n.rank: n.pid for n in self.story.notes if n.attempt == self.attempt and n.kind == "start"}

    def num_steps(self, since: float = 0.0) -> int:
        """Return the least number of steps that a rank of the newest attempt has taken since this time."""
        steps = Counter(
            note.rank
            for note in self.story.notes
            if note.attempt == self.attempt and note.kind == "step" and note.at > since
        )
        return min((steps[rank] for rank in range(len(self.workers))), default=0)

    def has_newcomer(self, since: float) -> bool:
        """Return True if a worker was registered since this time."""
        return any(at > since for at in self.cluster.workers().values())

    def has_event(self, since: float, kind: str, text: str = "") -> bool:
        """Return True if the driver's observer received an event of this kind and text since this time."""
        return any(e["at"] > since and text in str(e.get("text")) for e in self.story.of_kind(kind))

    def has_note(self, since: float, kind: str) -> bool:
        """Return True if a rank wrote a note of this kind since this time."""
        return any(note.kind == kind and note.at > since for note in self.story.notes)


# ---- Making faults --------------------------------------------------------------------------------------------------


FORKED = {"rank": is_rank, "fork server": is_server}
"""Targets that do not exist from the beginning, with their checks."""


def reach(gang: Watched, fault: Fault, since: float) -> bool:
    """Wait for a fault's moment. Return False if the gang ends before."""
    match fault.moment:
        case "start":
            gang.pause(fault.delay)
        case "checkpoint":
            gang.wait(lambda: gang.num_steps(since) >= PROGRESS, "steps before a checkpoint")
            since = time.time()
        case "end":
            recovered(gang, since)
            finish(gang)
    if not gang.wait(lambda: _is_time(gang, fault, since), f"the moment of {fault}"):
        return False
    if fault.moment != "start":
        gang.pause(fault.delay)
    return not gang.has_ended()


def _is_time(gang: Watched, fault: Fault, since: float) -> bool:
    """Return True if the sign of a fault's moment is present."""
    is_of_target = FORKED.get(fault.target, bool)
    signs: dict[str, Callable[[], bool]] = {
        "start": lambda: any(map(is_of_target, started_here())),
        "first": lambda: gang.num_steps(since) >= 1,
        "middle": lambda: gang.num_steps(since) >= fault.steps,
        "checkpoint": lambda: gang.has_note(since, "save"),
        "restart": lambda: gang.has_event(since, "restarting"),
        "newcomer": lambda: gang.has_newcomer(since),
        "growth": lambda: gang.has_event(since, "restarting", "more workers"),
        "together": lambda: True,
        "end": lambda: gang.has_note(since, "returning"),
    }
    return signs[fault.moment]()


def recovered(gang: Watched, since: float) -> bool:
    """Wait until suspended processes run, lost workers are back, and all ranks train."""
    if not gang.wait(lambda: not gang.chores, "suspended processes and lost workers"):
        return False
    if gang.num_wanted and not gang.wait(lambda: len(gang.workers) >= gang.num_wanted, "the gang to be whole again"):
        return False
    return gang.wait(lambda: gang.num_steps(since) >= PROGRESS, "all ranks to train again")


def finish(gang: Watched) -> None:
    """Order the training to finish."""
    (gang.folder / "finish").touch()


@dataclass
class Victims:
    """Processes that a fault hits, with the ranks and workers that may be blamed."""

    pids: list[int]
    ranks: set[int] | None = None
    workers: set[str] | None = None


def victims_of(gang: Watched, fault: Fault) -> Victims:
    """Return the victims of a fault. Empty if they are just being replaced."""
    gang.look()
    of: dict[str, Callable[[], Victims]] = {
        "rank": lambda: _rank(gang, fault),
        "fork server": lambda: _fork_server(gang, fault),
        "scheduler": lambda: Victims([gang.cluster.scheduler]),
        "driver": lambda: Victims([gang.driver.pid]),
        "everything": lambda: Victims(started_here()),
    }
    try:
        return of.get(fault.target, lambda: _pod(gang, fault))()
    except (SystemExit, OSError):  # a nanny has no worker, or a rank has ended
        return Victims([])


def _pod(gang: Watched, fault: Fault) -> Victims:
    """Return a worker, its nanny, or both. SIGTERM to a pod hits all its processes."""
    nannies = [nanny for nanny in gang.cluster.nannies if is_running(nanny)]
    if not nannies:
        return Victims([])
    nanny = nannies[fault.victim % len(nannies)]
    worker = worker_below(nanny)
    pids = {"worker": [worker], "nanny": [nanny], "pod": [nanny, worker]}[fault.target]
    if fault.target == "pod" and fault.signum == signal.SIGTERM:
        pids = pod_of(nanny)
    workers = addresses_of(worker)
    return Victims(pids, _ranks_on(gang, workers), workers)


def _rank(gang: Watched, fault: Fault) -> Victims:
    pids = gang.pids()
    if fault.moment == "start" and not pids:
        ranks = sorted(filter(is_rank, started_here()))
        return Victims([ranks[fault.victim % len(ranks)]] if ranks else [])
    rank = sorted(pids)[fault.victim % len(pids)] if pids else 0
    if rank not in pids or not is_running(pids[rank]):
        return Victims([])
    return Victims([pids[rank]], {rank})


def _fork_server(gang: Watched, fault: Fault) -> Victims:
    pids = gang.pids()
    if not pids:
        servers = sorted(filter(is_server, started_here()))
        return Victims([servers[fault.victim % len(servers)]] if servers else [])
    rank = sorted(pids)[fault.victim % len(pids)]
    workers = addresses_of(worker_of(pids[rank]))
    server = parent_of(pids[rank])
    return Victims([server] if is_server(server) else [], _ranks_on(gang, workers), workers)


def _ranks_on(gang: Watched, workers: set[str]) -> set[int]:
    return {rank for rank, worker in enumerate(gang.workers) if worker in workers}


def make(gang: Watched, fault: Fault, is_certain: bool) -> Made | None:
    """Make the fault. Return None if the fault had no victims."""
    found = victims_of(gang, fault)
    if not found.pids:
        return None
    settled = fault.moment in ("first", "middle", "checkpoint")
    at = time.time()
    hit = [pid for pid in found.pids if kill(pid, fault.signum)]
    if not hit:
        return None
    if fault.seconds is not None:
        gang.chores.append((time.monotonic() + fault.seconds, lambda: [kill(pid, signal.SIGCONT) for pid in hit]))
    if fault.loses_pod:
        _replace_pod(gang, fault, found.pids[0])
    is_known = (settled or fault.moment == "end") and found.workers != set()  # a nanny's worker may be starting
    return Made(
        fault=fault,
        at=at,
        ranks=found.ranks if is_known else None,
        workers=found.workers if is_known else None,
        is_certain=is_certain and settled and (found.ranks is None or bool(found.ranks)),  # not a new worker
    )


def _replace_pod(gang: Watched, fault: Fault, nanny: int) -> None:
    if nanny in gang.cluster.nannies:
        gang.cluster.nannies.remove(nanny)
    if fault.comes_back is None:
        return

    def start() -> None:
        if is_running(nanny):  # Kubernetes replaces a pod only after its end
            gang.chores.append((time.monotonic() + 0.2, start))
        elif not gang.has_ended() and is_running(gang.cluster.scheduler):
            gang.cluster.start_worker()

    gang.chores.append((time.monotonic() + fault.comes_back, start))


# ---- One schedule ---------------------------------------------------------------------------------------------------


def disturb(gang: Watched, schedule: Schedule) -> None:
    """Make all faults, then order the training to finish, unless a fault has to end the gang."""
    since, faults = 0.0, schedule.faults
    for index, fault in enumerate(faults):
        if not reach(gang, fault, since):
            break
        alone = fault.moment != "together" and (index + 1 == len(faults) or faults[index + 1].moment != "together")
        made = make(gang, fault, alone)
        if made is None:
            continue
        gang.story.made.append(made)
        since = max(since, time.time() if fault.moment != "together" else since)
        gang.num_wanted = _num_wanted(schedule, gang.story.made)
        if alone and fault.moment != "end":
            _watch_recovery(gang, made, schedule)
    if any(fault.moment == "end" for fault in faults):
        return
    if any(must_end(made.fault, schedule.setting) for made in gang.story.made):
        return  # the few steps to the end could be over before the driver hears of the fault
    if recovered(gang, since):
        finish(gang)


def _watch_recovery(gang: Watched, made: Made, schedule: Schedule) -> None:
    """Measure the seconds until the gang trains again, unless the next fault comes before."""
    later = [fault for fault in schedule.faults if fault.moment in ("restart", "newcomer", "growth")]
    if later or made.fault.moment == "start":
        return
    gang.wait(lambda: gang.num_steps(made.at) >= PROGRESS, f"all ranks to train again after {made.fault}")
    made.recovery = time.time() - made.at


def _num_wanted(schedule: Schedule, made: list[Made]) -> int:
    """Return the number of ranks that the gang needs before it may finish."""
    lost = sum(one.fault.loses_pod and one.fault.comes_back is None for one in made)
    return (schedule.setting.num_workers - lost) * schedule.setting.ranks_per_worker


@dataclass
class Stage:
    """Cluster that serves one schedule after the other, as long as no fault changes it."""

    folder: Path
    cluster: Cluster | None = None
    num_workers: int = 0
    pids: list[int] = field(default_factory=list)

    def prepare(self, num_workers: int, folder: Path) -> Cluster:
        """Return a cluster with this number of workers."""
        if self.cluster is None or self.num_workers != num_workers or not self._is_as_it_was():
            self.end()
            self.cluster = Cluster(folder / "cluster", num_workers)
            self.num_workers = num_workers
            self.pids = [self.cluster.scheduler, *self.cluster.nannies, *map(worker_below, self.cluster.nannies)]
        return self.cluster

    def _is_as_it_was(self) -> bool:
        return all(map(is_running, self.pids))

    def end(self) -> list[str]:
        """Kill the cluster as in the loss of a machine. Kill and return the leftover processes."""
        if self.cluster is None:
            return []
        workers = [pid for nanny in self.cluster.nannies for pid in children_of(nanny)]
        for pid in (self.cluster.scheduler, *self.cluster.nannies, *workers):
            kill(pid)
        self.cluster = None
        settled(lambda: not started_here())
        left = [f"{pid} {command_of(pid)}" for pid in started_here()]
        for pid in started_here():
            kill(pid)
        return left


def command_of(pid: int) -> str:
    """Return a process's command, in a line."""
    return " ".join(read(f"/proc/{pid}/cmdline").replace("\0", " ").split())[:160]


def settled(condition: Callable[[], object], patience: float = SETTLE_TIME) -> bool:
    """Wait for a condition, and return True if it came in time."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def run(schedule: Schedule, stage: Stage, folder: Path) -> Story:
    """Run one schedule, and return the observations."""
    cluster = stage.prepare(schedule.setting.num_workers, folder)
    traces = folder / "traces"
    traces.mkdir(parents=True)
    setting = schedule.setting
    arguments = {
        "folder": str(traces),
        "cluster": cluster.contact,
        "is_warm": setting.is_warm,
        "heeds_sigterm": setting.heeds_sigterm,
        "train": [PACE, setting.save_interval, setting.ballast, schedule.outages is not None],
        "gang": {
            "ranks_per_worker": setting.ranks_per_worker,
            "min_workers": setting.min_workers,
            "max_restarts": setting.max_restarts,
            "hang_timeout": setting.hang_timeout,
            "start_timeout": setting.start_timeout,
            "checkpoint_uri": str(folder / STORE) if schedule.outages is not None else None,
        },
    }
    driver = Program.serving(DRIVER, folder / "driver", json.dumps(arguments))
    gang = Watched(driver, cluster, traces)
    for outage in schedule.outages or ():
        _plan(gang, outage, folder / STORE)
    before = {pid: census_of(pid) for pid in (driver.pid, *map(worker_below, cluster.nannies))}
    driver.tell("go")
    driver.hear("launched")
    try:
        disturb(gang, schedule)
        gang.wait(gang.has_ended, "the gang's end", PATIENCE + schedule.setting.start_timeout)
    except LostPatienceError as error:
        last = {note.rank: f"{note.kind} {note.step} of attempt {note.attempt}" for note in gang.story.notes}
        gang.story.troubles.append(f"{error}; ranks {last} on {gang.workers}, all workers {list(cluster.workers())}")
    _take_outcome(gang)
    if schedule.outages is not None:
        check_storage(gang.story, folder / STORE)
    check_what_is_left(gang, setting.is_warm, before)
    return gang.story


def _plan(gang: Watched, outage: Outage, store: Path) -> None:
    """Take the storage away for a while, once the gang has formed: a file stands in place of its folder."""
    away = store.with_name("away")

    def begin() -> None:
        formed = gang.story.of_kind("formed")
        if not formed and not gang.story.outcome:
            gang.chores.append((time.monotonic() + 0.1, begin))
        elif formed and time.time() < formed[0]["at"] + outage.begin:
            gang.chores.append((time.monotonic() + 0.05, begin))
        elif store.is_dir():
            store.rename(away)
            store.write_text("away")
            gang.chores.append((time.monotonic() + outage.seconds, end))

    def end() -> None:
        store.unlink()
        away.rename(store)
        gang.story.storage_back_at = time.time()

    gang.chores.append((time.monotonic(), begin))


def _digest(file: Path) -> str:
    from flytekitplugins.daskpytorch.protocol.checkpoints import METADATA, digest_of

    return hashlib.sha256((file / METADATA).read_bytes()).hexdigest() if file.is_dir() else digest_of(file)


def check_storage(story: Story, store: Path) -> None:
    """Note what the manifest names and is not whole or has a wrong value, and a newest checkpoint that it lacks."""
    import torch
    from fsspec.implementations.local import LocalFileSystem

    from flytekitplugins.daskpytorch.driver.manifest import MANIFEST, read
    from flytekitplugins.daskpytorch.protocol.files import Files

    named = []
    for path in store.glob(f"*/{MANIFEST}"):
        if (found := read(Files(LocalFileSystem()), str(path.parent))) is None:
            story.troubles.append("the manifest is torn")
        for entry in found or ():
            file = Path(entry.uri) if entry.is_sharded else path.parent / entry.name
            named.append(entry.step)
            if not file.exists() or _digest(file) != entry.digest:
                story.troubles.append(f"the manifest names {entry.name}, which is not whole")
            elif not entry.is_sharded and torch.load(file, mmap=True)["value"] != expected(entry.step):
                story.troubles.append(f"{entry.name} has a wrong value")
    kept = story.of_kind("kept")
    ended_at = max((event["at"] for event in story.of_kind("ended")), default=0.0)
    if kept and story.outcome == "finished" and story.storage_back_at < ended_at and kept[-1]["step"] not in named:
        story.troubles.append(f"the manifest lacks step {kept[-1]['step']}: {named}")


def _take_outcome(gang: Watched) -> None:
    story = gang.story
    patience = 1.0 if story.troubles else PATIENCE
    ended_at = time.monotonic()
    try:
        story.outcome, story.message, story.results = json.loads(gang.driver.hear("outcome", patience))
    except SystemExit as end:
        story.outcome, story.message = ("died", "") if "ended before" in str(end) else ("none", str(end)[:200])
    now = time.time()
    for made in story.made:
        if made.recovery is None and made is story.made[-1]:
            made.recovery = now - made.at
    if story.outcome == "died":
        ranks = {note.pid for note in story.notes}
        patience = GRACE_AFTER_DRIVER + sum(made.fault.seconds or 0.0 for made in story.made)
        deadline = ended_at + patience
        gone = settled(lambda: gang.look() or not any(map(is_running, ranks)), deadline - time.monotonic())
        if not gone:
            story.troubles.append(f"the driver's ranks still ran after {GRACE_AFTER_DRIVER:g} s")
    while gang.chores:  # resumes all suspended processes
        gang.look()
        time.sleep(0.02)
    gang.look()


# ---- What is left ---------------------------------------------------------------------------------------------------


def check_what_is_left(gang: Watched, is_warm: bool, before: dict[int, dict[str, int]]) -> None:
    """Note processes, folders, threads, descriptors and memory that a gang has left in the driver and the workers."""
    troubles, of_driver = gang.story.troubles, before.pop(gang.driver.pid)
    if not settled(lambda: not any(map(is_rank, started_here()))):
        ranks = [pid for pid in started_here() if is_rank(pid)]
        troubles.append(f"ranks still run: {ranks}")
    has_ended = gang.story.outcome == "died" and settled(lambda: not is_running(gang.driver.pid))
    if not has_ended and is_running(gang.driver.pid):
        _check_driver(gang, is_warm, of_driver)
        _end_driver(gang)
    folder = Path(os.environ["TMPDIR"])
    if not settled(lambda: not _folders_in(folder)):
        left = _folders_in(folder)
        troubles.append(f"folders are left: {[path.name for path in left]}")
        for path in left:  # the next schedule must not find them
            shutil.rmtree(path, ignore_errors=True)
    for pid, census in before.items():
        if is_running(pid) and not settled(lambda: not _grown(census, census_of(pid), is_warm)):  # noqa: B023
            troubles.append(f"a worker has grown: {_grown(census, census_of(pid), is_warm)}")
    log = gang.driver.log.read_text(errors="replace")
    for found in re.finditer(r"Exception in thread .*(?:\n.*){1,40}?\n\S*(?:Error|Exception|Exit).*", log):
        if "daskpytorch" in found[0]:
            troubles.append(f"a thread's traceback: {found[0].splitlines()[0]} ... {found[0].splitlines()[-1][:200]}")


def _folders_in(folder: Path) -> list[Path]:
    """Return the scratch folders, except those of killed processes, which the next gang would remove."""
    from flytekitplugins.daskpytorch.process.folders import remove_abandoned

    remove_abandoned.cache_clear()  # the package looks once a process
    remove_abandoned(str(folder))
    return list(folder.glob("daskpytorch-*"))


def _grown(before: dict[str, int], after: dict[str, int], is_warm: bool) -> dict[str, str]:
    """Return the resources of which a worker has more than before. A first gang leaves a fork server and threads."""
    spare = {"memory": MAX_MEMORY_GROWTH, "threads": 2 if is_warm else 6}
    allowed = 0 if is_warm else 4
    return {
        what: f"{before.get(what, 0)} -> {count}"
        for what, count in after.items()
        if count > before.get(what, 0) + spare.get(what, allowed)
    }


def _check_driver(gang: Watched, is_warm: bool, before: dict[str, int]) -> None:
    """Check that the driver's threads and descriptors are gone. A first gang may leave those of libraries."""
    found: list[str] = []
    deadline = time.monotonic() + SETTLE_TIME
    while True:
        try:
            gang.driver.tell("census")
            threads = json.loads(gang.driver.hear("census", 20))
        except (SystemExit, OSError) as error:
            gang.story.troubles.append(f"the driver does not answer: {str(error)[:300]}")
            return
        after = census_of(gang.driver.pid)
        found = [f"thread {name}" for name in threads if name.startswith("daskpytorch")]
        if is_warm:
            files = {kind: count for kind, count in after.items() if kind not in ("threads", "memory")}
            old = {kind: before.get(kind, 0) for kind in files}
            found += [f"{kind} {old[kind]} -> {count}" for kind, count in files.items() if count > old[kind]]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.3)
    if found:
        gang.story.troubles.append(f"left in the driver: {', '.join(found)}")
    if (growth := after["memory"] - before["memory"]) > MAX_MEMORY_GROWTH * (1 if is_warm else 4):
        gang.story.troubles.append(f"the driver has grown by {growth >> 20} MiB")


def _end_driver(gang: Watched) -> None:
    with contextlib.suppress(OSError):
        gang.driver.tell("end")
    try:
        code = gang.driver.wait(25)
    except SystemExit as error:
        gang.story.troubles.append(str(error)[:200])
        kill(gang.driver.pid)
        return
    if code != 0 and gang.story.outcome not in ("died", "none"):
        gang.story.troubles.append(f"the driver's exit code was {code}")


# ---- All of them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """Results of the schedules."""

    stories: list[Story]
    failed: dict[int, list[str]]
    """Deviations from the required behaviour, by the schedule's index."""


def run_all(drawn: Sequence[Any], folder: Path, play: Callable[[Any, Stage, Path], Story]) -> Ended:
    """Run schedules, print a line for each, and print a summary.

    Args:
        drawn: The schedules.
        folder: Folder for the files of all schedules.
        play: Runs one schedule on a stage, in a folder of its own, and returns the story with all deviations.
    """
    stage, ended, began_at = Stage(folder), Ended([], {}), time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # the summary of completed schedules is still useful
        for schedule in drawn:
            here = folder / f"schedule-{schedule.index}"
            started_at = time.monotonic()
            try:
                story = play(schedule, stage, here)
            except SystemExit as error:  # the harness exits upon errors, but other schedules follow
                story = Story(outcome="not run", troubles=[f"it could not be run: {error}"])
            found = story.troubles
            if schedule is drawn[-1] or found or not schedule.keeps_cluster:
                found += [f"left over: {what}" for what in stage.end()]
            ended.stories.append(story)
            took, verdict = time.monotonic() - started_at, "FAILED" if found else "ok"
            print(f"{schedule.index:4} {verdict:6} {took:5.1f} s  {story.outcome:16} {schedule}", flush=True)
            if found:
                ended.failed[schedule.index] = found
                _explain(schedule.again, story, found, here)
    counts = Counter(made.fault.name for story in ended.stories for made in story.made)
    print("", ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())), sep="\n")
    print(*_summary(drawn, ended, time.monotonic() - began_at), sep="\n", flush=True)
    return ended


def judged(schedule: Schedule, stage: Stage, folder: Path) -> Story:
    """Run one schedule, and return the observations with all deviations from the required behaviour."""
    story = run(schedule, stage, folder)
    made = {id(one.fault) for one in story.made}
    story.troubles = judge(schedule, story)
    if story.troubles:
        story.troubles += [f"was not made: {fault}" for fault in schedule.faults if id(fault) not in made]
    return story


def _explain(again: str, story: Story, found: list[str], folder: Path) -> None:
    """Print the deviations, and the events before them."""
    for what in found:
        print(f"       - {what}")
    kept = [event["step"] for event in story.of_kind("kept")]
    print(f"       kept: {kept[-20:]}; again: {again}")
    times = [event["at"] for event in story.events] + [made.at for made in story.made]
    began_at = min(times, default=0.0)
    for event in story.of_kind("placed", "restarting", "noted", "ended"):
        rest = {key: value for key, value in event.items() if key not in ("kind", "at")}
        print(f"       {float(event['at']) - began_at:6.2f} s {event['kind']} {str(rest)[:300]}")
    for made in story.made:
        print(f"       {made.at - began_at:6.2f} s made {made.fault}, ranks {made.ranks}, workers {made.workers}")
    log = read(folder / "driver" / "log").splitlines()
    print(*(f"       | {line[:200]}" for line in log[-15:]), sep="\n", flush=True)


def _summary(drawn: Sequence[Any], ended: Ended, seconds: float) -> Iterator[str]:
    num_run = len(ended.stories)
    yield f"- {num_run - len(ended.failed)} of {num_run} schedules as they must be; {seconds:.0f} s"
    for schedule in drawn:
        if found := ended.failed.get(schedule.index):
            yield f"- failed, again with {schedule.again}: {found[0][:200]}"
