"""Flyte 2's tasks without a function: a script or module whose command line has the task's inputs."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flyte
from flyte.io import Dir, File

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.task.script_definition import declared, defining_module, digest_of, function_of
from flyteplugins.daskpytorch.config import DaskDDP, SpawnDDP
from flyteplugins.daskpytorch.rank import Flyte2Script


@dataclass(frozen=True)
class OutputLocation:
    """An output of a `ScriptTask`: a file or folder that rank 0 leaves."""

    var: str
    """Name of the output."""
    var_type: type
    """`flyte.io.File` or `flyte.io.Dir`."""
    location: str | os.PathLike[str]
    """Path, absolute or relative to the working folder. May name inputs, as in `out/{inputs.name}.pt`."""


def ScriptTask(  # noqa: N802 - the name that it has for flytekit
    environment: flyte.TaskEnvironment,
    name: str,
    *,
    script: str | os.PathLike[str] | None = None,
    module: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    output_locs: Sequence[OutputLocation] = (),
    arguments: str | None = None,
    **options: Any,
) -> Any:
    """Return a task without a function: every rank runs a script or module, as `torchrun` would run the program.

    Args:
        environment: Environment of the task, whose `plugin_config` is a `DaskDDP` or `SpawnDDP`.
        name: Name of the task in its environment.
        script: Path of the script. A relative path counts from the module that defines the task, else from the working
            folder.
        module: Name of a module to run as `python -m` does, instead of `script`.
        inputs: Types of the inputs, by name. `flytekitplugins.daskpytorch.ScriptTask` says how they become arguments.
        output_locs: Outputs, which rank 0 uploads.
        arguments: Command line, as in `--lr {inputs.lr} --out {outputs.model}`. Default: an option for each input.
        **options: Other arguments of `environment.task`, such as `cache`, `retries` and `report`.

    Raises:
        ValueError: An argument is invalid. The message names all problems.
        FileNotFoundError: The script is neither beside the module nor in the working folder.
        SyntaxError: The program is not Python.
    """
    inputs, output_locs, config = dict(inputs or {}), output_locs or (), environment.plugin_config
    is_known = isinstance(config, (DaskDDP, SpawnDDP))
    function = function_of(
        Flyte2Script,
        name,
        script=script,
        module=module,
        inputs=inputs,
        output_locs=output_locs,
        arguments=arguments,
        types=(File, Dir),
        problems=[] if is_known else [f"plugin_config={shown(config)}: must be a DaskDDP or a SpawnDDP"],
    )
    interface = declared(name, inputs, {each.var: each.var_type for each in output_locs})
    interface.__module__ = str(defining_module().get("__name__"))
    interface.__wrapped__ = _with_source(digest_of(function))  # type: ignore[attr-defined]
    task = environment.task(**options)(interface)
    interface.__name__ = f"program {name}"  # no identifier: Flyte then finds the task by its variable in the module
    interface.program = function  # type: ignore[attr-defined]
    return task


def _with_source(digest: str) -> Callable[[], str]:
    """Return a function whose source has a digest. Flyte derives the version of a task from its function's source."""
    file, text = f"<program {digest}>", f"def version():\n    return {digest!r}\n"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), {"__name__": __name__}, names)  # noqa: S102 - the text above
    return names["version"]  # type: ignore[no-any-return]
