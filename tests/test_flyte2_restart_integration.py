"""Flyte 2 repeats an attempt after a system error with equal paths, and our tasks end correctly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("flyteplugins.dask")

import flyte
from flyte._internal.runtime.taskrunner import extract_download_run_upload
from flyte.models import ActionID, CheckpointPaths, RawDataPath
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument, ExecutionError
from flyteidl2.task.common_pb2 import Outputs

from flyteplugins.daskpytorch import Gang, SpawnDDP, WorkerLostError, current_rank
from flyteplugins.daskpytorch.task import MAX_SYSTEM_RESTARTS

pytestmark = pytest.mark.usefixtures("one_fork_server")
spawned = flyte.TaskEnvironment("spawned", plugin_config=SpawnDDP(nproc=1, gang=Gang(max_restarts=0)))
ENOUGH = Path("enough")
"""Below the working directory: the infrastructure holds from now on."""


@spawned.task(retries=2)
def train() -> int:
    """One step further than the start before."""
    checkpoint = current_rank().checkpoint
    step = (checkpoint.load() or 0) + 1
    checkpoint.save(step, step=step)
    checkpoint.flush()
    if not ENOUGH.exists():
        raise WorkerLostError("worker default-worker-1 was lost")
    return step


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one attempt's outputs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def start(attempt: Path) -> None:
    """As the container's command does it."""
    above = attempt.parent
    running = extract_download_run_upload(
        train,
        action=ActionID(name="a0", run_name="run"),
        controller=None,
        raw_data_path=RawDataPath(path=str(above / "raw")),
        checkpoint_paths=CheckpointPaths(checkpoint_path=str(above / "checkpoint"), prev_checkpoint_path=""),
        output_path=str(attempt),
        run_base_dir=str(above),
        version="v1",
    )
    asyncio.run(running)


def error(attempt: Path, name: str = "error.pb") -> tuple[int, int]:
    left = ErrorDocument.FromString((attempt / name).read_bytes()).error
    assert left.code == "WorkerLostError"
    return left.kind, left.origin


def test_a_start_after_a_system_error_goes_on_and_its_success_counts(attempt: Path) -> None:
    attempt.mkdir()
    for number in (1, 2):
        start(attempt)
        assert error(attempt) == (ContainerError.RECOVERABLE, ExecutionError.SYSTEM)
        assert len(list(attempt.glob("error-*.pb"))) == number - 1
    ENOUGH.touch()
    start(attempt)
    assert sorted(path.name for path in attempt.glob("*.pb")) == ["error-1.pb", "error-2.pb", "outputs.pb"]
    [output] = Outputs.FromString((attempt / "outputs.pb").read_bytes()).literals
    assert output.value.scalar.primitive.integer == 3


def test_system_errors_that_do_not_end_count_towards_the_tasks_retries(attempt: Path) -> None:
    attempt.mkdir()
    for _ in range(MAX_SYSTEM_RESTARTS):
        start(attempt)
        assert error(attempt) == (ContainerError.RECOVERABLE, ExecutionError.SYSTEM)
    start(attempt)
    assert error(attempt) == (ContainerError.RECOVERABLE, ExecutionError.USER)
