"""`SpawnDDP` tasks as users and the backend run them: real ranks of a real gang on this node."""

import base64
import contextlib
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from flyteidl.core import artifact_id_pb2
from flytekit.core.context_manager import FlyteContextManager
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.models.literals import LiteralMap

from processes import fork_server, nothing_left_behind, until
from test_task_integration import (
    RECOVERABLE,
    SAMPLE_PROJECT,
    SYSTEM,
    Attempt,
    Meddle,
    check_training,
    execute,
    text_file,
)
from warm import Program

pytestmark = pytest.mark.usefixtures("one_fork_server")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the sample project."""
    return Path(shutil.copytree(SAMPLE_PROJECT, tmp_path / "project"))


def attempt(
    project: Path,
    task: str,
    *,
    env: dict[str, str] | None = None,
    meddle: Meddle | None = None,
    **inputs: Any,
) -> Attempt:
    """Run a task by the container's own command, with nothing left behind."""
    with nothing_left_behind():
        return execute(
            task,
            inputs,
            cluster=None,
            cwd=project,
            folder=project.parent / "attempt",
            module="flows.spawned",
            env=env,
            meddle=meddle,
        )


def test_what_a_rank_is_given_and_gives(project: Path) -> None:
    done = attempt(project, "forked", env={"_FSEC_TESTS_TOKEN": "s3cret"}, text=text_file(project), number=1.0)
    check_training(done)
    checkpoints = f"{done.folder}/checkpoint/daskpytorch/gang"
    assert f"forked: its checkpoints: {checkpoints}\n" in done.output
    assert f"<td>checkpoints</td><td>{checkpoints}</td>" in done.deck
    assert done.outputs["model_state"].scalar.blob.uri.startswith(str(done.folder / "raw"))


def here(monkeypatch: pytest.MonkeyPatch, name: str) -> LiteralMap:
    """The outputs of a task of the sample project that is run in this process."""
    monkeypatch.syspath_prepend(str(SAMPLE_PROJECT))
    from flows import spawned

    return getattr(spawned, name).dispatch_execute(FlyteContextManager.current_context(), LiteralMap(literals={}))


def test_metadata_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    literal = here(monkeypatch, "carded").literals["o0"]
    assert literal.scalar.primitive.string_value == "good"
    [encoded] = literal.metadata.values()
    partitions = artifact_id_pb2.ArtifactID.FromString(base64.b64decode(encoded)).partitions.value
    assert {key: value.static_value for key, value in partitions.items()} == {"kind": "test"}


def test_a_second_task_of_a_process_has_the_same_fork_server_and_the_process_as_it_is_then(tmp_path: Path) -> None:
    servers = set()
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "only_now.py").touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("ONLY_NOW", name)
            patch.syspath_prepend(folder)
            found = here(patch, "surroundings").literals["o0"].collection.literals
        server, *seen = [literal.scalar.primitive.string_value for literal in found]
        assert seen == [name, str(folder), str(folder / "only_now.py")]
        servers.add(int(server))
    assert servers == {fork_server().pid}


def test_an_output_of_the_wrong_type_ends_the_task_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    with pytest.raises(FlyteUserRuntimeException, match="Failed to convert outputs of task"):
        here(monkeypatch, "wrong_type")
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_48_sigterm_to_all_processes_of_the_pod(project: Path, method: str) -> None:
    def meddle(driver: Program) -> None:
        trains = [project / f"trains-{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in trains) or driver.poll() is not None, "the training")
        pod = psutil.Process(driver.pid)
        for process in [*pod.children(recursive=True), pod]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    done = attempt(project, "loading", folder=str(project), method=method, meddle=meddle)
    assert (done.error.kind, done.error.origin) == (RECOVERABLE, SYSTEM)
    [step] = {(project / f"stopped-{rank}").read_text() for rank in range(2)}
    assert "the task was told to end (SIGTERM)" in done.error.message
    assert f"the next attempt goes on from the checkpoint of step {step}" in done.error.message
