"""The user's code and arguments are pickled so that they run on machines without the project."""

import importlib
import importlib.util
import io
import os
import pickle
import sys
import tarfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flytekit import task

from flytekitplugins.daskpytorch.protocol import code as code_module
from flytekitplugins.daskpytorch.protocol.function import pack_call, unpack_call

PROJECT = {
    "ship_entry.py": """
        from ship_project.models import net
        from ship_project.training import train, train_task

        def run(x):
            return train(x)
    """,
    "ship_neighbour.py": "NAME = 'beside the entry'",
    "ship_project/__init__.py": "",
    "ship_project/training.py": """
        from pathlib import Path

        from flytekit import task

        class DomainError(Exception):
            pass

        def train(x, scale=1):
            import ship_neighbour
            from ship_project import later
            words = (Path(__file__).parent / "data" / "words.txt").read_text()
            return (later.double(x) * scale, words, ship_neighbour.NAME, __file__)

        @task
        def train_task(x: int) -> int:
            return x + 1

        def make_closure(n):
            from ship_project.later import double
            return lambda x: double(x) + n
    """,
    "ship_project/later.py": """
        def double(x):
            return 2 * x
    """,
    "ship_project/models/__init__.py": "",
    "ship_project/models/net.py": "WIDTH = 128",
    "ship_project/data/words.txt": "a few words",
    "ship_project/__pycache__/junk.cpython-311.pyc": "junk",
    "ship_project/.hidden/secret.py": "junk",
    "notes.txt": "beside a module without a package",
    ".env": "SECRET=1",
    "unrelated_package/__init__.py": "",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small project of the user's, with its entry module imported and its folder not on `sys.path` any more."""
    root = tmp_path / "checkout"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    (root / "ship_project/data/weights.bin").write_bytes(b"x" * (code_module.MAX_DATA_BYTES + 1))
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(root)
        importlib.import_module("ship_entry")
    yield root
    for name in set(sys.modules) - before:
        if name.startswith("ship_"):
            del sys.modules[name]


def training() -> Any:
    return sys.modules["ship_project.training"]


def names_in(code: code_module.Code) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(code.archive)) as archive:
        return set(archive.getnames())


def unpacked_elsewhere(code: code_module.Code, folder: Path) -> Path:
    """Where another machine has the copies."""
    [path] = code_module.place_code(replace(code, machine="another"), folder).folders
    return Path(path)


# ---- The project's sources ------------------------------------------------------------------------------------------


def test_a_project_travels_whole_and_nothing_else_does(project: Path) -> None:
    """Also modules that nobody has imported yet, neighbours of modules, small resources, and code of any size."""
    assert "ship_project.later" not in sys.modules
    (project / "ship_project/tables.py").write_text("#" * (code_module.MAX_DATA_BYTES + 1))
    names = names_in(code_module.pack_code())
    stay = {"ship_project/__pycache__/junk.cpython-311.pyc", "ship_project/.hidden/secret.py", ".env"}
    stay |= {"unrelated_package/__init__.py"}
    assert PROJECT.keys() - stay | {"ship_project/tables.py"} <= names
    assert names.isdisjoint(stay | {"ship_project/data/weights.bin"})
    tops = {name.partition("/")[0].removesuffix(".py") for name in names}
    assert tops.isdisjoint({"flytekitplugins", "flytekit", "pytest", "_pytest", "cloudpickle", "json", "tarfile"})


def test_files_beside_the_code_travel_up_to_a_limit_the_smallest_first(project: Path) -> None:
    for name, share in (("half", 2), ("quarter", 4), ("another", 4)):
        (project / name).write_bytes(bytes(code_module.MAX_DATA_BYTES // share))
    names = names_in(code_module.pack_code())
    assert {"notes.txt", "quarter", "another"} <= names
    assert "half" not in names


def test_files_that_cannot_be_read_stay(project: Path) -> None:
    (project / "gone.txt").symlink_to(project / "nowhere")
    os.mkfifo(project / "pipe")
    assert {"gone.txt", "pipe"}.isdisjoint(names_in(code_module.pack_code()))


def own_files(project: Path) -> code_module.Code:
    """Without what other tests have imported from elsewhere."""
    code = code_module.pack_code()
    originals = {name: it for name, it in code.originals.items() if it[0].startswith(str(project))}
    return replace(code, folders=[str(project)], originals=originals)


def test_the_drivers_own_files_serve_on_its_machine_unless_a_module_was_changed(project: Path, tmp_path: Path) -> None:
    code = own_files(project)
    (project / "notes.txt").write_text("one more line")  # as of a log
    sources = code_module.place_code(code, tmp_path)
    assert (sources.folders, sources.originals) == ([str(project)], {})
    (project / "ship_project/later.py").write_text("def double(x): return 22 * x")
    [folder] = code_module.place_code(code, tmp_path).folders
    assert "return 2 * x" in Path(folder, "ship_project/later.py").read_text()


def test_copies_serve_where_one_folder_would_hide_a_file_of_another(project: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "same.py").touch()
    files = {"same.py": other / "same.py"}
    assert code_module.Project(files=files, roots={one, other}).folders() == ()
    assert code_module.Project(files={"same.py": one / "same.py"}, roots={one, other}).folders() == [
        str(one),
        str(other),
    ]


def test_digest_is_that_of_the_sources_whenever_they_were_written(project: Path) -> None:
    first = code_module.pack_code()
    os.utime(project / "ship_project/training.py", (1, 1))
    assert code_module.pack_code() == first
    (project / "ship_project/later.py").write_text("def double(x): return x + x")
    assert code_module.pack_code().digest != first.digest


def test_packing_does_not_load_lazily_imported_modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "ship_lazy.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.spec_from_file_location("ship_lazy", project / "ship_lazy.py")
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "ship_lazy", module)
    assert "ship_lazy.py" in names_in(code_module.pack_code())


def test_sources_are_unpacked_once(project: Path, tmp_path: Path) -> None:
    code = code_module.pack_code()
    first = unpacked_elsewhere(code, tmp_path)
    (first / "mark").touch()
    assert unpacked_elsewhere(code, tmp_path) == first
    assert (first / "mark").exists()


def test_sources_are_unpacked_by_a_python_that_knows_no_filters(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract_all = tarfile.TarFile.extractall
    options = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}  # it may be such a Python

    def as_in_python_3_11_2(self: tarfile.TarFile, path: Path, members: object = None) -> None:
        extract_all(self, path, **options)

    monkeypatch.setattr(tarfile.TarFile, "extractall", as_in_python_3_11_2)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    test_sources_are_unpacked_once(project, tmp_path)


# ---- Calls ----------------------------------------------------------------------------------------------------------


def sent(function: Callable[..., Any], *args: Any, **kwargs: Any) -> partial[Any]:
    return unpack_call(pack_call(function, args, kwargs))


def test_function_of_a_module_travels_by_name(project: Path) -> None:
    data = pack_call(training().train, (3,), {"scale": 2})
    assert b"words.txt" not in data  # none of its code
    call = unpack_call(data)
    assert call.func is training().train
    assert (call.args, call.keywords) == ((3,), {"scale": 2})


def test_function_of_a_flyte_task_is_found_through_the_task(project: Path) -> None:
    function = training().train_task.task_function
    data = pack_call(function, (), {})
    assert len(data) < 400
    assert unpack_call(data).func is function


def test_functions_that_no_module_has_travel_by_value(project: Path) -> None:
    base, replaced = 100, training().train_task.task_function

    @task
    def nested(x: int) -> int:
        return x * 3

    training().train_task = None
    assert sent(lambda x: x + base)(1) == 101
    assert sent(training().make_closure(5))(2) == 9
    assert sent(nested.task_function)(2) == 6
    assert sent(replaced)(1) == 2


def test_argument_that_cannot_be_pickled_is_named(project: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="because the function itself cannot be"):
        pack_call(lambda: [lock], (), {})
    with pytest.raises(TypeError) as caught:
        pack_call(training().train, (1, lock), {"scale": 2, "lock": lock})
    text = str(caught.value)
    assert text.startswith("train cannot be sent to the ranks, because argument 1, lock cannot be pickled")
    assert "argument 0" not in text
    assert "scale" not in text
    assert isinstance(caught.value.__cause__, (TypeError, pickle.PicklingError))
