"""What the tests of kfpytorch's `Elastic` demand, of `SpawnDDP` in its place, in words of our own.

Left out is what has no counterpart: the operator's run policy, and the settings of torch's rendezvous.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import flytekit
import pytest
import torch
import torch.distributed as dist
from flytekit import Artifact, task, workflow
from flytekit.core.context_manager import FlyteContext
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.literals import LiteralMap

from flytekitplugins.daskpytorch import SpawnDDP

pytestmark = pytest.mark.usefixtures("one_fork_server")
METHODS = ("spawn", "forkserver")
"""`Elastic` calls the second `fork`."""


def of_two(method: str) -> SpawnDDP:
    return SpawnDDP(nproc=2, start_method=method)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("method", METHODS)
def test_a_workflow_has_rank_0s_outputs_of_all_types(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # flytekit 1.16 reads modules as torch did before 2.6.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    train_task = task(train, task_config=of_two(method))

    @workflow
    def whole(settings: Settings = Settings()) -> Trained:  # noqa: B008 - a dataclass that Flyte reads
        return train_task(settings=settings)

    who, settings, model, total = whole()
    assert (who, settings) == ("local rank 0", Settings(name="after"))
    assert (model.in_features, model.out_features) == (1000, 1)
    assert total == (5 + 2) + (5 + 2 + 2)


@task(task_config=SpawnDDP(nproc=1))
def look() -> str:
    context = flytekit.current_context()
    context.checkpoint.write(b"state")
    return str(context.execution_id.name)


def test_ranks_have_the_executions_parameters() -> None:
    """On a backend, too: see `test_what_a_rank_is_given_and_gives`."""
    assert look() == flytekit.current_context().execution_id.name


@task(task_config=SpawnDDP(nproc=2), enable_deck=True)
def decorate() -> None:
    context = flytekit.current_context()
    context.decks.append(flytekit.Deck("own", f"from rank {os.environ['RANK']}"))
    context.default_deck.append("on the default deck")


def test_decks_of_rank_0_are_the_tasks() -> None:
    decorate()
    decks = {deck.name: deck.html.strip() for deck in flytekit.current_context().decks}
    assert decks["own"] == "from rank 0"
    assert "on the default deck" in decks["default"]


artifact = Artifact(name="trained")


class Card:
    def serialize_to_string(self, ctx: FlyteContext, variable_name: str) -> tuple[str, str]:
        return "card", "## A card"


@task(task_config=SpawnDDP(nproc=2))
def describe() -> Annotated[str, artifact]:
    return artifact.create_from("described", Card())


def test_an_outputs_metadata_is_the_tasks() -> None:
    outputs = describe.dispatch_execute(FlyteContext.current_context(), LiteralMap(literals={}))
    assert outputs.literals["o0"].metadata


class CanBeTriedAgainError(FlyteRecoverableException):
    """A user's own."""


@task(task_config=SpawnDDP(nproc=2))
def fail(recoverable: bool) -> None:
    raise CanBeTriedAgainError("again") if recoverable else RuntimeError("never")


@pytest.mark.parametrize(("recoverable", "kind"), [(True, CanBeTriedAgainError), (False, RuntimeError)])
def test_errors_keep_their_type(recoverable: bool, kind: type[Exception]) -> None:
    """And on a backend the time of the failure: see `test_errors_have_flytes_kind_and_the_time_of_the_failure`."""
    with pytest.raises(kind):
        fail(recoverable=recoverable)


@task(task_config=SpawnDDP(nproc=2))
def count_threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


def test_threads_are_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Elastic` sets 1."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert count_threads() == str(max(1, (os.cpu_count() or 1) // 2))


@task(task_config=SpawnDDP(nproc=2), environment={"OMP_NUM_THREADS": "42"})
def count_threads_that_are_set() -> str:
    return os.environ["OMP_NUM_THREADS"]


def test_threads_that_are_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_threads_that_are_set() == "42"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert count_threads() == "5"
