"""Placement of ranks: each rank's worker, GPU and share of the cores. Pure functions, for the driver."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

GpuKey = tuple[str, str]
"""Identity of a GPU across all nodes: its UUID, else its host and its name on the host."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Resources of the node that a worker runs on, as the worker's agent reports them."""

    worker: str
    """Address of the worker, as users see it."""
    host: str
    """Name of the host. Workers of one host share its cores, and GPUs of equal UUID (or name)."""
    num_cores: int
    """Number of cores of the host, or of the container's limit."""
    gpus: tuple[str, ...]
    """Names of the visible GPUs in the worker's `CUDA_VISIBLE_DEVICES`, in that variable's order."""
    gpu_names: tuple[str, ...]
    """Model names of the visible GPUs, in the order of `gpus`."""
    gpu_uuids: tuple[str, ...] = ()
    """UUIDs of the visible GPUs or MIG instances, in the order of `gpus`. "" for an unknown UUID. Empty if all are
    unknown."""
    interface: str | None
    """Network interface that reaches the driver. None if unknown."""
    versions: dict[str, str]
    """Package -> version on this node, for packages whose versions must equal the driver's."""

    @property
    def title(self) -> str:
        """Name of the worker in messages."""
        return title_of(self.worker, self.host)

    def key_of(self, gpu: str) -> GpuKey:
        """Return the identity of a visible GPU: its UUID, else the host and the GPU's name there."""
        uuid = self.uuid_of(gpu)
        return ("", uuid) if uuid else (self.host, gpu)

    def uuid_of(self, gpu: str) -> str:
        """Return the UUID of a visible GPU or MIG instance. Return "" if the UUID is unknown."""
        return dict(zip(self.gpus, self.gpu_uuids, strict=False)).get(gpu, "")

    def title_of(self, gpu: str) -> str:
        """Return a visible GPU's title in messages: its name on the node, and its UUID."""
        host, uuid = self.key_of(gpu)
        return f"GPU {gpu}" if host or uuid == gpu else f"GPU {gpu} (UUID {uuid})"

    def without(self, faulty: Collection[GpuKey]) -> "Node":
        """Return this node without the GPUs in `faulty`."""
        sound = [index for index, gpu in enumerate(self.gpus) if self.key_of(gpu) not in faulty]

        def of_sound(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[index] for index in sound if index < len(values))

        return replace(
            self, gpus=of_sound(self.gpus), gpu_names=of_sound(self.gpu_names), gpu_uuids=of_sound(self.gpu_uuids)
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of a rank: its numbers in the gang and on its node, its GPU and its number of threads."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    """Index of the rank's worker in the gang, from 0."""
    host_rank: int
    """Number of the rank on its host, from 0, across all workers of that host."""
    gpu: str | None
    """Name of the rank's own GPU in the worker's `CUDA_VISIBLE_DEVICES`. None without a GPU."""
    visible_gpus: tuple[str, ...]
    """GPUs in the rank's `CUDA_VISIBLE_DEVICES`."""
    num_threads: int
    """Number of threads for computations of the rank: its share of the host's cores, at least 1."""
    gpu_uuid: str = ""
    """UUID of the rank's own GPU or MIG instance. Empty without a GPU, or if the UUID is unknown."""

    @property
    def device_index(self) -> int | None:
        """Index of the rank's own GPU among the GPUs that the rank sees. None without a GPU."""
        return None if self.gpu is None else self.visible_gpus.index(self.gpu)


def title_of(worker: str, host: str) -> str:
    """Return the name of a worker for messages: its host's name before its address.

    On Kubernetes the host's name is that of the pod, by which the pod's log is found after the address is gone.
    """
    return f"{host} ({worker})" if "://" in worker and host != worker else worker


def worker_order(address: str) -> list[tuple[int, str]]:
    """Return a sort key for workers' addresses, which puts 10.0.0.9 before 10.0.0.10.

    Workers get their ranks in this order. So attempts number them alike, and neighbours get consecutive ranks.
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", address)]


def one_per_gpu(found: Mapping[str, tuple[str, Sequence[str]]]) -> int:
    """Return the number of ranks per worker that gives each rank its own GPU. Return 1 without GPUs.

    Args:
        found: Worker -> its host's name and its GPUs. Workers of one host that see the same GPUs share them.

    Raises:
        ValueError: Some workers have more GPUs than others.
    """
    num_workers = Counter(host for host, _ in found.values())
    gpus: dict[str, set[str]] = defaultdict(set)
    for host, here in found.values():
        gpus[host].update(here)
    shares = {
        worker: max(1, min(len(here), len(gpus[host]) // num_workers[host])) for worker, (host, here) in found.items()
    }
    if len(counts := Counter(shares.values())) > 1:
        first = {share: worker for worker, share in reversed(shares.items())}
        texts = [
            f"{share} rank{'s' * (share > 1)} on {first[share]}" + (f" and on {count - 1} more" if count > 1 else "")
            for share, count in sorted(counts.items())
        ]
        raise ValueError(
            "ranks_per_worker='auto' means a rank for each of a worker's GPUs, which are not equally many: there would "
            f"be {', '.join(texts)}. Say how many ranks each is to have with Gang(ranks_per_worker=...)."
        )
    return next(iter(counts), 1)


def place_ranks(
    nodes: Sequence[Node], ranks_per_worker: int, devices: Literal["own", "all"] = "own"
) -> list[list[Place]]:
    """Assign consecutive ranks to each worker, in the order of `nodes`.

    Each rank gets its own GPU until no GPU of the host is free. Further ranks share GPUs in turn. All ranks of a host
    divide its cores.

    Args:
        nodes: The workers' nodes.
        ranks_per_worker: Number of ranks on each worker.
        devices: GPUs visible to a rank. With "own", only the rank's GPU. With "all", first the GPUs of the worker's
            ranks, in rank order, then unused GPUs of the node.

    Returns:
        For each node, the places of its ranks.
    """
    ranks_on_host: dict[str, int] = defaultdict(int)
    for node in nodes:
        ranks_on_host[node.host] += ranks_per_worker

    own, taken = _own_gpus(nodes, ranks_per_worker)
    placed_on_host: dict[str, int] = defaultdict(int)
    places = []
    for group_rank, node in enumerate(nodes):
        here = own[group_rank]
        together = tuple(dict.fromkeys(here + [gpu for gpu in node.gpus if node.key_of(gpu) not in taken]))
        places.append(
            [
                Place(
                    rank=group_rank * ranks_per_worker + local_rank,
                    local_rank=local_rank,
                    world_size=len(nodes) * ranks_per_worker,
                    local_world_size=ranks_per_worker,
                    group_rank=group_rank,
                    host_rank=placed_on_host[node.host] + local_rank,
                    gpu=here[local_rank] if here else None,
                    visible_gpus=together if devices == "all" else tuple(here[local_rank : local_rank + 1]),
                    num_threads=max(1, node.num_cores // ranks_on_host[node.host]),
                    gpu_uuid=node.uuid_of(here[local_rank]) if here else "",
                )
                for local_rank in range(ranks_per_worker)
            ]
        )
        placed_on_host[node.host] += ranks_per_worker
    return places


def leave_out(nodes: Sequence[Node], faulty: Collection[GpuKey], ranks_per_worker: int) -> list[Node]:
    """Return the nodes without the failed GPUs.

    A failed GPU stays if its node has no other GPU, or if its removal makes more ranks share a GPU.
    """
    left = list(nodes)
    for gpu in faulty:
        fewer = [node.without([gpu]) for node in left]
        all_have = all(after.gpus or not before.gpus for before, after in zip(left, fewer, strict=True))
        if all_have and _most_shared(fewer, ranks_per_worker) <= _most_shared(left, ranks_per_worker):
            left = fewer
    return left


def _most_shared(nodes: Sequence[Node], ranks_per_worker: int) -> int:
    """Return the greatest number of ranks on one GPU. Return 0 without GPUs."""
    return max(_own_gpus(nodes, ranks_per_worker)[1].values(), default=0)


def _own_gpus(nodes: Sequence[Node], ranks_per_worker: int) -> tuple[list[list[str]], Counter[tuple[str, str]]]:
    """Return the GPUs of each node's ranks, and the number of ranks on each GPU, by the GPU's identity."""
    num_ranks: Counter[tuple[str, str]] = Counter()
    own = []
    for node in nodes:
        keys = {gpu: node.key_of(gpu) for gpu in node.gpus}
        here: list[str] = []
        for _ in range(ranks_per_worker if node.gpus else 0):
            here.append(min(node.gpus, key=lambda gpu: num_ranks[keys[gpu]]))  # the first GPU with the fewest ranks
            num_ranks[keys[here[-1]]] += 1
        own.append(here)
    return own, num_ranks


def choose_backend(asked: str, nodes: Sequence[Node], places: Sequence[Sequence[Place]]) -> str:
    """Return the process group's backend. "auto" becomes nccl if every rank has its own GPU, else gloo.

    Raises:
        ValueError: `asked` is nccl, but a rank has no GPU, or shares one.
    """
    lacking, shared, taken = [], [], set()
    for node, here in zip(nodes, places, strict=True):
        for place in here:
            if place.gpu is None:
                lacking.append(f"rank {place.rank} on {node.title}")
            elif (key := node.key_of(place.gpu)) in taken:
                shared.append(f"rank {place.rank} on {node.title} (GPU {place.gpu})")
            else:
                taken.add(key)
    if asked == "nccl" and (lacking or shared):
        found = [f"no GPU for {', '.join(lacking)}"] if lacking else []
        found += [f"a GPU that another rank has for {', '.join(shared)}"] if shared else []
        raise ValueError(
            f"backend='nccl' needs a GPU of its own for every rank; found {'; '.join(found)}. "
            "Ask for GPUs in the workers' limits, lower ranks_per_worker, or use backend='gloo'."
        )
    if asked != "auto":
        return asked
    return "gloo" if lacking or shared else "nccl"
