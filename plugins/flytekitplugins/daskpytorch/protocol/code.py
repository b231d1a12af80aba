"""The user's code and arguments as bytes, packed in the driver and unpacked in a rank.

The driver sends an archive of the project's sources and a pickled call, for the ranks alone. Scheduler and Dask workers
never import a user's module, since their copies may be old or missing.
"""

import contextlib
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.system import running_kernel
from flytekitplugins.daskpytorch.protocol import pickling, program
from flytekitplugins.daskpytorch.protocol.program import Program
from flytekitplugins.daskpytorch.protocol.project import Project, is_code
from flytekitplugins.daskpytorch.protocol.script import Script

MAX_LEFT = 1000
"""Maximum number of files listed in `Code.left`: files that are too large to send to ranks."""


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
    left: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Path of a file that is too large to send -> its size in bytes."""
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
    left: Mapping[str, int] = field(default_factory=dict)
    """Files that the driver has not sent -> their sizes in bytes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# ---- Packing, in the driver -----------------------------------------------------------------------------------------


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    put_aside: Callable[[bytes | memoryview], bool] | None = None,
) -> bytes:
    """Pickle a call: the function by name if its module has the function, else (`__main__`, closures) by value.

    Args:
        function: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        put_aside: Function that takes the memory of each large array and tensor, which the pickle then lacks. If the
            remaining pickle is large, the function takes the pickle last, and `pack_call` returns empty bytes. The
            function returns False to leave the memory in the pickle. None keeps everything in the pickle.

    Raises:
        TypeError: The function or an argument cannot be pickled. The message names the part.
    """
    by_name = _by_name(function)
    try:
        data = pickling.dumps((by_name or function, tuple(args), dict(kwargs)), put_aside=put_aside)
    except Exception as error:
        parts = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        parts["the function itself"] = by_name or function
        culprits = [name for name, value in parts.items() if not _can_pickle(value)]
        raise TypeError(
            f"{name_of(function)} cannot be sent to the ranks, because {', '.join(culprits) or 'a part of it'} cannot "
            f"be pickled: {error}. Pass plain data, and open files, locks and connections inside the function."
        ) from error
    if put_aside is None or len(data) < pickling.LARGE or not put_aside(data):
        return data
    return b""


def pack_code(script: Script | None = None) -> Code:
    """Archive the project: the script, and the loaded modules that are not installed.

    For each module, the archive has the whole package, since later imports may need more. A module without a package
    comes with its neighbour files. A script that ranks run comes with its whole folder.
    """
    project = Project.loaded()
    if script is not None:
        project.add_script(script)
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
        left=dict(sorted(project.left.items())[:MAX_LEFT]),
        program=program.of_script(script.args, script.given if script.is_module else None)
        if script is not None
        else program.taken(is_users=project.script is not None or not hasattr(sys.modules["__main__"], "__file__")),
    )


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file to the archive, without its owner and times, so that equal sources give equal bytes.

    Links are archived as files, since their targets may exist only on this machine.
    """
    with contextlib.suppress(OSError):  # removed meanwhile, or unreadable for this user
        data = path.read_bytes()
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), path.stat().st_mode & 0o777
        archive.addfile(info, io.BytesIO(data))


def _by_name(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return a function's module and name if the module has the function under this name, else None."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<locals>" in qualname or "<lambda>" in qualname:
        return None
    try:
        return (module, qualname) if module in sys.modules and _find(module, qualname) is function else None
    except AttributeError:
        return None


def _can_pickle(value: object) -> bool:
    try:
        pickling.dumps(value)
    except Exception:
        return False
    return True


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function. A `partial` has the name of the function inside it."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def function_of(called: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a Flyte task. Any other callable is returned as it is."""
    return getattr(called, "_task_function", called)


# ---- Unpacking, beside the ranks and in them ------------------------------------------------------------------------


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
        left={str(target / name): size for name, size in code.left.items()},
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


def unpack_call(data: bytes, aside: Sequence[memoryview] = (), present: Mapping[str, Any] | None = None) -> Call:
    """Unpickle a call that `pack_call` has pickled. `sys.path` must contain the project's sources.

    Args:
        data: The pickle. Empty if the pickle is the last item of `aside`.
        aside: Memory that `pack_call` has put aside, in order.
        present: Names of `__main__` that keep their values. None: all present names.
    """
    function, args, kwargs = pickling.loads(data or aside[-1], aside, present)
    return Call(function=_find(*function) if type(function) is tuple else function, args=args, kwargs=kwargs)


def _find(module: str, qualname: str) -> Callable[..., Any]:
    """Return a function by module and name. If the name belongs to a Flyte task, return the task's function."""
    found: Any = import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return function_of(found)
