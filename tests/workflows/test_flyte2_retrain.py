"""Flyte 2's retraining: a run by its command line, its schedule and trigger as deployed, and what it publishes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("flyteplugins.dask")

import flyte
import flyte.report
from flyte._internal.runtime.convert import convert_from_native_to_outputs
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte._internal.runtime.trigger_serde import to_task_trigger
from flyte.io import File
from flyte.models import SerializationContext
from flyte.remote import Artifact
from flyteidl2.artifact import artifact_pb2
from flyteidl2.core import literals_pb2
from flyteidl2.task import common_pb2

from pages import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.char_lstm import CharLSTM
from tasks.model_card import Comparison
from workflows.flyte2 import retrain as flow

SERIALIZED = SerializationContext(version="v1", project="p", domain="d", org="o", root_dir=Path.cwd())


def test_new_names_train_from_the_champion_and_beat_it(tmp_path: Path) -> None:
    champion = tmp_path / "champion.pt"
    torch.save(CharLSTM().state_dict(), champion)
    hp = json.dumps({"epochs": 1, "batch_size": 2048})
    script = REPOSITORY / "workflows" / "flyte2" / "retrain.py"
    command = [SCRIPTS / "flyte", "run", "--local", script, "once", "--hp", hp, "--champion", champion]
    with nothing_left_behind():
        done = run_program(command, cwd=REPOSITORY, env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,981 names" in done.stdout
    assert "the new champion: " in done.stdout
    assert "model_state.pt" in done.stdout


def test_the_deployment_has_the_schedule_and_the_trigger_on_new_names() -> None:
    daily, on_names = (trigger(task) for task in (flow.publish_names, flow.retrain))
    assert daily.automation_spec.schedule.cron.expression == "0 4 * * *"
    assert daily.automation_spec.schedule.kickoff_time_input_arg == "kickoff_time"
    assert on_names.automation_spec.type == common_pb2.TriggerAutomationSpecType.TYPE_ARTIFACT
    assert on_names.automation_spec.artifact.artifact_name == flow.NAMES
    assert on_names.automation_spec.artifact.input_arg == "names"
    for task in (flow.publish_names, flow.retrain):
        assert translate_task_to_wire(task, SERIALIZED).task_template.metadata.produces_artifacts


def trigger(task: Any) -> Any:
    spec = translate_task_to_wire(task, SERIALIZED)
    made = to_task_trigger(task.triggers[0], task.name, spec.task_template.interface.inputs, list(spec.default_inputs))
    return asyncio.run(made)


def published(task: Any, value: Any) -> Iterator[Any]:
    """Artifacts that Flyte publishes for a task's output."""
    outputs = asyncio.run(convert_from_native_to_outputs(value, task.native_interface, task.name))
    return iter(outputs.proto_outputs.produced_artifacts)


def test_equal_names_are_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(File, "from_local_sync", lambda path, hash_method: File(path=str(path), hash=hash_method))
    first, second = (next(published(flow.publish_names, flow.publish_names.func())) for _ in range(2))
    assert first.name == flow.NAMES
    assert len(first.version) == 64
    assert first.version == second.version


@pytest.mark.parametrize("loss", [2.0, 2.9995, 3.5])
@pytest.mark.parametrize("has_champion", [True, False])
def test_the_model_is_published_as_the_champion_only_if_it_is_better(
    loss: float, has_champion: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("champion", "made"):
        (tmp_path / name).write_text(name)
    before = 3.0 if has_champion else None
    compared = Comparison(
        loss=loss,
        accuracy=0.1,
        champion_loss=before,
        champion_accuracy=before,
        bigram_loss=2.6,
        num_held_out=10,
    )
    blob = literals_pb2.Literal(scalar=literals_pb2.Scalar(blob=literals_pb2.Blob(uri=str(tmp_path / "champion"))))
    known = [Artifact(pb2=artifact_pb2.Artifact(spec=artifact_pb2.ArtifactSpec(value=blob)))] if has_champion else []
    monkeypatch.setattr(flyte, "ctx", lambda: SimpleNamespace(mode="remote"))
    monkeypatch.setattr(flyte.report, "replace", Mock())
    monkeypatch.setattr(Artifact, "listall", Mock(return_value=known))
    train = Mock(return_value=File(path=str(tmp_path / "made")))
    monkeypatch.setattr(flow, "train", train)
    monkeypatch.setattr(flow, "judge", Mock(return_value=compared))
    champion = flow.retrain.func(File(path="names"))
    start = train.call_args.kwargs["start"]
    assert (start.path if start else None) == (str(tmp_path / "champion") if has_champion else None)
    is_better = loss == 2.0 or not has_champion
    assert champion.path == f"{tmp_path}/{'made' if is_better else 'champion'}"
    assert [each.name for each in published(flow.retrain, champion)] == [flow.CHAMPION] * is_better
