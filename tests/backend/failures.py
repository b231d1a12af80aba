"""What a failed attempt leaves for Flyte to read: the error documents of each kind of failure that the README names."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from unittest.mock import patch

from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import PythonFunctionTask
from flytekit.bin.entrypoint import _dispatch_execute, setup_execution
from flytekit.exceptions.user import FlyteRecoverableException

from flytekitplugins.daskpytorch import GangError, GangHungError, GangStartError, PreemptedError, WorkerLostError
from flytekitplugins.daskpytorch.flyte.task import DaskDDPTask


def failures() -> Iterator[tuple[str, Exception]]:
    """What is raised where a gang's task fails, by what has happened."""
    of_a_rank = {"rank": 1, "host": "node-7"}
    for name, raised in (
        ("a rank raises", ValueError("no such label: 12")),
        ("a rank raises FlyteRecoverableException", FlyteRecoverableException("the database is away")),
    ):
        raised.__cause__ = GangError(f"rank 1 on node-7 raised {raised!r}", **of_a_rank)
        yield name, raised
    yield "a worker is lost", WorkerLostError("worker default-worker-1 was lost", **of_a_rank)
    yield "the task is told to end", PreemptedError("the task was told to end (SIGTERM)")
    yield "a rank crashes", GangError("rank 1 on node-7 was ended by SIGSEGV", **of_a_rank)
    yield "a rank hangs", GangHungError("rank 1 on node-7 has stood still for 600 s", **of_a_rank)
    yield "workers do not come", GangStartError("1 of 4 workers came within 1200 s")


def document(task: PythonFunctionTask, failure: Exception, folder: Path) -> ErrorDocument:
    """What Flyte's own entrypoint writes where a gang's task raises that."""
    folder.mkdir(parents=True)
    (folder / "inputs.pb").write_bytes(LiteralMap().SerializeToString())
    with (
        patch.object(DaskDDPTask, "_train", side_effect=failure),
        setup_execution(raw_output_data_prefix=str(folder / "raw")) as ctx,
        redirect_stderr(io.StringIO()),
    ):
        _dispatch_execute(ctx, lambda: task, str(folder / "inputs.pb"), str(folder / "out"))
    return ErrorDocument.FromString((folder / "out" / "error.pb").read_bytes())


def described(left: ErrorDocument) -> dict[str, object]:
    """In words, without what differs from run to run."""
    error = left.error
    return {
        "code": error.code,
        "kind": error.Kind.Name(error.kind),
        "origin": ExecutionError.ErrorKind.Name(error.origin),
    }
