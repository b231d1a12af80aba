"""Submitted results become files: pieces and paths, and the folder of a task, here and on a real S3 server."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import DataConfig
from flytekit.core.context_manager import ExecutionState
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.exceptions.system import FlyteUploadDataException

from flytekitplugins.daskpytorch import context
from flytekitplugins.daskpytorch.context import Link, RankContext
from flytekitplugins.daskpytorch.driver.futures import GangFuture
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.flyte.context import FlyteExecution
from flytekitplugins.daskpytorch.protocol.messages import PIECE_SIZE
from flytekitplugins.daskpytorch.results import DaskResultsHandler, ResultPathError, TaskResults
from gangs import pieces_of
from processes import files, until

MIB = 1 << 20


def submit(received: ReceivedResults, path: str, data: bytes, *, rank: int = 0) -> None:
    """Take a rank's result as the driver does."""
    for piece in pieces_of(path, data):
        received.add(received.keep(rank, piece))


def ended(received: ReceivedResults, error: Exception | None = None) -> GangFuture:
    """The future of a gang that has ended."""
    future = GangFuture(received)
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(None)
    return future


# ---- Pieces, and where they are kept


def test_a_result_that_was_cut_short_is_none(tmp_path: Path) -> None:
    received = ReceivedResults()
    for piece in pieces_of("a", bytes(3 * PIECE_SIZE))[:2]:
        received.add(received.keep(0, piece))
    submit(received, "b", b"of the next attempt")
    DaskResultsHandler().process_results(tmp_path, [ended(received)])
    assert files(tmp_path) == {"b": b"of the next attempt"}


def test_a_disk_that_takes_no_result_ends_the_gang_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = ReceivedResults()
    submit(received, "a", b"x")
    monkeypatch.setattr(Path, "open", mock.Mock(side_effect=OSError(28, "No space left on device")))
    (piece,) = pieces_of("b", b"x")
    with pytest.raises(OSError, match="No space left"):
        received.add(received.keep(0, piece))


@pytest.mark.parametrize("is_returned", [True, False])
def test_no_file_is_left_when_nobody_holds_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_returned: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    received = ReceivedResults()
    for piece in pieces_of(None if is_returned else "a", bytes(3 * PIECE_SIZE)):
        received.add(received.keep(0, piece))
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.iterdir())) == 1
    del received
    assert not list(tmp_path.iterdir())


# ---- From the received to files


def test_results_are_written_in_order_per_rank_and_once(tmp_path: Path) -> None:
    received, other, handler = ReceivedResults(), ReceivedResults(), DaskResultsHandler()
    submit(received, "a/b/c.txt", b"first")
    submit(received, "own", b"0", rank=0)
    submit(received, "a/b/c.txt", b"second")
    submit(received, "empty", b"", rank=1)
    submit(other, "other", b"1")
    handler.process_results(str(tmp_path), [ended(received), ended(received), ended(other)])
    assert files(tmp_path) == {"a/b/c.txt": b"second", "own": b"0", "empty": b"", "other": b"1"}
    (tmp_path / "own").unlink()
    handler.process_results(tmp_path, [ended(received)])
    assert "own" not in files(tmp_path)


def test_files_are_written_while_the_gang_runs(tmp_path: Path) -> None:
    received = ReceivedResults()
    future = GangFuture(received)
    writing = threading.Thread(target=DaskResultsHandler().process_results, args=(tmp_path, [future]))
    writing.start()
    submit(received, "a", b"early")
    until(lambda: files(tmp_path) == {"a": b"early"}, "the first file")
    submit(received, "b", b"late")
    future.set_result(None)
    writing.join()
    assert files(tmp_path) == {"a": b"early", "b": b"late"}


def test_futures_that_lead_to_no_gang_are_named(tmp_path: Path) -> None:
    from concurrent.futures import Future

    with pytest.raises(TypeError, match=r"what dispatch\.run returned"):
        DaskResultsHandler().process_results(tmp_path, [Future()])


def test_the_first_error_is_raised_when_all_is_written(tmp_path: Path) -> None:
    received = ReceivedResults()
    submit(received, "../a", b"refused")
    submit(received, "b", b"good")
    with pytest.raises(LookupError, match="the gang's"):
        DaskResultsHandler().process_results(
            tmp_path, [ended(ReceivedResults()), ended(received, LookupError("the gang's"))]
        )
    assert files(tmp_path) == {"b": b"good"}


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Let the writing of one file fail."""

    def stumble(file: Path, target: Path) -> Path:
        if target.name == name:
            raise error
        return replace(file, target)

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", stumble)


def test_what_cannot_be_written_now_is_kept_for_another_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received, handler = ReceivedResults(), DaskResultsHandler()
    for number in range(5):
        submit(received, str(number), b"x")
    with monkeypatch.context() as patch:
        fail_at(patch, "2", OSError(28, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            handler.process_results(tmp_path, [ended(received)], raise_errors=False)
    assert sorted(files(tmp_path)) == ["0", "1"]
    submit(received, "2", b"newer")
    handler.process_results(tmp_path, [ended(received)])
    assert files(tmp_path) == {"0": b"x", "1": b"x", "2": b"newer", "3": b"x", "4": b"x"}


def test_a_file_on_another_disk_is_copied_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    received = ReceivedResults()
    submit(received, "a/b", b"x" * MIB)
    DaskResultsHandler().process_results(tmp_path, [ended(received)])
    assert files(tmp_path) == {"a/b": b"x" * MIB}


# ---- Paths


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A folder with links that lead out of it, and one that does not."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("untouched")
    (tmp_path / "prefix" / "folder").mkdir(parents=True)
    (tmp_path / "prefix" / "leads-out").symlink_to(tmp_path / "outside")
    (tmp_path / "prefix" / "file-outside").symlink_to("../outside/secret")
    (tmp_path / "prefix" / "nowhere").symlink_to("../outside/new")
    (tmp_path / "prefix" / "inside").symlink_to("folder")
    (tmp_path / "prefix" / "circle").symlink_to("circle")
    (tmp_path / "prefix-too").mkdir()
    (tmp_path / "prefix" / "sibling").symlink_to("../prefix-too")
    (tmp_path / "prefix" / "file").write_text("a file")
    return tmp_path / "prefix"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/etc/passwd", "absolute"),
        ("../outside/secret", "leads to .*outside/secret"),
        ("..", "leads to"),
        (".", "leads to"),
        ("folder/", "names a folder"),
        ("folder", "directory"),
        ("file/x", "File exists"),
        ("leads-out/secret", "leads to .*outside/secret"),
        ("file-outside", "leads to .*outside/secret"),
        ("nowhere", "leads to .*outside/new"),
        ("sibling/x", "leads to .*prefix-too/x"),
        ("circle/x", "File exists"),
        ("nul\0", "null"),
        ("lone-\udc80\ud800", "surrogates"),
        ("x" * 300, "too long"),
    ],
)
def test_refused_paths_name_rank_path_and_prefix(
    prefix: Path, path: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files(prefix.parent)
    received = ReceivedResults()
    submit(received, path, b"bad", rank=3)
    submit(received, "good", b"good", rank=3)
    with pytest.raises(ResultPathError, match=reason) as caught:
        DaskResultsHandler().process_results(prefix, [ended(received)])
    assert "rank 3" in str(caught.value)
    assert repr(path) in str(caught.value)
    assert str(prefix) in str(caught.value)
    assert files(prefix.parent) == before | {"prefix/good": b"good"}
    assert capfd.readouterr().err == f"{caught.value}\n"


@pytest.mark.parametrize(
    "path",
    ["inside/x", "folder/x", "folder/../y", "./y", "a//b", "ü/…", "..x/x..", " ", "new/circle", "d/" * 100 + "x"],
)
def test_paths_that_stay_inside_are_written(prefix: Path, path: str) -> None:
    received = ReceivedResults()
    submit(received, path, b"good")
    DaskResultsHandler().process_results(prefix, [ended(received)])
    assert (prefix / path).read_bytes() == b"good"
    assert not any("unfinished" in name for name in files(prefix))


# ---- In a rank


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """What this process submits as a rank."""
    sent: list[tuple[str, bytes]] = []
    link = Link()
    link.takes_results, link.submit = True, lambda *result: sent.append(result)
    monkeypatch.setattr(context, "_current", (os.getpid(), RankContext(link=link)))
    return sent


def test_text_goes_as_utf_8_and_bytes_as_they_are_with_signs_of_life(submitted: list[tuple[str, bytes]]) -> None:
    handler = DaskResultsHandler("key")
    handler.submit_result("a", "ü")
    handler.submit_result("b", b"\xff")
    assert submitted == [("a", "ü".encode()), ("b", b"\xff")]
    assert context.current_rank().progress.num_moves == 2


@pytest.mark.parametrize(
    ("path", "data", "match"),
    [
        ("a", {"loss": 1.0}, "not dict; .*json.dumps"),
        ("a", bytearray(b"x"), "not bytearray; .*json.dumps"),
        (Path("a"), "x", "PosixPath"),
        ("", "x", "at least one character"),
    ],
)
def test_other_data_and_paths_are_refused_at_once(
    submitted: list[tuple[str, bytes]], path: Any, data: Any, match: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        DaskResultsHandler().submit_result(path, data)
    assert not submitted


def test_outside_a_gang_or_without_a_task_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"'a', .*function that dispatch\.run or dispatch\.map calls, .*DaskDDP"):
        DaskResultsHandler().submit_result("a", "x")
    with pytest.raises(RuntimeError, match=r"outside a rank of a DaskDDP .*process_results\(prefix, futures\)"):
        DaskResultsHandler().directory()


# ---- Of a task


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


def fail(results: TaskResults, error: Exception) -> None:
    """As a gang does that has submitted something."""
    with results.received() as received:
        submit(received, "a", b"last words")
        raise error


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
        results._execution._ctx.file_access.get_data(results.folder, str(tmp_path / "downloaded"), is_multipart=True)
        assert files(tmp_path / "downloaded") == {}


@pytest.mark.usefixtures("remote")
def test_what_storage_refuses_fails_the_task_and_does_not_hide_the_gangs_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = outputs_at("s3://x/raw", tmp_path)  # no server accepts the bucket's name
    said = f"Failed to put data .* to {refused.folder}"
    with pytest.raises(FlyteUploadDataException, match=said), refused.received() as received:
        submit(received, "a", b"x")
    with pytest.raises(LookupError, match="the gang's own"):
        fail(refused, LookupError("the gang's own"))
    assert f"did not reach {refused.folder} within 60 s (FlyteUploadDataException: " in capfd.readouterr().err


def test_a_task_that_is_taken_away_does_not_wait_for_storage(
    remote: TaskResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FLYTE_AWS_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        results = outputs_at("s3://tests/raw", tmp_path, grace_period=5.0)
        with pytest.raises(PreemptedError, match="told to end"):
            fail(results, PreemptedError("the task was told to end", cause="SIGTERM"))
        told = f"some results of the ranks did not reach {results.folder} within 0.5 s (TimeoutError: )."
        assert capfd.readouterr().err.startswith(told)
