"""Rank 0's return value becomes the task's outputs."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from flyteidl.core import literals_pb2
from flytekit.bin.entrypoint import setup_execution
from flytekit.configuration import DataConfig, S3Config
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.interface import Interface, transform_function_to_interface
from flytekit.core.type_engine import TypeEngine, TypeTransformer
from flytekit.models.literals import LiteralMap
from flytekit.models.types import LiteralType, SimpleType
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.flyte.context import FlyteRank
from flytekitplugins.daskpytorch.protocol import host
from flytekitplugins.daskpytorch.protocol.host import current_execution
from test_task import in_mode


def one() -> float:
    return 0.0


def two() -> tuple[int, str]:
    return 0, ""


def nothing() -> None:
    pass


def outputs(function: object, returned: object) -> dict[str, object]:
    interface: Interface = transform_function_to_interface(function)
    rank = FlyteRank.of_current_task("flows.train", interface, LiteralMap(literals={}), results="")
    made = literals_pb2.LiteralMap.FromString(rank.outputs(returned).literal_map)
    literals = LiteralMap.from_flyte_idl(made).literals
    return {name: literal.scalar.primitive.value for name, literal in literals.items()}


@pytest.mark.parametrize(
    ("function", "returned", "said"),
    [
        (two, (7,), r"declares 2 outputs \(o0, o1\); rank 0 returned 1 values"),
        (two, None, "rank 0 returned a NoneType"),
        (one, "text", "outputs of task 'flows.train'(.|\\n)*type <class 'str'> to type <class 'float'>"),
    ],
)
def test_a_return_value_of_another_type_is_an_error(function: object, returned: object, said: str) -> None:
    for mode in ExecutionState.Mode.LOCAL_TASK_EXECUTION, ExecutionState.Mode.TASK_EXECUTION:
        with in_mode(mode), pytest.raises(TypeError, match=said):
            outputs(function, returned)


class Names(list[str]):
    """A value whose conversion fails."""


class NamesTransformer(TypeTransformer[Names]):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("names", Names)

    def get_literal_type(self, t: type[Names]) -> LiteralType:
        return LiteralType(simple=SimpleType.STRUCT)

    def to_literal(self, *_: object) -> NoReturn:
        raise OSError("the names cannot be stored") from FileNotFoundError("names.txt")


def names() -> Names:
    return Names()


@pytest.mark.parametrize("mode", [ExecutionState.Mode.LOCAL_TASK_EXECUTION, ExecutionState.Mode.TASK_EXECUTION])
def test_a_conversions_error_keeps_its_cause(mode: ExecutionState.Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file ends the task, and an error of storage retries the task."""
    monkeypatch.setitem(TypeEngine._REGISTRY, Names, NamesTransformer())
    with in_mode(mode), pytest.raises(OSError, match="cannot be stored") as raised:
        outputs(names, Names())
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_no_import_is_left_for_two_threads_to_race_for() -> None:
    """As in a rank, which imports torch first."""
    script = """
import importlib.util, sys, torch
from flytekitplugins.daskpytorch.flyte import context
context.finish_imports()
kinds = {name: object.__getattribute__(module, "__class__") for name, module in sys.modules.items()}
print([name for name, kind in kinds.items() if kind is importlib.util._LazyModule])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_of_a_task_find_its_checkpoints(tmp_path: Path) -> None:
    def found() -> tuple[str | None, object]:
        with ThreadPoolExecutor(1) as thread:
            execution = thread.submit(current_execution).result()
        paths = execution.checkpoint_paths("gang")
        return paths.own if paths else None, execution.task

    places = {"raw_output_data_prefix": str(tmp_path), "checkpoint_path": str(tmp_path / "own")}
    with setup_execution(**places, prev_checkpoint=None), in_mode(ExecutionState.Mode.TASK_EXECUTION) as ctx:
        assert found() == (None, None)
        with host.known_to_threads():
            assert found() == (str(tmp_path / "own" / "daskpytorch" / "gang"), ctx.execution_state)
            assert current_execution().task is ctx.execution_state
    assert found() == (None, None)


def test_ranks_that_are_not_the_tasks_own_get_the_keys_to_flytes_storage(tmp_path: Path) -> None:
    keys = S3Config(endpoint="http://127.0.0.1:9", access_key_id="id", secret_access_key="secret")
    here = FlyteContextManager.current_context()
    access = FileAccessProvider(str(tmp_path), "s3://raw/data", data_config=DataConfig(s3=keys))
    state = here.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    assert request_for(print, (), {}, Gang()).execution is None
    with FlyteContextManager.with_context(here.with_file_access(access).with_execution_state(state)):
        packed = request_for(print, (), {}, Gang()).execution
        by_task = current_execution().filesystem("s3://raw/data").storage_options
    assert packed is not None
    in_rank = pickle.loads(packed)
    assert in_rank.filesystem("s3://bucket/folder").storage_options == by_task
    assert by_task["key"] == "id"
    assert isinstance(in_rank.filesystem("/folder"), LocalFileSystem)


def test_a_running_task_answers_before_a_ranks_execution_and_that_before_the_newest_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "_hosts", [])
    monkeypatch.setattr(host, "_known", [])
    older, newer, of_rank = host.Execution(), host.Execution(), host.Execution()
    host.provide(lambda: older)
    host.provide(lambda: newer)
    assert current_execution() is newer
    with host.known_to_threads(of_rank):
        assert current_execution() is of_rank
        older.task = object()
        assert current_execution() is older


def test_the_host_is_there_as_soon_as_flytekit_is_and_not_before() -> None:
    script = """
import sys
from flytekitplugins.daskpytorch.driver import request
from flytekitplugins.daskpytorch.protocol import host
from flytekitplugins.daskpytorch.protocol.host import current_execution
print(current_execution().name, "flytekit" in sys.modules)
import flytekit
print(current_execution().name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False", "local"]
