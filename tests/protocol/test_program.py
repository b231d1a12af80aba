"""In a rank, a script has its `__main__`, command line, files and logging, on its machine and on another.

The rank is an interpreter that does what one does before it joins its gang; it imports no torch.
"""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flytekitplugins.daskpytorch.protocol.code import pack_code

SCRIPT = """
import inspect
import logging
import os
import pickle
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from flytekitplugins.daskpytorch.protocol import code, function

WIDTH = 4


@dataclass
class Settings:
    width: int


class Outer:
    class Inner:
        def __eq__(self, other):
            return type(other) is type(self)


def plain_pickle():
    return pickle.loads(pickle.dumps(Settings(WIDTH))) == Settings(4)


def class_of_an_argument(value):
    return pickle.loads(pickle.dumps(value)) == value


def double(settings):
    return Settings(2 * settings.width)


def sources():
    return [inspect.getsource(each).partition(":")[0] for each in (double, Settings)]


def namespace():
    main = sys.modules["__main__"]
    return main.double is double, hasattr(main, "destination"), __name__, Path(__file__).name


def command_line():
    import options

    return options.rate, [Path(sys.argv[0]).name, *sys.argv[1:]]


def file_beside():
    return Path(__file__).with_name("conf.yaml").read_text()


def missing_file():
    return Path(__file__).with_name("weights.bin").read_bytes()


def folder():
    return str(Path(__file__).parent)


def paths():
    import options

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options.warn()
    try:
        options.fail()
    except ValueError:
        text = traceback.format_exc()
    return caught[0].filename, text, inspect.getsource(options.fail)


def record():
    logging.getLogger("mine").info("an INFO record")
    logging.getLogger("mine").debug("a DEBUG record")


if __name__ == "__main__":
    import options

    logging.basicConfig(level=logging.INFO, format="%(levelname)s of %(name)s: %(message)s")
    calls = {
        plain_pickle: (),
        class_of_an_argument: (Outer.Inner(),),
        sources: (),
        namespace: (),
        command_line: (),
        file_beside: (),
        missing_file: (),
        folder: (),
        paths: (),
        record: (),
    }
    destination = Path(os.environ["DESTINATION"])
    packed = {each.__name__: function.pack_call(each, args, {}) for each, args in calls.items()}
    destination.write_bytes(pickle.dumps((code.pack_code(), packed)))
"""
OPTIONS = """
import argparse
import warnings

parser = argparse.ArgumentParser()
parser.add_argument("--rate", type=float, default=0.1)
rate = parser.parse_args().rate


def warn():
    warnings.warn("odd", stacklevel=1)


def fail():
    raise ValueError("on purpose")
"""
RANK = """
import multiprocessing
import pickle
import sys
from pathlib import Path

sys.modules.pop("flytekitplugins", None)  # as the fork server does
from flytekitplugins.daskpytorch.protocol import code as code_module
from flytekitplugins.daskpytorch.protocol.function import unpack_call
from flytekitplugins.daskpytorch.rank import program

source, folder, *names = sys.argv[1:]
code, calls = pickle.loads(Path(source).read_bytes())
sources = code_module.place_code(code, Path(folder))
program.import_first_from(sources)
program.set_up_program(code.program, sources.script)
results = {}
for name in names:
    call = unpack_call(calls[name])
    try:
        results[name] = call()
    except Exception as error:
        program.explain(error, sources)
        results[name] = [type(error).__name__, *getattr(error, "__notes__", ())]
Path(folder, "results").write_bytes(pickle.dumps(results))
"""


class Script:
    """It has packed all its calls."""

    def __init__(self, folder: Path) -> None:
        self.project, self.packed, self._folder = folder / "project", folder / "packed", folder
        self.project.mkdir()
        (self.project / "train.py").write_text(SCRIPT)
        (self.project / "options.py").write_text(OPTIONS)
        (self.project / "conf.yaml").write_text("width: 7")
        (self.project / "weights.bin").write_bytes(bytes(9 << 20))
        command = [sys.executable, "train.py", "--rate", "3"]
        subprocess.run(command, cwd=self.project, env={"DESTINATION": str(self.packed)}, check=True)
        self.code, _ = pickle.loads(self.packed.read_bytes())

    def call(self, place: str, *names: str) -> tuple[dict[str, Any], str]:
        """Return what functions of it return in a rank on this machine or on another one, and what they write."""
        where = self._folder / f"{names[0]}-{place}"
        where.mkdir(exist_ok=True)
        elsewhere = self.project.with_name("away")
        if place == "elsewhere":
            self.project.rename(elsewhere)
        try:
            return called(self.packed, where, *names)
        finally:
            if place == "elsewhere":
                elsewhere.rename(self.project)


def called(packed: Path, folder: Path, *names: str) -> tuple[dict[str, Any], str]:
    """Return what functions that were packed return in a rank, and what they write."""
    command = [sys.executable, "-P", "-c", RANK, str(packed), str(folder), *names]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=env, check=False)
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "results").read_bytes()), done.stderr


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return Script(tmp_path_factory.mktemp("script"))


@pytest.fixture(params=["here", "elsewhere"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


FOUND = {
    "plain_pickle": True,
    "class_of_an_argument": True,
    "sources": ["def double(settings)", "@dataclass\nclass Settings"],
    "namespace": (True, False, "__main__", "train.py"),  # no line of the script's own part has run
    "command_line": (3.0, ["train.py", "--rate", "3"]),
    "file_beside": "width: 7",
}


def test_a_rank_finds_what_the_script_would_find(script: Script, place: str) -> None:
    assert script.call(place, *FOUND)[0] == FOUND


def test_ranks_on_this_machine_use_the_users_own_folder(script: Script) -> None:
    found, _ = script.call("here", "folder", "missing_file")
    assert found == {"folder": str(script.project), "missing_file": bytes(9 << 20)}


def test_the_error_for_a_file_that_did_not_travel_says_so(script: Script) -> None:
    found, _ = script.call("elsewhere", "missing_file")
    name, note = found["missing_file"]
    assert name == "FileNotFoundError"
    assert note.startswith(f"This rank's host, {socket.gethostname()}, has a copy of the driver's sources")
    assert "up to 8 MiB of files beside the code" in note


def test_warnings_and_tracebacks_name_the_users_own_files_and_lines(script: Script, place: str) -> None:
    script.call(place, "paths")
    warned, text, source = script.call(place, "paths")[0]["paths"]  # the second rank there, which may find bytecode
    original = str(script.project / "options.py")
    assert warned == original
    assert f'File "{original}", line' in text
    assert 'raise ValueError("on purpose")' in text
    assert f'File "{script.project / "train.py"}", line' in text
    assert source.startswith("def fail():")


def test_records_come_out_as_the_drivers_logging_is_set_up(script: Script, place: str) -> None:
    assert script.call(place, "record")[1] == "INFO of mine: an INFO record\n"


CELL = """
import inspect
import pickle
from dataclasses import dataclass


@dataclass
class Settings:
    width: int


def train():
    return pickle.loads(pickle.dumps(Settings(4))).width, inspect.getsource(train).splitlines()[0]
"""
NOTEBOOK = """
import linecache
import pickle
import sys
from pathlib import Path

from flytekitplugins.daskpytorch.protocol import code, function

destination, cell = sys.argv[1:]
linecache.cache["<cell 1>"] = len(cell), None, cell.splitlines(keepends=True), "<cell 1>"
exec(compile(cell, "<cell 1>", "exec"))
Path(destination).write_bytes(pickle.dumps((code.pack_code(), {"train": function.pack_call(train, (), {})})))
"""


def test_a_notebook_which_has_no_file_is_main_too(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NOTEBOOK, str(tmp_path / "packed"), CELL], cwd=tmp_path, check=True)
    assert called(tmp_path / "packed", tmp_path, "train")[0]["train"] == (4, "def train():")


def test_commands_of_installed_programs_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest_itself = ModuleType("__main__")
    pytest_itself.__file__ = str(Path(sys.executable).with_name("pytest"))
    monkeypatch.setitem(sys.modules, "__main__", pytest_itself)
    code = pack_code()
    assert (code.script, code.program.arguments) == (None, None)
