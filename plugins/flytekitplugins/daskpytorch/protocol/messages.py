"""Messages between driver and agents, with one connection per agent. Imports neither Dask nor torch."""

from dataclasses import dataclass

from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.orders import OrderToAll
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.protocol.questions import Answer

# ---- From the agent ...


@dataclass(frozen=True)
class Hello:
    """An agent's first message to the driver: the agent's node and port."""

    node: Node
    meets_at: tuple[str, int]
    """Host and port of the rendezvous store, if rank 0 runs on this node."""


@dataclass(frozen=True)
class Reported:
    """Pickled report of a rank, or list of its log records, which the agent passes on to the driver."""

    rank: int
    report: bytes


@dataclass(frozen=True)
class Lines:
    """Lines that a rank wrote to its standard output and error, as its agent sends them to the driver."""

    rank: int
    lines: list[str]


@dataclass(frozen=True)
class Exited:
    """The agent's report that the process of one of its ranks has ended."""

    rank: int
    exitcode: int
    stopped: bool
    """True if the agent had stopped the rank."""
    out_of_memory: bool
    log_tail: str
    time: float
    watchdog: str = ""
    """Log line in which torch's NCCL watchdog gave the reason to abort the rank. Empty for any other end."""
    log_folder: str = ""
    """Folder of the rank's log files on its machine. Empty without log files."""


@dataclass(frozen=True)
class Broken:
    """The agent's report of an error of its own, which ends its ranks, too."""

    traceback: str


@dataclass(frozen=True)
class Sent:
    """The agent's answer to `Fetch` without an upload: the file is in the driver's folder, or cannot be sent."""

    file: CheckpointFile
    failure: str | None = None
    """Reason why the agent cannot send the checkpoint. None: the driver's folder has a link to the file."""


@dataclass(frozen=True)
class Leaving:
    """The agent's report that its worker is closing, by order of the Dask scheduler or a signal."""


@dataclass(frozen=True)
class Stacks:
    """The agent's answer to `Dump`: the stack of a rank that has written it on a signal, since it did not answer."""

    rank: int
    text: str
    """Traceback of the rank's main thread, or the reason why the rank wrote none."""


FromAgent = Hello | Reported | Lines | Exited | Broken | Sent | Leaving | Stacks
"""All messages of an agent except its heartbeats."""


# ---- ... and to it


@dataclass(frozen=True)
class Start:
    """Order to an agent: start a rank for each place."""

    job: Job
    code: Code
    places: list[Place]


@dataclass(frozen=True)
class Stop:
    """Order to an agent: stop all its ranks, after a failure or because the training should end."""

    grace: float
    """Grace period in seconds, after which the agent kills the ranks."""
    main_grace: float
    """Grace period of rank 0 in seconds. Rank 0 may have trackers to close."""
    reason: str | None = None
    """Reason to stop a training that did not fail. None after a failure."""


@dataclass(frozen=True)
class Tell:
    """Order to an agent: pass `order` on to each of its ranks."""

    order: OrderToAll


@dataclass(frozen=True)
class Dump:
    """Order to an agent: signal ranks that do not answer, and send the stacks that the ranks then write to files."""

    ranks: list[int]


@dataclass(frozen=True)
class Fetch:
    """Order to an agent: upload a checkpoint of one of its ranks to the driver, over a separate connection."""

    file: CheckpointFile


@dataclass(frozen=True)
class Bring:
    """Order to an agent: download the checkpoint or the arguments in an answer, and give its ranks the answer then."""

    answer: Answer
    attempt: int
    """Number of the attempt whose ranks get the answer."""


@dataclass(frozen=True)
class Close:
    """Order to an agent: end, since the gang is over."""


ToAgent = Start | Stop | Tell | Dump | Fetch | Bring | Close


# ---- Over connections of their own, in pieces that follow


@dataclass(frozen=True)
class Upload:
    """The agent's announcement of a checkpoint, whose bytes follow on the same connection."""

    file: CheckpointFile


@dataclass(frozen=True)
class Download:
    """The agent's request to the driver for a file, whose bytes the driver sends on the same connection."""

    file: CheckpointFile | None
    """The checkpoint. None: the large arguments of the user's call."""
