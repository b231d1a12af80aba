"""Calls that wait for an import run once it is complete."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flytekitplugins.daskpytorch.rank import libraries


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose `__init__` takes from a module what the call may change."""
    (tmp_path / "waited_for").mkdir()
    (tmp_path / "waited_for/__init__.py").write_text("from waited_for.part import answer")
    (tmp_path / "waited_for/part.py").write_text("def answer():\n    return 'its own'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for name in ("waited_for", "waited_for.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def change(module: ModuleType) -> None:
    module.answer = lambda: "ours"  # type: ignore[attr-defined]


def test_a_module_is_changed_before_others_take_from_it() -> None:
    libraries.call_after("waited_for.part", change)
    assert "waited_for" not in sys.modules
    assert importlib.import_module("waited_for").answer() == "ours"


def test_nothing_is_left_after_the_import() -> None:
    before = [*sys.meta_path]
    libraries.call_after("waited_for.part", change)
    importlib.import_module("waited_for")
    assert sys.meta_path == before


def test_a_module_that_is_imported_already_is_changed_now() -> None:
    module = importlib.import_module("waited_for.part")
    libraries.call_after("waited_for.part", change)
    assert module.answer() == "ours"


def test_a_module_that_is_not_there_is_missed_as_ever() -> None:
    libraries.call_after("waited_for.nothing", change)
    with pytest.raises(ModuleNotFoundError, match=r"waited_for\.nothing"):
        importlib.import_module("waited_for.nothing")
