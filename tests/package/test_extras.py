"""The core works without optional packages. A config that needs a missing package raises an error."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flytekitplugins.daskpytorch
from flytekitplugins.daskpytorch import MLflow, OpenTelemetry, Picture, TensorBoard, Wandb, checks
from flytekitplugins.daskpytorch.data import S3ImageFolder
from pages import REPOSITORY

EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OF_THIS_REPOSITORY = {"workflows", "docs", "test", "dev", "bench"}
"""Those that are for its own files."""
CONFIGURED: dict[str, Callable[[], Any]] = {
    "flyte2": lambda: import_module("flyteplugins.daskpytorch").DaskDDP,
    "lightning": lambda: import_module("flytekitplugins.daskpytorch.lightning"),
    "mlflow": lambda: MLflow(experiment="e"),
    "opentelemetry": OpenTelemetry,
    "pictures": lambda: Picture.of(None),
    "s3": lambda: S3ImageFolder("s3://bucket/prefix"),
    "tensorboard": lambda: TensorBoard(folder="f"),
    "transformers": lambda: import_module("flytekitplugins.daskpytorch.transformers"),
    "wandb": lambda: Wandb(project="p"),
}
"""By what a user asks for an extra, before anything is trained."""
BLOCKED = """
import sys
from importlib.machinery import PathFinder

class Light(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv[1:] else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Light
from flytekitplugins.daskpytorch import *
from flytekitplugins.daskpytorch import data, dispatch, report, results, testing
from flytekitplugins.daskpytorch.node import agent, fork_server
from flytekitplugins.daskpytorch.rank import main
from flytekitplugins.daskpytorch.sweep import models

from flytekit import task

@task(task_config=SpawnDDP(gang=Gang(debug=True)))
def train() -> float:
    current_rank().log({"loss": 0.5})
    return 0.5

if __name__ == "__main__":
    print(train())
"""


def flat(extra: str) -> set[str]:
    """The packages of an extra, with those of the extras that it names."""
    names = set()
    for requirement in map(Requirement, EXTRAS[extra]):
        names |= set().union(*map(flat, requirement.extras)) if requirement.extras else {requirement.name}
    return names


def test_the_core_trains_with_nothing_of_any_extra(tmp_path: Path) -> None:
    optional = sorted({package for packages in checks.PACKAGES.values() for package in packages})
    (tmp_path / "script.py").write_text(BLOCKED)
    command = [sys.executable, "script.py", *optional]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "0.5\n", done.stderr


@pytest.mark.parametrize(
    ("extra", "package"), [(extra, package) for extra in CONFIGURED for package in checks.PACKAGES[extra]]
)
def test_what_is_not_installed_is_named_when_it_is_configured(
    extra: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("lightning", "transformers"):
        monkeypatch.delitem(sys.modules, f"flytekitplugins.daskpytorch.{module}", raising=False)
    for module in ("pytorch_lightning", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs .*{package}.*pip install 'flytekitplugins-daskpytorch\[{extra}\]'"):
        CONFIGURED[extra]()


def test_the_folder_of_offline_runs_is_not_what_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert not checks.is_installed("wandb")


def test_without_flytekit_the_task_types_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_installed", lambda package: package != "flytekit")
    with pytest.raises(ImportError, match=r"DaskDDP needs flytekit.*pip install 'flytekitplugins-daskpytorch'.*3\.13"):
        _ = flytekitplugins.daskpytorch.DaskDDP


def test_each_extra_holds_what_is_looked_for() -> None:
    assert EXTRAS.keys() - OF_THIS_REPOSITORY == checks.PACKAGES.keys()
    distributions = packages_distributions()
    for extra, packages in checks.PACKAGES.items():
        there = (map(canonicalize_name, distributions[package.partition(".")[0]]) for package in packages)
        assert all(flat(extra).intersection(names) for names in there), extra


# ---- Imports


def imported() -> Iterator[str]:
    """The modules of others."""
    for file in (REPOSITORY / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from (name.partition(".")[0] for name in names)


def test_whatever_is_imported_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = [project["optional-dependencies"][extra] for extra in checks.PACKAGES]
    declared = {Requirement(line).name for line in chain(project["dependencies"], *optional)}
    modules = set(imported()) - sys.stdlib_module_names - {"flytekitplugins", "flyteplugins", "_typeshed"}
    modules -= {"IPython", "amdsmi", "pytest", "pytorch_lightning", "torchcodec"}  # taken where a program has them
    distributions = packages_distributions()
    assert {module for module in modules if declared.isdisjoint(map(canonicalize_name, distributions[module]))} == set()
