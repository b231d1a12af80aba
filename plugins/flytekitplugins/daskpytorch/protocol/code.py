"""The project's sources and the program's state, packed in the driver, and unpacked beside the ranks.

The sources are for the ranks alone. Scheduler and Dask workers never import a user's module, since their copies may be
old or missing.
"""

import contextlib
import hashlib
import io
import linecache
import logging
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType

from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.system import running_kernel
from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.project import Project, is_code
from flytekitplugins.daskpytorch.protocol.script import Script

MAX_SPARE_PART = 256 << 10
"""Maximum number of bytes of a pickled class of `__main__` that ranks get apart from the call. Larger classes are left
out."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """State of the driver's program for the ranks: `__main__`, command line, logging. The user's objects are bytes."""

    arguments: Sequence[str] | None = field(default=None, repr=False)
    """Command-line arguments of the user's script. None if the program is not the user's, such as pyflyte."""
    module: str | None = None
    """Name of the user's module that `python -m` ran. None for a script."""
    package: str | None = None
    spare_parts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Name -> pickled class of `__main__`, for ranks that load files with objects of the class."""
    cells: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> text of source code without a file, such as a notebook's cells."""
    levels: Mapping[str, int] = field(default_factory=dict)
    """Name of a logger -> its level. The root logger's name is empty."""
    handlers: Sequence[bytes] = field(default=(), repr=False)
    """Pickled stream, level and formatter of each handler of the root logger that writes to a standard stream."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """The project's sources and the state of the driver's program, as the driver sends both to agents."""

    archive: bytes
    """Tar archive of the project's files, at paths that match the modules' names. Empty if the agent already has the
    archive."""
    digest: str
    """SHA-256 of the archive, in hexadecimal digits."""
    script: str | None = None
    """Path, in the archive, of the user's script. None if the driver's `__main__` has no file, or is a tool such as
    pyflyte."""
    folders: Sequence[str] = ()
    """Source folders on the driver's machine, in the order of the driver's `sys.path`. Empty if imports from these
    folders would not find exactly the archive's files."""
    originals: Mapping[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict, compare=False, repr=False)
    """Path of a module in the archive -> its path on the driver's machine, and the file's state (`state_of`)."""
    machine: str = ""
    """Boot ID of the driver's kernel, which identifies the driver's machine."""
    program: Program = field(default_factory=Program, compare=False)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Location of the project's sources on a node."""

    folders: Sequence[str]
    """Folders to put on `sys.path`."""
    script: Path | None
    """Path of the file of `__main__`. None if `__main__` has no file."""
    originals: Mapping[str, str] = field(default_factory=dict)
    """Path of a copied module -> its path on the driver's machine. Empty if the node uses the driver's own files."""


# ---- Packing, in the driver -----------------------------------------------------------------------------------------


def pack_code(script: Script | None = None) -> Code:
    """Archive the project: the script, and the loaded modules that are not installed.

    For each module, the archive has the whole package, since later imports may need more. A module without a package
    comes with its neighbour files. A script that ranks run comes with its whole folder.
    """
    project = Project.loaded()
    if script is not None:
        project.add_script(script)
    is_users = project.script is not None or not hasattr(sys.modules["__main__"], "__file__")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in sorted(project.files.items()):
            _add(archive, name, path)
    data = buffer.getvalue()
    return Code(
        archive=data,
        digest=hashlib.sha256(data).hexdigest(),
        script=project.script,
        folders=project.folders(),
        originals={
            name: (str(path), state_of(path))
            for name, path in project.files.items()
            if is_code(path) or name == project.script
        },
        machine=running_kernel(),
        program=_program(script, is_users=is_users),
    )


def _program(script: Script | None, *, is_users: bool) -> Program:
    """Return the state of this process's program, or of the script that ranks run.

    Args:
        script: Script or module that ranks run. None: they call a function.
        is_users: True if this process's program is the user's own. Its command line and `__main__` are left out
            otherwise.
    """
    levels, handlers = dict(_levels()), tuple(_handlers())
    if script is not None:
        module = script.given if script.is_module else None
        return Program(arguments=script.args, module=module, levels=levels, handlers=handlers)
    if not is_users:
        return Program(levels=levels, handlers=handlers)
    main = sys.modules["__main__"]
    return Program(
        arguments=tuple(sys.argv[1:]),
        module=getattr(getattr(main, "__spec__", None), "name", None),
        package=getattr(main, "__package__", None),
        spare_parts=pickling.spare_parts(MAX_SPARE_PART),
        cells={
            name: "".join(lines)
            for name in _places()
            if not Path(name).exists() and (lines := linecache.getlines(name))
        },
        levels=levels,
        handlers=handlers,
    )


def _places() -> set[str]:
    """Return the names of the files that define the functions and methods of `__main__`."""
    functions = [value for value in pickling.definitions().values() if isinstance(value, FunctionType)]
    classes = [value for value in pickling.definitions().values() if isinstance(value, type)]
    functions += [value for kind in classes for value in vars(kind).values() if isinstance(value, FunctionType)]
    return {function.__code__.co_filename for function in functions}


def _levels() -> Iterator[tuple[str, int]]:
    """Yield name and level of each logger whose level is not logging's default. Torch sets its own in each rank."""
    for name, logger in [("", logging.root), *logging.Logger.manager.loggerDict.copy().items()]:
        default = logging.NOTSET if name else logging.WARNING
        if isinstance(logger, logging.Logger) and logger.level != default and name.partition(".")[0] != "torch":
            yield name, logger.level


def _handlers() -> Iterator[bytes]:
    for handler in logging.root.handlers:
        stream = getattr(handler, "stream", None)
        if stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):  # a user's own formatter may hold objects of any kind
                yield pickling.dumps((stream, handler.level, handler.formatter))


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file to the archive, without its owner and times, so that equal sources give equal bytes.

    Links are archived as files, since their targets may exist only on this machine.
    """
    with contextlib.suppress(OSError):  # removed meanwhile, or unreadable for this user
        data = path.read_bytes()
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), path.stat().st_mode & 0o777
        archive.addfile(info, io.BytesIO(data))


# ---- Unpacking, beside the ranks ------------------------------------------------------------------------------------


def place_code(code: Code, folder: Path) -> Sources:
    """Return the location of the project's sources on this node.

    The sources are the driver's own files if this machine has them unchanged. Otherwise they are copies, unpacked once
    below `folder`.
    """
    if _are_here(code):
        script = code.originals[code.script][0] if code.script else None
        return Sources(folders=code.folders, script=Path(script) if script else None)
    target = _unpacked(code, folder)
    return Sources(
        folders=[str(target)],
        script=target / code.script if code.script else None,
        originals={str(target / name): original for name, (original, _) in code.originals.items()},
    )


def _are_here(code: Code) -> bool:
    if not code.machine or code.machine != running_kernel() or not code.folders:
        return False
    return all(
        state is not None and state == state_of(Path(path)) and os.access(path, os.R_OK)
        for path, state in code.originals.values()
    )


def _unpacked(code: Code, folder: Path) -> Path:
    """Unpack the archive below `folder`, unless unpacked before, and return the archive's folder.

    Two processes must not use the same `folder`.
    """
    target = folder / code.digest[:16]
    if not target.exists():
        target.mkdir()
        with tarfile.open(fileobj=io.BytesIO(code.archive), mode="r:") as archive:
            # Python before 3.11.4, such as Debian 12's, has no filters, and ignores the attribute.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(target)  # noqa: S202 - our own archive
    return target
