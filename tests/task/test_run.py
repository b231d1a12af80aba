"""`dispatch.run` shows, keeps and resumes its gang as a task does. Its futures have records, checkpoints and a page.

Here in debug mode, in this process; `test_run_integration.py` has real workers.
"""

import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import Gang, Keep, current_rank, dispatch
from flytekitplugins.daskpytorch.task import local_runs
from flytekitplugins.daskpytorch.task.run import RunFutures, place_of
from flytekitplugins.daskpytorch.testing import one_rank  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_rank", "kept")
LOSSES = [0.5, 0.2, 0.3, 0.4]
PLACE = f"{__name__}.train"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which local runs keep their checkpoints."""
    monkeypatch.setenv(local_runs.FOLDER_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.delenv(local_runs.RESUME_VARIABLE, raising=False)
    return tmp_path / "kept"


def train(losses: list[float], fails: int = 0) -> int:
    rank = current_rank()
    start = (rank.checkpoint.load() or {"step": -1})["step"] + 1
    for step in range(start, len(losses)):
        rank.log({"loss": losses[step], "word": "w"}, step=step, num_steps=len(losses))
        rank.checkpoint.save({"step": step}, step, metrics={"loss": losses[step]})
        rank.checkpoint.flush()
    if fails:
        raise LookupError("after all steps")
    return start


def run(*args: Any, **gang: Any) -> RunFutures:
    return dispatch.run(mock.create_autospec(Client, instance=True), train, *args, gang=Gang(key="train", **gang))


def test_its_futures_have_what_was_logged_and_kept_and_write_the_page(kept: Path, tmp_path: Path) -> None:
    futures = run(LOSSES, keep=Keep(last=1, best=1, metric="loss"))
    assert futures.result() == [0]
    futures.records.clear()  # a copy
    assert [record.metrics["loss"] for record in futures.records] == LOSSES
    assert (futures.metrics, futures.step) == ({"loss": 0.4, "word": "w"}, 3)
    best, newest = futures.checkpoints
    assert (futures.best_checkpoint, futures.newest_checkpoint) == (best, newest)
    assert (best.step, best.metrics, newest.step) == (1, {"loss": 0.2}, 3)
    for checkpoint in (best, newest):
        assert Path(checkpoint.place or "").parent.parent.parent == kept / PLACE
        assert Path(checkpoint.place or "").stat().st_size == checkpoint.size
    page = futures.report(tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count('class="dpt dpt-page"') == 1
    for text in ("done", "Metrics", "best 0.2 at 1", str(newest.place)):
        assert text in page
    with pytest.raises(OSError, match="missing"):
        futures.report(tmp_path / "missing" / "page.html")


def test_a_failed_run_is_kept_and_the_next_goes_on(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LookupError):
        run(LOSSES[:2], 1).result()
    said = capsys.readouterr().err
    assert "train failed: " in said
    assert re.search(
        r"^train: failed after \S+ s, step 1/2  loss 0.2; the checkpoint of step 1 is kept, DASKPYTORCH_RESUME=1 and "
        r"the same command go on from it\n  checkpoints: ",
        said,
        re.MULTILINE,
    ), said
    [first] = (kept / PLACE).iterdir()
    monkeypatch.setenv(local_runs.RESUME_VARIABLE, "1")
    assert run(LOSSES).result() == [2]
    said = capsys.readouterr().err
    assert f"going on from the run in {first}\n" in said
    assert re.search(r"^train: done after \S+ s, step 3/4  loss 0.4\n  checkpoints: ", said, re.MULTILINE), said
    monkeypatch.delenv(local_runs.RESUME_VARIABLE)
    assert run(LOSSES).result() == [0]


def test_with_a_checkpoint_uri_no_local_run_is_kept(kept: Path, tmp_path: Path) -> None:
    uri = str(tmp_path / "storage")
    assert run(LOSSES, checkpoint_uri=uri).result() == [0]
    assert run([*LOSSES, 0.1], checkpoint_uri=uri).result() == [4]
    assert not kept.exists()


def of_main() -> None: ...


@pytest.mark.parametrize(
    ("main", "key", "asked", "is_prompt", "place"),
    [
        ({"__file__": "/home/me/fit.py", "__spec__": None}, "of_main-1", None, False, "fit.of_main"),
        ({"__file__": "/home/me/fit.py", "__spec__": None}, "of_main-2", None, False, "fit.of_main-2"),
        ({"__file__": "/home/me/fit.py", "__spec__": None}, "mine", "mine", False, "fit.mine"),
        ({"__spec__": types.SimpleNamespace(name="pkg.__main__")}, "of_main-1", None, False, "pkg.of_main"),
        ({}, "of_main-3", None, True, "interactive.of_main"),  # a cell that was called three times
        ({}, "mine", "mine", True, "interactive.mine"),
    ],
)
def test_the_same_command_finds_the_same_folder(
    main: Any, key: str, asked: str | None, *, is_prompt: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(**main))
    monkeypatch.setattr(of_main, "__module__", "__main__")
    monkeypatch.setattr("flytekitplugins.daskpytorch.task.run.is_interactive", lambda: is_prompt)
    assert place_of(partial(of_main), key, asked) == place
    monkeypatch.setattr(of_main, "__module__", "pkg.models")
    assert place_of(of_main, key, asked) == f"pkg.models.{place.partition('.')[2]}"
