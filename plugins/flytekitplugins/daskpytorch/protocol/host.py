"""Interface of a task's host, such as Flyte: the execution, its storage and secrets, and preemption.

Runs in driver and ranks.
"""

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
    """Folders that a gang loads checkpoints from and saves checkpoints to."""

    files: "Files"
    """File system of `previous` and `own`."""
    previous: str | None
    """Folder of the task's attempt before this one. None without any."""
    own: str
    """Folder of this attempt of the task."""
    is_claimed: bool = False
    """True if two concurrent gangs may get the same folder."""
    prepare: Callable[[], object] = lambda: None
    """Function to call before each write of a checkpoint or the manifest."""
    shards: str | None = None
    """Folder or fsspec URL below which this attempt's ranks write sharded checkpoints. None means `own`."""
    previous_shards: str | None = None
    """Folder or fsspec URL with the sharded checkpoints of the attempt before. None means `previous`."""


class Execution:
    """The host's execution that this process is part of. This base class stands for a process without a host."""

    name: str | None = None
    """Name of the execution. `local` in local runs, None without a host."""
    task: object = None
    """Token of the running task, the same object for the task's whole run. None outside a task."""

    def checkpoint_paths(self, key: str) -> StoragePaths | None:
        """Return the checkpoint folders of the gang with this key. None if no later attempt needs them."""
        return None

    def filesystem(self, uri: str) -> Any:
        """Return the fsspec file system of a folder or an fsspec URL, with the host's credentials and settings."""
        return open_filesystem(uri)

    def new_folder(self) -> str | None:
        """Return the URI of a new folder among the task's outputs. None if the host stores no outputs."""
        return None

    def put_folder(self, folder: "Path", uri: str) -> None:
        """Upload a folder's files to a URL from `new_folder()`.

        Raises:
            Exception: The upload failed. The type of the host's error decides whether the task is retried.
        """
        raise NotImplementedError

    def in_ranks(self) -> "Execution | None":
        """Return the execution to pickle for ranks without a `RankHost`. None if those ranks need none."""
        return None

    def secret(self, name: Any) -> str:
        """Return the value of a secret.

        Args:
            name: The secret's `group`, `key` and `group_version`, as `flytekit.Secret` has them.

        Raises:
            ValueError: The host has no secret of this name.
        """
        raise ValueError(
            f"there is no secret {name.group}/{name.key}: only a Flyte task has secrets. Leave it out here"
        )


class RankHost(Protocol):
    """The host's part in a rank. The driver makes and pickles the object, and the rank unpickles it."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which the host's functions work like in any task. All other methods need this context."""

    def arguments(self) -> dict[str, Any]:
        """Return the task's inputs as values of this rank, by name."""

    def outputs(self, returned: Any) -> object:
        """Convert rank 0's return value to the object that is pickled for the driver."""

    def results_folder(self) -> object:
        """Return the folder of all submitted results, as an object that a task may return."""


def open_filesystem(uri: str, **options: Any) -> Any:
    """Return the fsspec file system of a folder or an fsspec URL (see `url_to_fs`)."""
    return url_to_fs(uri, **options)[0]


def url_to_fs(uri: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path there, like `fsspec.url_to_fs`.

    Unlike `fsspec.url_to_fs`, works beside Flyte 2's SDK, too. For `s3://`, `gs://` and `abfs://`, the SDK registers a
    file system whose functions are coroutines. `url_to_fs` returns the file system of s3fs, gcsfs or adlfs instead.

    Args:
        uri: A path, or an fsspec URL such as `s3://bucket/prefix`.
        options: The file system's own options, in addition to its settings in the environment.

    Raises:
        ImportError: The package of the file system is not installed. The message names the package.

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
    """Return the host's execution that this process is part of. Imports no host, and is cheap without one."""
    executions = [current() for current in _hosts]
    in_task = [each for each in executions if each.task is not None]
    return next(iter([*in_task, *reversed(_known), *executions]), Execution())


@contextlib.contextmanager
def known_to_threads() -> Iterator[None]:
    """Let threads that a task's function starts find the task. Threads do not inherit the host's context variables."""
    known = current_execution()
    _known.append(known)
    try:
        yield
    finally:
        _known.remove(known)


def provide(current: Callable[[], Execution], *, is_last: bool = False) -> None:
    """Register a host. Each host calls this function when it is imported.

    If several hosts are registered, `current_execution` takes the one whose task runs here, else the newest.

    Args:
        current: Returns the host's current execution.
        is_last: True replaces all other hosts, earlier and later ones.
    """
    global _has_last
    if is_last:
        _hosts.clear()
    if is_last or not _has_last:
        _hosts.insert(0, current)
        _has_last = is_last


_known: list[Execution] = []
"""Executions in blocks of `known_to_threads`, the newest last."""
_hosts: list[Callable[[], Execution]] = []
_has_last = False


class Preemptible(Protocol):
    """A gang of this process that ends early if the task is preempted."""

    def preempt(self, reason: str) -> None:
        """Save a checkpoint and end. A signal handler calls this method."""


running: weakref.WeakSet[Preemptible] = weakref.WeakSet()


def preempt_all(reason: str) -> bool:
    """Make all gangs of this process save a checkpoint and end. Return True if this process has any."""
    present = list(running)
    for preemptible in present:
        preemptible.preempt(reason)
    return bool(present)
