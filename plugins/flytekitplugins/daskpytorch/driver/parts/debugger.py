"""Terminals that are attached to a gang's ranks: lists of ranks, and the debuggers' input and output.

Runs in the driver, in the gang's thread. A gang without terminals has no state here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Answers, Attempt
from flytekitplugins.daskpytorch.driver.collectives import users_frames
from flytekitplugins.daskpytorch.driver.hang_detector import main_frames
from flytekitplugins.daskpytorch.driver.part import Moment, Part
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol import orders, reports
from flytekitplugins.daskpytorch.protocol.attaching import (
    Attach,
    Awaits,
    Detach,
    Left,
    Listing,
    Look,
    RankPlace,
    Shown,
    TerminalOrder,
    Typed,
)
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import Tell
from flytekitplugins.daskpytorch.protocol.orders import Job
from flytekitplugins.daskpytorch.protocol.questions import Question

ANSWER_TIME = 1.0
"""Seconds that a terminal's list of ranks waits for ranks that do not answer."""
MAX_TAIL = 1 << 14
"""Number of bytes of a debugger's newest output that a terminal gets when it attaches."""
KEPT_FOR = 1.0
"""Seconds that a rank whose debugger steps keeps the terminal. A step over a collective may need another rank."""
FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass
class Prompts:
    """Gives the terminal to one rank's debugger at a time."""

    clock: Callable[[], float]
    shown: int | None = None
    """The rank whose debugger's prompt the terminal shows. None: no rank has the terminal."""
    tell: Callable[[int | None], object] = lambda _: None
    """Called with the rank that gets the terminal, and with None when a rank leaves the terminal or ends."""
    debugged: set[int] = field(default_factory=set)
    """Ranks in a debugger, or in the queue for the terminal. While there are any, no rank counts as hung."""
    _waiting: list[int] = field(default_factory=list)
    _kept_for: int | None = None
    _kept_until: float = 0.0

    def ask(self, rank: int) -> None:
        """Queue a rank that wants the terminal."""
        self.debugged.add(rank)
        self._waiting.append(rank)

    def leave(self, rank: int, *, steps: bool) -> None:
        """Record that a rank's debugger has left its prompt, so that the rank's function goes on.

        Args:
            rank: The rank.
            steps: True if the debugger will soon ask for the terminal again, for example after `next`.
        """
        if not steps:
            self.debugged.discard(rank)
        if rank == self.shown:  # else the rank has an attached terminal
            self.shown = None
            self.tell(None)
            if steps:
                self._kept_for, self._kept_until = rank, self.clock() + KEPT_FOR

    def forget(self, rank: int) -> None:
        """Record that a rank has ended or failed."""
        self._waiting = [other for other in self._waiting if other != rank]
        self.leave(rank, steps=False)

    @property
    def due(self) -> float | None:
        """Time (driver's clock, seconds) at which the next rank may get the terminal. None: no rank."""
        return self._kept_until if self._waiting and self.shown is None else None

    def turn(self) -> int | None:
        """Give the free terminal to the next rank and return the rank, which keeps it until `leave`.

        Returns:
            The rank. None: the terminal is taken, or kept for a rank whose debugger steps, or no rank waits.
        """
        if self.shown is not None or not self._waiting:
            return None
        is_kept = self._kept_for in self.debugged and self.clock() < self._kept_until
        if is_kept and self._kept_for not in self._waiting:
            return None
        self.shown = self._kept_for if is_kept and self._kept_for is not None else self._waiting[0]
        self._waiting.remove(self.shown)
        self.tell(self.shown)
        return self.shown


@dataclass
class Prompt:
    """A rank's debugger that waits for a terminal, or has one."""

    attempt: Attempt
    state: str
    tail: bytes = b""
    """Newest output, which a terminal gets when it attaches."""


class Debugger(Part):
    """The driver's terminal, which one rank's debugger uses at a time, and the terminals that are attached to ranks."""

    takes = (reports.AtPrompt, reports.LeftPrompt, reports.Noted, Awaits, Shown)

    def __init__(self, state: GangState) -> None:
        self._state = state
        self._gang = state.request.name
        self._id = state.id
        self._launcher = state.agents.launcher
        self._observers = state.observers
        self._clock = state.now
        self.prompts = Prompts(state.now)
        self._prompts: dict[int, Prompt] = {}
        self._attached: dict[Connection, Attach] = {}
        """Terminal -> its newest request."""
        self._looking: dict[Connection, tuple[Look, float]] = {}
        """Terminal that waits for the list of ranks -> request, and time at which the list is sent in any case."""
        self._located = Answers()

    def equip(self, job: Job) -> Job:
        """Give ranks the command that attaches a terminal."""
        return replace(job, debugging=replace(job.debugging, attach=self.command))

    def begin(self, attempt: Attempt) -> None:
        """Forget the debuggers of earlier attempts."""
        self.prompts = Prompts(self._clock, tell=partial(self._observers.tell, "debugging"))
        self._located = Answers()

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        """Record that a rank's debugger wants a terminal, has written something, or has left its prompt."""
        match report:
            case reports.AtPrompt():
                self.prompts.ask(rank)
            case reports.LeftPrompt(steps):
                self.prompts.leave(rank, steps=steps)
                attempt.excuse()
                self._note_left(rank, steps=steps)
            case reports.Noted(text, is_debugged):
                if is_debugged:
                    self.prompts.debugged.add(rank)
                self._observers.note(f"rank {rank} {text}")
            case Awaits() | Shown():
                self._note(attempt, rank, report)

    def rank_over(self, attempt: Attempt, rank: int, failure: Failure | None) -> None:
        """Give the terminal of a rank to the next one."""
        self.prompts.forget(rank)

    def orders(self, now: float) -> None:
        """Give the free terminal to the next rank. Answer attached terminals on time."""
        self.answer(self._state.attempt)
        if (attempt := self._state.training) is not None and (rank := self.prompts.turn()) is not None:
            attempt.tell(Tell(orders.Prompt(rank)))

    def due(self, attempt: Attempt) -> float | None:
        """Return the time at which the next rank may get the terminal."""
        return self.prompts.due

    def blocks(self, moment: Moment) -> bool:
        """Count no rank as hung or late while one is debugged."""
        return moment in (Moment.LATE, Moment.HUNG) and bool(self.prompts.debugged)

    def interrupt(self) -> None:
        """Forward Ctrl-C to the rank whose debugger uses the terminal."""
        if self._state.attempt is not None and self.prompts.shown is not None:
            self._state.attempt.tell(Tell(orders.Interrupt(self.prompts.shown)))

    def hear_caller(self, connection: Connection, message: object) -> None:
        """Follow a terminal's message."""
        attempt = self._state.attempt
        if isinstance(message, Look):
            self._looking[connection] = message, self._clock() + ANSWER_TIME
            if attempt is not None:
                self._located = attempt.ask(Question.STACKS)
            return
        if isinstance(message, Attach):
            is_new = connection not in self._attached
            self._attached[connection] = message
            if is_new and (prompt := self._prompt_of(attempt, message.rank)) is not None:
                self._send(connection, Shown(prompt.tail))
        if isinstance(message, (Attach, Typed)):
            _tell(attempt, message)

    def lose_caller(self, connection: Connection) -> None:
        """Record the end of a connection, which may be a terminal's."""
        self._looking.pop(connection, None)
        gone = self._attached.pop(connection, None)
        if gone is not None and not self._terminals_of(gone.rank):
            _tell(self._state.attempt, Detach(gone.rank))

    def _note(self, attempt: Attempt, rank: int, said: Awaits | Shown) -> None:
        """Record that a rank's debugger waits for a terminal, or has written something."""
        if isinstance(said, Awaits):
            known = self._prompt_of(attempt, rank)
            self.prompts.debugged.add(rank)
            if known is not None:  # a step has led to this prompt
                known.state = said.state
                return
            self._prompts[rank] = Prompt(attempt, said.state)
            for terminal in self._terminals_of(rank):
                _tell(attempt, self._attached[terminal])  # a restarted rank does not know its terminals
            if not self._terminals_of(rank):
                gpus = [place.gpu for place, _ in attempt.places.values() if place.gpu is not None]
                held = f"{attempt.world_size} ranks" + (f" and {len(gpus)} GPUs" if gpus else "")
                host = attempt.places[rank][1].host
                self._observers.note(
                    f"rank {rank} ({host}) {said.state}, and waits up to {said.timeout:g} s for "
                    f"a terminal. The gang holds its {held} meanwhile. Attach by: {self.command} {rank}"
                )
        elif (prompt := self._prompt_of(attempt, rank)) is not None:
            prompt.tail = (prompt.tail + said.data)[-MAX_TAIL:]
            self._tell_terminals(rank, said)

    def _note_left(self, rank: int, *, steps: bool) -> None:
        """Record that a rank has left its debugger. `steps`: True if the rank shows its next prompt soon."""
        if not steps and self._prompts.pop(rank, None) is not None:
            self._tell_terminals(rank, Left())

    def answer(self, attempt: Attempt | None) -> None:
        """Send the list of ranks to waiting terminals once all ranks have answered, or time is up."""
        for rank in [rank for rank in self._prompts if self._prompt_of(attempt, rank) is None]:
            self._note_left(rank, steps=False)  # the rank has ended
        if not self._looking:
            return
        has_all = attempt is None or attempt.have_answered(self._located)
        due = {each: look for each, (look, at) in self._looking.items() if has_all or self._clock() >= at}
        for connection, look in due.items():
            del self._looking[connection]
            self._send(connection, self._listing(attempt, look))

    @property
    def command(self) -> str:
        """Command that attaches a terminal to one of this gang's ranks, without the rank's number."""
        scheduler, is_here = self._launcher.scheduler, ip_address(self._launcher.host).is_loopback
        return "daskpytorch attach" if scheduler is None or is_here else f"daskpytorch attach --scheduler {scheduler}"

    def _listing(self, attempt: Attempt | None, look: Look) -> Listing:
        ranks = [self._place(attempt, rank, look) for rank in sorted(attempt.places)] if attempt is not None else []
        return Listing(gang=self._gang, id=self._id, ranks=ranks)

    def _place(self, attempt: Attempt, rank: int, look: Look) -> RankPlace:
        prompt = self._prompt_of(attempt, rank)
        stack = self._located[rank].stacks if rank in self._located else ""
        return RankPlace(
            rank=rank,
            host=attempt.places[rank][1].host,
            step=attempt.steps.get(rank),
            state=prompt.state if prompt is not None else self._state_of(attempt, rank),
            awaits=prompt is not None,
            line=_line(stack),
            stack=stack if rank == look.rank else "",  # of all ranks of a large gang, stacks are many MB
        )

    def _state_of(self, attempt: Attempt, rank: int) -> str:
        if rank in attempt.exits or rank in attempt.failures:
            return "has ended"
        if rank in attempt.results:
            return "has returned"
        if rank in attempt.at_rest:
            return "waits for a call"
        if rank in self.prompts.debugged:
            return "is in another debugger"
        if rank not in attempt.ready:
            return "starts"
        return "runs" if rank in self._located else "does not answer"

    def _prompt_of(self, attempt: Attempt | None, rank: int) -> Prompt | None:
        prompt = self._prompts.get(rank)
        is_there = prompt is not None and prompt.attempt is attempt and rank in self.prompts.debugged
        return prompt if is_there else None

    def _terminals_of(self, rank: int) -> list[Connection]:
        return [connection for connection, attach in self._attached.items() if attach.rank == rank]

    def _tell_terminals(self, rank: int, message: Shown | Left) -> None:
        for connection in self._terminals_of(rank):
            self._send(connection, message)

    @staticmethod
    def _send(connection: Connection, message: object) -> None:
        """Send a message to a terminal. Hang up if the terminal does not read; the listener then reports its end."""
        try:
            connection.send(message)
        except OSError:
            connection.hang_up()


def _tell(attempt: Attempt | None, order: TerminalOrder) -> None:
    """Pass an order on to the agent that carries the rank."""
    if attempt is not None and order.rank in attempt.places:
        worker = attempt.places[order.rank][1].worker
        for peer in attempt.carriers:
            if peer.node.worker == worker:
                peer.send(Tell(order))


def _line(stack: str) -> str:
    """Return the innermost line of the user's code in the main thread. Empty if unknown."""
    for frame in users_frames(main_frames(stack)):
        if (found := FRAME.match(frame)) is not None:  # else "...", which stands for more frames
            return f"{found[1]}:{found[2]} ({found[3]})"
    return ""
