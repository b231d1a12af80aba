"""Files that stand for those of `torch.compile`, between a rank's folder and storage."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.rank import compile_cache
from flytekitplugins.daskpytorch.rank.compile_cache import CompileCache
from gangs import order_for

LIBRARY, GRAPH = "ab/cabc.main.so", "fxgraph/xy/fxyz/entry"
Make = Callable[[str], "Node"]


class Node:
    """A machine with one rank, or a rank of a machine."""

    def __init__(self, scratch: Path, uri: str, rank: int = 0) -> None:
        scratch.mkdir(exist_ok=True)
        self.folder = scratch / "compiled"
        self.notes: list[str] = []
        order = order_for(Gang(compile_cache=uri))
        place = replace(order.place, local_rank=rank)
        order = replace(order, scratch=str(scratch), place=place)
        self.cache = CompileCache(order, self.notes.append)
        self.cache.open()

    def build(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def files(self) -> dict[str, bytes]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv(compile_cache.VARIABLE, "")
    return lambda name: Node(tmp_path / name, str(tmp_path / "store"))


def stored(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_files_that_one_machine_has_built_are_there_on_the_next(node: Make, tmp_path: Path) -> None:
    first, beside = node("first"), node("beside")
    first.build(LIBRARY, b"library")
    first.build("locks/one.lock", b"")
    beside.build(GRAPH, b"graph")
    first.cache.close()
    beside.cache.close()
    third = node("third")
    assert third.files() == {LIBRARY: b"library", GRAPH: b"graph"}
    assert os.environ[compile_cache.VARIABLE] == str(third.folder)
    assert [note.startswith("fetched 2 compiled files from ") for note in third.notes] == [True]
    before = [path.stat().st_mtime_ns for path in stored(tmp_path)]
    third.cache.close()  # has nothing new
    assert [path.stat().st_mtime_ns for path in stored(tmp_path)] == before


def test_first_rank_of_a_machine_stores_what_all_have_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_cache.VARIABLE, "")
    first, second = (Node(tmp_path / "node", str(tmp_path / "store"), rank) for rank in range(2))
    second.build(GRAPH, b"graph")
    second.cache.close()
    assert not stored(tmp_path)
    first.cache.close()
    first, second = (Node(tmp_path / "next", str(tmp_path / "store"), rank) for rank in range(2))
    assert first.files() == {GRAPH: b"graph"}
    assert (len(first.notes), second.notes) == (1, [])  # one rank fetches them


def test_file_that_a_compiler_may_still_write_waits_for_the_end(node: Make, tmp_path: Path) -> None:
    first = node("first")
    first.build(LIBRARY, b"libr")
    first.cache._store(until=(first.folder / LIBRARY).stat().st_mtime - compile_cache.QUIET)
    assert not stored(tmp_path)
    first.cache.close()
    assert len(stored(tmp_path)) == 1


def test_damaged_file_is_left_out_said_and_replaced(node: Make, tmp_path: Path) -> None:
    first = node("first")
    first.build(LIBRARY, b"library")
    first.build(GRAPH, b"graph")
    first.cache.close()
    [library] = (path for path in stored(tmp_path) if "cabc" in path.name)
    library.write_bytes(b"lib")
    second = node("second")
    assert second.files() == {GRAPH: b"graph"}
    assert "1 compiled files are damaged, and left out: " in second.notes[0]
    second.build(LIBRARY, b"library")
    second.cache.close()
    assert node("third").files() == first.files()


def test_name_that_leads_out_of_the_folder_is_left_out(node: Make, tmp_path: Path) -> None:
    first = node("first")
    first.build(GRAPH, b"graph")
    first.cache.close()
    [graph] = stored(tmp_path)
    graph.rename(graph.with_name(f"{graph.name.partition('+')[0]}+..+..+escaped"))
    assert not node("second").files()
    assert not (tmp_path / "escaped").exists()


def test_files_of_another_torch_or_machine_are_left_alone(
    node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node("first")
    first.build(LIBRARY, b"library")
    first.cache.close()
    monkeypatch.setattr(compile_cache, "_kind", lambda: "torch-9-other")
    assert not node("second").files()
    assert len(stored(tmp_path)) == 1


def test_files_that_another_user_can_have_written_are_not_loaded(node: Make, tmp_path: Path) -> None:
    first = node("first")
    first.build(LIBRARY, b"library")
    first.cache.close()
    stored(tmp_path)[0].parent.chmod(0o777)
    second = node("second")
    assert not second.files()
    assert "compile_cache=" in second.notes[0]
    assert "is left out: PermissionError: other users can write to" in second.notes[0]


def test_storage_that_is_away_costs_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    node = Node(tmp_path / "node", str(tmp_path / "file/store"))
    node.build(LIBRARY, b"library")
    node.cache.close()
    assert "is left out: " in node.notes[-1]


def test_storage_that_takes_no_files_does_not_hold_up_the_end(node: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, is_over = node("first"), threading.Event()
    monkeypatch.setattr(compile_cache, "END_LIMIT", 0.1)
    monkeypatch.setattr(Files, "write", lambda *_: is_over.wait())
    first.build(LIBRARY, b"library")
    first.cache.close()
    is_over.set()
    assert "has not taken all files in 0.1 s: the rank ends" in first.notes[-1]
