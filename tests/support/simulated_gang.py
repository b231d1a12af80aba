"""A gang whose driver's brain is real and whose agents, ranks and clock are simulated: any order of events, at once."""

import functools
import hashlib
import itertools
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clock import Clock
from flytekitplugins.daskpytorch.driver.agents import Action, Agents
from flytekitplugins.daskpytorch.driver.brain import Brain
from flytekitplugins.daskpytorch.driver.parts.calls import Calls
from flytekitplugins.daskpytorch.driver.received import ReceivedPiece, ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.supervisor import Assembled, RunningClock
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import GangCancelledError, GangError, StoppedEarlyError
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol import journal, messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Written, folder_name
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.failure import Failure, RankExit, Recalled
from flytekitplugins.daskpytorch.protocol.host import AgentLauncher, AgentOrder, OnFailure, StoragePaths
from flytekitplugins.daskpytorch.protocol.observer import Observer, Observers
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.records import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Gang

STOPPED = 143


class OwnError(Exception):
    """What a simulated rank's function raises."""


class PeerLostError(RuntimeError):
    """What a simulated rank's function raises when another rank has gone."""


class Cluster(AgentLauncher):
    """Workers by name; their agents dial in when a test lets them."""

    host = "127.0.0.1"

    def __init__(self, workers: Sequence[str]) -> None:
        self.can_evaluate = True
        self.workers = list(workers)
        self.num_wanted = len(workers)
        self.here = set(workers)
        self.asked: dict[str, OnFailure] = {}
        """Workers whose agents are on their way."""
        self.is_there = True

    def title(self, worker: str) -> str:
        return f"pod-of-{worker}"

    def beside(self) -> AgentLauncher | None:
        if not self.is_there:
            raise OSError("no answer")
        return self if self.can_evaluate else None

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        self.asked |= {order.worker: on_failure for order in orders}

    def present(self) -> Sequence[str]:
        if not self.is_there:
            raise OSError("no answer")
        return sorted(self.here)

    def is_connected(self) -> bool:
        return self.is_there


@dataclass(eq=False)
class Rank:
    """What a simulated rank has done."""

    rank: int
    step: int = 0
    is_ready: bool = False
    has_delivered: bool = False
    number: int = 0
    """Which sharded checkpoint it writes, or will write next."""
    has_written: bool = False
    """The rank has written its part, and others have not."""
    call: int | None = None
    """The call of a staying gang that it runs."""


@dataclass(eq=False)
class Agent:
    """A simulated agent, and the driver's connection to it."""

    worker: str
    orders: deque[object] = field(default_factory=deque)
    ranks: dict[int, Rank] = field(default_factory=dict)
    attempt: int | None = None
    uploads: list[CheckpointEntry] = field(default_factory=list)
    """Checkpoints that its rank 0 writes, and has not reported."""
    answers: list[messages.Answer] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """The steps that are kept, as it was told."""
    heard_at: float = 0.0
    is_suspended: bool = False
    is_gone: bool = False
    is_hung_up: bool = False
    places: list[Place] = field(default_factory=list)
    """Where its ranks were told to be, newest attempt."""

    # ---- as the driver's connection

    def send(self, message: object) -> None:
        if self.is_gone or self.is_hung_up:
            raise BrokenPipeError
        self.orders.append(message)

    def hang_up(self) -> None:
        self.is_hung_up = True

    def close(self) -> None:
        pass


class Jobs(Worker):
    """Work with storage is done when a test says so."""

    def _start(self) -> None:
        pass


EVALUATION = Request(name="m.evaluate", call=b"", ranks_per_worker=1, settings=Gang())


class Evaluation:
    """A simulated gang that evaluates a checkpoint until a test ends it."""

    def __init__(self, request: Request) -> None:
        assert request.start is not None
        self.entry = request.start
        self.path = Path(self.entry.uri, "__0_0.distcp") if self.entry.is_sharded else Path(self.entry.uri)
        self.received = ReceivedResults()
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.has_ended = threading.Event()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the evaluation's function. The first sharded and the first whole checkpoint are the best."""
        return {"held_out": float(self.entry.step % 100)}

    def run(self) -> list[Any]:
        assert self.has_ended.wait(60.0)
        if self.error is not None:
            raise self.error
        return [pickle.dumps(self.metrics)]

    def cancel(self) -> None:
        self.is_cancelled = True
        self.end(GangCancelledError("cancelled"))

    def end(self, error: BaseException | None = None) -> None:
        if not self.has_ended.is_set():
            self.error = error
            self.has_ended.set()


class Watcher(Observer):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.events: list[journal.Event] = []
        self.notes: list[str] = []
        self.kept_steps: list[int] = []
        self.reasons: list[str] = []
        self.checkpoints: list[Sequence[SavedCheckpoint]] = []
        self.evaluated: list[tuple[int, Mapping[str, Any]]] = []
        """Steps and metrics of evaluations."""
        self.wish: StoppedEarlyError | None = None

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_checkpoint(self, step: int) -> None:
        self.kept_steps.append(step)

    def on_event(self, event: journal.Event) -> None:
        super().on_event(event)
        self.events.append(event)
        if isinstance(event, journal.Listed):
            self.checkpoints.append(event.checkpoints)

    def on_restart(self, reason: str, step: int | None) -> None:
        self.reasons.append(reason)

    def on_log(self, record: LogRecord) -> None:
        if record.is_evaluation:
            self.evaluated.append((record.step, record.metrics))
        if self.wish is not None:
            raise self.wish


class World:
    """One gang."""

    def __init__(
        self,
        folder: Path,
        num_workers: int = 2,
        *,
        ranks_per_worker: int = 1,
        may_stand_still: bool = False,
        storage: StoragePaths | None = None,
        calls: Calls | None = None,
        **settings: Any,
    ) -> None:
        """Gather the workers.

        `calls`: those of a staying gang. `may_stand_still`: a gap of the clock is a time in which the driver did not
        run.
        """
        self.clock = Clock()
        self.cluster = Cluster([f"tcp://10.0.0.{i}:1" for i in range(1, num_workers + 1)])
        self.folder = folder
        self.settings = Gang(**settings)
        self.jobs = Jobs()
        self.checkpoints = Vault(self.settings, storage, folder, worker=self.jobs)
        self.watcher = Watcher()
        self.received = ReceivedResults()
        self.calls: deque[Action] = deque()
        self.written: dict[tuple[int, int], set[int]] = {}
        """By attempt and number of a save that all ranks have written and rank 0 has reported: the ranks."""
        self.unwritten: set[tuple[int, int]] = set()
        """Saves that a rank cannot write, by attempt and number."""
        self.agents: list[Agent] = []
        self.starts: list[messages.Start] = []
        """The first order of each attempt."""
        self.recalled: dict[int, Recalled] = {}
        """What ranks remember of their collectives."""
        self.gpus: dict[str, tuple[str, ...]] = {}
        """UUIDs of the GPUs of workers that have some."""
        self.stacks: dict[int, str] = {}
        """What their threads do."""
        self.heeds = False
        """The ranks ask `should_stop`, once a step."""
        self.complaints: list[str] = []
        self.committed: int | None = None
        """The newest step that is safe."""
        self.results: list[Any] | None = None
        self.error: BaseException | None = None
        self._names = itertools.count(num_workers + 1)
        self.register = Agents(
            launcher=self.cluster,
            order=AgentOrder(driver=("127.0.0.1", 1), token=b"t"),
            post=self.calls.append,
            num_least=settings.get("min_workers") or num_workers,
            clock=self.clock,
        )
        self.begun, self.freed = list[tuple[int, int]](), list[tuple[int, int]]()
        """Ranks of a staying gang, each with a call that it has begun, or a kept value that it has freed."""
        what: dict[str, Any] = {"name": "m.train", "ranks_per_worker": ranks_per_worker, "storage": storage}
        what |= {"call": b"" if calls is None else None, "calls": calls}
        what |= {"evaluation": EVALUATION if self.settings.evaluate is not None else None}
        request = Request(**what, settings=self.settings)
        self.register.launch(self.cluster.workers)
        observers = Observers([self.watcher], name=request.name, clock=self.clock)
        self.evaluations: list[Evaluation] = []
        gang = Assembled(
            request,
            self.register,
            self.checkpoints,
            observers,
            self.received,
            self._evaluate,
            Debugging(has_terminal=True),
            asked_at=self.clock(),
            clock=self.clock,
            running_clock=RunningClock(self.clock) if may_stand_still else None,
        )
        self.state, self.saving, self.evaluator = gang.state, gang.checkpoints, gang.evaluator
        self.debugger, self.accounting = gang.debugger, gang.accounting
        self.brain = Brain(self.state, Code(archive=b"sources", digest="d"))
        self.decide()

    # ---- the driver

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.results is not None

    def feed(self, call: Callable[..., object] | None = None, *args: object) -> None:
        """Let the driver hear of something, if anything has happened, and act on it."""
        if call is not None:
            self.calls.append(functools.partial(call, *args))
        while not self.is_over:
            if self.calls:
                self.calls.popleft()()
            self.state.look_for_silence()
            self.decide()
            if not self.calls:
                return

    def decide(self) -> None:
        try:
            self.results = self.brain.decide()
        except Exception as error:
            self.error = error
        if self.results is not None:
            self.evaluator.conclude()

    def wait(self, seconds: float, *, beats: bool = True) -> None:
        """Let time go by; all agents that can say so are alive."""
        end = self.clock.now + seconds
        while self.clock.now < end and not self.is_over:
            self.clock.now = min(end, self.clock.now + (1.0 if beats else seconds))
            for agent in self.connected() if beats else ():
                if not agent.is_suspended:
                    agent.heard_at = self.clock()
            self.feed()

    # ---- evaluations

    def _evaluate(self, request: Request, _launcher: AgentLauncher) -> Evaluation:
        self.evaluations.append(made := Evaluation(request))
        return made

    @property
    def evaluating(self) -> Evaluation | None:
        """The running evaluation."""
        running = [each for each in self.evaluations if not each.has_ended.is_set()]
        assert len(running) <= 1, "two evaluations at a time"
        return next(iter(running), None)

    def end_evaluation(self, error: BaseException | None = None) -> None:
        """The running evaluation ends, and so do those that the driver has cancelled."""
        if (evaluation := self.evaluating) is not None:
            evaluation.end(error)
        if self.evaluator._thread is not None:
            self.evaluator._thread.join()
        self.feed()

    # ---- agents

    def connected(self) -> list[Agent]:
        return [agent for agent in self.agents if not agent.is_gone and not agent.is_hung_up]

    def agent(self, worker: str) -> Agent:
        """The newest of a worker."""
        return next(agent for agent in reversed(self.agents) if agent.worker == worker)

    def say(self, agent: Agent, message: messages.FromAgent) -> None:
        if not agent.is_gone and not agent.is_hung_up:
            agent.heard_at = self.clock()
            self.feed(self.state.hear, agent, message)

    def join(self, worker: str) -> Agent:
        """An agent dials in, asked or not."""
        self.cluster.asked.pop(worker, None)
        agent = Agent(worker)
        self.agents.append(agent)
        uuids = self.gpus.get(worker, ())
        node = Node(
            worker=worker,
            host=worker,
            num_cores=1,
            gpus=tuple(map(str, range(len(uuids)))),
            gpu_names=("H100",) * len(uuids),
            gpu_uuids=uuids,
            interface=None,
            versions=local_versions(),
        )
        self.say(agent, messages.Hello(node, (worker, 1)))
        return agent

    def join_all(self) -> None:
        """All that were asked dial in."""
        while self.cluster.asked and not self.is_over:
            worker = next(iter(self.cluster.asked))
            if worker in self.cluster.here:
                self.join(worker)
            else:
                del self.cluster.asked[worker]

    def lose(self, agent: Agent) -> None:
        """Its process has gone."""
        if not agent.is_gone:
            agent.is_gone = True
            self.feed(self.state.note_end, agent)

    def kill_worker(self, worker: str) -> None:
        """It goes with all its agents."""
        self.cluster.here.discard(worker)
        for agent in [agent for agent in self.agents if agent.worker == worker]:
            self.lose(agent)

    def new_worker(self) -> str:
        """A worker with a name of its own."""
        worker = f"tcp://10.0.0.{next(self._names)}:1"
        self.cluster.here.add(worker)
        return worker

    def obey(self, agent: Agent) -> None:
        """It does what it was told, as the real one does."""
        if agent.is_hung_up:
            self.lose(agent)
            return
        while agent.orders and not agent.is_gone:
            self._follow(agent, agent.orders.popleft())

    def obey_all(self) -> None:
        for agent in self.connected():
            if not agent.is_suspended:
                self.obey(agent)

    def _follow(self, agent: Agent, order: object) -> None:
        match order:
            case messages.Start():
                self._begin(agent, order)
            case messages.Stop() | messages.Tell() if agent.attempt is None:
                self.complaints.append(f"{agent.worker}, which carries no ranks, was told to {order}")
            case messages.Stop():
                for rank in list(agent.ranks):
                    self.leave(agent, rank, STOPPED, stopped=True)
            case messages.Tell(told):
                self._pass_on(agent, told)
            case messages.Close():
                self.lose(agent)

    def _pass_on(self, agent: Agent, order: messages.OrderToAll) -> None:
        if isinstance(order, messages.Kept):
            agent.kept = [checkpoint.step for checkpoint in order.checkpoints]
        if isinstance(order, messages.Answer):
            agent.answers.append(order)
        if isinstance(order, messages.Release) and order.last_call:
            self._stop_by_itself(agent)
            return
        for rank in list(agent.ranks.values()):
            match order:
                case messages.Ask():
                    self.report(agent, rank.rank, messages.Answer(order.number, self._answer(rank, order)))
                case messages.NextCall(number=number):
                    self._call(rank, number)
                case messages.Forget(number):
                    self.freed.append((rank.rank, number))
                case messages.Finish():
                    rank.has_delivered = True
                    self.report(agent, rank.rank, messages.Returned(rank.rank))
                case messages.Leave() if rank.has_delivered:
                    self.leave(agent, rank.rank, 0)

    def _answer(self, rank: Rank, asked: messages.Ask) -> object:
        match asked.question:
            case messages.Question.HOLD:
                return rank.step if self.heeds else 0, False
            case messages.Question.STACKS:
                return messages.Located(self.stacks.get(rank.rank, "stack"), -1)
            case _:
                return self.recalled.get(rank.rank)

    def _begin(self, agent: Agent, order: messages.Start) -> None:
        if not any(start.job.attempt == order.job.attempt for start in self.starts):
            self._note_start(order)
        agent.attempt, agent.places = order.job.attempt, order.places
        step = order.job.checkpoint.step if order.job.checkpoint else 0
        agent.ranks = {place.rank: Rank(place.rank, step=step) for place in order.places}

    def _call(self, rank: Rank, number: int) -> None:
        if rank.call is not None or rank.has_delivered or not rank.is_ready:
            self.complaints.append(f"rank {rank.rank} was told to begin call {number} while it had other work")
        rank.call = number
        self.begun.append((rank.rank, number))

    def end_call(self, rank: int, error: BaseException | None = None) -> None:
        """A rank of a staying gang returns from its call, or raises."""
        [agent] = [agent for agent in self.connected() if rank in agent.ranks]
        number, agent.ranks[rank].call = agent.ranks[rank].call, None
        assert number is not None
        failure = Failure.of(error, self.clock()) if error is not None else None
        value = pickle.dumps((number, rank)) if error is None else None
        self.report(agent, rank, messages.CallEnded(number=number, value=value, failure=failure))

    def _stop_by_itself(self, agent: Agent) -> None:
        """Its ranks save, and return, at the call of `should_stop` that turns true."""
        self.step(agent)
        self.upload_all(agent)
        for rank in list(agent.ranks.values()):
            rank.has_delivered = True
            self.report(agent, rank.rank, messages.Returned(stopped_early=True))

    def _note_start(self, order: messages.Start) -> None:
        self.starts.append(order)
        step = order.job.checkpoint.step if order.job.checkpoint else None
        if step != self.committed:
            self.complaints.append(f"attempt {order.job.attempt} starts from {step}; {self.committed} was kept")
        sharding = order.job.sharding
        found = sharding.start[0].uri.rpartition("/")[2].split("-")[:2] if sharding and sharding.start else None
        newest = max(self.written, default=None)
        if found != (None if newest is None else list(map(str, newest))):
            self.complaints.append(f"attempt {order.job.attempt} starts from the shards {found}; {newest} were kept")

    # ---- ranks

    def report(self, agent: Agent, rank: int, report: messages.ShortReport | ReceivedPiece) -> None:
        if not agent.is_gone and not agent.is_hung_up:
            agent.heard_at = self.clock()
            self.feed(self.state.hear_of_rank, agent, rank, [report])

    def beat(self, agent: Agent, num_moves: Mapping[int, int]) -> None:
        """It tells of its ranks' signs of life."""
        if not agent.is_gone and not agent.is_hung_up:
            agent.heard_at = self.clock()
            self.feed(self.state.note_beat, agent, messages.Beat(num_moves))

    def leave(
        self, agent: Agent, rank: int, exitcode: int, *, stopped: bool = False, watchdog: str = "", log_tail: str = ""
    ) -> None:
        if agent.ranks.pop(rank, None) is not None:
            if rank == 0:
                agent.uploads.clear()
            how = {"stopped": stopped, "log_tail": log_tail, "watchdog": watchdog}
            self.say(agent, RankExit(rank=rank, exitcode=exitcode, time=self.clock(), **how))

    def ready(self, agent: Agent) -> None:
        for rank in list(agent.ranks.values()):
            if not rank.is_ready:
                rank.is_ready = True
                self.report(agent, rank.rank, messages.Ready())

    def step(self, agent: Agent, *, saves: bool = True) -> None:
        """Its ranks take a step; rank 0 saves."""
        for rank in list(agent.ranks.values()):
            if rank.is_ready and not rank.has_delivered:
                rank.step += 1
                self.report(
                    agent, rank.rank, LogRecord(rank=rank.rank, step=rank.step, num_steps=None, time=0.0, metrics={})
                )
                if rank.rank == 0 and saves:
                    self.save(agent, rank.step, loss=1.0 / rank.step)

    def save(self, agent: Agent, step: int, **metrics: float) -> None:
        """Its rank 0 begins to write a checkpoint."""
        agent.uploads.append(replace(self._file(agent.attempt or 0, step), metrics=metrics))

    def _file(self, attempt: int, step: int) -> CheckpointEntry:
        data = f"{attempt} {step}".encode()
        return CheckpointEntry(attempt=attempt, step=step, size=len(data), digest=hashlib.sha256(data).hexdigest())

    def upload(self, agent: Agent, *, fails: bool = False) -> None:
        """The oldest checkpoint that its rank 0 writes arrives in the driver's folder, or not."""
        file = agent.uploads.pop(0)
        if not fails and not agent.is_gone and not agent.is_hung_up:
            self.checkpoints.path_of(file).write_bytes(f"{file.attempt} {file.step}".encode())
            self.report(agent, 0, Written(file))
            if file in self.checkpoints.entries():
                self.committed = file.step

    def write_shards(self, agent: Agent, *ranks: int, fails: bool = False) -> None:
        """These of its ranks, or all, have written their parts of a sharded checkpoint, or cannot.

        Once all ranks have, rank 0 reports it.
        """
        for rank in [rank for rank in agent.ranks.values() if rank.rank in ranks or not ranks]:
            if rank.has_written or rank.has_delivered or not rank.is_ready:
                continue
            rank.has_written, attempt = True, agent.attempt or 0
            self.write_shard(attempt, rank.rank, rank.number)
            if fails:
                self.unwritten.add((attempt, rank.number))
        peers = [rank for each in self.connected() if each.attempt == agent.attempt for rank in each.ranks.values()]
        if peers and all(rank.has_written for rank in peers) and len(peers) == self.starts[-1].places[0].world_size:
            self._end_save(agent.attempt or 0, peers)

    def _end_save(self, attempt: int, writing: Sequence[Rank]) -> None:
        number = writing[0].number
        for rank in writing:
            rank.number, rank.has_written = number + 1, False
        main = next(agent for agent in self.connected() if 0 in agent.ranks)
        failure = "PermissionError: no rights (rank 1)" if (attempt, number) in self.unwritten else None
        written = self.shards(attempt, number, failure)
        self.report(main, 0, written)
        if written.entry in self.checkpoints.sharded:
            self.written[attempt, number] = {rank.rank for rank in writing}

    def write_shard(self, attempt: int, rank: int, number: int) -> None:
        """A rank's part lies where it should."""
        sharding = self.starts[-1].job.sharding
        folder = Path(sharding.base, folder_name(attempt, sharding.nonce, 100 + number, number))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"__{rank}_0.distcp").write_bytes(b"shard")

    def shards(self, attempt: int, number: int, failure: str | None = None) -> Written:
        """Return rank 0's report."""
        step, sharding = 100 + number, self.starts[-1].job.sharding
        metrics = {"loss": abs(101.0 - step)}
        name = folder_name(attempt, sharding.nonce, step, number)
        made = CheckpointEntry(attempt=attempt, step=step, size=10, metrics=metrics, folder=sharding.base, shards=name)
        return Written(made, failure)

    def save_shards(self) -> None:
        """All ranks write a sharded checkpoint, and the driver its manifest."""
        for agent in self.connected():
            self.write_shards(agent)
        self.work()
        self.obey_all()

    def work(self) -> None:
        """Storage is written to, as far as there is something to write."""
        while self.jobs.jobs:
            self.jobs.do(self.jobs.jobs[0])
            self.feed()

    def fail(self, agent: Agent, rank: int, error: Exception) -> None:
        """A rank's function raises."""
        failure = Failure.of(error, self.clock(), position=(agent.ranks[rank].step, 0))
        self.report(agent, rank, replace(failure, recalled=self.recalled.get(rank)))
        self.leave(agent, rank, 1)

    def upload_all(self, agent: Agent) -> None:
        while agent.uploads:
            self.upload(agent)

    def deliver(self, agent: Agent) -> None:
        self.upload_all(agent)
        for rank in list(agent.ranks.values()):
            if rank.is_ready and not rank.has_delivered:
                rank.has_delivered = True
                self.report(agent, rank.rank, messages.Returned(rank.rank))

    # ---- all together

    def form(self) -> None:
        """Everybody comes, and all ranks meet."""
        self.join_all()
        self.obey_all()
        for agent in self.connected():
            self.ready(agent)

    def train(self, num_steps: int = 1) -> None:
        """All ranks take steps, each of which is kept."""
        for _ in range(num_steps):
            for agent in self.connected():
                self.step(agent)
            self.obey_all()
            for agent in self.connected():
                self.upload_all(agent)

    def finish(self) -> None:
        """From here on everything goes well, however long it takes."""
        for agent in self.agents:
            agent.is_suspended = False
        self.cluster.is_there = self.cluster.can_evaluate = True
        for _ in range(100):
            if self.is_over:
                return
            while len(self.cluster.here) < self.cluster.num_wanted:
                self.new_worker()
            self.form()
            for agent in self.agents:
                self.obey(agent)
            for agent in self.connected():
                self.deliver(agent)
            self.obey_all()
            self.work()
            self.end_evaluation()
            self.work()
            self.wait(1.0)


def raised(world: World) -> BaseException:
    assert world.error is not None, world.results
    return world.error


def is_own(error: BaseException | None) -> bool:
    """Whether it is what a rank's function raised."""
    return isinstance(error, OwnError) and isinstance(error.__cause__, GangError)
