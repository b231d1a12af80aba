"""A ScriptTask trains as users and the backend start it: `pyflyte run`, and the container's own commands."""

from __future__ import annotations

import contextlib
import json
import tarfile
import textwrap
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from flytekit.types.file import FlyteFile

from processes import (
    SCRIPTS,
    TASKS_IMPORT,
    dask_cluster,
    nothing_left_behind,
    run_program,
)
from test_task_integration import execute

TRAIN = """
    import argparse, json, os, sys
    import torch
    import torch.distributed as dist
    import neighbour
    from flytekitplugins.daskpytorch import current_rank

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        parser.add_argument("--data")
        parser.add_argument("--scale", type=float, default=neighbour.SCALE)
        args = parser.parse_args()
        dist.init_process_group("gloo")
        data = None
        if args.data is not None:
            paths = [None, None]
            dist.all_gather_object(paths, (args.data, os.stat(args.data).st_ino))
            data = paths + [open(args.data).read()]
        total = torch.tensor(float(args.epochs * 10 ** dist.get_rank()))
        dist.all_reduce(total)
        current_rank().log({"loss": total.item()}, step=7)
        if dist.get_rank() == 0 and args.epochs:
            os.makedirs("out", exist_ok=True)
            with open(f"out/{args.epochs}.json", "w") as file:
                json.dump({"total": total.item() * args.scale, "data": data, "path": sys.path[0]}, file)
        dist.destroy_process_group()
"""
FLOWS = """
    import os
    from flytekit import TaskMetadata, kwtypes, map_task, task, workflow
    from flytekit.extras.tasks.shell import OutputLocation
    from flytekit.types.file import FlyteFile
    from flytekitplugins.daskpytorch import DaskDDP, ScriptTask, SpawnDDP

    MODEL = OutputLocation(var="model", var_type=FlyteFile, location="out/{inputs.epochs}.json")
    CACHED = TaskMetadata(cache=True, cache_version=os.environ.get("CACHE_VERSION", "1"))
    HOW = {"script": "train.py", "output_locs": [MODEL]}
    learned = ScriptTask(name="train", inputs=kwtypes(epochs=int), task_config=DaskDDP(), metadata=CACHED, **HOW)
    on_dask = ScriptTask(name="of", inputs=kwtypes(epochs=int, data=FlyteFile), task_config=DaskDDP(), **HOW)
    on_node = ScriptTask(
        name="on",
        inputs=kwtypes(epochs=int, data=FlyteFile),
        arguments="--data {inputs.data} --epochs {inputs.epochs}",
        task_config=SpawnDDP(nproc=2),
        **HOW,
    )
    by_module = ScriptTask(name="by", module="train", inputs=kwtypes(epochs=int), task_config=SpawnDDP(nproc=2))
    mapped = map_task(learned)


    @task
    def read(model: FlyteFile) -> str:
        with open(model) as file:
            return file.read()


    @workflow
    def flow(epochs: int) -> str:
        return read(model=learned(epochs=epochs))
"""
ASKS = """
    import json, os, sys
    import flows
    from flytekit.configuration import SerializationSettings
    from flytekit.constants import CopyFileDetection
    from flytekit.tools.script_mode import ls_files

    command = getattr(flows, sys.argv[1]).get_command(SerializationSettings(image_config=None))
    files, _ = ls_files(os.getcwd(), CopyFileDetection.LOADED_MODULES)  # as `pyflyte run --remote` does
    print(json.dumps({"command": command, "files": files}))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose workflows are in a folder with a script."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in {"train.py": TRAIN, "flows.py": FLOWS, "neighbour.py": "SCALE = 1.0"}.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def test_a_workflow_trains_by_a_script_once_as_long_as_its_folder_is_the_same(project: Path, tmp_path: Path) -> None:
    env = {"CACHE_VERSION": uuid.uuid4().hex}
    command = [SCRIPTS / "pyflyte", "run", project / "flows.py", "flow", "--epochs", "3"]
    with nothing_left_behind():
        runs = [run_program(command, cwd=tmp_path, env=env) for _ in range(2)]
        (project / "neighbour.py").write_text("SCALE = 2.0")
        runs.append(run_program(command, cwd=tmp_path, env=env))
    assert [run.returncode for run in runs] == [0, 0, 0], runs[0].stderr
    totals = [json.loads(run.stdout.splitlines()[-1])["total"] for run in runs]
    assert totals == [33.0, 33.0, 66.0]
    assert ["starting 2 ranks" in run.stderr for run in runs] == [True, False, True]
    assert "loss 33" in runs[0].stderr


def test_a_file_that_the_script_has_not_left_ends_the_task_at_once(project: Path) -> None:
    done = run_program([SCRIPTS / "pyflyte", "run", "flows.py", "learned", "--epochs", "0"], cwd=project)
    assert done.returncode != 0
    assert f"left no file at {project}/out/0.json".replace(" ", "") in "".join(done.stdout.split())  # pyflyte wraps
    assert done.stderr.count("starting 2 ranks") == 1


def test_a_module_trains_in_the_users_working_folder(project: Path, tmp_path: Path) -> None:
    with nothing_left_behind():
        done = run_program([SCRIPTS / "pyflyte", "run", "project/flows.py", "by_module", "--epochs", "3"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out/3.json").read_text())["total"] == 33.0


def executed(
    project: Path, folder: Path, task: str, inputs: Mapping[str, Any], env: Mapping[str, str], **how: Any
) -> dict[str, Any]:
    """Return the outputs of a task that is run by its container's command, with fast registration into a new folder."""
    (project / "asks.py").write_text(textwrap.dedent(ASKS))
    found = json.loads(run_program(["asks.py", task], cwd=project).stdout.splitlines()[-1])
    with tarfile.open(folder / "code.tar.gz", "w:gz") as archive:
        for file in found["files"]:
            archive.add(file, Path(file).relative_to(project))
    (folder / "root").mkdir()
    how |= {"archive": folder / "code.tar.gz", "words": found["command"], "env": env, "cluster": how.get("cluster")}
    with nothing_left_behind():
        return execute(task, inputs, cwd=folder / "root", folder=folder, **how).outputs


@pytest.mark.parametrize("task", ["on_dask", "on_node"])
def test_the_containers_command_fetches_the_data_once_and_uploads_the_model(
    project: Path, tmp_path: Path, s3: dict[str, str], task: str
) -> None:
    storage = {"endpoint_url": s3["FLYTE_AWS_ENDPOINT"], "key": "test", "secret": "test"}
    with fsspec.open("s3://tests/names.csv", "w", **storage) as file:
        file.write("Rex")
    inputs = {"epochs": 3, "data": FlyteFile("s3://tests/names.csv")}
    with contextlib.ExitStack() as stack:
        address = None
        if task == "on_dask":
            address = stack.enter_context(dask_cluster(tmp_path / "cluster", imported_ahead=TASKS_IMPORT)).address
        made = executed(project, tmp_path, task, inputs, s3, raw="s3://tests/raw", cluster=address)
    assert made["model"].scalar.blob.uri.startswith("s3://tests/raw/")
    with fsspec.open(made["model"].scalar.blob.uri, **storage) as file:
        found = json.load(file)
    *paths, content = found["data"]
    assert (found["total"], content) == (33.0, "Rex")
    assert len({tuple(path) for path in paths}) == (1 if task == "on_node" else 2)
    assert all(path.endswith("names.csv") for path, _ in paths)


def test_an_element_of_a_map_by_the_containers_command(project: Path, tmp_path: Path) -> None:
    env = {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "INDEX", "INDEX": "1"}
    made = executed(project, tmp_path, "mapped", {"epochs": [5, 7]}, env)
    uri = made["model"].scalar.blob.uri
    assert uri.startswith(f"{tmp_path}/raw/")
    assert json.loads(Path(uri).read_text())["total"] == 77.0
