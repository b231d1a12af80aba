"""`Profile` records the right steps, counted by a rank's own optimizer."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from flytekitplugins.daskpytorch import Profile
from flytekitplugins.daskpytorch.rank.usage import profiled
from flytekitplugins.daskpytorch.results import DaskResultsHandler
from gangs import Notes, on_this_machine


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    """Those of all optimizers are as before."""
    before = dict(torch_optimizer._global_optimizer_post_hooks)
    yield
    torch_optimizer._global_optimizer_post_hooks.clear()
    torch_optimizer._global_optimizer_post_hooks.update(before)


class Taken:
    """What a profiler has done with what it was asked for."""

    def __init__(self, scratch: Path, **asked: Any) -> None:
        self.results: dict[str, bytes] = {}
        self.notes: list[str] = []
        profile = Profile(ranks=(3,), **asked)
        self.watching = profiled(profile, 3, scratch, self.results.__setitem__, self.notes.append)


def train(num_steps: int) -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()


def num_steps_in(trace: bytes) -> int:
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step#SGD") for event in events)


@pytest.mark.parametrize(("first", "until", "last"), [(1, 1, 1), (2, 3, 3), (3, 5, 5), (2, 99, 7)])
def test_steps_asked_for_are_in_the_trace_and_no_others(tmp_path: Path, first: int, until: int, last: int) -> None:
    taken = Taken(tmp_path, steps=(first, until))
    with taken.watching:
        train(7)
    [(path, trace)] = taken.results.items()
    assert path == f"profiles/rank-3-steps-{first}-{last}.pt.trace.json.gz"
    assert num_steps_in(trace) == last - first + 1
    assert taken.notes == [
        f"has recorded its steps {first} to {last}: {path} among the results (open it at ui.perfetto.dev)"
    ]
    assert not list(tmp_path.iterdir())


def test_what_fails_costs_a_line_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = Taken(tmp_path / "missing", steps=(1, 2))
    with taken.watching:
        train(4)
    assert not taken.notes
    [record] = caplog.records
    assert record.getMessage().startswith("Profiling rank 3 failed, and is left out: ")


def test_gang_leaves_the_traces_of_the_ranks_that_were_named(tmp_path: Path) -> None:
    profile = Profile(steps=(2, 3), ranks=(1, 7))
    futures = on_this_machine(train, 4, max_restarts=0, profile=profile, observers=[notes := Notes()])
    DaskResultsHandler().process_results(tmp_path, futures)
    [trace] = (tmp_path / "profiles").iterdir()
    assert trace.name == "rank-1-steps-2-3.pt.trace.json.gz"
    assert num_steps_in(trace.read_bytes()) == 2
    assert any(f"rank 1 has recorded its steps 2 to 3: profiles/{trace.name}" in note for note in notes.texts)
