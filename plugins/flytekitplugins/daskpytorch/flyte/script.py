"""Flytekit's tasks without a function: a script or module whose command line has the task's inputs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Self

from flytekit import PythonFunctionTask, TaskMetadata
from flytekit.configuration import SerializationSettings
from flytekit.core.python_auto_container import DefaultTaskResolver
from flytekit.core.tracker import get_full_module_path
from flytekit.extras.tasks.shell import OutputLocation
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.flyte.config import DaskDDP, SpawnDDP
from flytekitplugins.daskpytorch.flyte.rank import FlyteScript
from flytekitplugins.daskpytorch.flyte.task import DaskDDPTask, SpawnDDPTask
from flytekitplugins.daskpytorch.task.script_definition import declared, digest_of, function_of

FILES = (FlyteFile, FlyteDirectory)


class ScriptTask(PythonFunctionTask):  # type: ignore[misc]
    """Task without a function: every rank of a gang runs a script or module, as `torchrun` would run the program.

    `name`, `inputs`, `output_locs` and `metadata` are as in flytekit's `ShellTask`. Each input becomes a command-line
    option, such as `--epochs 3`. True becomes `--name`, False and None are left out, and a list is one option with all
    values. Files and folders are downloaded once per node, and the program gets their local paths.

    Outputs are files or folders that rank 0 leaves. They are uploaded from rank 0's machine.

    If the task is cached, the cache version also has a digest of the program. The digest covers the Python code and
    configuration files in the program's folder, without those that a `.gitignore` or `.dockerignore` names.

    Args:
        name: Name of the task, which is unique in the project.
        task_config: `DaskDDP` or `SpawnDDP`.
        script: Path of the script. A relative path counts from the module that defines the task, else from the working
            folder.
        module: Name of a module to run as `python -m` does, instead of `script`.
        inputs: Types of the inputs by name, as `kwtypes` returns them.
        output_locs: Outputs. A location is absolute or relative to the working folder, and may name inputs, as in
            `out/{inputs.name}.pt`.
        arguments: Command line, as in `--lr {inputs.lr} --out {outputs.model}`. Default: an option for each input.
        metadata: Caching, retries and timeout.
        **kwargs: Other arguments of a task, such as `requests`, `environment`, `container_image` and `enable_deck`.

    Raises:
        ValueError: An argument is invalid. The message names all problems.
        FileNotFoundError: The script is neither beside the module nor in the working folder.
        SyntaxError: The program is not Python.

    Examples:
        >>> from pathlib import Path
        >>> from flytekit import kwtypes
        >>> from flytekit.extras.tasks.shell import OutputLocation
        >>> from flytekit.types.file import FlyteFile
        >>> from flytekitplugins.daskpytorch import ScriptTask, SpawnDDP
        >>> _ = Path("train.py").write_text('''
        ... import argparse, os
        ... parser = argparse.ArgumentParser()
        ... parser.add_argument("--epochs", type=int)
        ... epochs = parser.parse_args().epochs
        ... if os.environ["RANK"] == "0":
        ...     open("model.txt", "w").write(f"trained for {epochs} epochs")
        ... ''')
        >>> train = ScriptTask(
        ...     name="train",
        ...     script="train.py",
        ...     inputs=kwtypes(epochs=int),
        ...     output_locs=[OutputLocation(var="model", var_type=FlyteFile, location="model.txt")],
        ...     task_config=SpawnDDP(),  # or DaskDDP(...)
        ... )
        >>> Path(train(epochs=3)).read_text()
        'trained for 3 epochs'
    """

    def __new__(cls, *_: Any, task_config: Any = None, **__: Any) -> Self:
        """Return a task of the type for `task_config`."""
        kinds: dict[type, type] = {DaskDDP: _OnDask, SpawnDDP: _OnOwnNode}
        return object.__new__(kinds.get(type(task_config), cls) if cls is ScriptTask else cls)

    def __init__(
        self,
        name: str,
        *,
        task_config: DaskDDP | SpawnDDP,
        script: str | os.PathLike[str] | None = None,
        module: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        output_locs: Sequence[OutputLocation] = (),
        arguments: str | None = None,
        metadata: TaskMetadata | None = None,
        **kwargs: Any,
    ) -> None:
        inputs, output_locs = dict(inputs or {}), output_locs or ()
        is_known = type(task_config) in (DaskDDP, SpawnDDP)
        function = function_of(
            FlyteScript,
            name,
            script=script,
            module=module,
            inputs=inputs,
            output_locs=output_locs,
            arguments=arguments,
            types=FILES,
            problems=[] if is_known else [f"task_config={shown(task_config)}: must be a DaskDDP or a SpawnDDP"],
        )
        metadata = metadata or TaskMetadata()
        if metadata.cache:
            version = f"{metadata.cache_version}-{digest_of(function)}"
            metadata = dataclasses.replace(metadata, cache_version=version)
        interface = declared(name, inputs, {each.var: each.var_type for each in output_locs})
        super().__init__(task_config, interface, metadata=metadata, task_resolver=resolver, **kwargs)
        self._name = name
        self._task_function: Callable[..., Any] = function

    @property
    def name(self) -> str:
        """Name of the task, without the module's name."""
        return self._name


class _OnDask(ScriptTask, DaskDDPTask):
    """`ScriptTask` on the workers of a Dask cluster."""


class _OnOwnNode(ScriptTask, SpawnDDPTask):
    """`ScriptTask` on the task's own node."""


class ScriptResolver(DefaultTaskResolver):  # type: ignore[misc]
    """Finds a `ScriptTask` by its module and variable, as flytekit finds its tasks without functions."""

    def name(self) -> str:
        """Return the resolver's name."""
        return "ScriptResolver"

    def loader_args(self, settings: SerializationSettings, task: ScriptTask) -> list[str]:
        """Return the arguments of the container's command that name the task."""
        module = import_module(task.instantiated_in)
        return ["task-module", get_full_module_path(module, module.__name__), "task-name", task.lhs]


resolver = ScriptResolver()
"""Named in the container's command of each `ScriptTask`."""
