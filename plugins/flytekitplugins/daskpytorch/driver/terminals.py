"""Terminals that are attached to a gang's ranks: lists of ranks, and the debuggers' input and output.

Runs in the driver, in the gang's thread. A gang without terminals has no state here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.collectives import users_frames
from flytekitplugins.daskpytorch.driver.hang_detector import main_frames
from flytekitplugins.daskpytorch.protocol.attaching import (
    LOOK,
    Attach,
    Awaits,
    Detach,
    FromTerminal,
    Left,
    Listing,
    Look,
    RankPlace,
    Shown,
    TerminalOrder,
)
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.messages import AgentLauncher, Tell
from flytekitplugins.daskpytorch.protocol.observer import Observers
from flytekitplugins.daskpytorch.protocol.orders import Locate
from flytekitplugins.daskpytorch.protocol.reports import Located

ANSWER_TIME = 1.0
"""Seconds that a terminal's list of ranks waits for ranks that do not answer."""
MAX_TAIL = 1 << 14
"""Number of bytes of a debugger's newest output that a terminal gets when it attaches."""
FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass
class Prompt:
    """A rank's debugger that waits for a terminal, or has one."""

    attempt: Attempt
    state: str
    tail: bytes = b""
    """Newest output, which a terminal gets when it attaches."""


class Terminals:
    """The terminals that are attached to one gang, and the debuggers that wait for terminals."""

    def __init__(
        self, gang: str, id_: str, launcher: AgentLauncher, observers: Observers, clock: Callable[[], float]
    ) -> None:
        self._gang = gang
        self._id = id_
        self._launcher = launcher
        self._observers = observers
        self._clock = clock
        self._prompts: dict[int, Prompt] = {}
        self._attached: dict[Connection, Attach] = {}
        """Terminal -> its newest request."""
        self._looking: dict[Connection, tuple[Look, float]] = {}
        """Terminal that waits for the list of ranks -> request, and time at which the list is sent in any case."""
        self._located: dict[int, Located] = {}

    def hear(self, attempt: Attempt | None, connection: Connection, message: FromTerminal) -> None:
        """Follow a terminal's message."""
        if isinstance(message, Look):
            self._looking[connection] = message, self._clock() + ANSWER_TIME
            self._located.clear()
            if attempt is not None:
                attempt.tell(Tell(Locate(LOOK)))
            return
        if isinstance(message, Attach):
            is_new = connection not in self._attached
            self._attached[connection] = message
            if is_new and (prompt := self._prompt_of(attempt, message.rank)) is not None:
                self._send(connection, Shown(prompt.tail))
        _tell(attempt, message)

    def forget(self, attempt: Attempt | None, connection: Connection) -> None:
        """Record the end of a connection, which may be a terminal's."""
        self._looking.pop(connection, None)
        gone = self._attached.pop(connection, None)
        if gone is not None and not self._terminals_of(gone.rank):
            _tell(attempt, Detach(gone.rank))

    def note(self, attempt: Attempt, rank: int, said: Awaits | Shown) -> None:
        """Record that a rank's debugger waits for a terminal, or has written something."""
        if isinstance(said, Awaits):
            known = self._prompt_of(attempt, rank)
            attempt.prompts.debugged.add(rank)
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

    def note_left(self, rank: int, *, steps: bool) -> None:
        """Record that a rank has left its debugger. `steps`: True if the rank shows its next prompt soon."""
        if not steps and self._prompts.pop(rank, None) is not None:
            self._tell_terminals(rank, Left())

    def note_located(self, attempt: Attempt, rank: int, located: Located) -> None:
        """Record a rank's stacks, if a terminal has asked for them."""
        if located.look == LOOK and self._looking:
            self._located[rank] = located
            self.answer(attempt)

    def answer(self, attempt: Attempt | None) -> None:
        """Send the list of ranks to waiting terminals once all ranks have answered, or time is up."""
        for rank in [rank for rank in self._prompts if self._prompt_of(attempt, rank) is None]:
            self.note_left(rank, steps=False)  # the rank has ended
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
            state=prompt.state if prompt is not None else _state(attempt, rank, has_answered=rank in self._located),
            awaits=prompt is not None,
            line=_line(stack),
            stack=stack if rank == look.rank else "",  # of all ranks of a large gang, stacks are many MB
        )

    def _prompt_of(self, attempt: Attempt | None, rank: int) -> Prompt | None:
        prompt = self._prompts.get(rank)
        is_there = prompt is not None and prompt.attempt is attempt and rank in prompt.attempt.prompts.debugged
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


def _state(attempt: Attempt, rank: int, *, has_answered: bool) -> str:
    if rank in attempt.exits or rank in attempt.failures:
        return "has ended"
    if rank in attempt.results:
        return "has returned"
    if rank in attempt.at_rest:
        return "waits for a call"
    if rank in attempt.prompts.debugged:
        return "is in another debugger"
    if rank not in attempt.ready:
        return "starts"
    return "runs" if has_answered else "does not answer"


def _line(stack: str) -> str:
    """Return the innermost line of the user's code in the main thread. Empty if unknown."""
    for frame in users_frames(main_frames(stack)):
        if (found := FRAME.match(frame)) is not None:  # else "...", which stands for more frames
            return f"{found[1]}:{found[2]} ({found[3]})"
    return ""
