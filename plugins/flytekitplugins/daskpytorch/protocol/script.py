"""Scripts and modules that ranks run as `torchrun` runs them. The driver finds a program, and each rank runs it."""

import asyncio
import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from flytekitplugins.daskpytorch.process import ending


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program with its command line, as the function of a gang.

    Made by `script_of` and `module_of`, which check it.
    """

    given: str
    is_module: bool = False
    args: tuple[str, ...] = ()
    file: str | None = None
    """Absolute path on the driver's machine, or None for an installed module, which does not travel."""
    folder: str | None = None
    """Folder from which the program imports its own modules, None as for `file`."""
    directory: str = field(default_factory=os.getcwd)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.given if self.is_module else Path(self.given).stem)
        object.__setattr__(self, "__module__", Path(self.folder).name if self.folder is not None else "installed")

    def __call__(self) -> None:
        copy = _place.script if self.file is not None else None
        if copy is not None and str(copy) != self.file:  # on another machine than the driver's
            root = copy.parents[len(Path(self.file or "").relative_to(self.folder or "").parts) - 1]
            _run_module(self.given, self.args, str(root)) if self.is_module else _run_script(copy, self.args)
            return
        with contextlib.suppress(FileNotFoundError):  # an installed program on another machine
            os.chdir(self.directory)
        if self.is_module:
            _run_module(self.given, self.args, str(Path.cwd()))
        else:
            _run_script(self.given, self.args)


# ---- In the driver --------------------------------------------------------------------------------------------------


def script_of(path: str | os.PathLike[str], *args: object) -> Script:
    """Return the script at a path. OSError or SyntaxError: it cannot start."""
    given = os.fspath(path)
    _check(Path(given))
    file = Path(given).resolve()
    return Script(given=given, args=tuple(map(str, args)), file=str(file), folder=str(file.parent))


def module_of(name: str, *args: object) -> Script:
    """Return the module that `python -m name` would run. The packages that contain it are imported.

    ModuleNotFoundError or SyntaxError: it cannot run.
    """
    importlib.invalidate_caches()  # the module's file may be new
    sys.path.insert(0, here := str(Path.cwd()))
    try:
        spec = _spec_of(name)
    finally:
        sys.path.remove(here)
    file = Path(spec.origin or "").absolute()
    _check(file)
    root = file.parents[spec.name.count(".")]
    return Script(given=name, is_module=True, args=tuple(map(str, args)), file=str(file), folder=str(root))


def as_script(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Replace a call of `run_script` or `run_module` by its program, so that the program's folder travels."""
    if args and (function is run_script or function is run_module):
        return (script_of if function is run_script else module_of)(*args), ()
    return function, args


def _check(file: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # each rank shows them
        _compiled(file, str(file))


# ---- In a rank ------------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    is_rank: bool = False
    """False where the driver is the process, as in debug mode."""
    script: Path | None = None
    originals: Mapping[str, str] = field(default_factory=dict)
    """Copied source -> its path on the driver's machine."""
    folder: str | None = None
    """`sys.path[0]` of the newest program that this process has run."""
    modules: set[str] = field(default_factory=set)
    without_group: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


_place = _Place()


def set_place(
    script: Path | None, originals: Mapping[str, str], without_group: Callable[[], AbstractContextManager[None]]
) -> None:
    _place.is_rank, _place.script, _place.originals = True, script, originals
    _place.without_group = without_group


def run_script(path: str | os.PathLike[str], *args: object) -> None:
    """Run a Python script in this rank, as `torchrun path *args` would run the script.

    `sys.argv`, `sys.path[0]`, `__main__`, `__file__` and the working folder are those of a script that Python runs. An
    exit code of 0 is a normal end. `run_script` returns after the script's threads have ended, and its open files are
    written. Exit functions run at the rank's end. A second run in the same process starts afresh: its modules are
    imported anew.

    As a gang's function, `dispatch.run(client, run_script, "train.py", "--lr", "0.1")` sends the script's folder to
    workers on other machines. A script that a task's function runs must lie beside a module of the project.

    Args:
        path: Path of the script. A relative path counts from the working folder, else from the folders on `sys.path`.
        *args: Command-line arguments. Numbers and paths become texts.

    Raises:
        FileNotFoundError: No folder has the script.
        SyntaxError: The file is not a Python program.
        SystemExit: The script has ended with another exit code than 0.
        BaseException: The script's own exception.

    Examples:
        >>> from pathlib import Path
        >>> from flytekitplugins.daskpytorch import dispatch, run_script
        >>> _ = Path("train.py").write_text("import sys; assert sys.argv[1:] == ['--lr', '0.1']")
        >>> dispatch.run(client, run_script, "train.py", "--lr", "0.1").result()
        [None, None]
    """
    with finished():
        _run_script(path, args)


def _run_script(path: str | os.PathLike[str], args: Sequence[object]) -> None:
    file = _found(Path(path))
    shown_as = _place.originals.get(str(file), str(file.absolute()))

    def load() -> tuple[CodeType, ModuleType]:
        main = ModuleType("__main__")
        main.__file__ = str(file.absolute())
        main.__loader__ = SourceFileLoader("__main__", main.__file__)
        return _compiled(file, shown_as), main

    _run(load, [os.fspath(path), *args], str(file.resolve().parent))


def run_module(name: str, *args: object) -> None:
    """Run a module in this rank, as `torchrun -m name *args` would run the module. See `run_script`.

    Args:
        name: Name of the module, such as `package.train`, or of a package that has a `__main__`.
        *args: Command-line arguments. Numbers and paths become texts.

    Raises:
        ModuleNotFoundError: Python cannot find the module.
        SystemExit: The module has ended with another exit code than 0.
        BaseException: The module's own exception.

    Examples:
        >>> from pathlib import Path
        >>> from flytekitplugins.daskpytorch import dispatch, run_module
        >>> _ = Path("fit.py").write_text("assert __name__ == '__main__' and __spec__.name == 'fit'")
        >>> dispatch.run(client, run_module, "fit").result()
        [None, None]
    """
    with finished():
        _run_module(name, args, str(Path.cwd()))


def finished() -> contextlib.AbstractContextManager[None]:
    return ending.finished("the program", ending.MAX_WAIT if _place.is_rank else None)


def _run_module(name: str, args: Sequence[object], folder: str) -> None:
    def load() -> tuple[CodeType, ModuleType]:
        spec = _spec_of(name)
        loader: Any = spec.loader
        main = ModuleType("__main__")
        main.__spec__, main.__package__, main.__loader__, main.__file__ = spec, spec.parent, loader, spec.origin
        sys.argv[0] = spec.origin or name
        return loader.get_code(spec.name), main

    _run(load, [name, *args], folder)


def _spec_of(name: str) -> ModuleSpec:
    with contextlib.suppress(ModuleNotFoundError):  # of a package above
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            return spec
    where = f"in {Path.cwd()} or on sys.path. Check the name and the working folder"
    raise ModuleNotFoundError(f"no module {name!r} that can be run, {where}", name=name)


def _run(load: Callable[[], tuple[CodeType, ModuleType]], argv: Sequence[object], folder: str) -> None:
    _forget()
    names = ("__main__", "__mp_main__")
    before = {name: sys.modules[name] for name in names if name in sys.modules}, sys.argv[:], sys.path[:]
    known = set(sys.modules)
    sys.argv[:] = map(str, argv)
    sys.path.insert(0, folder)
    try:
        code, main = load()
        sys.modules |= dict.fromkeys(names, main)
        with _place.without_group(), ending_as_program():
            exec(code, main.__dict__)  # noqa: S102 - the user's program
    finally:
        _place.folder, _place.modules = folder, {name for name in set(sys.modules) - known if _is_below(folder, name)}
        if not _place.is_rank:  # a rank's threads and exit functions may still need the program's
            modules, sys.argv[:], sys.path[:] = before
            for name in names:
                sys.modules.pop(name, None)
            sys.modules |= modules


def _forget() -> None:
    for name in _place.modules:
        sys.modules.pop(name, None)
    if _place.is_rank and _place.folder in sys.path:
        sys.path.remove(_place.folder)
    _place.folder, _place.modules = None, set()


def _is_below(folder: str, name: str) -> bool:
    file = attributes_of(sys.modules.get(name)).get("__file__")
    return isinstance(file, str) and file.startswith(folder + os.sep) and "site-packages" not in file


def attributes_of(module: object) -> dict[str, Any]:
    """Return a module's attributes without `getattr`, which would import a lazily imported module."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:  # sys.modules may hold objects of any kind
        return {}
    return attributes


def _found(path: Path) -> Path:
    places = [path, *(Path(entry, path) for entry in sys.path)]
    return next((place for place in places if place.is_file()), path)


def _compiled(file: Path, shown_as: str) -> CodeType:
    return compile(file.read_bytes(), shown_as, "exec", dont_inherit=True)


@contextlib.contextmanager
def ending_as_program() -> Iterator[None]:
    """Let the block end by `sys.exit()`, `quit()` or Click's `main()`, unless the exit code is not 0."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def completed(call: Callable[[], Any]) -> Any:
    """Return the value of a user's call, or None after `sys.exit()`. Processes that the call has forked end with it."""
    process = os.getpid()
    try:
        with ending_as_program():
            returned = call()
            return asyncio.run(returned) if inspect.iscoroutine(returned) else returned
    finally:
        if os.getpid() != process:
            _end_fork(sys.exception())


def _end_fork(error: BaseException | None) -> NoReturn:
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    code = (error.code or 0) if isinstance(error, SystemExit) else 1
    return int(code) & 0xFF if isinstance(code, int) else 1


def describe_exit(error: SystemExit) -> str:
    return f"exit code {exit_code_of(error)}" + (f" ({error.code})" if isinstance(error.code, str) else "")
