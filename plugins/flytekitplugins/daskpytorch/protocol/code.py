"""The project's sources and the program's state, packed in the driver, and unpacked beside the ranks.

Scheduler and Dask workers never import a user's module, since their copies may be old or missing.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import linecache
import logging
import os
import site
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.system import running_kernel
from flytekitplugins.daskpytorch.protocol.script import Script, attributes_of


@dataclass(frozen=True, kw_only=True)
class Program:
    arguments: Sequence[str] | None = field(default=None, repr=False)
    """Command line of the user's script, or None if the program is not the user's, such as pyflyte."""
    module: str | None = None
    package: str | None = None
    cells: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> source code without a file, such as a notebook's cells."""
    levels: Mapping[str, int] = field(default_factory=dict)
    log_format: logging.Formatter | None = None


@dataclass(frozen=True, kw_only=True)
class Code:
    archive: bytes
    """Tar archive of the files at the paths of their modules."""
    digest: str
    script: str | None = None
    folders: Sequence[str] = ()
    """Source folders in `sys.path` order, or none if imports from them would not find exactly the archive's files."""
    originals: Mapping[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict, compare=False, repr=False)
    """Module in the archive -> its path on the driver's machine, and the file's state (`state_of`)."""
    machine: str = ""
    program: Program = field(default_factory=Program, compare=False)


@dataclass(frozen=True, kw_only=True)
class Sources:
    folders: Sequence[str]
    script: Path | None
    originals: Mapping[str, str] = field(default_factory=dict)
    """Copied module -> its path on the driver's machine. Empty if the node uses the driver's own files."""


# ---- Packing, in the driver -----------------------------------------------------------------------------------------


def pack_code(script: Script | None = None) -> Code:
    """Archive the project: the script, and the loaded modules that are not installed.

    Modules bring their whole package, since later imports may need more, or else their neighbour files. A script that
    ranks run brings its whole folder.
    """
    project = Project.loaded()
    if script is not None:
        project.add_script(script)
    is_users = script is None and (project.script is not None or not hasattr(sys.modules["__main__"], "__file__"))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in project.travelling():
            _add(archive, name, path)
    data = buffer.getvalue()
    return Code(
        archive=data,
        digest=hashlib.sha256(data).hexdigest(),
        script=project.script,
        folders=project.folders(),
        originals={name: (str(path), state_of(path)) for name, path in project.files.items() if project.is_code(name)},
        machine=running_kernel(),
        program=_program(is_users=is_users),
    )


def _program(*, is_users: bool) -> Program:
    program = Program(levels=dict(_levels()), log_format=_log_format())
    if not is_users:
        return program
    main = sys.modules["__main__"]
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1}  # others are not read yet
    return replace(
        program,
        arguments=tuple(sys.argv[1:]),
        module=getattr(getattr(main, "__spec__", None), "name", None),
        package=getattr(main, "__package__", None),
        cells={name: "".join(lines) for name, (_, changed_at, lines, _) in entries.items() if changed_at is None},
    )


def _levels() -> Iterator[tuple[str, int]]:
    """Yield each logger whose level is not logging's default. Torch sets its own in each rank."""
    for name, logger in [("", logging.root), *logging.Logger.manager.loggerDict.copy().items()]:
        default = logging.NOTSET if name else logging.WARNING
        if isinstance(logger, logging.Logger) and logger.level != default and name.partition(".")[0] != "torch":
            yield name, logger.level


def _log_format() -> logging.Formatter | None:
    """Return the format of `logging.basicConfig`. A class of the user's does not travel in this way."""
    formats = [each.formatter for each in logging.root.handlers if type(each) is logging.StreamHandler]
    return next((each for each in formats if type(each) is logging.Formatter), None)


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file without its owner and times, so that equal sources give equal bytes.

    Links are archived as files, since their targets may exist only on this machine.
    """
    with contextlib.suppress(OSError):  # removed meanwhile, or unreadable for this user
        data = path.read_bytes()
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), path.stat().st_mode & 0o777
        archive.addfile(info, io.BytesIO(data))


# ---- Unpacking, beside the ranks ------------------------------------------------------------------------------------


def place_code(code: Code, folder: Path) -> Sources:
    """Return this node's sources: the driver's own files if unchanged, else copies, unpacked once below `folder`."""
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
    """Unpack the archive, unless unpacked before. Two processes must not use the same `folder`."""
    target = folder / code.digest[:16]
    if not target.exists():
        target.mkdir()
        with tarfile.open(fileobj=io.BytesIO(code.archive), mode="r:") as archive:
            # Python before 3.11.4, such as Debian 12's, has no filters, and ignores the attribute.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(target)  # noqa: S202 - our own archive
    return target


# ---- Files of the project

MAX_DATA_BYTES = 8 << 20
"""Bytes of all files beside the code that travel, the smallest first."""
MAX_FILES = 10_000
"""Files of a folder outside git, such as a home folder with one script."""
CODE_SUFFIXES = {".py", ".pyi", ".so"}
INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", *INSTALLED_FOLDERS}


@dataclass
class Project:
    files: dict[str, Path] = field(default_factory=dict)
    roots: set[Path] = field(default_factory=set)
    script: str | None = None
    _first: Path | None = None
    """Folder of the script that ranks run, which comes first on their `sys.path`."""

    @classmethod
    def loaded(cls) -> Self:
        project = cls()
        companions: set[tuple[Path, str | None]] = set()
        for module in list(sys.modules.values()):
            if place := _place_in_project(module):
                root, relative = place
                project.files[str(relative)] = root / relative
                if module is sys.modules["__main__"]:
                    project.script = str(relative)
                companions.add((root, relative.parts[0] if len(relative.parts) > 1 else None))
        for root, package in sorted(companions, key=str):
            project.roots.add(root)
            found = _files_beside(root) if package is None else _files_below(root / package)
            project.files = _named(root, found) | project.files
        return project

    def add_script(self, script: Script) -> None:
        self.script = None  # not the driver's own
        if script.file is None or script.folder is None or _is_installed(script.file):
            return
        root = self._first = Path(script.folder)
        self.script = str(Path(script.file).relative_to(root))
        self.roots.add(root)
        # The script's folder replaces files of the same name.
        self.files |= _named(root, _files_of_script(root)) | {self.script: Path(script.file)}

    def travelling(self) -> list[tuple[str, Path]]:
        data = sorted((_size_of(path), name) for name, path in self.files.items() if not self.is_code(name))
        totals = itertools.accumulate(size for size, _ in data)
        left_out = {name for (_, name), total in zip(data, totals, strict=True) if total > MAX_DATA_BYTES}
        return [(name, path) for name, path in sorted(self.files.items()) if name not in left_out]

    def is_code(self, name: str) -> bool:
        return Path(name).suffix in CODE_SUFFIXES or name == self.script

    def folders(self) -> Sequence[str]:
        """Return the source folders in `sys.path` order, or none if a module (not data) in one hides another's."""
        order = {os.path.abspath(entry): position for position, entry in reversed(list(enumerate(sys.path)))}
        roots = sorted(self.roots, key=lambda root: (root != self._first, order.get(str(root), len(order)), str(root)))
        if len(roots) > 1:
            for name, path in self.files.items():
                if self.is_code(name) and path != next((root / name for root in roots if (root / name).exists()), None):
                    return ()
        return [str(root) for root in roots]


@functools.cache  # repeated checks of thousands of modules would dominate packing time
def _is_installed(file: str) -> bool:
    """Layered environments (PYTHONPATH, .pth files) are recognised by folder names such as `site-packages`."""
    absolute = os.path.abspath(file)
    return absolute.startswith(_installation_folders()) or any(f"/{name}/" in absolute for name in INSTALLED_FOLDERS)


def _place_in_project(module: ModuleType) -> tuple[Path, Path] | None:
    attributes = attributes_of(module)
    name, file = _imported_as(attributes), attributes.get("__file__")
    if not isinstance(name, str) or not isinstance(file, str) or _is_installed(file):
        return None  # built-in and installed modules
    if name.startswith("flytekitplugins."):  # this package and its siblings
        return None
    path = Path(os.path.abspath(file))
    parts = name.split(".")
    relative = Path(*parts, path.name) if path.stem == "__init__" else Path(*parts[:-1], path.name)
    root = Path(str(path).removesuffix(str(relative)))
    return (root, relative) if root / relative == path and path.is_file() else None


def _imported_as(attributes: Mapping[str, Any]) -> object:
    name, file = attributes.get("__name__"), attributes.get("__file__")
    if name in ("__main__", "__mp_main__") and isinstance(file, str):
        return getattr(attributes.get("__spec__"), "name", None) or Path(file).stem
    return name


@functools.cache
def _installation_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(os.path.abspath(folder) + os.sep for folder in folders if folder)


def _files_below(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        yield from (path for name in sorted(names) if name[0] != "." and (path := Path(folder, name)).is_file())


def _named(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    return {str(path.relative_to(root)): path for path in paths}


def _files_beside(root: Path) -> Iterator[Path]:
    return (path for path in root.glob("[!.]*") if path.is_file())


def _files_of_script(root: Path) -> Iterable[Path]:
    if root == Path(root.anchor):  # of a container; /proc and /sys are below
        return _files_beside(root)
    return _known_to_git(root) or itertools.islice(_files_below(root), MAX_FILES)


def _known_to_git(root: Path) -> list[Path]:
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # there may be no git
        return []
    names = [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
    visible = [
        root / name for name in names if not any(part[0] == "." or part in SKIPPED_FOLDERS for part in name.parts)
    ]
    inner = (path for folder in visible if folder.is_dir() for path in _files_below(folder))  # repositories in this one
    return [*filter(Path.is_file, visible), *inner]


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the file has just been removed
        return 0
