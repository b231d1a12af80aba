"""Settings with which a rank starts, and its environment variables. Made by the driver, completed by the agent."""

import importlib
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.process.system import without_nannys
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointFile, Sharding
from flytekitplugins.daskpytorch.protocol.code import Program, Sources
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES
from flytekitplugins.daskpytorch.protocol.payload import Address
from flytekitplugins.daskpytorch.protocol.placement import Place
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Gang

STOPPED = 143
"""Exit code of a rank that ended on an order to stop: 128 + SIGTERM, as in shells."""
DUMP_SIGNAL = signal.SIGQUIT
"""Signal (SIGQUIT) on which a rank writes its main thread's stack to a file. Users may send the signal by hand."""
AUTO_PULSE = 10.0
"""Seconds between two reports of a rank's signs of life, with `hang_timeout="auto"`. Reports at this interval do not
slow down training steps."""
MAX_STACKS = 64 << 10
"""Maximum number of bytes of stacks that are read from a rank's stack file."""
Key = str | tuple[Any, ...]
"""Dask's key of a partition."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings of an attempt that all ranks share. The user's objects are bytes here."""

    gang: str
    attempt: int
    """Number of the gang's attempt. Each attempt has a new rendezvous store."""
    call: bytes | None
    """The pickled call of the user's function. Empty if `large` has the call. None: the ranks stay, and get calls."""
    large: Address | None = None
    """The driver's shared memory with a large call. None for a small call."""
    pass_local_rank: bool = False
    backend: str
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store in rank 0. None for a single rank without a store."""
    settings: Gang = field(default_factory=Gang)
    """The user's settings of the gang, without its observers and the function of `gpu_check`. The chosen backend is
    `Job.backend`, not `settings.backend`."""
    gpu_check: bytes | None = None
    """The pickled function of `Gang(gpu_check=...)`. None without a function."""
    checkpoint: CheckpointFile | None = None
    """Checkpoint from which the attempt starts. None for a fresh start or a sharded checkpoint."""
    sharding: Sharding = field(default_factory=lambda: Sharding(base="", nonce=""))
    """Folder of sharded checkpoints, and the committed checkpoints from which the attempt may start."""
    kept: Sequence[SavedCheckpoint] = ()
    """Checkpoints that the gang keeps at the attempt's start."""
    storage: str | None = None
    """Folder to which the driver uploads checkpoints. None without storage."""
    debugging: Debugging = field(default_factory=Debugging)
    host: bytes | None = field(default=None, repr=False)
    """Pickled `RankHost`, Flyte's part in a rank of a Flyte task type, which converts inputs and outputs. None for
    gangs of `dispatch`: each rank then returns its value pickled."""
    execution: bytes | None = field(default=None, repr=False)
    """Pickled `Execution`, by which ranks without a `RankHost` reach Flyte's storage. None if ranks need none. May hold
    secrets."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that the Flyte task and the gang's settings add to the ranks' own. May hold secrets."""
    observers: Sequence[bytes] = field(default=(), repr=False)
    """Pickled factories of rank 0's observers."""
    patience: float = 0.0
    """Longest time, in seconds, for which a request for the best checkpoint waits for evaluations."""

    @property
    def pulse(self) -> float | None:
        """Seconds between two reports of a rank's signs of life. None without a hang timeout."""
        timeout = self.settings.hang_timeout
        if timeout is None:
            return None
        return AUTO_PULSE if timeout == "auto" else min(1.0, timeout / 5)


@dataclass(frozen=True, kw_only=True)
class WorkerData:
    """Connection details of a rank's Dask worker, for the rank and the processes that the rank starts."""

    address: str
    """Address of the abstract Unix socket at which the worker answers ranks."""
    token: bytes = field(repr=False)
    """Secret that a rank sends first, as proof that the process is a rank beside this worker."""
    guide: str
    """Name of the module with `enter`, which prepares a rank that imports Dask, and `worker_of`, which makes the rank's
    stand-in for the worker."""

    def worker(self) -> Any:
        """Return this process's stand-in for the worker, with a Dask client."""
        return importlib.import_module(self.guide).worker_of(self)


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """Settings of one rank: its agent's second message to the rank, after the rank's environment variables.

    If the rank serves the rendezvous store (`serves_store`), the store's listening socket follows.
    """

    place: Place
    job: Job
    sources: Sources
    program: Program
    scratch: str
    """The agent's folder, where the rank reads and writes checkpoints."""
    driver_folder: str | None = None
    """The driver's folder, where the rank writes a large return value. None on other machines."""
    directory: str
    path: Sequence[str]
    """The agent's current `sys.path`, behind the folders in the gang's `PYTHONPATH`."""
    data: WorkerData | None = None
    """Connection details of the node's Dask worker, for partitions that it holds. None without a Dask worker."""

    @property
    def serves_store(self) -> bool:
        """True if this rank serves the rendezvous store."""
        return self.place.rank == 0 and self.job.store is not None


def environment(
    base: Mapping[str, str], place: Place, job: Job, interface: str | None, scratch: Path
) -> dict[str, str]:
    """Return a rank's environment variables: the agent's, the gang's, and those that `torchrun` sets.

    Args:
        base: The agent's environment.
        place: The rank's place.
        job: The settings that all ranks share.
        interface: The network interface that reaches the driver. None if unknown.
        scratch: The agent's folder.
    """
    host, port = job.store or _own_store()
    env = {**without_nannys(base), **job.environment}
    env |= {
        "RANK": str(place.rank),
        # Most code passes it to set_device. `torchrun --virtual-local-rank` sets 0, too, if a rank sees one GPU.
        "LOCAL_RANK": "0" if job.settings.devices == "own" and place.gpu is not None else str(place.local_rank),
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
        # True makes env:// join the gang's store. With False, rank 0 opens a store of its own.
        "TORCHELASTIC_USE_AGENT_STORE": str(job.store is not None),
        "TORCHELASTIC_RUN_ID": job.gang,
        "TORCHELASTIC_RESTART_COUNT": str(job.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.settings.max_restarts),
        # File to which torch's `record` writes an exception.
        "TORCHELASTIC_ERROR_FILE": str(scratch / f"error-{place.local_rank}.json"),
        "CUDA_VISIBLE_DEVICES": ",".join(place.visible_gpus),
    }
    env.setdefault("OMP_NUM_THREADS", str(place.num_threads))
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # the older name of the variable
        env.setdefault("TORCH_FR_BUFFER_SIZE", str(2 * MAX_COLLECTIVES))  # a report of torch's 2000 takes 0.1 s
    if interface is not None:
        # gloo listens at the address of the host's name, which is a loopback address on many machines.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return env


def _own_store() -> tuple[str, int]:
    """Return a free local address, where the only rank of a gang may open a store for itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", server.getsockname()[1]


def log_folder(settings: Gang, gang: str) -> Path | None:
    """Return the folder of a gang's log files on this machine. None if the gang has no log files."""
    return Path(settings.log_dir).expanduser().absolute() / gang if settings.log_dir is not None else None


def stacks_path(scratch: Path, place: Place) -> Path:
    """Return the file to which a rank's signal handler writes its stacks."""
    return scratch / f"stacks-{place.local_rank}"
