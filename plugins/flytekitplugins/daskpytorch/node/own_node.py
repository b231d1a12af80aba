"""Launcher of a gang's only agent, in a thread of this process, for ranks on the task's node. Does not import Dask."""

import socket
import threading
from collections.abc import Sequence

from flytekitplugins.daskpytorch.node import agent
from flytekitplugins.daskpytorch.node.hardware import require_gpus
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.messages import AgentOrder, OnFailure


class OwnNode:
    """Launcher of one agent, for the ranks of a `SpawnDDP` task. `dask.agents.DaskAgents` is the launcher for Dask."""

    num_wanted = 1
    host = "127.0.0.1"

    def __init__(self, start_method: str = "forkserver") -> None:
        self.workers: Sequence[str] = [socket.gethostname()]
        self._start_method = start_method

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Start the agent in a thread."""
        for order in orders:
            threading.Thread(
                target=self._serve, args=(order, on_failure), name="daskpytorch-agent", daemon=True
            ).start()

    def _serve(self, order: AgentOrder, on_failure: OnFailure) -> None:
        try:
            agent.run(order, start_method=self._start_method)
        except BaseException as error:  # the driver waits for the agent
            on_failure(order.worker, raisable(error, "the agent"))

    def present(self) -> Sequence[str]:
        """Return this node as the only worker."""
        return self.workers

    def is_connected(self) -> bool:
        """Return True, as an own node needs no connection."""
        return True

    def hindrance(self) -> str:
        """Return "", as the driver's own node is always present."""
        return ""

    def close(self) -> None:
        """Do nothing: the agent ends with its connection."""


def num_ranks_here(nproc: int | str, backend: str, num_gpus: int = 0) -> int:
    """Return the number of ranks on this node for `SpawnDDP(nproc=...)`.

    Args:
        nproc: The user's number. "auto" means one rank per GPU, or one rank without GPUs.
        backend: The user's backend of the process group.
        num_gpus: Number of GPUs in the task's resource limits. 0 if unknown.

    Raises:
        GangStartError: This node has fewer GPUs than were asked for.
        ValueError: The backend is nccl, and this node has fewer GPUs than ranks.
    """
    gpus = require_gpus(num_gpus, socket.gethostname()).names
    wanted = int(nproc) if nproc != "auto" else max(1, len(gpus))
    if backend == "nccl" and wanted > len(gpus):
        raise ValueError(
            f"SpawnDDP(nproc={nproc!r}) with Gang(backend='nccl') needs a GPU of its own for each of {wanted} ranks; "
            f"torch finds {len(gpus)} on this node{_named(gpus)}. Ask for GPUs in the task's requests, lower nproc, or "
            "use backend='gloo', with which ranks may share a GPU or do without."
        )
    return wanted


def _named(gpus: dict[str, str]) -> str:
    return f" ({', '.join(f'GPU {gpu}: {name}' for gpu, name in gpus.items())})" if gpus else ""
