"""Unchanged programs for Lightning, Accelerate, Transformers and others run in each kind of gang.

One gang for each kind runs all of `library_examples.py`: the fork servers import the libraries once for all of them.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client, LocalCluster
from flytekit import task

import fault_training as ft
import library_examples
import library_trainings
from flytekitplugins.daskpytorch import (
    DaskDDP,
    Evaluate,
    Gang,
    Keep,
    LogRecord,
    Observer,
    PreemptedError,
    SpawnDDP,
    WorkerGroup,
)
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.protocol import host
from flytekitplugins.daskpytorch.task.run import RunFutures
from pages import block, imported
from processes import nothing_left_behind

PACKAGES = {"lightning_trainer": "lightning", "lightning_fabric": "lightning"}
"""Example -> the package that it needs, where the names differ."""
HERE = [name for name in library_examples.EXAMPLES if find_spec(PACKAGES.get(name, name)) is not None]
ONCE = {"max_restarts": 0}


def as_json(folder: str) -> str:
    return json.dumps(library_examples.run_all(HERE, folder))


@task(task_config=DaskDDP(workers=WorkerGroup(number_of_workers=2), gang=Gang(**ONCE)))
def on_two_workers(folder: str) -> str:
    return as_json(folder)


@task(task_config=SpawnDDP(nproc=2, gang=Gang(**ONCE)))
def on_own_node(folder: str) -> str:
    return as_json(folder)


@pytest.fixture(scope="module", autouse=True)
def _imported_ahead() -> Iterator[None]:
    """One fork server for all gangs of this process."""
    fork_client.shutdown()
    with nothing_left_behind(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client, "_imported_ahead", ["library_imports"])
        yield


@pytest.fixture(scope="module", params=[on_two_workers, on_own_node], ids=["DaskDDP", "SpawnDDP"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the examples found on either rank of a gang."""
    found: list[dict[str, Any]] = json.loads(request.param(folder=str(tmp_path_factory.mktemp("libraries"))))
    assert len(found) == 2
    return found


ALONE = "would not train with all of them"

EXPECTED: dict[str, dict[str, Any]] = {
    # And a mean over both ranks; `one` and the like are what is said of Trainers that do not fit.
    "lightning_trainer": {
        "size": 2,
        "num_batches": 3,
        "one": ALONE,
        "four": ALONE,
        "spawning": "would start processes of its own",
    },
    "lightning_fabric": {"size": 2, "num_batches": 3, "ranks": 3.0, "three": ALONE},
    "accelerate": {"size": 2, "num_batches": 3, "ranks": 3.0},
    "transformers": {"size": 2, "num_batches": 3},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_are_those_of_one_process_that_sees_the_samples_of_all(ranks: list[dict[str, Any]], name: str) -> None:
    if name not in HERE:
        pytest.skip(f"{PACKAGES.get(name, name)} is not installed")
    for rank in ranks:
        found = dict(rank[name])
        assert found.pop("distance") < 1e-6
        assert found.pop("mean_loss", None) == ranks[0][name].get("mean_loss")
        assert found == EXPECTED[name]


# ---- The callbacks


TWO_RANKS = Gang(ranks_per_worker=2)


@pytest.fixture(scope="module")
def worker() -> Iterator[Client]:
    """A client of a worker in this process."""
    with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as local, Client(local) as client:
        yield client


@pytest.mark.parametrize("library", library_trainings.TRAININGS)
def test_a_killed_training_goes_on_to_the_result_of_the_undisturbed_one(
    library: str, worker: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library) if find_spec(library) is None else None  # without importing it here
    monkeypatch.setattr(ft, "train", library_trainings.TRAININGS[library])
    own = {"lightning": "validated", "transformers": "eval_loss"}[library]
    evaluate = Evaluate(library_trainings.EVALUATIONS[library], workers=0)
    beside = replace(TWO_RANKS, evaluate=evaluate, keep=Keep(best=1, metric="loss_beside"), **ONCE)
    with ft.watching(tmp_path / "undisturbed") as launch:
        undisturbed = launch(worker, gang=beside).futures
        expected = undisturbed.result()
    check_evaluated(undisturbed, own)
    with ft.watching(tmp_path / "killed") as launch:
        best = Keep(best=1, metric=own, mode="min")
        killed = launch(worker, 6, gang=replace(TWO_RANKS, keep=best))
        results, records = killed.futures.result(), killed.futures.records
    assert killed.starts(0) == killed.starts(1) == [0, 4]
    assert set(killed.kept) >= {4, 8}  # a gang that has its results does not wait for the last one
    for result in results:
        assert all(torch.equal(result[name], value) for name, value in expected[0].items())
    step, metrics = json.loads((killed.folder / "best").read_text())
    validated = {record.step: record.numbers[best.metric] for record in records if best.metric in record.numbers}
    assert metrics[best.metric] == min(validated.values()) == validated[step]
    assert {record.step for record in records if "loss" in record.metrics} == {2, 4, 6, 8, 10, 12}
    assert {record.num_steps for record in records} == {12}
    names, spent = {name for record in records for name in record.metrics}, killed.futures.goodput
    assert spent is not None
    assert min(spent.stepping, spent.data, spent.evaluation, spent.saving, spent.lost) > 0
    assert names >= {"lightning": {"epoch", "own_loss", "validated"}, "transformers": {"epoch", "grad_norm"}}[library]


def check_evaluated(futures: RunFutures, own: str) -> None:
    """The evaluation beside the training has found the trainer's own values."""
    validated = {record.step: record.numbers[own] for record in futures.records if own in record.numbers}
    beside = {record.step: record.numbers["loss_beside"] for record in futures.records if record.is_evaluation}
    assert 12 in beside
    assert {step: pytest.approx(validated[step], abs=1e-3) for step in beside} == beside
    assert futures.best_checkpoint is not None
    assert futures.best_checkpoint.step == min(beside, key=beside.__getitem__)


@pytest.mark.parametrize("library", library_trainings.TRAININGS)
def test_a_training_that_is_told_to_end_keeps_its_state_and_returns(
    library: str, worker: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library) if find_spec(library) is None else None
    monkeypatch.setattr(ft, "train", library_trainings.TRAININGS[library])

    class EndsIt(Observer):
        def on_log(self, record: LogRecord) -> None:
            host.preempt_all("the test has had enough")

    with ft.watching(tmp_path / "stopped") as launch:
        stopped = launch(worker, epochs=100_000, gang=replace(TWO_RANKS, observers=(EndsIt,), grace_period=600))
        with pytest.raises(PreemptedError, match=r"the newest checkpoint \(step"):
            stopped.futures.result()
    ends = {(stopped.folder / f"ended-{rank}").read_text() for rank in range(2)}
    assert ends == {str(stopped.kept[-1])}


# ---- The guide


@pytest.mark.parametrize("library", library_trainings.TRAININGS)
def test_the_guides_example_trains(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library)
    example = imported(f"with_{library}", block(f"daskpytorch.{library} import"), tmp_path, monkeypatch)
    trained = example.train(epochs=1)
    said = capfd.readouterr().err
    if library == "lightning":
        assert trained == 32  # of the model's 64 samples each rank sees half
    else:
        assert trained == pytest.approx(math.log(16), abs=1.0)  # that of a guess among 16 words
        assert "step 1/1" in said  # of 16 texts, two ranks take 8 each at once
