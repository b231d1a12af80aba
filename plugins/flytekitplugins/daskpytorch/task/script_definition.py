"""Definition of tasks without a function: their program, checks of their arguments, the version of their code.

Runs where the module with the task is imported. flytekit and Flyte 2 share the module.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import inspect
import os
import re
import shlex
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.protocol.project import Project, is_code
from flytekitplugins.daskpytorch.protocol.script import Script, module_of, script_of
from flytekitplugins.daskpytorch.task.script import OutputFile, TaskScript

CONFIGURATION = (".cfg", ".ini", ".json", ".toml", ".yaml", ".yml")
"""Endings of files that count as part of a program, beside its Python code."""
SCALARS = (bool, int, float, str, Enum, dt.date, dt.timedelta, NoneType)
"""Types of inputs that have a form on a command line, as have lists of them, files and folders."""

AnyScript = TypeVar("AnyScript", bound=TaskScript)


def function_of(
    kind: type[AnyScript],
    name: str,
    *,
    script: str | os.PathLike[str] | None,
    module: str | None,
    inputs: Mapping[str, Any],
    output_locs: Sequence[Any],
    arguments: str | None,
    types: tuple[type, type],
    problems: Sequence[str] = (),
) -> AnyScript:
    """Return the function of a task without a function, after checks of the task's arguments.

    Args:
        kind: The host's type of the function.
        name: Name of the task.
        script: Path of the script. None: a module.
        module: Name of the module that `python -m` would run. None: a script.
        inputs: Types of the inputs, by name.
        output_locs: Outputs, with `var`, `var_type` and `location` as flytekit's `OutputLocation` has them.
        arguments: Template of the command line. None: an option for each input.
        types: The host's types of files and of folders.
        problems: What the host has found wrong.

    Raises:
        ValueError: Arguments are invalid. The message names all problems.
        FileNotFoundError: There is no such script.
        ModuleNotFoundError: Python cannot find the module.
        SyntaxError: The program is not Python.
    """
    found = [*problems, *_problems(script, module, inputs, output_locs, types)]
    outputs: dict[str, OutputFile] = {}
    if not found:
        for each in output_locs:
            is_folder = issubclass(each.var_type, types[1])
            outputs[each.var] = OutputFile(location=os.fspath(each.location), is_folder=is_folder)
        found = list(_problems_of_templates(arguments, outputs, list(inputs)))
    if found:
        raise ValueError(f"ScriptTask({name!r}): {'; '.join(found)}")
    program = _program_of(script, module)
    if _is_users():
        _let_register(files_of(program))
    return kind(name=name, script=program, inputs=tuple(inputs), arguments=arguments, outputs=outputs)


def _program_of(script: str | os.PathLike[str] | None, module: str | None) -> Script:
    """Return the program of a task: a script beside the module that defines the task, else in the working folder.

    In pods and ranks, which import the module again, a missing program is an error only when the task runs.

    Raises:
        FileNotFoundError: Neither folder has the script.
        ModuleNotFoundError: Python cannot find the module.
        SyntaxError: The program is not Python.
    """
    try:
        if module is not None:
            return module_of(module)
        file = defining_module().get("__file__")  # a notebook has none
        folders = [*([Path(file).absolute().parent] if file else []), Path.cwd()]
        places = [folder / (script or "") for folder in folders]
        place = next((place for place in places if place.exists()), None)
        if place is None:
            looked = " nor at ".join(map(str, dict.fromkeys(places)))
            raise FileNotFoundError(
                f"script={os.fspath(script or '')!r}: no script at {looked}. A relative path counts from the module "
                "that defines the task, else from the working folder."
            )
        return script_of(place)
    except (ImportError, OSError, SyntaxError):
        if _is_users():
            raise
    return Script(given=module or os.fspath(script or ""), is_module=module is not None)


def _is_users() -> bool:
    """Return True in the user's process. Pods and ranks import the module with the task, too."""
    return os.environ.keys().isdisjoint(["RANK", "ACTION_NAME", "FLYTE_INTERNAL_EXECUTION_ID"])


def _let_register(files: Mapping[str, Path]) -> None:
    """Let fast registration copy a program's files: by default, Flyte copies the files of loaded modules alone."""
    for path in files.values():
        name = f"file of a ScriptTask: {path}"
        stand_in = sys.modules.setdefault(name, ModuleType(name))
        stand_in.__file__ = str(path)


def defining_module() -> Mapping[str, Any]:
    """Return the global names of the module whose import defines the task."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_globals if frame is not None else {}


def files_of(script: Script) -> Mapping[str, Path]:
    """Return the files of a program's folder that travel to other machines, by their paths in the folder."""
    project = Project()
    project.add_script(script)
    return project.files


def digest_of(function: TaskScript) -> str:
    """Return a text that changes with the program's code and with configuration files in its folder.

    Data, files over 1 MiB that are not code, files that `.gitignore` or `.dockerignore` names, and the outputs' own
    files do not count. For an installed module the versions of its distributions count.
    """
    digest = hashlib.sha256(_versions_of(function.script).encode())
    own = {Path(output.location).absolute() for output in function.outputs.values()}
    for name, path in sorted(files_of(function.script).items()):
        if (is_code(path) or path.suffix in CONFIGURATION) and own.isdisjoint([path, *path.parents]):
            with contextlib.suppress(OSError):  # removed meanwhile
                digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _versions_of(script: Script) -> str:
    """Return the names and versions of the distributions of an installed module. Empty for a script."""
    found = metadata.packages_distributions().get(script.given.partition(".")[0], ()) if script.is_module else ()
    return " ".join(sorted(f"{name}=={metadata.version(name)}" for name in found))


def _has_text(kind: Any, files: tuple[type, ...]) -> bool:
    """Return True if the values of an input's type have a form on a command line. `files`: the host's file types."""
    if isinstance(kind, type) and get_origin(kind) is None:
        return issubclass(kind, (*SCALARS, *files))
    parts = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    if get_origin(kind) is Literal:
        return True
    return get_origin(kind) in (list, Union, UnionType, Annotated) and all(_has_text(part, files) for part in parts)


def _problems_of_templates(
    arguments: str | None, outputs: Mapping[str, OutputFile], inputs: Sequence[str]
) -> Iterator[str]:
    """Yield what is wrong with a task's templates: quotes, braces, names of inputs and outputs."""
    known = {f"inputs.{name}" for name in inputs}
    templates = [("arguments", arguments or "", known | {f"outputs.{name}" for name in outputs})]
    templates += [(f"location of {name}", output.location, known) for name, output in outputs.items()]
    for what, template, names in templates:
        try:
            shlex.split(template if what == "arguments" else "")
            fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            yield f"{what}={template!r}: {error}"
            continue
        unknown = [f"{{{name}}}" for name in fields if "".join(re.split(r"([.[])", name)[:3]) not in names]
        if unknown:
            there = ", ".join(f"{{{name}}}" for name in sorted(names)) or "no names"
            yield f"{what}={template!r}: there is no {' and no '.join(unknown)}, but {there}"


def _problems(
    script: object, module: object, inputs: Mapping[str, Any], outputs: Sequence[Any], types: tuple[type, type]
) -> Iterator[str]:
    if (script is None) == (module is None):
        yield "must have either script= or module="
    for name, kind in inputs.items():
        if not _has_text(kind, types):
            yield f"input {name} is a {getattr(kind, '__name__', kind)}, which has no form on a command line"
    for output in outputs:
        kind = getattr(output, "var_type", None)
        if not (isinstance(kind, type) and issubclass(kind, types)):
            files = " or ".join(each.__name__ for each in types)
            yield f"output_locs has {shown(output)}: must be an OutputLocation of a {files}"
    names = [getattr(output, "var", None) for output in outputs]
    if repeated := {name for name in names if names.count(name) > 1}:
        yield f"output_locs has more than one {', '.join(map(str, repeated))}"


def declared(name: str, inputs: Mapping[str, Any], outputs: Mapping[str, type]) -> Callable[..., Any]:
    """Return a function from which the host reads the task's interface. Never called."""

    def function(**inputs: Any) -> Any:
        return inputs

    returned: Any = NamedTuple("Outputs", list(outputs.items())) if outputs else None
    if returned is not None:
        returned.__name__ = ""  # the host then returns a single output without a tuple
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(each, kind, annotation=type_) for each, type_ in inputs.items()]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {**inputs, "return": returned}
    function.__name__ = function.__qualname__ = name
    return function
