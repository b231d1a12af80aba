"""A driver's part in sharded checkpoints, played in a group of ranks without one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.process.worker import Worker
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, Sharding, Written
from flytekitplugins.daskpytorch.rank.sharded import ShardedCheckpoints

NONCE = "nonce"


class Rank:
    """A rank's checkpoints, and what it has reported."""

    def __init__(
        self, base: Path | str, start: Sequence[CheckpointEntry] = (), *, attempt: int = 0, token: str | None = None
    ) -> None:
        self.base = str(base)
        self.attempt = attempt
        self.reports: list[Written] = []
        self.num_moves = 0
        self.checkpoints = ShardedCheckpoints(
            Sharding(base=self.base, nonce=NONCE, token=token, start=tuple(start)),
            attempt,
            current_rank().rank,
            Worker(),
            self.reports.append,
            self._move,
        )

    def _move(self) -> None:
        self.num_moves += 1

    def save(self, state: dict[str, Any], step: int, **metrics: float) -> CheckpointEntry:
        """Save a state, and have it committed."""
        self.checkpoints.save(state, step, metrics)
        return self.commit()

    def commit(self) -> CheckpointEntry:
        """Return the entry that the driver would put into the manifest."""
        self.checkpoints.flush()
        reports: list[Any] = [self.reports.pop(0) if current_rank().is_main else None]
        if current_rank().world_size > 1:
            dist.broadcast_object_list(reports)
        assert reports[0].failure is None, reports
        return reports[0].entry
