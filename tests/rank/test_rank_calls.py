"""A rank runs the calls of a gang that stays, and keeps no more between them than its caller refers to."""

from __future__ import annotations

import gc
import importlib
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from flytekitplugins.daskpytorch.protocol import function
from flytekitplugins.daskpytorch.protocol.code import pack_code
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.function import pack_call
from flytekitplugins.daskpytorch.protocol.messages import CallEnded, CallOrder, Finish, Forget, NextCall
from flytekitplugins.daskpytorch.rank.calls import Server


class Value:
    """Value that a rank keeps between calls."""

    made: ClassVar[list[weakref.ref[Value]]] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))


class Reference:
    """As a driver's reference to what the ranks have kept of call 1."""

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return function.kept_value, (1,)


class Rank:
    """This thread as a rank, whose driver has ordered all beforehand."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[Any] = []
        link: Any = SimpleNamespace(
            ledger=SimpleNamespace(spending=lambda _: nullcontext()),
            progress=SimpleNamespace(move=lambda: None, step=None),
            send=self.sent.append,
            send_returned=pickle.dumps,
        )
        stop: Any = SimpleNamespace(has_fired=False)
        self.server = Server(link, folder, stop, lambda error: Failure.of(error, 0.0))

    def serve(self, *orders: CallOrder) -> list[CallEnded]:
        self.sent.clear()
        for order in (*orders, Finish()):
            self.server.put(order)
        self.server.serve()
        return [report for report in self.sent if isinstance(report, CallEnded)]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    handler = signal.getsignal(signal.SIGINT)
    for name in ("path", "path_hooks"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(function, "values", function.values)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    yield Rank(tmp_path / "of-rank")
    signal.signal(signal.SIGINT, handler)
    function.values.clear()


def of_notebook(cell: str, **names: object) -> bytes:
    """The call of `f`, which a cell of a notebook in another process defines, with these variables."""
    ours, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        namespace = vars(sys.modules["__main__"])
        exec(cell, namespace)
        namespace.update(names)
        return pack_call(namespace["f"], (), {})
    finally:
        sys.modules["__main__"] = ours


def test_after_a_reload_copies_of_changed_sources_count_also_in_packages(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "daskpytorch_package"
    package.mkdir()
    (package / "__init__.py").touch()
    name = f"{package.name}.part"
    sent = []
    with monkeypatch.context() as of_driver:
        of_driver.syspath_prepend(str(tmp_path))
        for text in ("def value(): return 'old'", "def value(): return 'newer'"):
            (package / "part.py").write_text(text)
            module = importlib.import_module(name)
            sent.append((pack_code(), pack_call(module.value, (), {})))
    reload = pack_call(reload_named, (name,), {})
    for each in (name, package.name):
        monkeypatch.delitem(sys.modules, each)
    (package / "part.py").unlink()  # this host is another than the driver's
    (old, call), (newer, _) = sent
    found = rank.serve(
        NextCall(number=1, call=call, code=old),
        NextCall(number=2, call=call, code=newer),
        NextCall(number=3, call=reload),
        NextCall(number=4, call=call),
        NextCall(number=5, call=reload, code=old),
        NextCall(number=6, call=call),
    )
    values = [each.value for each in found]
    assert [pickle.loads(value) for value in values if value] == ["old", "old", None, "newer", None, "old"]
    copies = [folder for folder in sys.path if Path(folder).is_relative_to(tmp_path)]
    assert len(copies) == len(set(copies)) > 0
    for each in (name, package.name):
        monkeypatch.delitem(sys.modules, each)


def reload_named(name: str) -> None:
    importlib.reload(sys.modules[name])


def test_a_kept_value_that_a_cells_function_uses_by_name_is_freed_with_its_reference(rank: Rank) -> None:
    load = NextCall(number=1, call=pack_call(Value, (), {}), keeps=True)
    use = NextCall(number=2, call=of_notebook("def f(): return type(kept).__name__, other", kept=Reference(), other=5))
    _, used = rank.serve(load, use, Forget(1))
    assert used.value == pickle.dumps(("Value", 5))
    gc.collect()
    assert Value.made[-1]() is None
    assert vars(sys.modules["__main__"])["other"] == 5
