"""A driver's part in sharded checkpoints, played in a group of ranks without one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.protocol.checkpoints import (
    LAYOUT,
    ShardedCheckpoint,
    Sharding,
    WrittenShards,
    folder_name,
    layout_of,
    metadata_of,
)
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints

NONCE = "nonce"


class Rank:
    """A rank's checkpoints, and what it has reported."""

    def __init__(
        self,
        base: Path | str,
        start: Sequence[ShardedCheckpoint] = (),
        *,
        attempt: int = 0,
        token: str | None = None,
    ) -> None:
        self.base = str(base)
        self.attempt = attempt
        self.reports: list[WrittenShards] = []
        self.num_moves = 0
        self.checkpoints = ShardedCheckpoints(
            Sharding(base=self.base, nonce=NONCE, token=token, start=tuple(start)),
            attempt=attempt,
            rank=current_rank().rank,
            report=self.reports.append,
            moved=self._move,
        )

    def _move(self) -> None:
        self.num_moves += 1

    def save(self, state: dict[str, Any], step: int, **metrics: float) -> ShardedCheckpoint:
        """Save a state, and have it committed."""
        self.checkpoints.save(state, step, metrics)
        return self.commit()

    def commit(self) -> ShardedCheckpoint:
        """What the driver does when all ranks have reported."""
        self.checkpoints.flush()
        report = self.reports.pop(0)
        assert report.failure is None, report
        everywhere: list[Any] = [report] * current_rank().world_size
        if len(everywhere) > 1:
            dist.all_gather_object(everywhere, report)
        committed = (commit if current_rank().is_main else entry)(self.base, everywhere)
        if len(everywhere) > 1:
            dist.barrier()
        self.checkpoints.settle(report.number)
        return committed


def entry(base: str, written: Sequence[WrittenShards]) -> ShardedCheckpoint:
    """As the manifest has it."""
    first = written[0]
    return ShardedCheckpoint(
        attempt=first.attempt,
        step=first.step,
        world_size=len(written),
        uri=f"{base}/{folder_name(first.attempt, NONCE, first.step, first.number)}",
        size=sum(part.size for shards in written for part in shards.parts),
        layout_digest=hashlib.sha256(layout_of(written)).hexdigest(),
        metrics=first.metrics,
    )


def commit(base: str, written: Sequence[WrittenShards]) -> ShardedCheckpoint:
    """Write what makes the ranks' parts a checkpoint."""
    committed = entry(base, written)
    files = current_execution().filesystem(committed.uri)
    files.pipe_file(f"{committed.uri}/{LAYOUT}", layout_of(written))
    files.pipe_file(f"{committed.uri}/.metadata", metadata_of(layout_of(written)))
    return committed
