"""Placement of ranks: each rank's worker, GPU and share of the cores. Pure functions, for the driver."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Node:
    worker: str
    host: str
    """Workers of one host share its cores, and GPUs of equal UUID (or name)."""
    num_cores: int
    gpus: tuple[str, ...]
    """As in the worker's `CUDA_VISIBLE_DEVICES`."""
    gpu_names: tuple[str, ...]
    """In the order of `gpus`."""
    gpu_uuids: tuple[str, ...] = ()
    """UUIDs, also of MIG instances, or PCI addresses of AMD's GPUs, in the order of `gpus`: "" if unknown."""
    interface: str | None
    versions: dict[str, str]
    """Versions that must equal the driver's."""

    @property
    def title(self) -> str:
        return title_of(self.worker, self.host)

    def key_of(self, gpu: str) -> tuple[str, str]:
        uuid = self.uuid_of(gpu)
        return ("", uuid) if uuid and ":" not in uuid else (self.host, uuid or gpu)

    def uuid_of(self, gpu: str) -> str:
        return dict(zip(self.gpus, self.gpu_uuids, strict=False)).get(gpu, "")

    def title_of(self, gpu: str) -> str:
        host, uuid = self.key_of(gpu)
        return f"GPU {gpu}" if host or uuid == gpu else f"GPU {gpu} (UUID {uuid})"


@dataclass(frozen=True, kw_only=True)
class Place:
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    host_rank: int
    """Number on the host, from 0, across all workers there."""
    gpu: str | None
    visible_gpus: tuple[str, ...]
    num_threads: int
    gpu_uuid: str = ""
    """UUID of the GPU or MIG instance, or AMD's PCI address, or empty if unknown."""

    @property
    def device_index(self) -> int | None:
        return None if self.gpu is None else self.visible_gpus.index(self.gpu)


def title_of(worker: str, host: str) -> str:
    """Return a worker's name with its host first: on Kubernetes the pod, whose log remains when the address is gone."""
    return f"{host} ({worker})" if "://" in worker and host != worker else worker


def worker_order(address: str) -> list[tuple[int, str]]:
    """Sort 10.0.0.9 before 10.0.0.10, so that attempts number workers alike, and neighbours get consecutive ranks."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", address)]


def one_per_gpu(found: Mapping[str, tuple[str, Sequence[str]]]) -> int:
    """Return the number of ranks per worker that gives each rank its own GPU, or 1 without GPUs.

    Workers of one host that see the same GPUs share them. ValueError: some workers have more than others.
    """
    num_workers = Counter(host for host, _ in found.values())
    gpus: dict[str, set[str]] = defaultdict(set)
    for host, here in found.values():
        gpus[host].update(here)
    shares = {
        worker: max(1, min(len(here), len(gpus[host]) // num_workers[host])) for worker, (host, here) in found.items()
    }
    if len(counts := Counter(shares.values())) > 1:
        texts = [
            f"{share} rank{'s' * (share > 1)} on {count} worker{'s' * (count > 1)}"
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
    """Assign consecutive ranks to each worker, and return the places of each node's ranks.

    Each rank gets its own GPU until no GPU of the host is free, and shares one then. All ranks of a host divide its
    cores. With devices="all", a rank sees the GPUs of the worker's ranks, in rank order, then unused GPUs.
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


def _own_gpus(nodes: Sequence[Node], ranks_per_worker: int) -> tuple[list[list[str]], Counter[tuple[str, str]]]:
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
    """ValueError: nccl was asked for and cannot be."""
    without, taken = [], set()
    for node, here in zip(nodes, places, strict=True):
        for place in here:
            if place.gpu is None:
                without.append(f"rank {place.rank} on {node.title} has none")
            elif (key := node.key_of(place.gpu)) in taken:
                without.append(f"rank {place.rank} on {node.title} shares GPU {place.gpu}")
            else:
                taken.add(key)
    if asked == "nccl" and without:
        raise ValueError(
            f"backend='nccl' needs a GPU of its own for every rank: {', '.join(without)}. "
            "Ask for GPUs in the workers' limits, lower ranks_per_worker, or use backend='gloo'."
        )
    if asked != "auto":
        return asked
    return "gloo" if without else "nccl"
