"""Arguments of observers' methods: a gang's shape, log records and usages, with defaults."""

from __future__ import annotations

from typing import Any

from flytekitplugins.daskpytorch.protocol.observer import Shape
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage


def record(step: int = 0, rank: int = 0, num_steps: int | None = None, time: float = 0.0, **metrics: Any) -> LogRecord:
    return LogRecord(rank=rank, step=step, num_steps=num_steps, time=time, metrics=metrics)


def usage(rank: int, time: float = 0.0, num_steps: int = 0, **changes: Any) -> RankUsage:
    seconds = {"stepping": 1.5, "data": 0.25}
    given = {"seconds": seconds, "cpu": 2.0, "memory": 3 << 30, "gpu_memory": None, "gpu_utilization": None} | changes
    return RankUsage(rank=rank, time=time, num_steps=num_steps, **given)


def node(worker: str = "w", host: str = "h", **changes: Any) -> Node:
    usual = {"num_cores": 8, "gpus": (), "gpu_names": (), "interface": None, "versions": {}}
    return Node(worker=worker, host=host, **usual | changes)


def shape_of(*nodes: Node, per_worker: int = 1) -> Shape:
    return Shape(name="flows.train", backend="gloo", nodes=[*nodes], places=place_ranks(nodes, per_worker))
