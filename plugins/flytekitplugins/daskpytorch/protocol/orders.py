"""What a rank is told: before it starts, and while it runs. Filled in by driver and agent, read by the rank."""

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flytekitplugins.daskpytorch.context import SavedCheckpoint
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.code import Sources
from flytekitplugins.daskpytorch.protocol.collectives import MAX_COLLECTIVES
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.placement import Place
from flytekitplugins.daskpytorch.protocol.program import Program
from flytekitplugins.daskpytorch.protocol.segments import Address
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint, Sharding
from flytekitplugins.daskpytorch.protocol.worker_data import WorkerData
from flytekitplugins.daskpytorch.settings import Profile

STOPPED = 143
"""The exit code of a rank that ended because it was told to (128 + SIGTERM, as shells have it)."""
DUMP_SIGNAL = signal.SIGQUIT
"""Has a rank write down its main thread's stack, as it has a Java machine; also good for `kill -QUIT` by hand."""
MAX_STACKS = 64 << 10
"""Bytes of a rank's stacks."""
NANNYS_MARK = "MALLOC_TRIM_THRESHOLD_"
"""Nobody but a nanny sets it, as a rule."""
NANNYS_SETTINGS = {NANNYS_MARK: "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""`distributed.nanny.pre-spawn-environ` up to distributed 2026.8. A nanny keeps what its own environment has."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for all the ranks of a gang. Holds the user's objects only as bytes."""

    gang: str
    attempt: int
    """Which attempt of the gang; each has a rendezvous store of its own."""
    call: bytes
    """From `code.pack_call`."""
    large: Address | None = None
    """Where the driver has what is large in the call; None: nothing is."""
    pass_local_rank: bool = False
    backend: str
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store, which rank 0 serves; None where the only rank has nobody to meet."""
    timeout: float
    """Seconds for all ranks to meet."""
    devices: Literal["own", "all"] = "own"
    """Which of its worker's GPUs a rank sees."""
    max_restarts: int = 0
    """How often a gang may start again, for code that asks."""
    checkpoint: CheckpointFile | None = None
    """What the attempt starts from."""
    sharding: Sharding | None = None
    """Where sharded checkpoints go and come from; None: nowhere."""
    kept: Sequence[SavedCheckpoint] = ()
    """All that are kept when it starts."""
    storage: str | None = None
    """The folder that checkpoints are copied to."""
    best_by: str | None = None
    """The metric that the best are kept by."""
    pulse: float | None = None
    """Seconds between two reports of how far a rank has come; None: nobody asks."""
    profile: Profile | None = None
    """Steps to be recorded."""
    hints: bool = False
    """Tell (`Hint`) of what looks forgotten."""
    debugging: Debugging = field(default_factory=Debugging)
    host: bytes | None = field(default=None, repr=False)
    """A pickled `RankHost`; without one results travel pickled, from every rank."""
    execution: bytes | None = field(default=None, repr=False)
    """Of ranks without one: a pickled `Execution`, by which they reach the host's storage; it may hold secrets."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The host's variables; they may hold secrets."""
    observers: Sequence[bytes] = field(default=(), repr=False)
    """For rank 0; see `Observers.for_rank`."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """All that one rank is told; the first message on its channel.

    Where it is to serve the rendezvous store, the socket follows that this listens on; see `serves_store`.
    """

    place: Place
    job: Job
    sources: Sources
    program: Program
    scratch: str
    """The agent's folder: checkpoints come and go through it."""
    driver_folder: str | None = None
    """The driver's, which what is returned goes through; None where it is not on this machine."""
    directory: str
    path: Sequence[str]
    """The agent's `sys.path` of the moment."""
    environment: dict[str, str] = field(repr=False)
    """The whole of the rank's environment; it may hold secrets."""
    data: WorkerData | None = None
    """The way to what the Dask worker here holds; None where there is none."""

    @property
    def serves_store(self) -> bool:
        """Whether it is here that the ranks meet."""
        return self.place.rank == 0 and self.job.store is not None


# ---- While it runs: from the driver ...


@dataclass(frozen=True)
class Hold:
    """Hold back the next call of `should_stop`, and report (`Held`) how many there were."""


@dataclass(frozen=True)
class Release:
    """Let those calls through: they return False up to this one, True from the next."""

    last_call: int


@dataclass(frozen=True)
class Settled:
    """All that will be done for this sharded checkpoint has been done: the next one may be written."""

    number: int
    """As in `WrittenShards`."""
    step: int
    committed: bool
    """It is whole, and named in the manifest."""


@dataclass(frozen=True)
class Kept:
    """Which checkpoints are kept now."""

    checkpoints: Sequence[SavedCheckpoint]


@dataclass(frozen=True)
class Locate:
    """Report where you are (`Located`), and your last collectives (`Remembered`)."""

    look: int = 0
    """Which look of the search for deadlocks asks; `Located` repeats the number. 0: another asks."""


@dataclass(frozen=True)
class ShowStacks:
    """Write to the log what all threads do."""


@dataclass(frozen=True)
class Accounted:
    """Where the gang's time has gone, for those who have asked (`reports.GoodputWanted`)."""

    number: int
    goodput: Goodput


@dataclass(frozen=True)
class Prompt:
    """The terminal is this rank's debugger's."""

    rank: int


@dataclass(frozen=True)
class Interrupt:
    """Ctrl-C was pressed at this rank's prompt."""

    rank: int


@dataclass(frozen=True)
class Leave:
    """The functions of all ranks have returned: nobody needs you any more."""


# ---- ... and from the agent


START = 0
"""The number of the checkpoint that an attempt starts from, among those that ranks wait for; ..."""
LARGE_ARGUMENTS = -1
"""... and that of what is large in the call. Numbers from 1 up are those of `reports.Wanted`."""


@dataclass(frozen=True)
class Arrived:
    """What ranks wait for is on their node, or will not come."""

    attempt: int
    number: int
    """Says what it is; see `START`."""
    value: CheckpointFile | ShardedCheckpoint | Address | None = None
    """A checkpoint in the agent's folder, or in storage if it is sharded, or the arguments' memory. None: there is no
    such checkpoint."""
    failure: str | None = None
    """Why it will not come."""


@dataclass(frozen=True)
class Quit:
    """End at once."""

    reason: str | None
    """Why a training that did not fail is not to go on; for observers in rank 0."""
    grace: float
    """Seconds until it is killed."""


OrderToAll = Hold | Release | Settled | Kept | Accounted | Locate | ShowStacks | Prompt | Interrupt | Leave
OrderToRank = OrderToAll | Arrived
"""What a rank does, and goes on."""
Order = OrderToRank | Quit


def environment(
    base: Mapping[str, str], place: Place, job: Job, interface: str | None, scratch: Path
) -> dict[str, str]:
    """A rank's environment: the worker's own, the execution's names, and the variables that `torchrun` sets.

    Args:
        base: The agent's own.
        place: The rank's.
        job: The gang's.
        interface: The network interface that reaches the driver, where that is known.
        scratch: The agent's folder.
    """
    host, port = job.store or _own_store()
    env = {**_without_nannys(base), **job.environment}
    env |= {
        "RANK": str(place.rank),
        # What most code passes to set_device; so does `torchrun --virtual-local-rank` where a rank sees one GPU.
        "LOCAL_RANK": "0" if job.devices == "own" and place.gpu is not None else str(place.local_rank),
        "NODE_LOCAL_RANK": str(place.host_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.world_size // place.local_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # With it env:// joins the gang's store; without, rank 0 opens one.
        "TORCHELASTIC_USE_AGENT_STORE": str(job.store is not None),
        "TORCHELASTIC_RUN_ID": job.gang,
        "TORCHELASTIC_RESTART_COUNT": str(job.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        # Where torch's `record` writes an exception down.
        "TORCHELASTIC_ERROR_FILE": str(scratch / f"error-{place.local_rank}.json"),
        "CUDA_VISIBLE_DEVICES": ",".join(place.visible_gpus),
    }
    env.setdefault("OMP_NUM_THREADS", str(place.num_threads))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # its older name
        env.setdefault("TORCH_FR_BUFFER_SIZE", str(2 * MAX_COLLECTIVES))  # to tell torch's 2000 takes 0.1 s
    if interface is not None:
        # gloo listens where the host's name resolves to, which on many machines is a loopback address.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return env


def _own_store() -> tuple[str, int]:
    """Where the only rank of a gang may open a store for itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", server.getsockname()[1]


def _without_nannys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment less what a nanny has set.

    A nanny sets the variables in its own process, too: in the program that makes a `LocalCluster`. So the user's are
    those with other values, and those that the program or its nanny was started with.
    """
    if NANNYS_MARK not in environment:
        return dict(environment)
    at_start = _before_nanny()
    return {
        name: value
        for name, value in environment.items()
        if value != NANNYS_SETTINGS.get(name) or at_start.get(name) == value
    }


def _before_nanny() -> Mapping[str, str]:
    """Return what the nearest process that no nanny has started was started with: this one or one above it."""
    pid = os.getpid()
    while pid > 1:
        try:
            at_start = _at_start(pid)
            if NANNYS_MARK not in at_start:
                return at_start
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # another user's, or it has ended
            break
    return {}


def _at_start(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return {name: value for name, _, value in (variable.partition("=") for variable in variables)}


def stacks_path(scratch: Path, place: Place) -> Path:
    """Where a rank that does not answer writes down its stacks, in a signal handler."""
    return scratch / f"stacks-{place.local_rank}"
