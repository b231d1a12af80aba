"""Return values in a file arrive unchanged, without copies of large parts, and leave no file name."""

from __future__ import annotations

import pickle
import string
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flytekitplugins.daskpytorch.protocol.payload import SMALL_SIZE, MappedReturn, Piece, Segments, send_by_file
from flytekitplugins.daskpytorch.protocol.pickling import LARGE


def sent(folder: Path, value: Any) -> tuple[bytes | None, list[Piece]]:
    """What the driver gets of a value."""
    pieces: list[Piece] = []

    def dump(file: IO[bytes], takes: Callable[[pickle.PickleBuffer], bool]) -> None:
        pickle.Pickler(file, protocol=5, buffer_callback=takes).dump(value)

    return send_by_file(dump, folder, pieces.append), pieces


def mapped(piece: Piece) -> MappedReturn:
    assert piece.file is not None
    return MappedReturn(*piece.file)


PARTS = st.one_of(
    st.integers(),
    st.text(string.ascii_letters, max_size=20),
    st.sampled_from([SMALL_SIZE - 100, SMALL_SIZE, 3 * SMALL_SIZE, LARGE, LARGE + 1]).map(lambda size: b"b" * size),
    st.sampled_from([0, 10, LARGE - 1, LARGE, LARGE + 1]).map(lambda size: np.arange(size, dtype=np.uint8)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, max_size=8))
def test_any_mixture_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("driver")
    small, pieces = sent(folder, value)
    found = pickle.loads(small) if small is not None else mapped(pieces[0]).load()
    assert [type(part) for part in found] == [type(part) for part in value]
    assert all(np.array_equal(here, there) for here, there in zip(found, value, strict=True))
    assert list(folder.iterdir()) == []


def test_what_is_small_makes_no_file(tmp_path: Path) -> None:
    small, pieces = sent(tmp_path, b"s" * (SMALL_SIZE - 100))
    assert (pickle.loads(small or b""), pieces) == (b"s" * (SMALL_SIZE - 100), [])


def test_an_array_is_the_files_memory_at_the_start_of_a_page_and_may_be_written_to(tmp_path: Path) -> None:
    value = ["before", np.ones(LARGE, dtype=np.uint8), b"between" * SMALL_SIZE, np.zeros(LARGE, dtype=np.uint8)]
    _, [piece] = sent(tmp_path, value)
    file = mapped(piece)
    _, ones, _, zeros = file.load()
    for array, memory in zip((ones, zeros), file.aside, strict=True):
        assert np.shares_memory(array, np.frombuffer(memory, dtype=np.uint8))
        assert array.ctypes.data % 4096 == 0
        array[0] = 7
    assert (ones[:2].tolist(), zeros[:2].tolist()) == ([7, 1], [7, 0])


def test_what_is_given_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "add", mock.Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space left"):
        sent(tmp_path, b"x" * LARGE)
    assert list(tmp_path.iterdir()) == []
