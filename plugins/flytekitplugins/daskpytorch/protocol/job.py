"""Settings with which a rank starts, and its environment variables. Made by the driver, completed by the agent."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.process.gpu_vendor import variables_for
from flytekitplugins.daskpytorch.process.system import without_nannys
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Sharding
from flytekitplugins.daskpytorch.protocol.code import Program, Sources
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.failure import MAX_COLLECTIVES
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.placement import Place
from flytekitplugins.daskpytorch.records import SavedCheckpoint
from flytekitplugins.daskpytorch.settings import Gang

STOPPED = 143
"""Exit code after an order to stop: 128 + SIGTERM, as in shells."""
AUTO_PULSE = 10.0
"""Seconds between two reports of signs of life with `hang_timeout="auto"`."""
LARGE = 1 << 20
"""Bytes from which ranks download a pickled call (`rank.link`)."""
Key = str | tuple[Any, ...]


@dataclass(frozen=True)
class LargeCall:
    """Stands for a pickled call in orders."""

    number: int
    size: int


def in_order(call: bytes, number: int = 0) -> bytes | LargeCall:
    return LargeCall(number, len(call)) if len(call) >= LARGE else call


@dataclass(frozen=True, kw_only=True)
class Job:
    gang: str
    attempt: int
    num_after_memory: int = 0
    call: bytes | LargeCall | None
    """None if the ranks stay and get calls."""
    pass_local_rank: bool = False
    backend: str
    store: tuple[str, int] | None = None
    settings: Gang = field(default_factory=Gang)
    """Without observers and the function of `gpu_check`. The backend may be "auto", unlike `Job.backend`."""
    gpu_check: bytes | None = None
    checkpoint: CheckpointEntry | None = None
    sharding: Sharding = field(default_factory=lambda: Sharding(base="", nonce=""))
    kept: Sequence[SavedCheckpoint] = ()
    storage: str | None = None
    debugging: Debugging = field(default_factory=Debugging)
    host: bytes | None = field(default=None, repr=False)
    """Pickled `RankHost`, which converts a Flyte task's inputs and outputs, or None for gangs of `dispatch`."""
    execution: bytes | None = field(default=None, repr=False)
    """Pickled `Execution`, by which ranks without a `RankHost` reach Flyte's storage. May hold secrets."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the Flyte task and the gang's settings. May hold secrets."""
    observers: Sequence[bytes] = field(default=(), repr=False)
    patience: float = 0.0
    """Seconds for which a request for the best checkpoint waits for evaluations."""

    @property
    def pulse(self) -> float | None:
        timeout = self.settings.hang_timeout
        if timeout is None:
            return None
        return AUTO_PULSE if timeout == "auto" else min(1.0, timeout / 5)


@dataclass(frozen=True, kw_only=True)
class WorkerData:
    """Addresses and credentials of the agent's Dask worker, for a Dask client of the rank's own."""

    worker: str
    scheduler: str
    security: bytes = field(repr=False)
    """Pickled `Security`, which may hold TLS keys. Ranks that do not use Dask do not import it."""


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    place: Place
    job: Job
    sources: Sources = field(default_factory=lambda: Sources(folders=(), script=None))
    program: Program = field(default_factory=Program)
    scratch: str
    """The agent's folder, where ranks on other machines than the driver's read and write checkpoints."""
    agent: AgentOrder
    """The agent's own order, with the address of the driver and the gang's token."""
    driver_folder: str | None = None
    """Folder on the driver's machine, for checkpoints and a large return value. None elsewhere."""
    directory: str = "."
    path: Sequence[str] = ()
    """The agent's `sys.path`, behind the folders in the gang's `PYTHONPATH`."""
    data: WorkerData | None = None

    @property
    def serves_store(self) -> bool:
        return self.place.rank == 0 and self.job.store is not None


def environment(
    base: Mapping[str, str], place: Place, job: Job, interface: str | None, scratch: Path
) -> dict[str, str]:
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
        "TORCHELASTIC_ERROR_FILE": str(scratch / f"error-{place.local_rank}.json"),
        **variables_for(place.visible_gpus, env),
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", server.getsockname()[1]
