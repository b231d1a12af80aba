"""The user's code and arguments, as bytes: packed in the driver, unpacked in a rank.

Neither the scheduler nor a Dask worker ever unpickles a user's module by name; they may have no copy of it, or an old
one. What travels is an archive of the project's sources and a pickled call, which only the ranks open.
"""

import asyncio
import contextlib
import fnmatch
import functools
import hashlib
import inspect
import io
import os
import site
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from flytekitplugins.daskpytorch.process.system import running_kernel
from flytekitplugins.daskpytorch.protocol import pickling, program
from flytekitplugins.daskpytorch.protocol.program import Program

MAX_RESOURCE_BYTES = 1 << 20
"""Files of a package that are not code travel up to this size, and those beside a script; data belongs in storage."""
MAX_BESIDE_BYTES = 4 << 20
"""All files together that are not code and lie beside a script, or another module without a package."""
MAX_LEFT = 1000
"""How many of the files that do not travel are known by name where they are missing."""
CODE_PATTERNS = ("*.py", "*.pyi", "*.so")
INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", *INSTALLED_FOLDERS}


@dataclass(frozen=True, kw_only=True)
class Code:
    """The project's sources, and the program that they are run by."""

    archive: bytes
    """A tar file of modules, laid out as their names say; empty for who has had it."""
    digest: str
    """SHA-256 of the archive, in hexadecimal digits."""
    script: str | None = None
    """The file of `__main__` in the archive; None: it has none, or is no program of the user's."""
    folders: Sequence[str] = ()
    """Those that the sources come from, on the driver's machine, in the order of its `sys.path`; empty where they would
    not find the same files as the archive has."""
    originals: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict, compare=False, repr=False)
    """A module's file in the archive -> the file itself, and what it is known by; see `_identity`."""
    machine: str = ""
    """Where that is: the kernel's name for itself since it has started."""
    left: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Files that are too large to travel -> bytes."""
    program: Program = field(default_factory=Program, compare=False)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a node has them."""

    folders: Sequence[str]
    """For `sys.path`."""
    script: Path | None
    """The file of `__main__`."""
    originals: Mapping[str, str] = field(default_factory=dict)
    """A copied module's file -> what the driver calls it; empty where these are the driver's own files."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Files that have not come -> bytes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function and what to call it with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _ByName:
    """A function that its module finds, perhaps as the Flyte task made of it."""

    module: str
    qualname: str

    def find(self) -> Callable[..., Any]:
        found: Any = import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return getattr(found, "_task_function", found)  # type: ignore[no-any-return]


def completed(returned: Any) -> Any:
    """What a call has returned; of a coroutine function, once it has run to its end."""
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


@contextlib.contextmanager
def ending_as_program() -> Iterator[None]:
    """Let the block end by `sys.exit()`, `quit()` or Click's `main()`: exit code 0 is a normal end.

    Raises:
        SystemExit: The exit code is another.
    """
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


# ---- Packing, in the driver -----------------------------------------------------------------------------------------


def pack_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    put_aside: Callable[[bytes | memoryview], object] | None = None,
) -> bytes:
    """Pickle a call: the function by name where its module has it, else (`__main__`, closures) by value.

    Where it can be put aside, what is large in it is: the memory of arrays and tensors, and then, if that alone is
    large, all the rest, in whose place there are no bytes.

    Raises:
        TypeError: Something in it cannot be pickled; the message says which argument, or the function.
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
    if put_aside is None or len(data) < pickling.LARGE:
        return data
    put_aside(data)
    return b""


def check_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """See to it that a call can be packed later, and keep nothing of it; what is large in it is not even copied.

    Raises:
        TypeError: As `pack_call`.
    """
    pack_call(function, args, kwargs, lambda _: None)


def pack_code() -> Code:
    """Archive the project: script and loaded modules that no installation holds, with their packages or neighbours.

    Whole packages, because modules may be imported later than now.
    """
    project = _Project.loaded()
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
            name: (str(path), _identity(path))
            for name, path in project.files.items()
            if _is_code(path) or name == project.script
        },
        machine=running_kernel(),
        left=dict(sorted(project.left.items())[:MAX_LEFT]),
        program=program.taken(is_users=project.script is not None or not hasattr(sys.modules["__main__"], "__file__")),
    )


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """The same sources give the same bytes, whoever packs them and when; links may point to where only we are."""
    with contextlib.suppress(OSError):  # it has gone, or is not ours to read
        data = path.read_bytes()
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), path.stat().st_mode & 0o777
        archive.addfile(info, io.BytesIO(data))


def _by_name(function: Callable[..., Any]) -> _ByName | None:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<locals>" in qualname or "<lambda>" in qualname:
        return None
    reference = _ByName(module=module, qualname=qualname)
    try:
        return reference if module in sys.modules and reference.find() is function else None
    except AttributeError:
        return None


@dataclass
class _Project:
    """What is to travel, as it lies here."""

    files: dict[str, Path] = field(default_factory=dict)
    """Name in the archive -> file."""
    roots: set[Path] = field(default_factory=set)
    """The folders that modules are imported from."""
    left: dict[str, int] = field(default_factory=dict)
    script: str | None = None

    @classmethod
    def loaded(cls) -> Self:
        """That of this process."""
        project = cls()
        companions: set[tuple[Path, str | None]] = set()
        for module in _modules_not_installed():
            if place := _place_in_project(module):
                root, relative = place
                project.files[str(relative)] = root / relative
                if module is sys.modules["__main__"]:
                    project.script = str(relative)
                companions.add((root, relative.parts[0] if len(relative.parts) > 1 else None))
        for root, package in sorted(companions, key=str):
            project.roots.add(root)
            project._add(root, _files_beside(root) if package is None else _package_files(root / package))
        return project

    def _add(self, root: Path, paths: Iterable[Path]) -> None:
        total = 0
        for path in paths:
            name, size = str(path.relative_to(root)), _size_of(path)
            total += size if path.parent == root and not _is_code(path) else 0
            if _is_code(path) or (size <= MAX_RESOURCE_BYTES and total <= MAX_BESIDE_BYTES):
                self.files.setdefault(name, path)
            else:
                self.left[name] = size

    def folders(self) -> Sequence[str]:
        """See `Code`: with several, a module of one may hide another's; other files are found beside their modules."""
        order = {os.path.abspath(entry): position for position, entry in reversed(list(enumerate(sys.path)))}
        roots = sorted(self.roots, key=lambda root: (order.get(str(root), len(order)), str(root)))
        if len(roots) > 1:
            for name, path in self.files.items():
                if _is_code(path) and path != next((root / name for root in roots if (root / name).exists()), None):
                    return ()
        return [str(root) for root in roots]


_installed_modules: dict[str, ModuleType] = {}
"""By name. There are thousands, and to look at each of them with every gang would take most of its packing's time."""


def _modules_not_installed() -> Iterator[ModuleType]:
    installed = _installation_folders()
    for name, module in list(sys.modules.items()):
        if _installed_modules.get(name) is module:
            continue
        if _is_installed(_attributes(module).get("__file__"), installed):
            _installed_modules[name] = module
        else:
            yield module


def _is_installed(file: object, installed: tuple[str, ...]) -> bool:
    """In whatever environment: layered ones (PYTHONPATH, .pth files) have folders that this one does not know."""
    if not isinstance(file, str):
        return False
    absolute = file if file.startswith(installed) else os.path.abspath(file)
    return absolute.startswith(installed) or any(f"{os.sep}{name}{os.sep}" in absolute for name in INSTALLED_FOLDERS)


def _place_in_project(module: ModuleType) -> tuple[Path, Path] | None:
    """The folder that the module is imported from and its path below, or None where it has none to travel."""
    attributes = _attributes(module)
    name, file = _imported_as(attributes), attributes.get("__file__")
    if not isinstance(name, str) or not isinstance(file, str) or name.startswith("flytekitplugins."):
        return None  # built in; or this package and its siblings
    path = Path(os.path.abspath(file))
    parts = name.split(".")
    relative = Path(*parts, path.name) if path.stem == "__init__" else Path(*parts[:-1], path.name)
    root = Path(str(path).removesuffix(str(relative)))
    return (root, relative) if root / relative == path and path.is_file() else None


def _imported_as(attributes: Mapping[str, Any]) -> object:
    """The module's name; for the script, the one by which others would import it."""
    name, file = attributes.get("__name__"), attributes.get("__file__")
    if name in ("__main__", "__mp_main__") and isinstance(file, str):
        return getattr(attributes.get("__spec__"), "name", None) or Path(file).stem
    return name


def _attributes(module: ModuleType) -> dict[str, Any]:
    """What is in a module now: to ask a lazily imported one for an attribute would import it."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:  # anything may stand in sys.modules
        return {}
    return attributes


@functools.cache
def _installation_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(os.path.abspath(folder) + os.sep for folder in folders if folder)


def _package_files(package: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith("."))
        yield from (path for name in sorted(names) if (path := Path(folder, name)).is_file())


def _files_beside(root: Path) -> list[Path]:
    """All modules, and other files, the smallest first; not hidden ones."""
    found = [path for path in root.glob("[!.]*") if path.is_file()]
    return sorted(found, key=lambda path: (not _is_code(path), _size_of(path), path))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it has just gone
        return 0


def _is_code(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in CODE_PATTERNS)


def _identity(path: Path) -> Sequence[int]:
    """Tells a file from others of its machine, and from what it has been before; empty: it cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) if os.access(path, os.R_OK) else ()


@functools.cache
def _can_pickle(value: object) -> bool:
    try:
        pickling.dumps(value)
    except Exception:
        return False
    return True


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called; a partial, like the function inside it."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


# ---- Unpacking, beside the ranks and in them ------------------------------------------------------------------------


def place_code(code: Code, folder: Path) -> Sources:
    """The driver's own files where they are here and as they were, else copies, unpacked once below `folder`."""
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
    return all(identity and identity == _identity(Path(path)) for path, identity in code.originals.values())


def _unpacked(code: Code, folder: Path) -> Path:
    """Copies, once below `folder`, which is the caller's alone."""
    target = folder / code.digest[:16]
    if not target.exists():
        target.mkdir()
        with tarfile.open(fileobj=io.BytesIO(code.archive), mode="r:") as archive:
            # Python 3.11 before 3.11.4, as Debian 12 has it, knows no filters; set here, they are for those that do
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(target)  # noqa: S202 - our own archive
    return target


def unpack_call(data: bytes, aside: Sequence[memoryview] = ()) -> Call:
    """The call that `pack_call` made, with its function found; the sources must be on `sys.path`."""
    function, args, kwargs = pickling.loads(data or aside[-1], aside)
    return Call(function=function.find() if isinstance(function, _ByName) else function, args=args, kwargs=kwargs)
