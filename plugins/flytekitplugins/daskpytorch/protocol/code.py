"""The user's code and arguments, as bytes: packed in the driver, unpacked in a rank.

Neither the scheduler nor a Dask worker ever unpickles a user's module by name; they may have no copy of it, or an old
one. What travels is an archive of the project's sources and a pickled call, which only the ranks open.
"""

import fnmatch
import hashlib
import io
import os
import pickle
import site
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["Call", "Code", "name_of", "pack_call", "pack_code", "unpack_call", "unpack_code"]

MAX_RESOURCE_BYTES = 1 << 20
"""Files of a package that are not code travel up to this size; data belongs in storage."""
CODE_PATTERNS = ("*.py", "*.pyi", "*.so")
INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv", *INSTALLED_FOLDERS}


@dataclass(frozen=True, kw_only=True)
class Code:
    """The project's sources."""

    archive: bytes
    """A tar file of modules, laid out as their names say; empty for who has unpacked it."""
    digest: str
    """SHA-256 of the archive, in hexadecimal digits."""


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


# ---- Packing, in the driver -----------------------------------------------------------------------------------------


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call: the function by name where its module has it, else (`__main__`, closures) by value.

    Raises:
        TypeError: Something in it cannot be pickled; the message says which argument, or the function.
    """
    by_name = _by_name(function)
    try:
        return _pickled((by_name or function, tuple(args), dict(kwargs)))
    except Exception as error:
        parts = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        parts["the function itself"] = by_name or function
        culprits = [name for name, value in parts.items() if not _can_pickle(value)]
        raise TypeError(
            f"{name_of(function)} cannot be sent to the ranks, because {', '.join(culprits) or 'a part of it'} cannot "
            f"be pickled: {error}. Pass plain data, and open files, locks and connections inside the function."
        ) from error


def pack_code() -> Code:
    """Archive the project: every loaded module that no installation holds, with its whole package or its neighbours.

    Whole packages, because modules may be imported later than now.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as archive:  # links may point to where only we are
        for name, path in sorted(_project_files().items()):
            archive.add(path, arcname=name, recursive=False, filter=_anonymous)
    data = buffer.getvalue()
    return Code(archive=data, digest=hashlib.sha256(data).hexdigest())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Also pickles modules that are objects of a class of their own.

    Cloudpickle takes `torch.classes`, which is one, along with every function that has `torch` and says `x.classes`.
    """

    def reducer_override(self, obj: Any) -> Any:
        """How such a module travels: by the name that it is imported by."""
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            for name, module in list(sys.modules.items()):
                if module is obj:
                    return import_module, (name,)
        return super().reducer_override(obj)


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _by_name(function: Callable[..., Any]) -> _ByName | None:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or "<locals>" in qualname or "<lambda>" in qualname:
        return None
    reference = _ByName(module=module, qualname=qualname)
    try:
        return reference if module in sys.modules and reference.find() is function else None
    except AttributeError:
        return None


def _project_files() -> dict[str, Path]:
    installed = _installation_folders()
    files: dict[str, Path] = {}
    companions: set[tuple[Path, str | None]] = set()
    for module in list(sys.modules.values()):
        if place := _place_in_project(module, installed):
            root, relative = place
            files[str(relative)] = root / relative
            companions.add((root, relative.parts[0] if len(relative.parts) > 1 else None))
    for root, package in companions:
        for path in root.glob("*.py") if package is None else _package_files(root / package):
            files.setdefault(str(path.relative_to(root)), path)
    return files


def _place_in_project(module: ModuleType, installed: tuple[str, ...]) -> tuple[Path, Path] | None:
    """The folder that the module is imported from and its path below, or None for what is installed."""
    attributes = _attributes(module)
    name, file = attributes.get("__name__"), attributes.get("__file__")
    if not isinstance(name, str) or not isinstance(file, str) or name.startswith(("__m", "flytekitplugins.")):
        return None  # built in; the script itself, which is pickled by value; or this package and its siblings
    absolute = os.path.abspath(file)
    # Of whatever environment: layered ones (PYTHONPATH, .pth files) have folders that this one does not know.
    if absolute.startswith(installed) or any(f"{os.sep}{name}{os.sep}" in absolute for name in INSTALLED_FOLDERS):
        return None
    path = Path(absolute)
    parts = name.split(".")
    relative = Path(*parts, path.name) if path.stem == "__init__" else Path(*parts[:-1], path.name)
    root = Path(str(path).removesuffix(str(relative)))
    return (root, relative) if root / relative == path and path.is_file() else None


def _attributes(module: ModuleType) -> dict[str, Any]:
    """What is in a module now: to ask a lazily imported one for an attribute would import it."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:  # anything may stand in sys.modules
        return {}
    return attributes


def _installation_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(os.path.abspath(folder) + os.sep for folder in folders if folder)


def _package_files(package: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = sorted(s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            is_code = any(fnmatch.fnmatch(name, pattern) for pattern in CODE_PATTERNS)
            if path.is_file() and (is_code or path.stat().st_size <= MAX_RESOURCE_BYTES):
                yield path


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same sources give the same bytes, whoever packs them and when."""
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


def _can_pickle(value: object) -> bool:
    try:
        _pickled(value)
    except Exception:
        return False
    return True


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called; a partial, like the function inside it."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


# ---- Unpacking, beside the ranks and in them ------------------------------------------------------------------------


def unpack_code(code: Code, folder: Path) -> Path:
    """Unpack the sources once below `folder`, which is the caller's alone; the path to put on `sys.path`."""
    target = folder / code.digest[:16]
    if not target.exists():
        target.mkdir()
        with tarfile.open(fileobj=io.BytesIO(code.archive), mode="r:") as archive:
            archive.extractall(target, filter="data")
    return target


def unpack_call(data: bytes) -> Call:
    """The call that `pack_call` made, with its function found; the sources must be on `sys.path`."""
    function, args, kwargs = pickle.loads(data)  # noqa: S301 - from our own driver, by our agent's pipe
    return Call(function=function.find() if isinstance(function, _ByName) else function, args=args, kwargs=kwargs)
