"""Tasks as users and the backend run them: `pyflyte run`, and the container's own commands on a real cluster."""

import contextlib
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import fsspec
import pytest
import torch
from flyteidl.core import errors_pb2, execution_pb2, literals_pb2
from flytekit.core import utils
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.file import FlyteFile

from pages import REPOSITORY
from processes import SCRIPTS, TASKS_IMPORT, Cluster, dask_cluster, running, start_worker, until
from warm import Program

SAMPLE_PROJECT = REPOSITORY / "tests/support/sample_project"
RECOVERABLE = errors_pb2.ContainerError.RECOVERABLE
NON_RECOVERABLE = errors_pb2.ContainerError.NON_RECOVERABLE
SYSTEM = execution_pb2.ExecutionError.SYSTEM
USER = execution_pb2.ExecutionError.USER


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Scheduler and workers in an empty directory, without the sample project; one has an old copy of it."""
    folder = tmp_path_factory.mktemp("cluster")
    old_copy = folder / "old"
    shutil.copytree(SAMPLE_PROJECT, old_copy)
    (old_copy / "flows" / "arithmetic.py").write_text("OFFSET = -1\ndef shifted(value): return OFFSET\n")
    environment = {"_FSEC_TESTS_TOKEN": "s3cret"}
    environments = {0: {**environment, "PYTHONPATH": str(old_copy)}, 1: environment}
    with dask_cluster(folder, imported_ahead=TASKS_IMPORT, worker_environments=environments) as running:
        yield running


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the sample project."""
    return Path(shutil.copytree(SAMPLE_PROJECT, tmp_path / "project"))


Meddle = Callable[[Program], None]


@dataclass
class Attempt:
    """One run of the container's command, and what it wrote."""

    folder: Path
    output: str
    checkpoint: str = ""
    """Where its intratask checkpoint went."""
    seconds: float = 0.0
    """How long it ran once nobody meddled with it any more."""

    @property
    def outputs(self) -> dict[str, Any]:
        path = self.folder / "out" / "outputs.pb"
        assert path.exists(), self.output
        return dict(literals_pb2.LiteralMap.FromString(path.read_bytes()).literals)

    @property
    def error(self) -> errors_pb2.ContainerError:
        path = self.folder / "out" / "error.pb"
        assert path.exists(), self.output
        return errors_pb2.ErrorDocument.FromString(path.read_bytes()).error

    @property
    def deck(self) -> str:
        return (self.folder / "out" / "deck.html").read_text()


def execute(
    task: str,
    inputs: Mapping[str, Any],
    *,
    cluster: str | None,
    cwd: Path,
    folder: Path,
    archive: Path | None = None,
    raw: str | None = None,
    env: Mapping[str, str] | None = None,
    number: int = 0,
    checkpoint: str | None = None,
    previous: str = '""',
    module: str = "flows.training",
    meddle: Meddle | None = None,
    words: Sequence[str] = (),
) -> Attempt:
    """Run a task by the command that a backend starts in the job-runner's container.

    `cwd` is where the sample project is, and all that is written goes to `folder`. `meddle` is called with the process,
    which is waited for afterwards. `words` are the registered command of a task that is elsewhere. `previous` is where
    the attempt before had its checkpoint: Flyte passes that on every retry, whatever is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ctx = FlyteContextManager.current_context()
    types = {name: list[type(v[0])] if isinstance(v, list) else type(v) for name, v in inputs.items()}  # type: ignore[misc]
    literals = TypeEngine.dict_to_literal_map(ctx, dict(inputs), types)
    utils.write_proto_to_file(literals.to_flyte_idl(), str(folder / "inputs.pb"))
    checkpoint = checkpoint or str(folder / "checkpoint")
    words = words or (
        *("pyflyte-execute", "--inputs", "{{.input}}", "--output-prefix", "{{.outputPrefix}}"),
        *("--raw-output-data-prefix", "{{.rawOutputDataPrefix}}", "--checkpoint-path", "{{.checkpointOutputPrefix}}"),
        *("--prev-checkpoint", "{{.prevCheckpointPrefix}}"),
        *("--resolver", "flytekit.core.python_auto_container.default_task_resolver"),
        *("--", "task-module", module, "task-name", task),
    )
    places = {
        "{{.input}}": str(folder / "inputs.pb"),
        "{{.outputPrefix}}": str(folder / "out"),
        "{{.rawOutputDataPrefix}}": raw or str(folder / "raw"),
        "{{.checkpointOutputPrefix}}": checkpoint,
        "{{.prevCheckpointPrefix}}": previous,
    }
    command = [str(SCRIPTS / words[0]), *(places.get(word, word) for word in words[1:])]
    if archive is not None:
        fast = [str(SCRIPTS / "pyflyte-fast-execute"), "--additional-distribution", str(archive)]
        command = [*fast, "--dest-dir", str(cwd), "--", *command]
    environment = {
        "PYTHONPATH": "",
        "FLYTE_INTERNAL_EXECUTION_ID": "f3a",
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "tests",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_ATTEMPT_NUMBER": str(number),
        "HOSTNAME": f"f3a-n0-{number}-runner",
        **({"DASK_SCHEDULER_ADDRESS": cluster} if cluster else {}),
        **(env or {}),
    }
    with running(command, cwd=cwd, log=folder / "output.txt", env=environment) as process:
        if meddle is not None:
            meddle(process)
        alone_at = time.monotonic()
        process.wait()
    said = (folder / "output.txt").read_text()
    return Attempt(folder, said, checkpoint, time.monotonic() - alone_at)


def expected(epochs: int) -> float:
    """What the sample project's `resumable` returns, undisturbed."""
    value = 0.0
    for epoch in range(1, epochs + 1):
        value = 0.5 * value + 20.0 * epoch + 1
    return value


def result(attempt: Attempt) -> float:
    """What it returned."""
    return float(attempt.outputs["o0"].scalar.primitive.float_value)


def check_training(attempt: Attempt) -> None:
    """What `train` returns when all is well."""
    outputs = attempt.outputs
    assert outputs["total"].scalar.primitive.float_value == 111.0  # 1 + 10 over the ranks, and the new OFFSET
    seen = {name: value.scalar.primitive.string_value for name, value in outputs["seen"].map.literals.items()}
    threads = max(1, (os.cpu_count() or 1) // 2)
    told = {"execution": "f3a", "secret": "s3cret", "text": "hello", "lazy": "42", "rank": "0 of 2", "folders": "2"}
    assert seen == {**told, "threads": f"{threads} {threads}"}
    assert "the sum is 11.0" in attempt.deck
    assert 'class="dpt-card dpt-chart"' in attempt.deck
    assert (attempt.folder / "checkpoint" / "_dst_cp").read_bytes() == b"kept"
    assert files_in(outputs["results"].scalar.blob.uri) == {
        f"rank-{rank}/total.json": b'{"total": 11.0}' for rank in range(2)
    }


def files_in(folder: str) -> dict[str, bytes]:
    """All files of a folder, here or on S3."""
    filesystem, root = fsspec.core.url_to_fs(folder)
    return {path.removeprefix(f"{root}/"): filesystem.cat_file(path) for path in filesystem.find(root)}


def submitted(said: str) -> dict[str, bytes]:
    """What the ranks have submitted, in the folder that the task has named."""
    [folder] = re.findall(r"^  results: (\S+)$", said, re.MULTILINE)
    return files_in(folder)


def text_file(tmp_path: Path) -> FlyteFile:
    path = tmp_path / "text.txt"
    path.write_text("hello")
    return FlyteFile(str(path))


# Cases 44 and 45 of the project's list of faults.
def test_fast_registration_and_files_on_s3(cluster: Cluster, tmp_path: Path, s3: str) -> None:
    archive = tmp_path / "fast.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(SAMPLE_PROJECT / "flows", "flows", filter=lambda i: None if "__pycache__" in i.name else i)
    destination = tmp_path / "root"
    destination.mkdir()
    attempt = execute(
        "train",
        {"text": text_file(tmp_path), "number": 1.0},
        cluster=cluster.address,
        cwd=destination,
        folder=tmp_path / "run",
        archive=archive,
        raw=f"{s3}/raw",
    )
    check_training(attempt)
    for output in ("model_state", "results"):
        assert attempt.outputs[output].scalar.blob.uri.startswith(f"{s3}/raw/")
    with fsspec.open(attempt.outputs["model_state"].scalar.blob.uri) as file:
        assert torch.load(file, weights_only=True)["weight"] == 11.0


@pytest.mark.parametrize(
    ("how", "kind", "origin", "text"),
    [
        ("value", NON_RECOVERABLE, USER, "ValueError: the numbers do not add up"),
        ("recoverable", RECOVERABLE, USER, "try again"),
        ("killed", RECOVERABLE, SYSTEM, "SIGKILL"),
    ],
)
def test_flytes_verdict_on_a_failure(
    cluster: Cluster, project: Path, tmp_path: Path, s3: str, how: str, kind: int, origin: int, text: str
) -> None:
    inputs, raw = {"how": how}, f"{s3}/{how}"
    attempt = execute("fail", inputs, cluster=cluster.address, cwd=project, folder=tmp_path / "run", raw=raw)
    assert (attempt.error.kind, attempt.error.origin) == (kind, origin)
    assert text in attempt.error.message
    assert f"rank 1 of 2 failed on {gethostname()} (tcp://" in attempt.error.message
    alert = re.search(r'role="alert"><strong>(.*?)</div>', attempt.deck, re.DOTALL)
    assert alert
    assert f"rank 1 of 2 failed on {gethostname()} (tcp://" in alert[1]
    assert text in alert[1]
    kept = submitted(attempt.output)
    assert kept["last-words-1"] == how.encode()


def test_the_driver_waits_for_workers_and_counts_those_that_do_not_come(project: Path, tmp_path: Path) -> None:
    with dask_cluster(tmp_path, 1) as cluster, contextlib.ExitStack() as workers:

        def start_the_other(_: object) -> None:
            said = tmp_path / "run" / "output.txt"
            until(lambda: "(DASK_SCHEDULER_ADDRESS), waiting for the others" in said.read_text(), "the driver to wait")
            workers.callback(start_worker(cluster.address, 1, tmp_path))

        where = {"cluster": cluster.address, "cwd": project}
        too_few = execute("fail", {"how": "value"}, folder=tmp_path / "few", env={"START_TIMEOUT": "2"}, **where)
        both = execute("fail", {"how": "recoverable"}, folder=tmp_path / "run", meddle=start_the_other, **where)
    assert (too_few.error.kind, too_few.error.origin) == (RECOVERABLE, SYSTEM)
    assert "1 of 2 Dask workers came" in too_few.error.message
    assert "try again" in both.error.message
