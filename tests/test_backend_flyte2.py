"""Failed attempts of Flyte 2 tasks write what Flyte 2's executor needs to read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

flyte = pytest.importorskip("flyte")
pytest.importorskip("flyteplugins.dask")

from flyte._internal.runtime.taskrunner import extract_download_run_upload
from flyte.models import ActionID, RawDataPath
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument, ExecutionError

from backend import failures
from flytekitplugins.daskpytorch import GangError
from flyteplugins.daskpytorch import DaskDDP, WorkerGroup
from flyteplugins.daskpytorch.task import DaskDDPTask

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

environment = flyte.TaskEnvironment(
    "tried_again",
    image="registry.example/daskpytorch:v1",
    plugin_config=DaskDDP(workers=WorkerGroup(number_of_workers=2)),
)


@environment.task(retries=2)
def train() -> int:
    return 1


def errors() -> Iterator[tuple[str, Exception]]:
    """What is raised where a gang's task fails, by what has happened."""
    yield from ((name, raised) for name, raised in failures.failures() if "Flyte" not in name)
    repeated = ValueError("no such label: 12")
    repeated.__cause__ = GangError("rank 1 on node-7 raised it at step 7 once more", rank=1, is_repeated=True)
    yield "a rank raises the same at the same step", repeated


def document(failure: Exception, folder: Path) -> Any:
    """What Flyte 2's runtime writes where a gang's task raises that."""
    with patch.object(DaskDDPTask, "_train", side_effect=failure):
        asyncio.run(
            extract_download_run_upload(
                train,
                action=ActionID(name="a0", run_name="run"),
                controller=None,
                raw_data_path=RawDataPath(path=str(folder / "raw")),
                output_path=str(folder),
                run_base_dir=str(folder),
                version="v1",
            )
        )
    return ErrorDocument.FromString((folder / "error.pb").read_bytes()).error


@pytest.mark.parametrize(("name", "raised"), [pytest.param(*each, id=each[0]) for each in errors()])
def test_what_an_attempt_leaves_says_whose_failure_it_was(name: str, raised: Exception, tmp_path: Path) -> None:
    left = document(raised, tmp_path)
    kind, origin = ContainerError.Kind.Name(left.kind), ExecutionError.ErrorKind.Name(left.origin)
    assert (left.code, kind, origin) == LEFT[name]
