"""The host of a task, Flyte or none: how all else asks for it, and how it ends gangs. Runs in driver and ranks."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from flytekitplugins.daskpytorch.protocol.files import Files


@dataclass(frozen=True, kw_only=True)
class StoragePaths:
    """Where checkpoints come from and go to."""

    files: "Files"
    """The file system of `previous` and `own`."""
    previous: str | None
    """Folder of the attempt before."""
    own: str
    """Folder of this attempt."""
    is_claimed: bool = False
    """True if two gangs may be given the same folder at the same time."""
    prepare: Callable[[], object] = lambda: None
    """Called before a checkpoint or the manifest is written."""
    shards: str | None = None
    """Folder or fsspec URL below which this attempt's ranks write sharded checkpoints. None means `own`."""
    previous_shards: str | None = None
    """Folder or fsspec URL of the attempt before, likewise. None means `previous`."""


class Execution:
    """What this process executes, as its host knows it. As it stands here: nothing, since there is no host."""

    name: str | None = None
    """The execution's; `local` in local runs."""
    task: object = None
    """Stands for the task: the same object for as long as it runs; None outside one."""

    def checkpoint_paths(self, key: str) -> StoragePaths | None:
        """Where the gang of this key keeps its checkpoints; None where no other attempt will look for them."""
        return None

    def filesystem(self, uri: str) -> Any:
        """The fsspec file system of a folder or an fsspec URL, with what the host knows of how to get there."""
        return open_filesystem(uri)

    def new_folder(self) -> str | None:
        """The URI of a folder that nobody else has, among the outputs of the task; None where nothing has outputs."""
        return None

    def put_folder(self, folder: "Path", uri: str) -> None:
        """Upload the files of a folder to `new_folder()`, if that is a URL.

        Raises:
            Exception: The storage does not take them. The host's error decides whether the task is tried again.
        """
        raise NotImplementedError

    def in_ranks(self) -> "Execution | None":
        """What stands for it in ranks without a `RankHost`, where it is pickled to; None: they need nothing of it."""
        return None

    def secret(self, name: Any) -> str:
        """The value of a secret with this group, key and group version, as `flytekit.Secret` has them.

        Raises:
            ValueError: There is none of this name.
        """
        raise ValueError(f"there is no secret {name.group}/{name.key}: nothing here keeps secrets")


class RankHost(Protocol):
    """What a rank has of its host. Made in the driver, opened in the rank, and bytes to whoever passes it on."""

    def entered(self) -> AbstractContextManager[object]:
        """Have the host's own functions work in the rank as in any task; all that follows is called within."""

    def arguments(self) -> dict[str, Any]:
        """The task's inputs, as this rank's own values."""

    def outputs(self, returned: Any) -> object:
        """What rank 0's return value is to the driver: it goes there pickled."""

    def results_folder(self) -> object:
        """The folder of all that the ranks submit, as a task may return it."""


def open_filesystem(uri: str, **options: Any) -> Any:
    """The fsspec file system of a folder or an fsspec URL; see `url_to_fs`."""
    return url_to_fs(uri, **options)[0]


def url_to_fs(uri: str, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path there: `fsspec.url_to_fs`, also beside Flyte 2's SDK.

    An import of that SDK has fsspec give out, for `s3://`, `gs://` and `abfs://`, a file system whose functions are
    coroutines. Here it is the one that fsspec itself has: s3fs's, gcsfs's, adlfs's.

    Args:
        uri: A path, or an fsspec URL such as `s3://bucket/prefix`.
        options: What the file system needs besides what the environment says, by its own names.

    Raises:
        ImportError: The package of that file system is not installed; the message names it.

    Examples:
        >>> from flytekitplugins.daskpytorch import url_to_fs
        >>> files, path = url_to_fs("memory://names/2026.csv")
        >>> files.pipe_file(path, b"Rex")
        >>> files.cat_file(path)
        b'Rex'
    """
    from fsspec.core import url_to_fs as of_fsspec
    from fsspec.registry import known_implementations, registry

    protocol, is_url, _ = uri.partition("://")
    if not is_url or not getattr(registry.get(protocol), "asynchronous", False):
        return of_fsspec(uri, **options)  # type: ignore[no-any-return]
    package, _, name = known_implementations[protocol]["class"].rpartition(".")
    try:
        kind = getattr(import_module(package), name)
    except ImportError as error:
        raise ImportError(f"{protocol}:// needs the package {package}: pip install {package}") from error
    return kind(**kind._get_kwargs_from_urls(uri) | options), kind._strip_protocol(uri)  # noqa: SLF001 - as fsspec does


def current_execution() -> Execution:
    """Return what is being executed here. Costs nothing where no host was imported, and imports none."""
    executions = [current() for current in _hosts]
    in_task = [each for each in executions if each.task is not None]
    return next(iter([*in_task, *reversed(_known), *executions]), Execution())


@contextlib.contextmanager
def known_to_threads() -> Iterator[None]:
    """Have threads that a task's function starts find the task, too: the context of its host is not theirs."""
    known = current_execution()
    _known.append(known)
    try:
        yield
    finally:
        _known.remove(known)


def provide(current: Callable[[], Execution], *, is_last: bool = False) -> None:
    """Have a host answer from now on, called when it is imported; `is_last`: and no other.

    Of several hosts the one answers whose task runs here, and where none does the newest.
    """
    global _has_last
    if is_last:
        _hosts.clear()
    if is_last or not _has_last:
        _hosts.insert(0, current)
        _has_last = is_last


_known: list[Execution] = []
"""Executions of the tasks that run here and may have threads, the newest last."""
_hosts: list[Callable[[], Execution]] = []
_has_last = False


class Preemptible(Protocol):
    """What runs in this process and must end when the task is told to."""

    def preempt(self, reason: str) -> None:
        """Save and end; called by a signal handler."""


running: weakref.WeakSet[Preemptible] = weakref.WeakSet()


def preempt_all(reason: str) -> bool:
    """Have all gangs of this process save a checkpoint and end; whether there are any."""
    present = list(running)
    for preemptible in present:
        preemptible.preempt(reason)
    return bool(present)
