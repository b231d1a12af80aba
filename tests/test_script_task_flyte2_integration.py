"""A ScriptTask of Flyte 2 trains by the container's command, and its version is that of the script."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flyteplugins.dask")

import flyte
from flyteidl2.core import literals_pb2
from flyteidl2.task import common_pb2

from flyteplugins.daskpytorch import DaskCluster, OutputLocation, ScriptTask
from processes import OF_FLYTE2, SCRIPTS, nothing_left_behind, run_program

TRAIN = """
    import argparse, json, os
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    total = torch.tensor(float(args.epochs * 10 ** dist.get_rank()))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        with open("model.json", "w") as file:
            json.dump({"total": total.item()}, file)
"""
FLOWS = """
    import flyte
    from flyte.io import File
    from flyteplugins.daskpytorch import OutputLocation, ScriptTask, SpawnDDP

    training = flyte.TaskEnvironment("training", plugin_config=SpawnDDP(nproc=2))
    MODEL = OutputLocation("model", File, "model.json")
    HOW = {"script": "train.py", "output_locs": [MODEL]}
    plain = ScriptTask(training, "plain", inputs={"epochs": int}, arguments="--epochs {inputs.epochs}", **HOW)
"""
ASKS = """
    import json
    from pathlib import Path
    import flows
    from flyte._internal.runtime.task_serde import translate_task_to_wire
    from flyte.models import SerializationContext

    how = SerializationContext(version="v1", project="p", domain="d", org="o", root_dir=Path.cwd())
    template = translate_task_to_wire(flows.plain, how).task_template
    [container] = template.k8s_pod.pod_spec["containers"]  # not of `template.container`, as the pods have annotations
    print(json.dumps([[*container["args"]], template.metadata.discovery_version]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose workflows are in a folder with a script."""
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in {"train.py": TRAIN, "flows.py": FLOWS, "asks.py": ASKS}.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def asked(project: Path) -> Any:
    """The container's command and the version that the backend gets."""
    done = run_program(["asks.py"], cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_containers_command_trains_and_the_version_is_that_of_the_script(project: Path, tmp_path: Path) -> None:
    command, version = asked(project)
    number = literals_pb2.Literal(scalar=literals_pb2.Scalar(primitive={"integer": 7}))
    inputs = common_pb2.Inputs(literals=[common_pb2.NamedLiteral(name="epochs", value=number)])
    (tmp_path / "inputs.pb").write_bytes(inputs.SerializeToString())
    (tmp_path / "out").mkdir()
    places = {
        "{{.input}}": f"{tmp_path}/inputs.pb",
        "{{.outputPrefix}}": f"{tmp_path}/out",
        "{{.rawOutputDataPrefix}}": f"{tmp_path}/raw",
        "{{.checkpointOutputPrefix}}": f"{tmp_path}/checkpoint",
        "{{.prevCheckpointPrefix}}": "",
        "{{.runName}}": "run",
        "{{.actionName}}": "a0",
        "{{.runStartTime}}": "2026-11-26T12:00:00Z",
    }
    words = [places.get(word, word) for word in command]
    words[1:1] = ["--run-base-dir", f"{tmp_path}"]  # which the backend adds
    with nothing_left_behind():
        done = run_program([SCRIPTS / words[0], *words[1:]], cwd=project, env=OF_FLYTE2)
    assert (tmp_path / "out/outputs.pb").exists(), done.stdout + done.stderr
    outputs = common_pb2.Outputs.FromString((tmp_path / "out/outputs.pb").read_bytes())
    [uri] = [each.value.scalar.blob.uri for each in outputs.literals]
    assert uri.startswith(f"{tmp_path}/raw")
    assert json.loads(Path(uri).read_text())["total"] == 77.0

    (project / "model.json").unlink()
    assert asked(project)[1] == version
    with (project / "train.py").open("a") as script:
        script.write("\n# other\n")
    assert asked(project)[1] != version


def test_what_is_wrong_is_told_where_the_task_is_defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    environment = flyte.TaskEnvironment("training", plugin_config=DaskCluster())
    with pytest.raises(ValueError, match=r"plugin_config=DaskCluster\(.*must be .*; .*OutputLocation of a File or Dir"):
        ScriptTask(environment, "train", script="train.py", output_locs=[OutputLocation("model", str, "a.txt")])
