"""Attempts of Flyte 2 tasks leave what Flyte 2's executor needs to read, and one with equal paths goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

flyte = pytest.importorskip("flyte")
pytest.importorskip("flyteplugins.dask")

from flyte._internal.runtime.taskrunner import extract_download_run_upload
from flyte.models import ActionID, CheckpointPaths, RawDataPath
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument, ExecutionError
from flyteidl2.task.common_pb2 import Outputs

from backend import failures
from flytekitplugins.daskpytorch import GangError
from flyteplugins.daskpytorch import DaskDDP, Gang, SpawnDDP, WorkerGroup, WorkerLostError, current_rank
from flyteplugins.daskpytorch.task import MAX_SYSTEM_RESTARTS, DaskDDPTask

LEFT = {
    "a rank raises": ("ValueError", "RECOVERABLE", "USER"),
    "a rank raises the same at the same step": ("ValueError", "NON_RECOVERABLE", "USER"),
    "a rank crashes": ("GangError", "RECOVERABLE", "USER"),
    "a rank hangs": ("GangHungError", "RECOVERABLE", "USER"),
    "a worker is lost": ("WorkerLostError", "RECOVERABLE", "SYSTEM"),
    "the task is told to end": ("PreemptedError", "RECOVERABLE", "SYSTEM"),
    "workers do not come": ("GangStartError", "RECOVERABLE", "SYSTEM"),
}
"""Code, kind and origin. What Flyte 2's executor makes of these: backend/README.md."""

tried_again = flyte.TaskEnvironment(
    "tried_again",
    image="registry.example/daskpytorch:v1",
    plugin_config=DaskDDP(workers=WorkerGroup(number_of_workers=2)),
)
spawned = flyte.TaskEnvironment("spawned", plugin_config=SpawnDDP(nproc=1, gang=Gang(max_restarts=0)))
ENOUGH = Path("enough")
"""Below the working directory: the infrastructure holds from now on."""


@tried_again.task(retries=2)
def train() -> int:
    return 1


@spawned.task(retries=2)
def train_further() -> int:
    """One step further than the start before."""
    checkpoint = current_rank().checkpoint
    step = (checkpoint.load() or 0) + 1
    checkpoint.save(step, step=step)
    checkpoint.flush()
    if not ENOUGH.exists():
        raise WorkerLostError("worker default-worker-1 was lost")
    return step


def attempt(task: Any, out: Path) -> None:
    """What a container's command does; its outputs go there, and its checkpoints beside that."""
    out.mkdir(exist_ok=True)
    running = extract_download_run_upload(
        task,
        action=ActionID(name="a0", run_name="run"),
        controller=None,
        raw_data_path=RawDataPath(path=str(out.parent / "raw")),
        checkpoint_paths=CheckpointPaths(checkpoint_path=str(out.parent / "checkpoint"), prev_checkpoint_path=""),
        output_path=str(out),
        run_base_dir=str(out.parent),
        version="v1",
    )
    asyncio.run(running)


def error(out: Path) -> tuple[str, str, str]:
    """Code, kind and origin of the error that an attempt has left."""
    left = ErrorDocument.FromString((out / "error.pb").read_bytes()).error
    return left.code, ContainerError.Kind.Name(left.kind), ExecutionError.ErrorKind.Name(left.origin)


def errors() -> Iterator[tuple[str, Exception]]:
    """What is raised where a gang's task fails, by what has happened."""
    yield from ((name, raised) for name, raised in failures.failures() if "Flyte" not in name)
    repeated = ValueError("no such label: 12")
    repeated.__cause__ = GangError("rank 1 on node-7 raised it at step 7 once more", rank=1, is_repeated=True)
    yield "a rank raises the same at the same step", repeated


@pytest.mark.parametrize(("name", "raised"), [pytest.param(*each, id=each[0]) for each in errors()])
def test_what_an_attempt_leaves_says_whose_failure_it_was(name: str, raised: Exception, tmp_path: Path) -> None:
    with patch.object(DaskDDPTask, "_train", side_effect=raised):
        attempt(train, tmp_path / "out")
    assert error(tmp_path / "out") == LEFT[name]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_fork_server: None) -> Path:
    """Flyte 2 repeats an attempt after a system error with equal paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def test_a_start_after_a_system_error_goes_on_and_its_success_counts(out: Path) -> None:
    for number in (1, 2):
        attempt(train_further, out)
        assert error(out) == ("WorkerLostError", "RECOVERABLE", "SYSTEM")
        assert len(list(out.glob("error-*.pb"))) == number - 1
    ENOUGH.touch()
    attempt(train_further, out)
    assert sorted(path.name for path in out.glob("*.pb")) == ["error-1.pb", "error-2.pb", "outputs.pb"]
    [output] = Outputs.FromString((out / "outputs.pb").read_bytes()).literals
    assert output.value.scalar.primitive.integer == 3


def test_system_errors_that_do_not_end_count_towards_the_tasks_retries(out: Path) -> None:
    for _ in range(MAX_SYSTEM_RESTARTS):
        attempt(train_further, out)
        assert error(out) == ("WorkerLostError", "RECOVERABLE", "SYSTEM")
    attempt(train_further, out)
    assert error(out) == ("WorkerLostError", "RECOVERABLE", "USER")
