"""Interfaces of a task's host, such as Flyte (execution, storage, secrets, preemption), and of a gang's workers.

Runs in driver and ranks.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.files import Files

OTHER_PROTOCOLS = {"s3": "s3a", "gs": "gcs", "abfs": "az", "abfss": "az"}
"""Second name of each protocol for which Flyte 2's SDK registers another file system: the package's own stays there."""


@dataclass(frozen=True, kw_only=True)
class StoragePaths:
    """Folders in storage from which a gang loads its start checkpoint, and to which the gang saves checkpoints."""

    files: "Files"
    """File system of `previous` and `own`."""
    previous: str | None
    """Folder with the checkpoints of the task's previous attempt or call. None: there was none."""
    own: str
    """Folder for the checkpoints of this attempt of the task."""
    is_claimed: bool = False
    """True if two gangs at the same time may get the same folder, which a gang therefore has to claim."""
    prepare: Callable[[], object] = lambda: None
    """Function that the driver calls before each write of a whole checkpoint or the manifest. Local runs make room for
    the checkpoint here, and models of a sweep store their records. Default: does nothing."""
    resume: str | None = None
    """Text for messages: how the user goes on from these checkpoints. None: the host goes on by itself."""
    shards: str | None = None
    """Folder or fsspec URL to which this attempt's ranks write sharded checkpoints. None: to the folder `own`."""
    previous_shards: str | None = None
    """Folder or fsspec URL with the previous attempt's sharded checkpoints. None: they are in `previous`."""


class Execution:
    """Execution on a host, such as Flyte, that this process is part of. The base class stands for no host."""

    name: str | None = None
    """Name of the execution on the host. `local` in local runs, None without a host."""
    task: object = None
    """Object that identifies the running task, the same one during the task's whole run. None outside a task."""

    def checkpoint_paths(self, key: str) -> StoragePaths | None:
        """Return the checkpoint folders of the gang with this key. None if the host keeps no checkpoints."""
        return None

    def filesystem(self, uri: str) -> Any:
        """Return the fsspec file system of a folder or an fsspec URL, with the host's credentials and settings."""
        return open_filesystem(uri)

    def new_folder(self) -> str | None:
        """Return the URI of a new folder among the task's outputs. None if the host stores no outputs here."""
        return None

    def put_folder(self, folder: "Path", uri: str) -> None:
        """Upload a folder's files to a URL from `new_folder()`.

        Raises:
            Exception: The upload failed. The type of the host's error decides whether the task is retried.
        """
        raise NotImplementedError

    def in_ranks(self) -> "Execution | None":
        """Return the execution that the driver pickles for ranks without a `RankHost`. None if these ranks need none.

        The ranks of `dispatch.run` have no `RankHost`, while the ranks of a task have one.
        """
        return None

    def secret(self, name: Any) -> str:
        """Return the value of a secret.

        Args:
            name: The secret's `group`, `key` and `group_version`, as `flytekit.Secret` has them.

        Raises:
            ValueError: The host has no secret of this name.
        """
        raise ValueError(
            f"there is no secret {name.group}/{name.key}: only a Flyte task has secrets. Outside a task leave "
            "out secret=. The key then comes from WANDB_API_KEY or `wandb login`"
        )


class RankHost(Protocol):
    """Access to the task's host, such as Flyte, in a rank. The driver pickles the object, and the rank unpickles it."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context manager in which the host's functions work as in a task. Other methods need the context."""

    def arguments(self) -> dict[str, Any]:
        """Return the task's inputs by name, converted to Python values for this rank's function."""

    def outputs(self, returned: Any) -> object:
        """Convert rank 0's return value to the object that is pickled for the driver."""

    def results_folder(self) -> object:
        """Return the folder of the files that ranks submit, as an object that a task may return."""


def open_filesystem(uri: str, **options: Any) -> Any:
    """Return the fsspec file system of a folder or an fsspec URL. Works beside Flyte 2's SDK, too.

    Args:
        uri: A path, or an fsspec URL such as `s3://bucket/prefix`.
        options: The file system's own options, in addition to its settings in the environment.
    """
    protocol, is_url, path = uri.partition("://")
    host = path.partition("/")[0]
    # without the path, of which fsspec would take `::` for a chain of file systems
    return url_to_fs(f"{protocol}://{host}/" if is_url else "/", **options)[0]


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
    from fsspec.registry import registry

    protocol, is_url, path = uri.partition("://")
    if is_url and getattr(registry.get(protocol), "asynchronous", False):
        uri = f"{OTHER_PROTOCOLS.get(protocol, protocol)}://{path}"
    return of_fsspec(uri, **options)  # type: ignore[no-any-return]


def current_execution() -> Execution:
    """Return the execution on a host, such as Flyte, that this process is part of. Imports no host's package."""
    executions = [current() for current in _hosts]
    in_task = [each for each in executions if each.task is not None]
    return next(iter([*in_task, *reversed(_known), *executions]), Execution())


@contextlib.contextmanager
def known_to_threads() -> Iterator[None]:
    """Let `current_execution` find the task from any thread of this process, during a `with` block.

    Threads do not inherit the context variables in which the host keeps the task.
    """
    known = current_execution()
    _known.append(known)
    try:
        yield
    finally:
        _known.remove(known)


def provide(current: Callable[[], Execution], *, is_last: bool = False) -> None:
    """Register a host of tasks, such as Flyte. Each host's module calls this function when it is imported.

    If several hosts are registered, `current_execution` takes the one whose task runs here, else the newest.

    Args:
        current: Returns the host's current execution.
        is_last: True if this host replaces all other hosts, those registered before and those that register later.
    """
    global _has_last
    if is_last:
        _hosts.clear()
    if is_last or not _has_last:
        _hosts.insert(0, current)
        _has_last = is_last


_known: list[Execution] = []
"""Executions whose `with known_to_threads()` block is running, the newest last."""
_hosts: list[Callable[[], Execution]] = []
_has_last = False


class Preemptible(Protocol):
    """A gang whose driver is in this process, and which ends early if the task is preempted."""

    def preempt(self, reason: str) -> None:
        """Make the gang save a checkpoint and end. A signal handler calls this method.

        Args:
            reason: Reason for the end, as text for messages.
        """


running: weakref.WeakSet[Preemptible] = weakref.WeakSet()


def preempt_all(reason: str) -> bool:
    """Make all gangs whose driver is in this process save a checkpoint and end. Return True if there are any."""
    present = list(running)
    for preemptible in present:
        preemptible.preempt(reason)
    return bool(present)


# ---- Workers


@dataclass(frozen=True, kw_only=True)
class AgentOrder:
    """Settings with which an agent starts and finds its driver."""

    worker: str = ""
    """Name of the agent's worker for users: the worker's address, except for local workers. Empty before the launch."""
    driver: tuple[str, int]
    """Host and port of the driver."""
    token: bytes = field(repr=False)
    """Secret of the gang, by which agent and driver authenticate each other."""
    num_gpus: int = 0
    """Number of GPUs in the worker's resource limits. 0 if unknown."""
    folder: Path | None = None
    """The driver's folder for checkpoints. An agent that can reach the folder puts checkpoints there instead of sending
    them. None: no folder."""


OnFailure = Callable[[str, Exception], None]
"""Callback for an agent that did not start or raised an error. Arguments: worker and error."""


class AgentLauncher(Protocol):
    """Starts agents, one per worker, on a Dask cluster or another kind of workers.

    The methods' defaults fit workers that are always present.
    """

    workers: Sequence[str]
    """Workers of the first attempt (names for users), in rank order."""
    num_wanted: int
    """Number of workers that the gang should have."""
    host: str
    """IP address at which the workers can reach the driver."""

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Start an agent for each order, and return without waiting for the agents.

        Args:
            orders: One order per agent.
            on_failure: Callback for each agent that fails to start or raises an error.
        """

    def present(self) -> Sequence[str]:
        """Return all present workers (names for users), including workers outside the gang.

        Raises:
            OSError: The scheduler does not answer.
        """
        return self.workers

    @property
    def scheduler(self) -> str | None:
        """Address of the workers' Dask scheduler. None without Dask workers."""
        return None

    def is_connected(self) -> bool:
        """Return True while the Dask scheduler is connected. Always True on one node, which has no scheduler."""
        return True

    def beside(self) -> "AgentLauncher | None":
        """Return a launcher for a gang that evaluates beside this launcher's gang. None: no worker is there for it.

        Raises:
            OSError: The scheduler does not answer.
        """
        return self

    def title(self, worker: str) -> str:
        """Return the name of a worker for messages, also of a worker whose agent has not reported its host."""
        return worker

    def hindrance(self) -> str:
        """Return the reason for missing workers, as text to append to a message. Return an empty text if unknown."""
        return ""

    def close(self) -> None:
        """Release the launched agents. Each agent ends when its connection to the driver closes."""
        return
