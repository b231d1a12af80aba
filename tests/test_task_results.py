"""Submitted files of a task's ranks reach the task's folder, on this machine and on a real S3 server."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.context_manager import ExecutionState
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.exceptions.system import FlyteUploadDataException

from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.flyte.context import FlyteExecution
from flytekitplugins.daskpytorch.results import LOST, TaskResults
from processes import until
from test_results import files, submit

AWKWARD = {"a [1]*?.json": b"1", "ü/… x": b"2", "rank-0/#x%20y": b"3", "empty": b""}
"""Paths that file systems and object stores must not take for patterns, and an empty file."""


def outputs_at(prefix: str, tmp_path: Path, grace_period: float = 20.0) -> TaskResults:
    """The results of a task whose raw outputs go there."""
    access = FileAccessProvider(str(tmp_path / "sandbox"), prefix, DataConfig.auto())
    here = FlyteContextManager.current_context()
    state = here.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    ctx = here.with_file_access(access).with_execution_state(state).build()
    return TaskResults(grace_period, FlyteExecution(ctx, None))


@pytest.fixture
def here(tmp_path: Path) -> TaskResults:
    return outputs_at(str(tmp_path / "raw"), tmp_path)


@pytest.fixture
def remote(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskResults]:
    """In a bucket; what is on its way there lies below the test's folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield outputs_at(f"{s3}/raw", tmp_path)
    assert not list((tmp_path / "temporary").glob("daskpytorch-results-*"))


def downloaded(results: TaskResults, tmp_path: Path) -> dict[str, bytes]:
    """The files of the folder, as the next node gets them."""
    access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"), DataConfig.auto())
    folder = tmp_path / "downloaded"
    access.get_data(results.folder, str(folder), is_multipart=True)
    return files(folder)


def submit_all(received: ReceivedResults, contents: Mapping[str, bytes]) -> None:
    for rank, (path, data) in enumerate(contents.items()):
        submit(received, path, data, rank=rank)


def fail(results: TaskResults, error: Exception) -> None:
    """As a gang does that has submitted something."""
    with results.received() as received:
        submit(received, "a", b"last words")
        raise error


def test_here_files_appear_in_their_place_while_the_gang_runs(here: TaskResults) -> None:
    with here.received() as received:
        submit(received, "a", b"first")
        until(lambda: Path(here.folder, "a").exists(), "the file")
        submit(received, "a", b"second")
    assert files(Path(here.folder)) == {"a": b"second"}


def test_profiles_can_be_named_as_soon_as_they_are_here(here: TaskResults) -> None:
    assert here.profiles() == {}
    with here.received() as received:
        submit(received, "profiles/rank-1.json.gz", b"trace")
        submit(received, "a", b"no profile")
        until(here.profiles, "the profile")
    assert here.profiles() == {"rank-1.json.gz": f"{here.folder}/profiles/rank-1.json.gz"}


def test_profiles_that_go_to_s3_can_be_named_once_they_are_there(remote: TaskResults) -> None:
    with remote.received() as received:
        submit(received, "profiles/rank-1.json.gz", b"trace")
        assert remote.profiles() == {}
    assert remote.profiles() == {"rank-1.json.gz": f"{remote.folder}/profiles/rank-1.json.gz"}


def test_the_results_of_all_handlers_reach_s3(remote: TaskResults, tmp_path: Path) -> None:
    with remote.received() as received:
        submit_all(received, AWKWARD)
    assert downloaded(remote, tmp_path) == AWKWARD


@pytest.mark.parametrize("place", ["here", "remote"])
def test_a_folder_that_nobody_filled_is_made_only_if_it_is_wanted(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    results: TaskResults = request.getfixturevalue(place)
    files_there = results._execution.filesystem(results.folder)
    with results.received():
        pass
    assert not files_there.exists(results.folder)
    with results.received() as received:
        submit(received, "", b"")
        submit(received, "../refused", b"")
    if place == "here":
        assert list(Path(results.folder).iterdir()) == []
    else:
        files_there.invalidate_cache()
        assert files_there.exists(results.folder)  # of which older s3fs makes no folder, though
        assert downloaded(results, tmp_path) == {}


@pytest.fixture
def refused(remote: TaskResults, tmp_path: Path) -> TaskResults:
    """In a bucket whose name no server accepts."""
    return outputs_at("s3://x/raw", tmp_path)


def test_what_storage_refuses_fails_the_task(refused: TaskResults) -> None:
    said = f"Failed to put data .* to {refused.folder}"
    with pytest.raises(FlyteUploadDataException, match=said), refused.received() as received:
        submit(received, "a", b"x")


def test_what_storage_refuses_does_not_hide_the_gangs_error(
    refused: TaskResults, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LookupError, match="the gang's own"):
        fail(refused, LookupError("the gang's own"))
    assert f"did not reach {refused.folder} (FlyteUploadDataException: " in capfd.readouterr().err


def test_a_task_that_is_taken_away_does_not_wait_for_storage(
    remote: TaskResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FLYTE_AWS_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        results = outputs_at("s3://tests/raw", tmp_path, grace_period=5.0)
        with pytest.raises(PreemptedError, match="told to end"):
            fail(results, PreemptedError("the task was told to end", cause="SIGTERM"))
        told = f"some results of the ranks did not reach {results.folder} within 0.5 s. {LOST}\n"
        assert capfd.readouterr().err == told
