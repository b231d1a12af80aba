"""What Flyte 2's own code makes of our tasks for its SDK; `render.py` writes it to golden/flyte2.yaml.

git clone --depth 1 --branch v2.0.43 https://github.com/flyteorg/flyte
FLYTE2=flyte python tests/backend/render.py
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import flyte
from flyte._internal.runtime.task_serde import get_proto_task
from flyte._internal.runtime.taskrunner import extract_download_run_upload
from flyte.models import ActionID, CodeBundle, RawDataPath, SerializationContext
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument, ExecutionError
from flyteidl2.core.tasks_pb2 import TaskTemplate

from backend import examples_flyte2, failures
from flytekitplugins.daskpytorch import GangError
from flyteplugins.daskpytorch.task import DaskDDPTask
from workflows.flyte2 import pet_names

FOLDER = Path(__file__).resolve().parent
MODULE = FOLDER / "flyte2"
CHECKOUT = os.environ.get("FLYTE2")
"""Its source code: Go's proxy has refused to give out the module."""
CONTEXT = SerializationContext(
    version="v1",
    project="flytesnacks",
    domain="development",
    org="testorg",
    root_dir=FOLDER.parents[1],
    code_bundle=CodeBundle(computed_version="v1", tgz="s3://flyte/code.tgz"),
)


def templates() -> dict[str, bytes]:
    """The tasks as they are registered, by name, without what changes with each edit and each release of the SDK."""
    environments = [*_environments(pet_names), *_environments(examples_flyte2)]
    tasks = {name: task for each in environments for name, task in each.tasks.items()}
    return {name: _serialised(task) for name, task in sorted(tasks.items())}


def _environments(module: Any) -> Iterator[flyte.TaskEnvironment]:
    yield from (each for each in vars(module).values() if isinstance(each, flyte.TaskEnvironment))


def _serialised(task: Any) -> bytes:
    template: TaskTemplate = get_proto_task(task, CONTEXT)
    template.metadata.discovery_version = template.metadata.runtime.version = ""
    template.container.image = examples_flyte2.IMAGE  # Flyte's default is named after Python and the SDK
    return template.SerializeToString(deterministic=True)


def digests() -> dict[str, str]:
    """Of the tasks as they are now, and of what looks at them."""
    files = [*MODULE.glob("*.go"), MODULE / "go.mod", MODULE / "flyte.yaml", FOLDER / "failures.py"]
    read = templates() | {path.name: path.read_bytes() for path in files}
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(read.items())}


def errors() -> Iterator[tuple[str, Exception]]:
    """What is raised where a gang's task fails, by what has happened."""
    for name, raised in failures.failures():
        if "Flyte" not in name:
            yield name, raised
    repeated = ValueError("no such label: 12")
    repeated.__cause__ = GangError("rank 1 on node-7 raised it at step 7 once more", rank=1, is_repeated=True)
    yield "a rank raises the same at the same step", repeated


def document(failure: Exception, folder: Path) -> ErrorDocument:
    """What Flyte 2's runtime writes where a gang's task raises that."""
    folder.mkdir(parents=True)
    with patch.object(DaskDDPTask, "_train", side_effect=failure):
        asyncio.run(
            extract_download_run_upload(
                examples_flyte2.train,
                action=ActionID(name="a0", run_name="run"),
                controller=None,
                raw_data_path=RawDataPath(path=str(folder / "raw")),
                output_path=str(folder),
                run_base_dir=str(folder),
                version="v1",
            )
        )
    return ErrorDocument.FromString((folder / "error.pb").read_bytes())


def described(left: ErrorDocument) -> dict[str, str]:
    """In words."""
    error = left.error
    return {
        "code": error.code,
        "kind": ContainerError.Kind.Name(error.kind),
        "origin": ExecutionError.ErrorKind.Name(error.origin),
    }


def contents(folder: Path, go: str) -> dict[str, Any]:
    """The golden file's."""
    made = templates()
    for name, content in made.items():
        (folder / f"{name}.pb").write_bytes(content)
    (folder / "errors").mkdir()
    (folder / "errors" / "task").write_bytes(made["tried_again.train"])
    left = {name: document(raised, folder / "left" / name) for name, raised in errors()}
    for name, each in left.items():
        (folder / "errors" / f"{name}.pb").write_bytes(each.SerializeToString())
    found = rendered(folder, go)
    ordinary = [name for name, each in found["resources"].items() if each["kind"] == "Pod" and name.startswith("pet_")]
    for name in ordinary:
        del found["resources"][name]
    return {"digests": digests(), "failures": {name: described(each) for name, each in left.items()}, **found}


def rendered(folder: Path, go: str) -> dict[str, Any]:
    """What Flyte makes of it."""
    assert CHECKOUT is not None
    source = shutil.copytree(MODULE, folder / "source")
    replaced = f"-replace=github.com/flyteorg/flyte/v2={Path(CHECKOUT).resolve()}"
    environment = {"GOFLAGS": "-p=1 -mod=mod", **os.environ}
    subprocess.run([go, "mod", "edit", replaced], cwd=source, check=True)
    subprocess.run(["nice", "-n", "19", go, "build", "-o", "flyte2", "."], cwd=source, env=environment, check=True)
    command = [str(source / "flyte2"), str(MODULE / "flyte.yaml"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-20_000:]
    return dict(json.loads(done.stdout))
