"""Gangs survive failures of Flyte: case 41 of the project's list of faults, and later attempts.

Cases 44 and 45 are in test_task_integration.py, case 48 in test_streams_integration.py.
"""

import contextlib
import json
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed import Client

import fault_training as ft
from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from pages import block
from processes import MAX_SECONDS, TASKS_IMPORT, Cluster, dask_cluster, is_alive, nothing_left_behind, until
from test_task_integration import RECOVERABLE, SAMPLE_PROJECT, SYSTEM, Attempt, execute, expected, result
from tracked import Flow, scalars
from wandb_file import read_run
from warm import Program

RUN_ID = "f3a-n0"
"""Of Weights & Biases: the execution and the node, whatever the attempt."""


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wandb")


@pytest.fixture(scope="module")
def worker_environment(wandb_folder: Path) -> dict[str, str]:
    """Nothing listens where the workers look for the Weights & Biases server."""
    return {"WANDB_DIR": str(wandb_folder), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "15"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, worker_environment: dict[str, str]) -> Iterator[Cluster]:
    """Two workers on two hosts, for all tests that leave them alive."""
    with _cluster(tmp_path_factory.mktemp("cluster"), worker_environment) as running:
        yield running


def _cluster(folder: Path, environment: Mapping[str, str]) -> Any:
    environments = {0: environment, 1: environment}
    hosts = ["127.0.0.2", "127.0.0.3"]
    return dask_cluster(folder, hosts=hosts, imported_ahead=TASKS_IMPORT, worker_environments=environments)


@dataclass
class Execution:
    """One node of a workflow: its attempts, as Flyte would make them, and the traces that the ranks left."""

    cluster: str
    project: Path
    folder: Path
    wandb: Path

    def __post_init__(self) -> None:
        self.traces.mkdir(parents=True)

    @property
    def traces(self) -> Path:
        return self.folder / "traces"

    def attempt(
        self,
        number: int,
        task: str = "resumable",
        *,
        previous: str = '""',
        env: Mapping[str, str] | None = None,
        meddle: Any = None,
        **inputs: Any,
    ) -> Attempt:
        return execute(
            task,
            {"folder": str(self.traces), **inputs},
            cluster=self.cluster,
            cwd=self.project,
            folder=self.folder / f"attempt-{number}",
            number=number,
            previous=previous,
            env={"WANDB_MODE": "offline", **(env or {})},
            meddle=meddle,
        )

    def lines(self, name: str) -> list[str]:
        path = self.traces / name
        return path.read_text().splitlines() if path.exists() else []

    def starts(self, number: int) -> list[int]:
        """After which epoch each rank of an attempt started, every attempt."""
        return [int(line) for rank in range(2) for line in self.lines(f"start-{number}-{rank}")]

    def mirrored(self, number: int) -> list[int]:
        """The epochs whose checkpoints the attempt has in storage."""
        return steps_in(self.folder / f"attempt-{number}" / "checkpoint" / "daskpytorch" / "gang" / MANIFEST)

    def runs(self) -> list[Path]:
        """The Weights & Biases runs that its attempts began, in order; the files' names end in the runs' ids."""
        return sorted(self.wandb.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime)


@pytest.fixture
def execution(cluster: Cluster, wandb_folder: Path, tmp_path: Path) -> Iterator[Execution]:
    shutil.rmtree(wandb_folder / "wandb", ignore_errors=True)
    project = Path(shutil.copytree(SAMPLE_PROJECT, tmp_path / "project"))
    begun = Execution(cluster.address, project, tmp_path / "run", wandb_folder)
    yield begun
    pids = [int(line) for line in begun.lines("pids")]
    assert pids
    until(lambda: not any(is_alive(pid) for pid in pids), "the ranks to be gone")


def check_stopped(execution: Execution, attempt: Attempt, reason: str) -> int:
    """The attempt ended with a checkpoint, all ranks at one step, and Flyte will try again; the step."""
    assert (attempt.error.kind, attempt.error.origin) == (RECOVERABLE, SYSTEM)
    assert "PreemptedError" in attempt.output
    assert reason in attempt.error.message
    stopped = {line for rank in range(2) for line in execution.lines(f"stopped-0-{rank}")}
    assert len(list(execution.traces.glob("stopped-0-*"))) == 2
    assert len(stopped) == 1
    step = int(stopped.pop())
    assert f"the next attempt goes on from the checkpoint of step {step}" in attempt.error.message
    assert execution.mirrored(0) == [step]
    return step


LONG = {"epochs": 100_000, "saves_every": 100_000, "pace": 0.1}
"""Inputs of a training that saves nothing by itself, and ends when it is told to."""


def test_41_sigterm_to_the_task(execution: Execution, tmp_path: Path) -> None:
    env = {"TRACKED": str(tmp_path / "tracked")}

    def meddle(process: Program) -> None:
        """Not before MLflow has made its database, for which a busy machine takes longer than pods are given to end."""
        is_there = partial(_has_points, tmp_path / "tracked" / "mlflow.db")
        until(lambda: is_there() or process.poll() is not None, "MLflow")
        until(lambda: len(execution.lines("epochs-0-1")) >= 3 or process.poll() is not None, "the training")
        process.send_signal(signal.SIGTERM)

    with nothing_left_behind():
        first = execution.attempt(0, **LONG, env=env, meddle=meddle)
        step = check_stopped(execution, first, "the task was told to end (SIGTERM)")
        hours = json.loads((file := Path(first.checkpoint, "daskpytorch/gang/hours.json")).read_text())
        file.write_text(json.dumps({**hours, "core_hours": 100 + hours["core_hours"]}))
        second = execution.attempt(1, epochs=step + 2, env=env, previous=first.checkpoint)
    assert first.seconds < MAX_SECONDS
    assert execution.starts(1) == [step, step]
    assert result(second) == expected(step + 2)
    runs = [read_run(path) for path in execution.runs()]
    assert [(run["id"], run["exit_code"]) for run in runs] == [(RUN_ID, 1), (RUN_ID, 0)]
    assert hours["core_hours"] > 0
    assert runs[1]["summary"]["goodput"]["core_hours"] > 100
    steps = list(range(1, step + 3))
    assert [point for point, _ in scalars(tmp_path / "tracked" / f"resumable-{RUN_ID}", "value")] == steps
    flow = Flow(tmp_path / "tracked", "tests")
    [run] = flow.runs
    assert (run.info.status, run.data.tags["daskpytorch.id"]) == ("FINISHED", f"resumable-{RUN_ID}")
    assert [point for point, _ in flow.points(run, "value")] == steps
    for attempt in (first, second):
        assert f"  MLflow: run {run.info.run_id} in sqlite:///" in attempt.output
        assert "  TensorBoard: " in attempt.output


def _has_points(database: Path) -> bool:
    with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(f"file:{database}?mode=ro", uri=True) as read:
        return bool(read.execute("select count(*) from metrics where key = 'value'").fetchone()[0])
    return False


def test_41_a_gang_that_may_shrink_goes_on_without_the_worker(tmp_path: Path) -> None:
    with (
        nothing_left_behind(),
        _cluster(tmp_path, {}) as cluster,
        Client(cluster.address) as client,
        ft.watching(tmp_path / "traces") as launch,
    ):
        (tmp_path / "traces/gate-9").touch()
        watched = launch(client, gang=Gang(min_workers=1))
        watched.wait_for("start-1")
        signalled_at = time.time()
        cluster.workers[1].send_signal(signal.SIGTERM)
        until(lambda: any("was told to end" in note for note in watched.notes) or watched.futures.done(), "the notice")
        watched.open(9)
        value = watched.futures[0].result()
    stopped = watched.stopped_at()
    assert len(stopped) == 2
    assert stopped[0] == stopped[1] < ft.STEPS
    assert watched.starts(0) == [0, stopped[0]]
    assert watched.starts(1) == [0]
    assert value == ft.expected({1: 2, stopped[0] + 1: 1})
    assert watched.formed_at[-1] - signalled_at < MAX_SECONDS
    assert any("tcp://127.0.0.3" in note and "was told to end" in note for note in watched.notes)


def test_the_guides_best_checkpoint_is_that_of_the_undisturbed_run_though_its_task_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "best.py").write_text(block("# best.py:"))
    manifest = tmp_path / "killed" / "checkpoint" / "daskpytorch" / "gang" / MANIFEST

    def attempt(name: str, epochs: int, **how: Any) -> Attempt:
        where = {"cluster": cluster.address, "cwd": project, "folder": tmp_path / name, "module": "best"}
        return execute("train", {"epochs": epochs}, **where, **how)

    def has_best_and_later() -> bool:
        steps = steps_in(manifest)
        return steps[-1:] == [7] and steps[0] >= 12

    def kill_at_epoch_12(process: Program) -> None:
        until(lambda: has_best_and_later() or process.poll() is not None, "the best checkpoint and one after it")
        until(lambda: stands_still(process) and has_best_and_later(), "a whole manifest")  # unlike on S3
        process.kill()

    with nothing_left_behind():
        undisturbed = attempt("undisturbed", epochs=30)
        killed = attempt("killed", epochs=1_000, meddle=kill_at_epoch_12)
        kept = steps_in(manifest)
        retried = attempt("retried", epochs=1_000, number=1, previous=killed.checkpoint)
    assert not killed.has_outputs
    assert kept[-1] == 7
    assert f"going on from the previous attempt's checkpoint of step {kept[0]}" in retried.output
    assert best_of(retried) == best_of(undisturbed)
    assert best_of(retried)[1] == 7


def stands_still(process: Program) -> bool:
    """After it was allowed to go on for a moment, if it did."""
    process.send_signal(signal.SIGCONT)
    time.sleep(0.02)
    process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the process to stop")
    return True


def steps_in(manifest: Path) -> list[int]:
    try:
        return [entry["step"] for entry in json.loads(manifest.read_text())["checkpoints"]]
    except (OSError, ValueError, KeyError):
        return []


def best_of(attempt: Attempt) -> tuple[list[list[float]], int, float]:
    """What the task has returned."""
    outputs = attempt.outputs
    weights = torch.load(outputs["weights"].scalar.blob.uri, weights_only=True)
    epoch, loss = (outputs[name].scalar.primitive for name in ("epoch", "held_out_loss"))
    return weights.tolist(), epoch.integer, loss.float_value
