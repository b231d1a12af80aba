"""What the backend is told of every task, workflow and launch plan, in words: the specs of `pyflyte package`.

`python tests/support/specs.py` writes them anew to tests/specs/*.yaml, to be read and committed with the change.
"""

import base64
import os
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import yaml
from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from google.protobuf.json_format import MessageToDict

from warm import WarmPython, warm_python

Spec = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[2]
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


KINDS = {"1": ("task", TaskSpec), "2": ("workflow", WorkflowSpec), "3": ("launch plan", LaunchPlan)}
"""Kind and message type of a file in a package, by the last character of its name."""
LEFT_OUT = {"description", "resourceType", "runtime"}
"""Docstrings, what a name is of, and the version of flytekit."""
WRAPPERS = {"promise", "primitive", "scalar", "simple", "stringValue", "type", "value", "variables"}
"""Words around a single thing that say nothing of it."""


def described(file: str, content: bytes) -> tuple[str, Spec]:
    """One file of a package."""
    word, kind = KINDS[Path(file).stem[-1]]
    found = MessageToDict(kind.FromString(content))
    found = found.get("template", found)
    return f"{word} {found.pop('id')['name']}", plain(found)


def plain(value: Any) -> Any:
    """Types and other entities by their names alone, values in words, and nothing that is empty."""
    found = value
    match value:
        case {"name": name, "version": _}:
            found = name
        case {"simple": _, "metadata": {"title": title}}:
            found = title
        case {"binary": {"value": packed}}:
            found = msgpack.unpackb(base64.b64decode(packed))
        case {"key": name, "value": given} | {"name": name, "value": given}:
            found = f"{name}={given}"
        case ["pyflyte-execute", *words]:
            found = " ".join(words[words.index("--") :])
        case dict() if len(value) == 1 and value.keys() <= WRAPPERS:
            found = plain(*value.values())
        case dict():
            found = {key: plain(each) for key, each in value.items() if key not in LEFT_OUT and each not in ({}, [])}
        case list():
            found = [plain(each) for each in value]
            if all(isinstance(each, str) for each in found):
                found.sort()  # what a node waits for has another order each time
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        for profile, specs in packaged(Path(home)).items():
            text = yaml.safe_dump(specs, allow_unicode=True, width=120)
            (FOLDER / f"{profile}.yaml").write_text(f"# Written by: python tests/support/specs.py\n{text}")
