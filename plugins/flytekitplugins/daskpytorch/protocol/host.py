"""Interfaces of a task's host, such as Flyte (execution, storage, secrets, preemption), and of a gang's workers.

Runs in driver and ranks.
"""

import contextlib
import itertools
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
    files: "Files"
    previous: str | None
    """Checkpoints of the task's previous attempt or call."""
    own: str
    is_claimed: bool = False
    """Two gangs at the same time may get the same folder."""
    prepare: Callable[[], object] = lambda: None
    """Called by the driver before each write of a whole checkpoint or the manifest. A sweep's models store records."""
    resume: str | None = None
    """How the user goes on from these checkpoints, or None if the host goes on by itself."""
    shards: str | None = None
    """Folder or fsspec URL to which ranks write sharded checkpoints, by default `own`."""
    previous_shards: str | None = None
    """Folder or fsspec URL of the previous attempt's sharded checkpoints, by default `previous`."""


class Execution:
    """The base class stands for no host."""

    name: str | None = None
    task: object = None
    """Identifies the running task, as one object during its whole run."""

    def checkpoint_paths(self, key: str) -> StoragePaths | None:
        return None

    def opener(self) -> Callable[[str], Any]:
        """Return a picklable function that opens the file system of a path or URL with the task's credentials."""
        return open_filesystem

    def filesystem(self, uri: str) -> Any:
        return self.opener()(uri)

    def new_folder(self) -> str | None:
        """Return the URI of a new folder among the task's outputs, or None if the host stores none here."""
        return None

    def put_folder(self, folder: "Path", uri: str) -> None:
        """Upload to a URL from `new_folder()`. The type of the host's error decides whether the task is retried."""
        raise NotImplementedError

    def in_ranks(self) -> "Execution | None":
        """Return the execution that the driver pickles for ranks without a `RankHost`, those of `dispatch.run`."""
        return StorageInRanks(self.opener()) if self.task is not None else None

    def secret(self, name: Any) -> str:
        """Return a secret by `flytekit.Secret`'s fields `group`, `key` and `group_version`, or raise ValueError."""
        raise ValueError(
            f"there is no secret {name.group}/{name.key}: only a Flyte task has secrets. Outside a task leave "
            "out secret=. The key then comes from WANDB_API_KEY or `wandb login`"
        )


@dataclass(frozen=True)
class StorageInRanks(Execution):
    """Execution in the ranks of `dispatch.run`, with the credentials of the driver's task."""

    open: Callable[[str], Any]
    """Picklable, with settings of the storage such as access keys. A cloud role is that of the rank's own pod."""

    def opener(self) -> Callable[[str], Any]:
        return self.open


class RankHost(Protocol):
    """The task's host, such as Flyte, in a rank. The driver pickles this object."""

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which the host's functions, and the other methods, work as in a task."""

    def arguments(self) -> dict[str, Any]:
        """Return the task's inputs by name, converted to Python values."""

    def outputs(self, returned: Any) -> object:
        """Convert rank 0's return value to the object that is pickled for the driver."""

    def results_folder(self) -> object:
        """Return the folder of submitted files, as an object that a task may return."""


def open_filesystem(uri: str, **options: Any) -> Any:
    """Return the fsspec file system of a path or URL, also beside Flyte 2's SDK."""
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
    """Return the execution that this process is part of, without an import of a host's package."""
    executions = [current() for current in _hosts]
    in_task = (each for each in executions if each.task is not None)
    return next(itertools.chain(in_task, (known() for known in reversed(_known)), executions), Execution())


def know(current: Callable[[], Execution]) -> None:
    """Let all threads of this process find an execution, as in a rank.

    Threads do not inherit the context variables in which the host keeps the task.
    """
    _known.append(current)


@contextlib.contextmanager
def known_to_threads(execution: Execution | None = None) -> Iterator[None]:
    """Let all threads find an execution, by default the present one, during a `with` block."""
    execution = execution or current_execution()
    know(known := lambda: execution)
    try:
        yield
    finally:
        _known.remove(known)


def provide(current: Callable[[], Execution]) -> None:
    """Register a host of tasks, as each host's module does at its import.

    Of several hosts, `current_execution` takes the one whose task runs here, else a known execution, else the newest.
    """
    _hosts.insert(0, current)


_known: list[Callable[[], Execution]] = []
_hosts: list[Callable[[], Execution]] = []


class Preemptible(Protocol):
    def preempt(self, reason: str) -> None:
        """Make the gang save a checkpoint and end. Called in a signal handler."""


running: weakref.WeakSet[Preemptible] = weakref.WeakSet()


def preempt_all(reason: str) -> bool:
    """Return False if this process has no gangs."""
    present = list(running)
    for preemptible in present:
        preemptible.preempt(reason)
    return bool(present)


def check_count(task: str, returned: Any, names: Sequence[str]) -> None:
    if len(names) < 2 or (isinstance(returned, tuple) and len(returned) == len(names)):
        return
    what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    raise TypeError(
        f"task {task} declares {len(names)} outputs ({', '.join(names)}); rank 0 returned {what}. Return a tuple of "
        f"{len(names)} values"
    )


# ---- Workers


@dataclass(frozen=True, kw_only=True)
class AgentOrder:
    worker: str = ""
    """The worker's address, except for local workers. Empty before the launch."""
    driver: tuple[str, int]
    token: bytes = field(repr=False)
    num_gpus: int = 0
    """The worker's limit, or 0 if unknown."""
    folder: Path | None = None
    """The driver's folder, where an agent that can reach it puts checkpoints instead of sending them."""


OnFailure = Callable[[str, Exception], None]
"""Gets worker and error of an agent that did not start or raised an error."""


class AgentLauncher(Protocol):
    """Starts agents, one per worker, on a Dask cluster or other workers.

    The defaults fit workers that are always present.
    """

    workers: Sequence[str]
    """Workers of the first attempt (names for users), in rank order."""
    num_wanted: int
    host: str
    """IP address at which the workers can reach the driver."""

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Start an agent for each order, without waiting for the agents."""

    def present(self) -> Sequence[str]:
        """Return all present workers, also those outside the gang. OSError: the scheduler does not answer."""
        return self.workers

    @property
    def scheduler(self) -> str | None:
        return None

    def is_connected(self) -> bool:
        return True

    def beside(self) -> "AgentLauncher | None":
        """Return a launcher for a gang that evaluates beside this one, if there is a worker. OSError: no answer."""
        return self

    def title(self, worker: str) -> str:
        """Return a worker's name for messages, also of a worker whose agent has not reported its host."""
        return worker

    def close(self) -> None:
        """Release the agents, each of which ends when its connection to the driver closes."""
        return
