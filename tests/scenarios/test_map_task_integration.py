"""Gangs as elements of a `map_task`, in this process and by the container's command."""

import json
from pathlib import Path

import torch

from processes import nothing_left_behind, run_program
from test_task_integration import execute

FLOWS = """
import functools
import json
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from flytekit import task, workflow
from flytekit.configuration import SerializationSettings
from flytekit.core.array_node_map_task import map_task

from flytekitplugins.daskpytorch import DaskDDP, SpawnDDP, WorkerGroup, current_rank


def reduced(number):
    total = torch.tensor(float(number * 10 ** current_rank().rank))
    dist.all_reduce(total)
    return total.item()


@task(task_config=SpawnDDP(nproc=2), environment={"OMP_NUM_THREADS": "3"})
def train(number: int, scale: float) -> list[float]:
    return [reduced(number) * scale, float(torch.get_num_threads()), float(os.environ["OMP_NUM_THREADS"])]


class Made(NamedTuple):
    total: float
    text: str


@task(task_config=DaskDDP(workers=WorkerGroup(number_of_workers=2)))
def on_dask(number: int) -> Made:
    return Made(reduced(number), "from rank 0")


@task(task_config=SpawnDDP(nproc=2), enable_deck=True)
def fit(number: int, scale: float) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, number * scale)
    return model


mapped = map_task(functools.partial(train, scale=2.0), concurrency=2)
models = map_task(functools.partial(fit, scale=2.0))


@workflow
def sweep(numbers: list[int]) -> list[list[float]]:
    return mapped(number=numbers)


if __name__ == "__main__":
    print(json.dumps([sweep(numbers=[1, 2]), on_dask.execute(number=1)]))
"""


def test_elements_of_a_map_are_gangs_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "flows.py").write_text(FLOWS)
    with nothing_left_behind():
        done = run_program(["flows.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    elements, by_hand = json.loads(done.stdout.splitlines()[-1])
    assert elements == [[22.0, 3.0, 3.0], [44.0, 3.0, 3.0]]
    assert by_hand == [11.0, "from rank 0"]


def test_a_model_that_the_driver_cannot_load_is_an_elements_output(tmp_path: Path) -> None:
    """One element, by its container's command."""
    (tmp_path / "flows.py").write_text(FLOWS)
    command = "flows.models.get_command(flows.SerializationSettings(image_config=None))"
    (tmp_path / "asks.py").write_text(f"import json, flows; print(json.dumps({command}))")
    words = json.loads(run_program(["asks.py"], cwd=tmp_path).stdout.splitlines()[-1])
    how = {"env": {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "INDEX", "INDEX": "1"}, "words": words}
    with nothing_left_behind():
        done = execute("models", {"number": [5, 7], "scale": 2.0}, cluster=None, cwd=tmp_path, folder=tmp_path, **how)
    model = torch.load(done.outputs["o0"].scalar.blob.uri, weights_only=False)
    assert (type(model), model.weight.item()) == (torch.nn.Linear, 14.0)
