"""The real Dask operator runs our tasks' clusters, on a Kubernetes whose pods are local processes."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dask_kubernetes", reason="the Dask operator is not installed")
pytest.importorskip("kmock", reason="kmock, the Kubernetes API, is not installed")

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from backend import render
from backend.kube import Kube, argument, kubernetes, of_attempt
from flytekitplugins.daskpytorch.task.in_ranks import UNDISTURBED
from processes import MARK, nothing_left_behind, until

JOB = "f3a-n0-0"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What the image has at /root."""
    render.lay_out_examples(tmp_path / "root" / "examples")
    return tmp_path / "root"


@pytest.fixture
def image(sources: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that the image sets."""
    with nothing_left_behind() as mark:
        yield {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": str(sources),
            "PYTHONUNBUFFERED": "1",
            MARK: mark,
        }


@pytest.fixture
def kube(image: dict[str, str], tmp_path: Path) -> Iterator[Kube]:
    with kubernetes(tmp_path / "kube", image, grace_period=20.0) as running:
        yield running


@dataclass
class Training:
    """The task `counting`, which Flyte runs, an attempt after the other; and what its ranks leave."""

    kube: Kube
    storage: Path
    job: dict[str, Any]
    """The DaskJob that Flyte has made of the task, as it is in the golden files."""
    task: PythonTask
    inputs: dict[str, Any]

    def start(self, number: int = 0, previous: str = '""') -> dict[str, Any]:
        job = of_attempt(self.job, self.storage, number, previous)
        given = argument(job, "--inputs")
        given.parent.mkdir(parents=True, exist_ok=True)
        context, types = FlyteContextManager.current_context(), self.task.python_interface.inputs
        literals = TypeEngine.dict_to_literal_map(context, self.inputs, types)
        given.write_bytes(literals.to_flyte_idl().SerializeToString())
        self.kube.submit(job)
        return job

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        path = Path(self.inputs["folder"], f"rank-{rank}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, num_lines: int) -> None:
        until(lambda: len(self.lines()) >= num_lines, lambda: f"{num_lines} steps\n{self.kube.logs()}")

    def starts(self) -> set[int]:
        """The first steps of the gangs."""
        return {line["first"] for line in self.lines()}

    def check_clean(self) -> None:
        """The operator takes the cluster away once the job has ended."""
        until(lambda: not self.kube.pods("worker") + self.kube.pods("scheduler"), "the cluster to be gone")
        assert self.kube.plane.find("daskclusters", JOB) is None


def counting(kube: Kube, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> Training:
    monkeypatch.syspath_prepend(sources)
    monkeypatch.delitem(sys.modules, "examples", raising=False)
    monkeypatch.delitem(sys.modules, "examples.more", raising=False)
    (tmp_path / "traces").mkdir()
    given = {"folder": str(tmp_path / "traces"), "steps": 100_000, "pace": 0.05, **inputs}
    made = render.golden("examples")["resources"]["examples.more.counting"]
    task = import_module("examples.more").counting
    return Training(kube, tmp_path / "storage", made, task, given)


@pytest.fixture
def training(kube: Kube, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    """One that goes on until it is ended."""
    return counting(kube, tmp_path, sources, monkeypatch)


def outputs(job: dict[str, Any]) -> dict[str, Any]:
    return dict(LiteralMap.FromString((argument(job, "--output-prefix") / "outputs.pb").read_bytes()).literals)


def error(job: dict[str, Any]) -> ContainerError:
    return ErrorDocument.FromString((argument(job, "--output-prefix") / "error.pb").read_bytes()).error


def is_tried_again_by_flyte(job: dict[str, Any]) -> bool:
    return (error(job).kind, error(job).origin) == (ContainerError.RECOVERABLE, ExecutionError.SYSTEM)


# ---- From its start to its end


def test_a_job_trains_and_its_cluster_is_gone(
    kube: Kube, tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = counting(kube, tmp_path, sources, monkeypatch, steps=3, pace=0.0)
    job = training.start()
    until(lambda: len(kube.pods("worker")) == 2, lambda: f"the workers\n{kube.logs()}")
    metadata = [pod["metadata"] for pod in kube.plane.alive("pods")]
    labels = [each["labels"] for each in metadata]
    assert kube.ends(JOB) == "Successful", kube.logs()
    assert outputs(job)["o0"].scalar.primitive.integer == 3
    assert [line["step"] for line in training.lines(1)] == [1, 2, 3]
    pods = {training.lines(rank)[0]["pod"] for rank in range(2)}
    assert len(pods) == 2
    assert all(pod.startswith(f"{JOB}-default-worker-") for pod in pods)
    assert sorted(each["dask.org/component"] for each in labels) == ["job-runner", "scheduler", "worker", "worker"]
    assert {each["kueue.x-k8s.io/queue-name"] for each in labels} == {"training"}
    assert {each["dask.org/cluster-name"] for each in labels} == {JOB}
    assert all(UNDISTURBED.items() <= each["annotations"].items() for each in metadata)
    training.check_clean()


# ---- Workers


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_in_its_pod_and_the_ranks_go_on(training: Training) -> None:
    training.start()
    training.wait(10)
    victim = training.lines(1)[0]["pod"]
    training.kube.kill(victim)
    until(lambda: len(training.starts()) == 2, lambda: f"another gang\n{training.kube.logs()}")
    assert training.kube.status(JOB) == "Running"
    assert max(training.starts()) > 10
    assert victim in {training.lines(rank)[-1]["pod"] for rank in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["worker evicted", "worker deleted", "scheduler killed"])
def test_a_worker_that_is_told_to_end_or_a_lost_scheduler_is_a_system_error(how: str, training: Training) -> None:
    job = training.start()
    training.wait(10)
    if how == "worker evicted":
        training.kube.evict(training.lines(1)[0]["pod"])
    elif how == "worker deleted":
        training.kube.delete("pods", training.lines(1)[0]["pod"])
    else:
        training.kube.kill(*training.kube.pods("scheduler"))
    assert training.kube.ends(JOB) == "Successful"  # the task has left an error for Flyte
    assert is_tried_again_by_flyte(job)
    assert ("told to end" in error(job).message) == how.startswith("worker")


# ---- The task's own pod


@pytest.mark.slow
def test_a_job_runner_that_is_killed_fails_the_job_and_the_next_attempt_goes_on(training: Training) -> None:
    first = training.start()
    training.wait(10)
    training.kube.kill(f"{JOB}-runner")
    assert training.kube.ends(JOB) == "Failed"
    training.check_clean()
    done = len(training.lines())
    training.start(1, str(argument(first, "--checkpoint-path")))
    training.wait(done + 2)
    assert training.lines()[-1]["attempt"] == "1"
    assert training.lines()[-1]["first"] > 1


@pytest.mark.slow
def test_a_job_runner_that_is_deleted_leaves_the_job_running_and_a_checkpoint_for_the_next_attempt(
    training: Training,
) -> None:
    first = training.start()
    training.wait(10)
    training.kube.drain(f"{JOB}-runner")
    assert is_tried_again_by_flyte(first)  # by what it has left, which Flyte reads at the job's end
    time.sleep(3)  # the operator would report the end within a second
    assert training.kube.status(JOB) == "Running"
    assert len(training.kube.pods("worker")) == 2
    done = len(training.lines())
    training.start(1, str(argument(first, "--checkpoint-path")))
    training.wait(done + 2)
    assert training.lines()[-1]["attempt"] == "1"
    assert training.lines()[-1]["first"] > 10
