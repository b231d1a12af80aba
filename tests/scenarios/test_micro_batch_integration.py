"""After a lack of memory, a gang trains on with smaller micro batches, to the same result."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from flytekitplugins.daskpytorch.display import deck
from flytekitplugins.daskpytorch.node import hardware

TWO = Gang(ranks_per_worker=2)
NUM_STEPS = 6
BATCH = 32


def run_out(how: str, oom_kills: str) -> None:
    """As the kernel, which kills a process and counts it for its control group; or as torch on a GPU."""
    if how == "gpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    Path(oom_kills).write_text(f"oom_kill {1 + int(Path(oom_kills).read_text().split()[1])}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def train(how: str, oom_kills: str, room: int, *, asks: bool = True) -> tuple[list[float], int, int]:
    """The weights after some steps, the attempt's number, and the number of samples of rank 0's steps.

    Rank 1 has room for so many samples at a time, and runs out in step 3.
    """
    rank = current_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(NUM_STEPS, 2 * BATCH, 4)
    state = rank.checkpoint.load() or {"step": 0, "model": model.state_dict(), "num_samples": 0}
    model.load_state_dict(state["model"])
    num_samples = state["num_samples"]
    size, count = rank.micro_batch(BATCH) if asks else (BATCH, 1)
    for step in range(state["step"], NUM_STEPS):
        batch = inputs[step, rank.rank :: 2]
        parts = batch.split(size)
        assert len(parts) == count
        for part in parts:
            if rank.rank == 1 and step == 3 and len(part) > room:
                time.sleep(0.5)  # rank 0 is ended for it, whose note must have left
                run_out(how, oom_kills)
            with model.no_sync() if part is not parts[-1] else rank.evaluating():
                (mse_loss(model(part), part.sum(1, keepdim=True)) * len(part) / BATCH).backward()
            num_samples += len(part)
        optimizer.step()
        optimizer.zero_grad()
        if asks:
            rank.checkpoint.save({"step": step + 1, "model": model.state_dict(), "num_samples": num_samples}, step + 1)
            rank.checkpoint.flush()
    return model.module.weight.flatten().tolist(), rank.attempt.number, num_samples


@pytest.fixture
def oom_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file in which the kernel counts, as the agent reads it: on this node, in this process."""
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", tmp_path)
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    return str(tmp_path / "memory.events")


@pytest.mark.parametrize("how", ["kernel", "gpu"])
def test_a_gang_out_of_memory_trains_on_with_smaller_micro_batches(how: str, oom_kills: str) -> None:
    undisturbed, _, _ = dispatch.run(None, train, how, oom_kills, BATCH, gang=TWO).result()[0]
    futures = dispatch.run(None, train, how, oom_kills, 8, gang=replace(TWO, max_restarts=1))
    weights, number, num_samples = futures.result()[0]
    assert futures._run_state.failures == {"memory": 2}
    assert weights == pytest.approx(undisturbed, abs=1e-5)
    assert (number, num_samples) == (2, NUM_STEPS * BATCH)
    told = [event.text for event in futures._run_state.history if re.match(r"rank \d( in|$)", event.text)]
    assert told == [
        "rank 0 in attempt 0: micro batches of 32, 1 for a batch of 32",
        "rank 0 in attempt 1: micro batches of 16, 2 for a batch of 32",
        "rank 0 in attempt 2: micro batches of 8, 4 for a batch of 32",
    ]
    page = deck.document(futures._run_state)
    assert all(text in page for text in told)


@pytest.mark.parametrize(("asks", "num_attempts"), [(True, 4), (False, 2)])
def test_restarts_for_memory_end(asks: bool, num_attempts: int, oom_kills: str) -> None:
    """A training that takes no less memory is not tried again at the same step."""
    error = dispatch.run(None, train, "kernel", oom_kills, 0, asks=asks, gang=TWO).exception()
    assert getattr(error, "kind", None) == "memory"
    assert int(Path(oom_kills).read_text().split()[1]) == num_attempts
    said = "a limit of 3 is used up by lacks of memory" if asks else "the same error came at the same step twice"
    assert said in str(error)
