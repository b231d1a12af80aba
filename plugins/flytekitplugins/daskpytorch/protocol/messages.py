"""What the driver and an agent say to each other, over a connection of their own. Imports neither Dask nor torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.orders import Arrived, Job, OrderToAll
from flytekitplugins.daskpytorch.protocol.placement import Node, Place


@dataclass(frozen=True, kw_only=True)
class AgentOrder:
    """How an agent finds its driver."""

    worker: str
    """The address of the worker that it should run on."""
    driver: tuple[str, int]
    """Host and port."""
    num_ranks: int
    """How many ranks it will be told to start, so that they can be forked while all meet."""
    token: bytes = field(repr=False)
    """By which agent and driver know each other; see `handshake`."""
    num_gpus: int = 0
    """GPUs that the worker's limits ask for; 0 where nobody knows."""
    folder: Path | None = None
    """The driver's for checkpoints: where it is on this machine, too, files need not travel."""


OnFailure = Callable[[str, Exception], None]
"""Called with a worker and an error: its agent could not be started, or ended in an error."""


class AgentLauncher(Protocol):
    """Starts agents, one per worker, wherever those are."""

    workers: Sequence[str]
    """The workers to begin with, in the order of their ranks."""
    num_wanted: int
    """How many workers the gang is to have."""
    host: str
    """The address at which the workers can reach this process."""

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Start agents."""

    def present(self) -> Sequence[str]:
        """All workers that are there now, these and others.

        Raises:
            OSError: Nobody answers that question.
        """

    def is_connected(self) -> bool:
        """Whether whoever knows the workers can be asked."""

    def hindrance(self) -> str:
        """Return what is known to keep workers away, as text to append to a message; empty if nothing is."""

    def close(self) -> None:
        """Forget the agents; they end with their connections."""


# ---- From the agent ...


@dataclass(frozen=True)
class Hello:
    """The agent is there."""

    node: Node
    meets_at: tuple[str, int]
    """Host and port where the ranks of a gang can meet whose rank 0 is here."""


@dataclass(frozen=True)
class Reported:
    """What a rank has reported, unopened; see `reports`."""

    rank: int
    reports: bytes


@dataclass(frozen=True)
class Lines:
    """What a rank wrote to its standard output and error."""

    rank: int
    lines: list[str]


@dataclass(frozen=True)
class Exited:
    """A rank ended."""

    rank: int
    exitcode: int
    stopped: bool
    """It was told to."""
    out_of_memory: bool
    log_tail: str
    time: float
    watchdog: str = ""
    """Log line by which torch's NCCL watchdog said why it aborted the rank."""


@dataclass(frozen=True)
class Broken:
    """The agent itself failed, and its ranks with it."""

    traceback: str


@dataclass(frozen=True)
class NotSent:
    """A checkpoint that was asked for cannot be sent, for this reason."""

    file: CheckpointFile
    reason: str


@dataclass(frozen=True)
class Leaving:
    """The agent's worker is being taken away: it was told to close."""


@dataclass(frozen=True)
class Stacks:
    """What a rank does that was signalled: the traceback of its main thread, or why there is none."""

    rank: int
    text: str


FromAgent = Hello | Reported | Lines | Exited | Broken | NotSent | Leaving | Stacks
"""Besides, about every second, a `heartbeat`."""


# ---- ... and to it


@dataclass(frozen=True)
class Start:
    """Start these ranks."""

    job: Job
    code: Code
    places: list[Place]


@dataclass(frozen=True)
class Stop:
    """End all ranks: something failed, or the training is not to go on."""

    grace: float
    """Seconds until they are killed."""
    main_grace: float
    """The same for rank 0, which may have something to close."""
    reason: str | None = None
    """Why a training that did not fail is not to go on."""


@dataclass(frozen=True)
class Tell:
    """Pass this on to every rank."""

    order: OrderToAll


@dataclass(frozen=True)
class Dump:
    """Signal these ranks, which do not answer, to write down their stacks; send what there is of each."""

    ranks: list[int]


@dataclass(frozen=True)
class Fetch:
    """Send this checkpoint, which one of the agent's ranks has written, over a connection of its own."""

    file: CheckpointFile


@dataclass(frozen=True)
class Bring:
    """Have this checkpoint in the agent's folder, and pass it on to every rank that it is there, or will not be."""

    chosen: Arrived


@dataclass(frozen=True)
class Close:
    """The gang is over."""


ToAgent = Start | Stop | Tell | Dump | Fetch | Bring | Close


# ---- Over connections of their own, in pieces that follow


@dataclass(frozen=True)
class Upload:
    """Here comes a checkpoint."""

    file: CheckpointFile
    is_there: bool = False
    """Nothing follows: it lies in the driver's folder."""


@dataclass(frozen=True)
class Download:
    """Please send a checkpoint."""

    file: CheckpointFile


@dataclass(frozen=True)
class DownloadLarge:
    """Please send what is large in the call."""
