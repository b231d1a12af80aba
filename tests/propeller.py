"""Runs a launch plan as a backend does: each node by the command of its container, from the serialised specs."""

from __future__ import annotations

import os
import subprocess
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from flyteidl.core import errors_pb2, literals_pb2
from flytekit import LaunchPlan
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.local_cache import _calculate_cache_key
from flytekit.models.literals import LiteralMap as ModelLiteralMap
from flytekit.models.task import TaskSpec
from flytekit.tools.translator import get_serializable

from conftest import REPOSITORY
from processes import SCRIPTS, nothing_left_behind

SETTINGS = SerializationSettings(
    project="tests", domain="development", version="v7", image_config=ImageConfig(Image("default", "image", "tag"))
)
Literals = dict[str, Any]


@dataclass
class Propeller:
    """Keeps what the tasks' cache has from one execution to the next."""

    folder: Path
    env: Mapping[str, str]
    executed: list[str] = field(default_factory=list)
    """The tasks of all executions that were not in the cache."""
    _cache: dict[str, Literals] = field(default_factory=dict)

    def run(self, plan: LaunchPlan, given: Literals) -> Literals:
        """Returns the workflow's outputs."""
        entities: OrderedDict[Any, Any] = OrderedDict()
        parameters = get_serializable(entities, SETTINGS, plan).to_flyte_idl().spec.default_inputs.parameters
        workflow = get_serializable(entities, SETTINGS, plan.workflow).template.to_flyte_idl()
        specs = (spec.template.to_flyte_idl() for spec in entities.values() if isinstance(spec, TaskSpec))
        tasks = {template.id.name: template for template in specs}
        values = {"": {name: parameter.default for name, parameter in parameters.items()} | given}
        for node in workflow.nodes:
            if node.id != "start-node":
                values[node.id] = self._run_node(node, values, tasks)
        return _bound(workflow.outputs, values)

    def _run_node(self, node: Any, values: dict[str, Literals], tasks: Mapping[str, Any]) -> Literals:
        inputs = _bound(node.inputs, values)
        if node.WhichOneof("target") == "branch_node":
            block = node.branch_node.if_else
            is_true = _is_true(block.case.condition.comparison, inputs)
            return self._run_node(block.case.then_node if is_true else block.else_node, values, tasks)
        template = tasks[node.task_node.reference_id.name]
        if not template.metadata.discoverable:
            return self._execute(template, inputs)
        version, literals = template.metadata.discovery_version, literals_pb2.LiteralMap(literals=inputs)
        key = _calculate_cache_key(template.id.name, version, ModelLiteralMap.from_flyte_idl(literals))
        if key not in self._cache:
            self._cache[key] = self._execute(template, inputs)
        return self._cache[key]

    def _execute(self, template: Any, inputs: Literals) -> Literals:
        name = template.id.name.rpartition(".")[2]
        self.executed.append(name)
        folder = self.folder / f"{len(self.executed)}-{name}"
        folder.mkdir()
        (folder / "inputs.pb").write_bytes(literals_pb2.LiteralMap(literals=inputs).SerializeToString())
        places = {
            "{{.input}}": folder / "inputs.pb",
            "{{.outputPrefix}}": folder / "out",
            "{{.rawOutputDataPrefix}}": folder / "raw",
            "{{.checkpointOutputPrefix}}": folder / "checkpoint",
            "{{.prevCheckpointPrefix}}": '""',
        }
        command, *arguments = template.container.args
        with nothing_left_behind() as mark:
            done = subprocess.run(
                [str(SCRIPTS / command), *(str(places.get(argument, argument)) for argument in arguments)],
                cwd=REPOSITORY,
                env={**os.environ, **self.env, "DASKPYTORCH_TEST_MARK": mark, **_environment(template)},
                capture_output=True,
                text=True,
                check=True,
            )
        if (error := folder / "out" / "error.pb").exists():
            raise RuntimeError(errors_pb2.ErrorDocument.FromString(error.read_bytes()).error.message)
        outputs = folder / "out" / "outputs.pb"
        assert outputs.exists(), done.stdout + done.stderr
        return dict(literals_pb2.LiteralMap.FromString(outputs.read_bytes()).literals)


def _environment(template: Any) -> dict[str, str]:
    own = {entry.key: entry.value for entry in template.container.env}
    return {**own, "FLYTE_INTERNAL_EXECUTION_ID": "f3a", "FLYTE_INTERNAL_TASK_VERSION": template.id.version}


def _bound(bindings: Any, values: Mapping[str, Literals]) -> Literals:
    return {binding.var: _value(binding.binding, values) for binding in bindings}


def _value(binding: Any, values: Mapping[str, Literals]) -> Any:
    if binding.WhichOneof("value") == "scalar":
        return literals_pb2.Literal(scalar=binding.scalar)
    promise = binding.promise
    found = values["" if promise.node_id == "start-node" else promise.node_id][promise.var]
    if not promise.attr_path:
        return found
    (attribute,) = promise.attr_path
    value = msgpack.unpackb(found.scalar.binary.value)[attribute.string_value]
    return literals_pb2.Literal(scalar={"primitive": {"float_value": value}})


def _is_true(comparison: Any, inputs: Literals) -> bool:
    assert comparison.operator == comparison.EQ
    found = inputs[comparison.left_value.var].scalar.primitive
    return bool(found == comparison.right_value.primitive)
