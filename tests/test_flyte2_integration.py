"""Tasks of Flyte 2 as `flyte.run` runs them here: real ranks of a real gang, in this process's own fork server."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flyteplugins.dask")

import flyte
import flyte.errors
import flyte.report
import pandas as pd
import torch
import torch.distributed as dist
from flyte.io import DataFrame, Dir, File
from flyteidl2.core import execution_pb2, literals_pb2
from flyteidl2.task import common_pb2
from pydantic import BaseModel

from flyteplugins.daskpytorch import (
    DaskCluster,
    DaskDDP,
    Gang,
    SpawnDDP,
    current_client,
    current_rank,
    dispatch,
    results,
)
from processes import SCRIPTS, Cluster, run_program

pytestmark = pytest.mark.usefixtures("one_fork_server", "below")

spawned = flyte.TaskEnvironment("spawned", plugin_config=SpawnDDP(nproc=2), env_vars={"OF_THE_TASK": "set"})
on_dask = flyte.TaskEnvironment("on_dask", plugin_config=DaskDDP())
with_client = flyte.TaskEnvironment("with_client", plugin_config=DaskCluster())


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run keeps lies below the test's folder."""
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))


def run(task: Any, tmp_path: Path, **inputs: Any) -> Any:
    """What `flyte run --local` does with it."""
    flyte.init(root_dir=Path(__file__).parent)
    outputs = flyte.with_runcontext(mode="local", raw_data_path=str(tmp_path / "raw")).run(task, **inputs).outputs()
    return outputs if len(outputs) > 1 else outputs[0]


@dataclass
class Options:
    scale: float
    words: list[str]


class Found(BaseModel):
    total: float
    words: list[str]


@spawned.task(report=True)
def all_types(options: Options, text: File, folder: Dir) -> tuple[Found, File, Dir, Options, dict[str, str]]:
    rank = current_rank()
    total = torch.tensor([options.scale * (rank.rank + 1)])
    dist.all_reduce(total)
    words = [*options.words, Path(text.download_sync()).read_text(), str(len(list(folder.list_files_sync())))]
    rank.log({"loss": 0.25}, step=7)
    results.DaskResultsHandler().submit_result(f"of-{rank.rank}", b"submitted")
    flyte.report.get_tab("Mine").log(f"<p>rank {rank.rank}</p>")
    if rank.is_main:
        (weights := Path(text.path).with_name("weights")).write_text("weights")
    seen = {"variable": os.environ["OF_THE_TASK"], "rank": os.environ["RANK"], "name": flyte.ctx().action.name}
    return (
        Found(total=float(total), words=words),
        File.from_local_sync(weights) if rank.is_main else text,
        results.DaskResultsHandler().directory(),
        options,
        seen,
    )


def test_inputs_and_outputs_of_all_types_and_the_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("text", "folder/a", "folder/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("content")
    found, file, submitted, options, seen = run(
        all_types,
        tmp_path,
        options=Options(2.0, ["one"]),
        text=File(path=str(tmp_path / "text")),
        folder=Dir(path=str(tmp_path / "folder")),
    )
    assert found == Found(total=6.0, words=["one", "content", "2"])
    assert Path(file.download_sync()).read_text() == "weights"
    assert {Path(each.path).name for each in submitted.list_files_sync()} == {"of-0", "of-1"}
    assert options == Options(2.0, ["one"])
    assert (seen["variable"], seen["rank"]) == ("set", "0")
    [line] = [line for line in capfd.readouterr().err.splitlines() if "its Deck" in line]
    text = Path(line.partition("reloaded: ")[2]).read_text()
    assert "Training" in text
    assert "0.25" in text
    assert "rank 0" in text


@spawned.task
def doubles(table: pd.DataFrame, reference: DataFrame) -> tuple[pd.DataFrame, DataFrame]:
    return table * 2, DataFrame.from_df(reference.open(pd.DataFrame).all_sync() * 3)


def test_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"x": [1, 2]})
    doubled, tripled = run(doubles, tmp_path, table=table, reference=DataFrame.from_df(table))
    assert list(doubled.x) == [2, 4]
    assert list(pd.read_parquet(tripled.uri).x) == [3, 6]


class OwnError(Exception):
    """A user's."""


@spawned.task
def fails() -> None:
    if current_rank().rank == 1:
        raise OwnError("in rank 1")
    dist.barrier()


def test_a_ranks_error_is_the_tasks(tmp_path: Path) -> None:
    with pytest.raises(flyte.errors.RuntimeUserError, match="in rank 1") as caught:
        run(fails, tmp_path)
    assert caught.value.code == "OwnError"


@spawned.task(retries=flyte.RetryStrategy(count=2, backoff=flyte.Backoff(base=timedelta(milliseconds=10))))
def goes_on(folder: str) -> list[int]:
    """The gang may not start again: each attempt of the task makes one step, and ends in a kill or an error."""
    rank = current_rank()
    state = rank.checkpoint.load() or {"steps": []}
    steps = [*state["steps"], len(state["steps"])]
    rank.checkpoint.save({"steps": steps}, step=len(steps))
    rank.checkpoint.flush()
    dist.barrier()
    if len(steps) < 3 and rank.rank == 1:
        Path(folder, f"attempt-{len(steps)}").touch()
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OwnError("again")
    dist.barrier()
    return steps


goes_on.plugin_config = SpawnDDP(nproc=2, gang=Gang(max_restarts=0))


def test_a_retried_task_goes_on_from_its_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(goes_on, tmp_path, folder=str(tmp_path)) == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.glob("attempt-*")) == ["attempt-1", "attempt-2"]
    assert capfd.readouterr().err.count("going on from the attempt before") == 2


@on_dask.task
async def asynchronous(scale: float) -> float:
    total = torch.tensor([scale * (current_rank().rank + 1)])
    dist.all_reduce(total)
    return float(total)


def test_a_coroutine_function_on_dask(tmp_path: Path) -> None:
    assert run(asynchronous, tmp_path, scale=2.0) == 6.0


def square(number: int) -> int:
    return number * number


@with_client.task
def many(numbers: list[int]) -> list[int]:
    return list(dispatch.map(current_client(), square, numbers).result())


def test_many_models_with_the_tasks_client(tmp_path: Path) -> None:
    assert run(many, tmp_path, numbers=[1, 2, 3]) == [1, 4, 9]


def container(folder: Path, number: int, cluster: Cluster, cwd: Path) -> Path:
    """An attempt of the flow's task, by the command that a backend starts in the container; where its outputs are."""
    out = folder / f"out-{number}"
    command = [
        *(SCRIPTS / "a0", "--inputs", folder / "inputs.pb", "--outputs-path", out, "--version", "v1"),
        *("--raw-data-path", folder / "raw", "--run-base-dir", folder, "--name", "a0", "--run-name", "run"),
        *("--checkpoint-path", folder / f"checkpoint-{number}", "--prev-checkpoint"),
        folder / f"checkpoint-{number - 1}" if number else "",
        *("--resolver", "flyte._internal.resolvers.default.DefaultTaskResolver"),
        *("mod", "flyte2_flow", "instance", "train"),
    ]
    env = {
        "_U_ORG_NAME": "org",
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "tests",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "_U_EP_OVERRIDE": "127.0.0.1:1",
        "_UNION_EAGER_API_KEY": "",
        "FLYTE_CLUSTERED_WORKER": "1",  # without a controller, which would want a backend
        "DASK_SCHEDULER_ADDRESS": cluster.address,
    }
    out.mkdir()
    done = run_program([str(part) for part in command], cwd=cwd, env=env)
    (folder / f"output-{number}.txt").write_text(done.stdout + done.stderr)
    return out


def test_the_containers_command_on_workers_that_have_no_copy_of_the_code(cluster: Cluster, tmp_path: Path) -> None:
    """The first attempt ends by a rank's error, the second goes on from its checkpoint beside Flyte's object."""
    (cwd := tmp_path / "project").mkdir()
    shutil.copy(Path(__file__).with_name("flyte2_flow.py"), cwd)
    scale = literals_pb2.Literal(scalar=literals_pb2.Scalar(primitive=literals_pb2.Primitive(float_value=2.0)))
    inputs = common_pb2.Inputs(literals=[common_pb2.NamedLiteral(name="scale", value=scale)])
    (tmp_path / "inputs.pb").write_bytes(inputs.SerializeToString())

    first = container(tmp_path, 0, cluster, cwd)
    said = (tmp_path / "output-0.txt").read_text()
    assert (first / "error.pb").exists(), said
    document = execution_pb2.ErrorDocument.FromString((first / "error.pb").read_bytes())
    assert document.error.code == "KeyError"
    assert "not yet" in document.error.message
    assert document.error.kind == execution_pb2.ContainerError.RECOVERABLE
    assert (tmp_path / "checkpoint-0.daskpytorch" / "gang").is_dir()

    second = container(tmp_path, 1, cluster, cwd)
    said = (tmp_path / "output-1.txt").read_text()
    assert (second / "outputs.pb").exists(), said
    outputs = common_pb2.Outputs.FromString((second / "outputs.pb").read_bytes())
    steps, total = [each.value for each in outputs.literals]
    assert [each.scalar.primitive.integer for each in steps.collection.literals] == [0, 1]
    assert total.scalar.primitive.float_value == 6.0
    assert "Training" in (second / "report.html").read_text()
