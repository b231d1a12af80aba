"""A ScriptTask passes its inputs as arguments, finds its program, and refuses what cannot run. No rank starts."""

from __future__ import annotations

import datetime as dt
import enum
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from flytekit import TaskMetadata, kwtypes
from flytekit.configuration import SerializationSettings
from flytekit.extras.tasks.shell import OutputLocation
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins.daskpytorch import DaskCluster, DaskDDP, ScriptTask, SpawnDDP
from flytekitplugins.daskpytorch.context import RankContext, enter

WRITES_ARGUMENTS = "import pathlib, sys\npathlib.Path('seen.txt').write_text(repr(sys.argv[1:]))"
SEEN = OutputLocation(var="seen", var_type=FlyteFile, location="seen.txt")


class Optimizer(enum.Enum):
    SGD = "sgd"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script that writes its arguments to a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "ACTION_NAME", "FLYTE_INTERNAL_EXECUTION_ID"):  # what pods and ranks have
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(WRITES_ARGUMENTS)
    return tmp_path


def made(**options: Any) -> ScriptTask:
    return ScriptTask(name="train", **{"script": "train.py", "task_config": SpawnDDP(nproc=2), **options})


def seen(task: ScriptTask, **inputs: Any) -> list[str]:
    """The arguments of the script, which runs in this process as it does in a rank."""
    task.task_function(**inputs)
    found: list[str] = eval(Path("seen.txt").read_text())
    return found


def test_each_input_is_an_option(folder: Path) -> None:
    types = kwtypes(
        epochs=int,
        lr=float,
        use_amp=bool,
        is_slow=bool,
        layers=list[int],
        name=str,
        optimizer=Optimizer,
        day=dt.date,
        resume=str | None,
        mode=Literal["fast", "slow"],
        data=FlyteFile,
        photos=FlyteDirectory,
    )
    (folder / "data.csv").touch()
    values: dict[str, Any] = {
        "data": FlyteFile("data.csv"),
        "photos": FlyteDirectory("."),
        "resume": None,
        "mode": "fast",
        "day": dt.date(2026, 11, 26),
        "optimizer": Optimizer.SGD,
        "name": "-a b",
        "layers": [3, 4],
        "is_slow": False,
        "use_amp": True,
        "lr": 1e-05,
        "epochs": 3,
    }
    expected = ["--epochs", "3", "--lr", "1e-05", "--use_amp", "--layers", "3", "4", "--name=-a b", "--optimizer"]
    expected += ["sgd", "--day", "2026-11-26", "--mode", "fast", "--data", str(folder / "data.csv"), "--photos"]
    assert seen(made(inputs=types), **values) == [*expected, str(folder)]


def test_a_template_is_split_before_its_values_are_filled_in() -> None:
    task = made(
        inputs=kwtypes(lr=float, name=str, layers=list[int]),
        output_locs=[OutputLocation(var="seen", var_type=FlyteFile, location="{inputs.name}.txt")],
        arguments="lr={inputs.lr:.3f} --layers {inputs.layers} --name '{inputs.name}' --out {outputs.seen}",
    )
    Path("two words.txt").touch()
    words = ["lr=0.100", "--layers", "1", "2", "--name", "two words", "--out", "two words.txt"]
    assert seen(task, lr=0.1, name="two words", layers=[1, 2]) == words


def test_a_missing_output_names_the_path_and_the_working_folder(folder: Path) -> None:
    task = made(output_locs=[OutputLocation(var="model", var_type=FlyteFile, location="out/model.pt")])
    with pytest.raises(FileNotFoundError, match=rf"no file at {folder}/out/model\.pt .* folder {folder} on") as error:
        task.task_function()
    assert "model in output_locs" in str(error.value)
    enter(RankContext(rank=1, world_size=2))
    try:
        assert task.task_function() is None
    finally:
        enter(RankContext())


def test_a_file_of_an_earlier_run_is_told_apart_from_what_the_program_has_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.pt").write_text("of yesterday")
    (folder / "seen.txt").write_text("of yesterday")
    task = made(output_locs=[SEEN, OutputLocation(var="model", var_type=FlyteFile, location="model.pt")])
    task.task_function()
    told = [line for line in capsys.readouterr().err.splitlines() if "was there before" in line]
    assert told == [f"output model: {folder}/model.pt was there before {folder}/train.py started, and is unchanged"]


def test_a_local_output_is_to_be_copied_as_the_next_run_writes_the_file_again(folder: Path) -> None:
    folder_of_all = OutputLocation(var="all", var_type=FlyteDirectory, location=".")
    file, directory = made(output_locs=[SEEN, folder_of_all]).task_function()
    assert (file.path, directory.path) == (str(folder / "seen.txt"), str(folder))
    places = [Path(file.remote_path), Path(directory.remote_directory)]
    assert all(not place.exists() and not place.is_relative_to(folder) for place in places)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task_config": DaskCluster()}, r"task_config=DaskCluster\(.*must be a DaskDDP or a SpawnDDP"),
        ({"module": "train"}, "must have either script= or module="),
        ({"script": None}, "must have either script= or module="),
        ({"inputs": kwtypes(a=dict[str, int])}, r"input a is a dict.*, which has no form on a command line"),
        ({"arguments": "--lr {inputs.lrr}", "inputs": kwtypes(lr=float)}, r"no \{inputs\.lrr\}, but \{inputs\.lr\}"),
        ({"arguments": "--lr '{inputs.lr}", "inputs": kwtypes(lr=float)}, "arguments=.* No closing quotation"),
        ({"arguments": "--json {}"}, r"there is no \{\}"),
        ({"output_locs": [OutputLocation("a", FlyteFile, "{outputs.a}")]}, r"location of a=.* no \{outputs\.a\}"),
        ({"output_locs": [OutputLocation("a", str, "a.txt")]}, "must be an OutputLocation of a FlyteFile or"),
        ({"output_locs": [SEEN, SEEN]}, "more than one seen"),
    ],
)
def test_what_is_wrong_is_told_where_the_task_is_defined(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**options)


DEFINES = """
from flytekit import kwtypes
from flytekitplugins.daskpytorch import ScriptTask, SpawnDDP

learned = ScriptTask(name="train", script={script!r}, inputs=kwtypes(epochs=int), task_config=SpawnDDP())
"""


@pytest.fixture
def define(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of another folder that defines a task of a script."""

    def imported(script: str) -> Any:
        (folder / "flows").mkdir(exist_ok=True)
        (folder / "flows/script_flows.py").write_text(DEFINES.format(script=script))
        monkeypatch.syspath_prepend(folder / "flows")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a file of the same size and second
        sys.modules.pop("script_flows", None)
        return __import__("script_flows").learned

    return imported


def test_a_script_is_found_beside_its_module_and_then_in_the_working_folder(
    folder: Path, define: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert define("train.py").task_function.script.file == str(folder / "train.py")
    (folder / "flows/train.py").write_text(WRITES_ARGUMENTS)
    assert define("train.py").task_function.script.file == str(folder / "flows/train.py")
    with pytest.raises(FileNotFoundError, match=rf"'other\.py': no script at {folder}/flows/other.py nor at {folder}/"):
        define("other.py")
    (folder / "other.py").write_text("#!/bin/sh\nexec python train.py")
    with pytest.raises(SyntaxError, match=r"other\.py"):
        define("other.py")
    monkeypatch.setenv("RANK", "1")  # a rank that imports the module for another task
    assert define("nowhere.py").task_function.script.file is None


def test_the_containers_command_names_module_and_variable(define: Callable[[str], Any]) -> None:
    task = define("train.py")
    command = task.get_command(SerializationSettings(image_config=None))
    assert task.name == "train"
    assert command[command.index("--resolver") :][1:] == [
        "flytekitplugins.daskpytorch.flyte.script.resolver",
        *("--", "task-module", "script_flows", "task-name", "learned"),
    ]
    assert isinstance(task, ScriptTask)
    assert task.task_resolver.load_task(["task-module", "script_flows", "task-name", "learned"]) is task


def test_a_cached_tasks_version_changes_with_the_script_and_its_neighbours(folder: Path) -> None:
    def version(cache_version: str = "1") -> str:
        metadata = TaskMetadata(cache=True, cache_version=cache_version, retries=2)
        located = OutputLocation(var="seen", var_type=FlyteFile, location="out/seen.json")
        task = made(metadata=metadata, output_locs=[located], task_config=DaskDDP())
        assert task.metadata.retries == 2
        return str(task.metadata.cache_version)

    (folder / "out").mkdir()
    versions = [version()]
    for name in ("out/seen.json", "notes.txt", "events.bin"):  # left by runs
        (folder / name).write_text(os.urandom(4).hex())
    assert version() == versions[0]
    for name in ("train.py", "models/net.py", "conf/main.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"x = {len(versions)}")
        versions.append(version())
    versions.append(version("2"))
    assert len(set(versions)) == 5
    assert all(each.startswith("1-") for each in versions[:4])
