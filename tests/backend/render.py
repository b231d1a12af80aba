"""What Flyte's own code makes of our tasks: `python tests/backend/render.py` has it made anew, into golden/.

It needs Go and its module proxy, and minutes where nothing of Flyte has been compiled yet. Read what it writes, and
commit it with the change.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from flyteidl.core.errors_pb2 import ErrorDocument

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parent
sys.path[:0] = [str(TESTS / "support"), str(TESTS), str(TESTS.parent)]

import specs
from backend import failures
from pages import block, blocks

REPOSITORY = TESTS.parent
GOLDEN = FOLDER / "golden"
GO = shutil.which("go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin")
SERIALISE = """
import sys
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.repo import serialize_to_folder
image = ImageConfig.auto(img_name="registry.example/daskpytorch:v1")
settings = SerializationSettings(project="flytesnacks", domain="development", version="v1", image_config=image)
serialize_to_folder([sys.argv[1]], settings, ".", sys.argv[2])
"""


def sources() -> Iterator[Path]:
    """What the golden files are made from."""
    yield from sorted((TESTS / "specs").glob("*.yaml"))
    yield from (FOLDER / name for name in ("examples.py", "failures.py", "go.mod"))
    yield from sorted(FOLDER.glob("*.go"))


def digests() -> dict[str, str]:
    """Of the sources as they stand, and of the guides' tasks and configuration."""
    guides = {"README.md": guides_tasks().encode(), "flyte.yaml": guides_configuration().encode()}
    read = {path.name: path.read_bytes() for path in sources()} | guides
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(read.items())}


def golden(name: str) -> Any:
    """What is in the repository."""
    return yaml.load((GOLDEN / f"{name}.yaml").read_bytes(), yaml.CSafeLoader)  # ten times as fast


def guides_tasks() -> str:
    """The blocks of "Run it on Flyte"."""
    return "\n".join(blocks("python", "docs/guides/run_on_flyte.md"))


def guides_configuration() -> str:
    """What a backend's administrator adds to Flyte's configuration, by the guide."""
    return block("task-plugins:", "yaml")


def lay_out(folder: Path) -> None:
    """All that Flyte is to read: what is registered, and what failed attempts have left."""
    for profile in specs.PROFILES:
        serialise("workflows", REPOSITORY, folder / profile, {"DASKPYTORCH_PROFILE": profile})
    lay_out_examples(folder / "source" / "examples")
    serialise("examples", folder / "source", folder / "examples", {})
    (folder / "errors").mkdir()
    [task] = (folder / "examples").glob("*examples.readme.train_1.pb")
    shutil.copy(task, folder / "errors" / "task")
    for name, left in documents(folder / "source").items():
        left.error.message = left.error.message.rpartition("Message:")[2].strip()  # without a traceback of this machine
        (folder / "errors" / f"{name}.pb").write_bytes(left.SerializeToString())


def lay_out_examples(package: Path) -> None:
    """A package of the guide's tasks and ours."""
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "readme.py").write_text(guides_tasks())
    shutil.copy(FOLDER / "examples.py", package / "more.py")


def serialise(package: str, cwd: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """As `pyflyte package` does it, for a project and a version."""
    folder.mkdir()
    plain = specs.environment(folder) | environment
    subprocess.run([sys.executable, "-c", SERIALISE, package, str(folder)], cwd=cwd, env=plain, check=True)


def documents(source: Path) -> dict[str, ErrorDocument]:
    """The error documents of the guide's task, by what has happened."""
    sys.path.insert(0, str(source))
    task = import_module("examples.readme").train
    return {name: failures.document(task, raised, source / "left" / name) for name, raised in failures.failures()}


def rendered(folder: Path) -> dict[str, Any]:
    """What Flyte makes of it."""
    assert GO is not None, "Go is not installed"
    go = {"GOFLAGS": "-p=1 -mod=readonly", **os.environ}
    built = folder / "backend"
    subprocess.run(["nice", "-n", "19", GO, "build", "-o", str(built), "."], cwd=FOLDER, env=go, check=True)
    configuration = folder / "flyte.yaml"
    configuration.write_text(guides_configuration())
    done = subprocess.run([str(built), str(configuration), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-20_000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def contents(folder: Path) -> dict[str, Any]:
    """The golden files' contents by their names; of the workflows, what runs on Dask."""
    found = rendered(folder)
    profiles = {
        name: {
            "accepted": found["compiled"][name],
            "resources": {task: made for task, made in all_made.items() if name == "examples" or on_dask(made)},
        }
        for name, all_made in found["resources"].items()
    }
    left = {path.stem: ErrorDocument.FromString(path.read_bytes()) for path in (folder / "errors").glob("*.pb")}
    documents = {name: failures.described(document) for name, document in left.items()}
    links = found["links"]["examples"]
    return {**profiles, "attempts": found["attempts"], "links": links, "failures": documents, "digests": digests()}


def on_dask(made: Mapping[str, Any]) -> bool:
    return made["kind"] == "DaskJob"


def render() -> None:
    """Write the golden files anew."""
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        made = contents(Path(folder))
    for name, content in made.items():
        text = yaml.safe_dump(content, allow_unicode=True, width=120, default_flow_style=None)
        (GOLDEN / f"{name}.yaml").write_text(f"# Written by: python tests/backend/render.py\n{text}")


if __name__ == "__main__":
    render()
