"""Sharded checkpoints of gangs: other numbers of ranks, folders and S3, and the end of a task.

`benchmarks/chaos.py --storage 1` draws kills, and storage that is away.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flytekitplugins.daskpytorch import Gang, GangStartError, Keep, current_rank, dispatch
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.protocol.host import open_filesystem
from gangs import Notes, driver_of, on_this_machine
from processes import until
from sharded_states import assert_same, make, state_of, whole

pytestmark = pytest.mark.usefixtures("one_fork_server")

ODD_NAME = "a[b]*?::c %20#{d}~é"
"""Characters that mean something to fsspec, to URLs or to shells."""


def train(stop: int, pause: float = 0.0) -> dict[str, Any]:
    """Train an FSDP2 model until this step. What there was at the start, and in the end, gathered."""
    rank = current_rank()
    model, optimizer = make(seed=0)
    state = state_of(model, optimizer)
    first = rank.checkpoint.load_sharded(state) or 0
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    start = whole(model, optimizer)
    for step in range(first, stop):
        optimizer.zero_grad()
        model(torch.linspace(step, step + 1, 6).reshape(2, 3)).square().sum().backward()
        optimizer.step()
        rank.checkpoint.save_sharded(state_of(model, optimizer), step + 1, metrics={"loss": 1 / (step + 1)})
        time.sleep(pause)
        if rank.should_stop():
            break
    return {"first": first, "start": start, "end": whole(model, optimizer)}


def count(steps: int) -> list[int]:
    """A training without a model: from which step it went on, and the sum of all."""
    rank, state = current_rank(), {"sum": torch.zeros(1)}
    first = rank.checkpoint.load_sharded(state) or 0
    for step in range(first, steps):
        state["sum"] += step + 1
        rank.checkpoint.save_sharded(state, step + 1)
    return [first, int(state["sum"])]


def run(*args: Any, **how: Any) -> tuple[list[dict[str, Any]], Notes]:
    """What `train` returns on each rank of a gang."""
    notes = Notes()
    return on_this_machine(train, *args, observers=[notes], **how).result(), notes


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.slow), "S3"])
def uri(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue('s3') if request.param == 'S3' else 'file://'}{tmp_path}/{ODD_NAME}"


def test_gangs_of_other_sizes_go_on_from_the_same_place_which_has_the_last_checkpoints_alone(uri: str) -> None:
    before = None
    for num_ranks, stop in ((4, 3), (3, 6), (1, 8)):
        results, notes = run(stop, num_ranks=num_ranks, checkpoint_uri=uri)
        if before is not None:
            assert results[0]["first"] == notes.resumed_steps[0]
            assert_same(results[0]["start"], before)
        before = results[0]["end"]
    kept = {path.partition("/gang/")[2].partition("/")[0] for path in open_filesystem(uri).find(uri)}
    assert kept == {"manifest.json", *(f"step-{step}" for step in (6, 7, 8)[-Keep().last :])}


def train_for_the_best() -> dict[str, Any]:
    """Overshoot; the best model, gathered, and what it was when it was saved. Beside it, a whole state of each step."""
    rank = current_rank()
    model = torch.nn.Linear(3, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (rank.world_size,)))
    optimizer = torch.optim.SGD(model.parameters())
    then: dict[int, Any] = {}
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, 0.7)):
        for parameter in model.parameters():
            parameter.data.fill_(float(step))
        then[step] = whole(model, optimizer)
        rank.checkpoint.save_sharded(state_of(model, optimizer), step, metrics={"loss": loss})
        rank.checkpoint.save({"step": step}, step, metrics={"loss": loss})
        until(lambda step=step: [kept.step for kept in rank.checkpoint.list()].count(step) == 2, f"step {step}")
    state = state_of(model, optimizer)
    found = [rank.checkpoint.load_sharded(state, best=True)]
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    best = whole(model, optimizer)
    assert rank.checkpoint.loaded is not None
    found += [rank.checkpoint.loaded.step, rank.checkpoint.load_sharded(state, step=4)]
    found += [rank.checkpoint.load(best=True)["step"], rank.checkpoint.load(step=4)["step"]]
    try:
        rank.checkpoint.load_sharded(state, step=3)
    except LookupError as error:  # on all ranks, or the others would wait
        return {"found": found, "best": best, "then": then[2], "refused": str(error)}
    raise AssertionError("step 3 is kept, too")


def test_all_ranks_load_the_best_and_their_parts_of_it() -> None:
    for result in on_this_machine(train_for_the_best, keep=Keep(last=1, best=1, metric="loss")).result():
        assert result["found"] == [2, 2, 4, 2, 4]
        for key, value in result["then"].items():
            assert value.equal(result["best"][key]) if isinstance(value, torch.Tensor) else value == result["best"][key]
        assert "Steps of kept checkpoints: 2, 2, 4, 4" in result["refused"]


def test_gang_that_is_told_to_end_commits_its_last_shards_and_says_so(tmp_path: Path) -> None:
    notes = Notes()
    supervisor = driver_of(train, 1_000_000, 0.01, checkpoint_uri=str(tmp_path), observers=[notes])
    told = threading.Thread(
        target=lambda: (
            until(lambda: max(notes.kept_steps, default=0) >= 5, "five steps"),  # a busy rank leaves some out
            supervisor.preempt("the task was told to end"),
        )
    )
    told.start()
    kept = r"the checkpoint of step (\d+) is in .*, and the same call in a new process goes on from it"
    with pytest.raises(PreemptedError, match=kept) as ended:
        supervisor.run()
    told.join()
    step = int(re.search(kept, str(ended.value))[1])
    assert notes.kept_steps[-1] == step
    [again, _], notes = run(step, checkpoint_uri=str(tmp_path))
    assert again["first"] == step
    assert notes.resumed_steps == [step]


def test_each_gang_on_a_cluster_goes_on_from_its_own_by_its_key(client: Client, tmp_path: Path) -> None:
    sweep, both = (Gang(checkpoint_uri=str(tmp_path / "kept"), key=key) for key in ("sweep", "both"))
    assert dispatch.map(client, count, [2, 3], gang=sweep).result() == [[0, 3], [0, 6]]
    assert dispatch.run(client, count, 4, gang=both).result() == [[0, 10]] * 2
    assert dispatch.map(client, count, [4, 4], gang=sweep).result() == [[2, 10], [3, 10]]
    assert dispatch.run(client, count, 5, gang=both).result() == [[4, 15]] * 2
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["both", "sweep-0", "sweep-1"]


@contextlib.contextmanager
def training(uri: Path) -> Iterator[tuple[Notes, Future[list[Any]]]]:
    """A gang that has checkpoints at an address, and trains until the end of the block."""
    notes = Notes()
    gang = driver_of(train, 1_000_000, 0.01, checkpoint_uri=str(uri), observers=[notes])
    with ThreadPoolExecutor() as pool:
        running = pool.submit(gang.run)
        try:
            until(lambda: max(notes.kept_steps, default=0) >= 3, "three steps")
            yield notes, running
        finally:
            gang.preempt("that is enough")


def test_a_second_gang_at_the_same_address_is_refused_and_the_first_keeps_its_checkpoints(tmp_path: Path) -> None:
    with training(tmp_path) as (notes, running):
        second = driver_of(train, 3, checkpoint_uri=str(tmp_path))
        with pytest.raises(GangStartError, match=rf"{tmp_path}/gang is in use by .*train on .*, which began at"):
            second.run()
        kept = max(notes.kept_steps)
        until(lambda: max(notes.kept_steps) > kept, "the first to go on")
    assert isinstance(running.exception(), PreemptedError)
    [again, _], resumed = run(notes.kept_steps[-1], checkpoint_uri=str(tmp_path))
    assert [again["first"], *resumed.resumed_steps] == [notes.kept_steps[-1]] * 2
