"""A workflow that replaces `Elastic` gets rank 0's outputs of all types.

The rest of what `Elastic` promises is in test_spawn_integration.py, and threads in test_orders.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from flytekit import task, workflow

from flytekitplugins.daskpytorch import SpawnDDP

pytestmark = pytest.mark.usefixtures("one_fork_server")


@dataclass
class Settings:
    learning_rate: float = 1e-5
    batch_size: int = 64
    name: str = "before"


class Trained(NamedTuple):
    who: str
    settings: Settings
    model: torch.nn.Module
    total: int


def train(settings: Settings) -> Trained:
    dist.init_process_group(backend="gloo")  # as under torchrun
    local_rank = int(os.environ["LOCAL_RANK"])
    total = torch.tensor([5 + 2 * dist.get_rank() + dist.get_world_size()])
    dist.all_reduce(total)
    settings.name = "after"
    return Trained(f"local rank {local_rank}", settings, torch.nn.Linear(1000, local_rank + 1), int(total))


def test_a_workflow_has_rank_0s_outputs_of_all_types(monkeypatch: pytest.MonkeyPatch) -> None:
    # flytekit 1.16 reads modules as torch did before 2.6.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    train_task = task(train, task_config=SpawnDDP(nproc=2))

    @workflow
    def whole(settings: Settings = Settings()) -> Trained:  # noqa: B008 - a dataclass that Flyte reads
        return train_task(settings=settings)

    who, settings, model, total = whole()
    assert (who, settings) == ("local rank 0", Settings(name="after"))
    assert (model.in_features, model.out_features) == (1000, 1)
    assert total == (5 + 2) + (5 + 2 + 2)
