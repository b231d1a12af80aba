"""The package imports only what its metadata declares."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import REPOSITORY
from flytekitplugins.daskpytorch import extras


def imported() -> Iterator[str]:
    """The modules of others."""
    for file in (REPOSITORY / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from (name.partition(".")[0] for name in names)


def test_whatever_is_imported_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = [project["optional-dependencies"][extra] for extra in extras.PACKAGES]
    declared = {Requirement(line).name for line in chain(project["dependencies"], *optional)}
    modules = set(imported()) - sys.stdlib_module_names - {"flytekitplugins", "flyteplugins", "_typeshed"}
    modules -= {
        "IPython",
        "flyte_migrate",
        "pytest",
        "pytorch_lightning",
    }  # there where a notebook, a test, or a program has them
    distributions = packages_distributions()
    assert {module for module in modules if declared.isdisjoint(map(canonicalize_name, distributions[module]))} == set()


@pytest.mark.parametrize("module", ["node.agent", "node.fork_server", "protocol.messages"])
def test_what_runs_beside_any_host_imports_none(module: str) -> None:
    """Dask takes half as long to import as all else that an agent needs."""
    script = (
        f"import sys, flytekitplugins.daskpytorch.{module}; print({{'dask', 'flytekit', 'torch'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
