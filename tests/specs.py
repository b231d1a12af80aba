"""What the backend is told of every task, workflow and launch plan, in words: the specs of `pyflyte package`.

`python tests/specs.py` writes them anew to tests/specs/*.yaml, to be read and committed with the change.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import yaml
from flyteidl.admin.launch_plan_pb2 import LaunchPlan, LaunchPlanSpec
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core.interface_pb2 import VariableMap
from flyteidl.core.literals_pb2 import Literal, Scalar
from flyteidl.core.tasks_pb2 import Resources, TaskTemplate
from flyteidl.core.types_pb2 import LiteralType, SimpleType
from flyteidl.core.workflow_pb2 import Node
from google.protobuf.json_format import MessageToDict

from warm import WarmPython, warm_python

Spec = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "tests" / "specs"
PROFILES = ("sandbox", "gpu")
IMAGE = "registry.example/daskpytorch:v1"
PYFLYTE = Path(sys.executable).parent / "pyflyte"


def environment(home: Path, profile: str | None = None) -> dict[str, str]:
    """That of a machine on which nothing has been set."""
    plain = {name: os.environ[name] for name in ("PATH", "DASKPYTORCH_TEST_MARK") if name in os.environ}
    return plain | {"HOME": str(home)} | ({"DASKPYTORCH_PROFILE": profile} if profile else {})


def package(python: WarmPython, profile: str, home: Path) -> dict[str, Spec]:
    """Have pyflyte package the workflows, from the repository's root; what it is, by kind and name."""
    target = home / f"{profile}.tgz"
    command = [str(PYFLYTE), "--pkgs", "workflows", "package", "--image", IMAGE, "--output", str(target)]
    log = home / f"{profile}.log"
    with log.open("w") as said:
        program = python.start(command, cwd=REPOSITORY, env=environment(home, profile), stdout=said, stderr=said)
    assert program.wait() == 0, log.read_text()
    with tarfile.open(target) as archive:
        contents = {member.name: archive.extractfile(member) for member in archive}
        return dict(sorted(described(name, file.read()) for name, file in contents.items() if file))


def packaged(home: Path) -> dict[str, dict[str, Spec]]:
    """Both profiles; of that with GPUs, what is not as in the sandbox."""
    with ThreadPoolExecutor() as both:
        sandbox, gpu = both.map(partial(package, warm_python(), home=home), PROFILES)
    changed = {
        name: {key: value for key, value in spec.items() if sandbox.get(name, {}).get(key) != value}
        for name, spec in gpu.items()
    }
    return {"sandbox": sandbox, "gpu": {name: spec for name, spec in changed.items() if spec}}


def committed(profile: str) -> Any:
    """What is in the repository."""
    return yaml.load((FOLDER / f"{profile}.yaml").read_bytes(), yaml.CSafeLoader)  # ten times as fast


# ---- Protocol buffers into words


def described(file: str, content: bytes) -> tuple[str, Spec]:
    """One file of a package."""
    match Path(file).stem[-1]:
        case "1":
            task = TaskSpec.FromString(content).template
            return f"task {task.id.name}", of_task(task)
        case "2":
            workflow = WorkflowSpec.FromString(content).template
            nodes = {node.id: of_node(node) for node in workflow.nodes if node.id not in ("start-node", "end-node")}
            spec = {"nodes": nodes, **of_interface(workflow.interface.inputs, workflow.interface.outputs)}
            if workflow.HasField("failure_node"):
                spec["on failure"] = of_node(workflow.failure_node)
            return f"workflow {workflow.id.name}", spec
        case "3":
            plan = LaunchPlan.FromString(content)
            return f"launch plan {plan.id.name}", of_launch_plan(plan.spec)
    raise AssertionError(f"{file} is no task, workflow or launch plan")


def of_task(task: TaskTemplate) -> Spec:
    metadata = task.metadata
    spec = {
        "type": task.type,
        "custom": MessageToDict(task.custom),
        "command": command_of(list(task.container.args)),
        "image": task.container.image,
        "environment": {pair.key: pair.value for pair in task.container.env},
        "requests": of_resources(task.container.resources.requests),
        "limits": of_resources(task.container.resources.limits),
        "extended": MessageToDict(task.extended_resources),
        "pod": MessageToDict(task.k8s_pod),
        "config": dict(task.config),
        "secrets": [f"{secret.group}/{secret.key}" for secret in task.security_context.secrets],
        "retries": metadata.retries.retries,
        "interruptible": metadata.interruptible,
        "timeout": metadata.timeout.seconds,
        "cache": metadata.discovery_version,
        "not in the cache's key": list(metadata.cache_ignore_input_vars),
        "deck": metadata.generates_deck.value,
    }
    return {key: value for key, value in spec.items() if value} | of_interface(
        task.interface.inputs, task.interface.outputs
    )


def command_of(args: list[str]) -> str:
    """Without what flytekit gives to all tasks alike."""
    return " ".join([args[0], "...", *args[args.index("--") :]])


def of_resources(entries: list[Resources.ResourceEntry]) -> dict[str, str]:
    return {Resources.ResourceName.Name(entry.name).lower(): entry.value for entry in entries}


def of_node(node: Node) -> Spec:
    after = sorted(set(node.upstream_node_ids) - {"start-node"})
    options = {"after": after, "interruptible": node.metadata.interruptible, "retries": node.metadata.retries.retries}
    return {"runs": list(run_by(node)), **{key: value for key, value in options.items() if value}}


def run_by(node: Node) -> Iterator[str]:
    """Several where it is a conditional."""
    if node.HasField("task_node"):
        yield node.task_node.reference_id.name
    elif node.HasField("workflow_node"):
        yield node.workflow_node.launchplan_ref.name or node.workflow_node.sub_workflow_ref.name
    elif node.HasField("branch_node"):
        cases = node.branch_node.if_else
        for block in (cases.case, *cases.other):
            yield from (f"if ...: {name}" for name in run_by(block.then_node))
        if cases.HasField("else_node"):
            yield from (f"else: {name}" for name in run_by(cases.else_node))
        elif cases.HasField("error"):
            yield f"else: fails with {cases.error.message}"


def of_launch_plan(plan: LaunchPlanSpec) -> Spec:
    inputs = {
        name: {"type": type_name(given.var.type)}
        | ({"required": True} if given.required else {"default": value_of(given.default)})
        for name, given in sorted(plan.default_inputs.parameters.items())
    }
    spec = {
        "workflow": plan.workflow_id.name,
        "inputs": inputs,
        "fixed inputs": {name: value_of(value) for name, value in sorted(plan.fixed_inputs.literals.items())},
        "schedule": MessageToDict(plan.entity_metadata.schedule),
        "notifications": [MessageToDict(notification) for notification in plan.entity_metadata.notifications],
    }
    return {key: value for key, value in spec.items() if value}


def of_interface(inputs: VariableMap, outputs: VariableMap) -> Spec:
    return {
        "inputs": {name: type_name(variable.type) for name, variable in sorted(inputs.variables.items())},
        "outputs": {name: type_name(variable.type) for name, variable in sorted(outputs.variables.items())},
    }


def type_name(literal: LiteralType) -> str:
    match literal.WhichOneof("type"):
        case "simple":
            return MessageToDict(literal.metadata).get("title") or SimpleType.Name(literal.simple).lower()
        case "blob":
            kind = "directory" if literal.blob.dimensionality else "file"
            return f"{kind} {literal.blob.format}".rstrip()
        case "collection_type":
            return f"list of {type_name(literal.collection_type)}"
        case "map_value_type":
            return f"map of {type_name(literal.map_value_type)}"
        case "union_type":
            return " | ".join(type_name(variant) for variant in literal.union_type.variants)
        case kind:
            return str(kind)


def value_of(literal: Literal) -> Any:
    match kind := literal.WhichOneof("value"):
        case "collection":
            return [value_of(item) for item in literal.collection.literals]
        case "map":
            return {name: value_of(item) for name, item in sorted(literal.map.literals.items())}
        case "scalar":
            return value_of_scalar(literal.scalar)
    raise AssertionError(f"no words for a literal that is a {kind}")


def value_of_scalar(scalar: Scalar) -> Any:
    match kind := scalar.WhichOneof("value"):
        case "none_type":
            return None
        case "binary":
            return msgpack.unpackb(scalar.binary.value)
        case "union":
            return value_of(scalar.union.value)
        case "primitive":
            value = getattr(scalar.primitive, scalar.primitive.WhichOneof("value"))
            return value if isinstance(value, bool | int | float | str) else value.ToJsonString()
    return MessageToDict(getattr(scalar, kind))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        for profile, specs in packaged(Path(home)).items():
            text = yaml.safe_dump(specs, allow_unicode=True, width=120)
            (FOLDER / f"{profile}.yaml").write_text(f"# Written by: python tests/specs.py\n{text}")
