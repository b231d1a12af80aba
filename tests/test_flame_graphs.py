"""A user's request makes a running rank record a flame graph with py-spy."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import __main__, current_rank, flame_graphs
from flytekitplugins.daskpytorch.rank import profiler
from flytekitplugins.daskpytorch.results import DaskResultsHandler
from gangs import Notes, on_this_machine
from processes import Cluster, until


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def agents_folder(temporary: Path) -> Path:
    (folder := temporary / "daskpytorch-agent").mkdir()
    (folder / "stacks-0").touch()
    return folder


def test_request_that_a_rank_takes_counts(temporary: Path) -> None:
    folder = agents_folder(temporary)
    watched = profiler.Profiler(3, folder, lambda *_: None, lambda _: None)

    def take() -> None:
        until(lambda: watched.take_requests() == [7], "the request")

    rank = threading.Thread(target=take)
    rank.start()
    try:
        assert flame_graphs.ask(3, 7) == 1
    finally:
        rank.join()


def test_request_that_nobody_takes_is_withdrawn(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame_graphs, "REQUEST_TIMEOUT", 0.0)
    folder = agents_folder(temporary)
    assert flame_graphs.ask(3, 7) == 0
    assert [path.name for path in folder.iterdir()] == ["stacks-0"]


def test_workers_of_a_cluster_are_asked(cluster: Cluster, client: Client, tmp_path: Path) -> None:
    client.run(setattr, tempfile, "tempdir", str(tmp_path))  # other tests' agents use the default folder
    try:
        assert flame_graphs.ask(999_999, 1, cluster.address) == 0
    finally:
        client.run(setattr, tempfile, "tempdir", None)


@pytest.mark.parametrize(("count", "exit_code"), [(0, 1), (2, 0)])
def test_command_says_whether_there_is_such_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, exit_code: int
) -> None:
    asked = []
    monkeypatch.setattr(flame_graphs, "ask", lambda *how: asked.append(how) or count)
    assert __main__.main(["profile", "--rank", "3", "--seconds", "7", "--scheduler", "tcp://s:1"]) == exit_code
    assert asked == [(3, 7, "tcp://s:1")]
    told = "".join(capsys.readouterr())
    assert ("has a running rank 3" in told) == (count == 0)
    assert "on the workers of tcp://s:1" in told


def test_without_py_spy_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(profiler.shutil, "which", lambda *_, **__: None)
    (tmp_path / profiler.request_name(0, 1, "mine")).touch()
    profiler.Profiler(0, tmp_path, lambda *_: None, notes.append).draw_flame_graphs()
    until(lambda: bool(notes), "a word")
    [note] = notes
    assert note.startswith(
        "was not watched by py-spy: py-spy was not found. A flame graph needs py-spy where the ranks run"
    )
    assert note.endswith('pip install "flytekitplugins-daskpytorch[profile]"')


def be_busy(gate: str) -> None:
    Path(gate, f"started-{current_rank().rank}").touch()
    while not Path(gate, "enough").exists():
        sum(range(1000))


def test_flame_graph_of_a_running_rank_is_among_the_results(temporary: Path, tmp_path: Path) -> None:
    (gate := tmp_path / "gate").mkdir()
    futures = on_this_machine(be_busy, str(gate), max_restarts=0, observers=[notes := Notes()])
    try:
        until((gate / "started-1").exists, "rank 1")
        assert flame_graphs.ask(1, 1) == 1
        until(lambda: any("py-spy" in note for note in notes.texts), "the flame graph")
    finally:
        (gate / "enough").touch()
    DaskResultsHandler().process_results(tmp_path / "results", futures)
    [picture] = (tmp_path / "results" / "profiles").iterdir()
    assert picture.name.startswith("rank-1-flame-graph-")
    assert "be_busy" in picture.read_text()
    assert any(f"rank 1 was watched by py-spy for 1 s: profiles/{picture.name}" in note for note in notes.texts)
