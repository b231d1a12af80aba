"""Workers to ranks: who gets which rank, GPU and share of the cores. Pure; runs in the driver."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

GpuKey = tuple[str, str]
"""Key of one GPU among those of all nodes, made by `Node.key_of`."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """What an agent found where it runs."""

    worker: str
    """The worker's address, as the user knows it."""
    host: str
    """The host's name; workers of the same name share its cores, and GPUs of one UUID (or of one name)."""
    num_cores: int
    """Cores that this host, or this container's limit, gives."""
    gpus: tuple[str, ...]
    """The visible GPUs, as `CUDA_VISIBLE_DEVICES` names them, in its order."""
    gpu_names: tuple[str, ...]
    gpu_uuids: tuple[str, ...] = ()
    """UUIDs of the GPUs, of MIG instances their own; "" or none where unknown."""
    interface: str | None
    """The network interface that reaches the driver."""
    versions: dict[str, str]
    """Versions that all sides must share."""

    def key_of(self, gpu: str) -> GpuKey:
        """Return what tells a visible GPU from all other GPUs: its UUID, else the host and the GPU's name there."""
        uuid = dict(zip(self.gpus, self.gpu_uuids, strict=False)).get(gpu)
        return ("", uuid) if uuid else (self.host, gpu)

    def title_of(self, gpu: str) -> str:
        """Return how messages name a visible GPU: its name there, and its UUID."""
        host, uuid = self.key_of(gpu)
        return f"GPU {gpu}" if host or uuid == gpu else f"GPU {gpu} (UUID {uuid})"

    def without(self, faulty: Collection[GpuKey]) -> "Node":
        """Return this node without GPUs that have failed."""
        sound = [index for index, gpu in enumerate(self.gpus) if self.key_of(gpu) not in faulty]

        def of_sound(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[index] for index in sound if index < len(values))

        return replace(
            self, gpus=of_sound(self.gpus), gpu_names=of_sound(self.gpu_names), gpu_uuids=of_sound(self.gpu_uuids)
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place in its gang."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    """The index of the rank's worker in the gang."""
    host_rank: int
    """0 for the first of the gang's ranks on its host, whichever worker that has, then 1, 2, ..."""
    gpu: str | None
    """The rank's own, as the worker's `CUDA_VISIBLE_DEVICES` names it."""
    visible_gpus: tuple[str, ...]
    """What the rank's `CUDA_VISIBLE_DEVICES` says."""
    num_threads: int
    """Threads for the rank's own computing: its share of the host's cores."""

    @property
    def device_index(self) -> int | None:
        """The number of the rank's own GPU among those that it sees; None without any."""
        return None if self.gpu is None else self.visible_gpus.index(self.gpu)


def worker_order(address: str) -> list[tuple[int, str]]:
    """A sort key that puts 10.0.0.9 before 10.0.0.10, so that ranks are stable and neighbours stay together."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", address)]


def one_per_gpu(found: Mapping[str, tuple[str, Sequence[str]]]) -> int:
    """How many ranks each worker gets so that each has a GPU of its own; one where there are none.

    Args:
        found: The workers, each with its host's name and its GPUs. Workers of one host that see the same share them.

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
    """Give every worker its ranks: consecutive, in the order of `nodes`.

    Each rank gets a GPU of its own while its host has one left; after that GPUs are shared in turn. Cores are divided
    among all the ranks of a host.

    Args:
        nodes: What the workers have.
        ranks_per_worker: How many ranks each of them gets.
        devices: Which GPUs a rank sees; of "all" those come first that the worker's ranks have, in their order, and
            those of other workers on the host are left out.

    Returns:
        For each node, its places.
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
                )
                for local_rank in range(ranks_per_worker)
            ]
        )
        placed_on_host[node.host] += ranks_per_worker
    return places


def leave_out(nodes: Sequence[Node], faulty: Collection[GpuKey], ranks_per_worker: int) -> list[Node]:
    """Return the nodes without each of the failed GPUs in whose place the ranks there have others to themselves."""
    left = list(nodes)
    for gpu in faulty:
        fewer = [node.without([gpu]) for node in left]
        all_have = all(after.gpus or not before.gpus for before, after in zip(left, fewer, strict=True))
        if all_have and _most_shared(fewer, ranks_per_worker) <= _most_shared(left, ranks_per_worker):
            left = fewer
    return left


def _most_shared(nodes: Sequence[Node], ranks_per_worker: int) -> int:
    """Return how many ranks share the GPU that most ranks have."""
    return max(_own_gpus(nodes, ranks_per_worker)[1].values(), default=0)


def _own_gpus(nodes: Sequence[Node], ranks_per_worker: int) -> tuple[list[list[str]], Counter[tuple[str, str]]]:
    """Return for each node the GPUs of its ranks, if it has any, and how many ranks have each GPU (`Node.key_of`)."""
    num_ranks: Counter[tuple[str, str]] = Counter()
    own = []
    for node in nodes:
        keys = {gpu: node.key_of(gpu) for gpu in node.gpus}
        here: list[str] = []
        for _ in range(ranks_per_worker if node.gpus else 0):
            here.append(min(node.gpus, key=lambda gpu: num_ranks[keys[gpu]]))  # the first of the least used
            num_ranks[keys[here[-1]]] += 1
        own.append(here)
    return own, num_ranks


def choose_backend(asked: str, nodes: Sequence[Node], places: Sequence[Sequence[Place]]) -> str:
    """The process group's backend: as asked, or nccl where every rank has a GPU to itself, else gloo.

    Raises:
        ValueError: nccl was asked for and some rank has no GPU, or shares one.
    """
    lacking, shared, taken = [], [], set()
    for node, here in zip(nodes, places, strict=True):
        for place in here:
            if place.gpu is None:
                lacking.append(f"rank {place.rank} on {node.worker}")
            elif (key := node.key_of(place.gpu)) in taken:
                shared.append(f"rank {place.rank} on {node.worker} (GPU {place.gpu})")
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
