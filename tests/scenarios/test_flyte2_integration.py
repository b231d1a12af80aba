"""Flyte 2 tasks under a local `flyte.run`: real ranks of a real gang, in this process's own fork server."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flyteplugins.dask")

import flyte
import flyte.errors
import flyte.report
import torch
import torch.distributed as dist
from flyte.io import Dir, File
from flyteidl2.core import execution_pb2, literals_pb2
from flyteidl2.task import common_pb2
from pydantic import BaseModel

import flyte2_flow
from flyteplugins.daskpytorch import DaskCluster, DaskDDP, SpawnDDP, current_client, current_rank, results
from processes import OF_FLYTE2, SCRIPTS, Cluster, dask_cluster, running, until
from seaweed import Weed

pytestmark = pytest.mark.usefixtures("weed", "one_fork_server", "below")  # the server before what looks for processes

spawned = flyte.TaskEnvironment("spawned", plugin_config=SpawnDDP(nproc=2), env_vars={"OF_THE_TASK": "set"})
on_dask = flyte.TaskEnvironment("on_dask", plugin_config=DaskDDP())
clustered = flyte.TaskEnvironment("clustered", plugin_config=DaskCluster())


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


@on_dask.task
async def asynchronous(scale: float) -> float:
    total = torch.tensor([scale * (current_rank().rank + 1)])
    dist.all_reduce(total)
    return float(total)


def test_a_coroutine_function_on_dask(tmp_path: Path) -> None:
    assert run(asynchronous, tmp_path, scale=2.0) == 6.0


@clustered.task
def orchestrates(numbers: list[int]) -> list[int]:
    return current_client().gather(current_client().map(abs, numbers))


@clustered.task
async def orchestrates_soon(numbers: list[int]) -> list[int]:
    return current_client().gather(current_client().map(abs, numbers))


@pytest.mark.parametrize("task", [orchestrates, orchestrates_soon])
def test_a_function_and_a_coroutine_have_a_clusters_client(task: Any, tmp_path: Path) -> None:
    assert run(task, tmp_path, numbers=[-1, -2]) == [1, 2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Scheduler and workers as Flyte 2's backend starts them, with the variables that the task has in all its pods."""
    with dask_cluster(tmp_path_factory.mktemp("cluster"), of_flyte2=flyte2_flow.train_sharded.env_vars) as running:
        yield running


# ---- Containers ------------------------------------------------------------------------------------------------------


@dataclass
class Flow:
    """Attempts of the flow's task, each by the command that a backend starts in the container."""

    folder: Path
    scheduler: str
    above: str
    """Where outputs and checkpoints go."""
    env: dict[str, str]
    """What the container has besides, and its workers have not."""

    def __post_init__(self) -> None:
        (self.folder / "project").mkdir(parents=True)
        shutil.copy(Path(flyte2_flow.__file__), self.folder / "project")
        text = literals_pb2.Literal(scalar=literals_pb2.Scalar(primitive={"string_value": str(self.folder)}))
        inputs = common_pb2.Inputs(literals=[common_pb2.NamedLiteral(name="folder", value=text)])
        (self.folder / "inputs.pb").write_bytes(inputs.SerializeToString())

    def fails(self, step: int, fault: str) -> None:
        """Have this happen to rank 1 then, once."""
        (self.folder / f"fault-{step}").write_text(fault)

    def attempt(self, number: int, *, kill_when: Callable[[], bool] | None = None) -> tuple[Path, str]:
        """Where its outputs are, and what it said; `kill_when`: once rank 1 waits, and this is so."""
        (out := self.folder / f"out-{number}").mkdir()
        command = [
            *(SCRIPTS / "a0", "--inputs", self.folder / "inputs.pb", "--outputs-path", out, "--version", "v1"),
            *("--raw-data-path", f"{self.above}/raw", "--run-base-dir", self.folder, "--name", "a0"),
            *("--run-name", "run", "--checkpoint-path", f"{self.above}/checkpoint-{number}", "--prev-checkpoint"),
            f"{self.above}/checkpoint-{number - 1}" if number else "",
            *("--resolver", "flyte._internal.resolvers.default.DefaultTaskResolver"),
            *("mod", "flyte2_flow", "instance", "train_sharded"),
        ]
        env = OF_FLYTE2 | {"DASK_SCHEDULER_ADDRESS": self.scheduler} | self.env
        said = self.folder / f"output-{number}.txt"
        with running(command, cwd=self.folder / "project", log=said, env=env) as process:
            if kill_when is not None:
                until(lambda: (self.folder / "waiting").exists() or process.poll() is not None, "the step")
                until(lambda: kill_when() or process.poll() is not None, "what is killed then")
                process.kill()
            process.wait()
        return out, said.read_text()


def test_attempts_go_on_from_each_others_checkpoints_in_a_bucket(
    cluster: Cluster, weed: Weed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have no copy of the code, and the keys are the container's alone, from which the ranks have them.

    The first attempt ends by an error, the second is killed.
    """
    for name in weed.env():
        monkeypatch.delenv(name, raising=False)
    weed.make_bucket("attempts")
    keys = {"ENDPOINT": weed.endpoint, "ACCESS_KEY_ID": weed.keys.access, "SECRET_ACCESS_KEY": weed.keys.secret}
    env = {f"FLYTE_AWS_{name}": value for name, value in keys.items()}
    flow = Flow(tmp_path, cluster.address, f"s3://attempts/{tmp_path.name}", env)

    def kept(number: int) -> list[int]:
        """The steps that an attempt's manifest names."""
        key = f"{tmp_path.name}/checkpoint-{number}.daskpytorch/gang/manifest.json"
        try:
            body = weed.client.get_object(Bucket="attempts", Key=key)["Body"].read()
        except weed.client.exceptions.NoSuchKey:
            return []
        return [entry["step"] for entry in json.loads(body)["checkpoints"] if entry["shards"]]

    flow.fails(1, "raise")
    out, said = flow.attempt(0)
    assert (out / "error.pb").exists(), said
    error = execution_pb2.ErrorDocument.FromString((out / "error.pb").read_bytes()).error
    assert (error.code, error.kind) == ("KeyError", execution_pb2.ContainerError.RECOVERABLE)
    assert "not yet" in error.message
    assert kept(0) == [0], said

    flow.fails(2, "wait")
    out, said = flow.attempt(1, kill_when=lambda: 1 in kept(1))
    assert not list(out.glob("*.pb")), said
    assert "going on from the previous attempt's checkpoint of step 0" in said

    out, said = flow.attempt(2)
    assert "going on from the previous attempt's checkpoint of step 1" in said
    steps, value = [each.value for each in common_pb2.Outputs.FromString((out / "outputs.pb").read_bytes()).literals]
    done = [each.scalar.primitive.integer for each in steps.collection.literals]
    assert (done, value.scalar.primitive.float_value) == (list(range(flyte2_flow.STEPS)), flyte2_flow.expected())
