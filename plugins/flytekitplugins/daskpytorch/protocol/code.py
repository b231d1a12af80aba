"""The project's sources and the program's state, packed in the driver and unpacked beside the ranks.

The sources are for the ranks alone. Scheduler and Dask workers never import a user's module, since their copies may be
old or missing.
"""

import contextlib
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.system import running_kernel
from flytekitplugins.daskpytorch.protocol import program
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


# ---- Packing, in the driver -----------------------------------------------------------------------------------------


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
