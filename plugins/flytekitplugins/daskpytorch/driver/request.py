"""Request for one gang, and the gang's key, which stays equal across a task's attempts. Made in the driver."""

import contextlib
import hashlib
import inspect
import pickle
import re
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from flytekitplugins.daskpytorch.driver.calls import Calls
from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.code import Code, function_of, name_of, pack_call
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import Execution, StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, Training
from flytekitplugins.daskpytorch.protocol.payload import SharedMemory
from flytekitplugins.daskpytorch.protocol.script import Script
from flytekitplugins.daskpytorch.protocol.sharded import ShardedCheckpoint
from flytekitplugins.daskpytorch.settings import Gang

MAX_NAME = 100
"""Maximum length of a function's name in a key, in characters. Longer names lose their beginning."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request for one gang: the call, the settings, and where checkpoints go."""

    name: str
    """Function name or task name."""
    call: bytes | None
    """The pickled call of the user's function, without the memory in `large`. None: the gang stays, with `calls`."""
    large: SharedMemory | None = field(default=None, repr=False)
    """Large arguments of the call. None without large arguments."""
    ranks_per_worker: int
    num_gpus: int = 0
    """Number of GPUs in each worker's or the task's limits. 0 if unknown."""
    settings: Gang
    gpu_check: bytes | None = field(default=None, repr=False)
    """The pickled function of `Gang(gpu_check=...)`. None without a function."""
    pass_local_rank: bool = False
    """True passes the argument `local_rank` to the function: the rank's index on its worker."""
    host: bytes | None = field(default=None, repr=False)
    """Pickled `RankHost`, which converts a Flyte task's inputs and outputs in ranks. None for gangs of `dispatch`."""
    execution: bytes | None = field(default=None, repr=False)
    """Pickled `Execution`, by which ranks without a `RankHost` reach Flyte's storage. None if ranks need none."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that a Flyte task gives its ranks, which may hold secrets."""
    observers: Sequence[Observer] = ()
    """Observers of this gang, such as the user's and the display's."""
    training: Training | None = None
    """Name, id and inputs of the training for observers. None: `Observer.begins` is not called."""
    storage: StoragePaths | None = None
    """Checkpoint folders of this attempt and the previous attempt of the task. None if no later attempt or call looks
    for checkpoints."""
    code: Code | None = None
    """The project's packed sources. None: the supervisor packs the sources."""
    script: Script | None = None
    """The program that ranks run as their `__main__`. None: ranks call a function."""
    key: str = ""
    """Unique name among the task's gangs, equal in every attempt. Empty for a task's only gang."""
    calls: Calls | None = field(default=None, repr=False, compare=False)
    """Calls of a gang that stays. None in a gang of one call."""
    evaluation: "Request | None" = field(default=None, repr=False)
    """Request for the gangs that evaluate this gang's checkpoints, each with another `start`. None: no evaluation."""
    start: ShardedCheckpoint | tuple[CheckpointFile, Path] | None = None
    """Checkpoint that this gang evaluates: a sharded one, or a whole one and its file on the driver's disk. None: the
    gang is no evaluation, and starts from the checkpoints in `storage`."""
    keep: object = field(default=None, repr=False, compare=False)
    """The call's function and arguments, referenced until the gang's end. Dask then keeps the data of Dask futures
    among the arguments."""


def request_for(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Gang,
    *,
    pass_local_rank: bool = False,
    code: Code | None = None,
    execution: Execution | None = None,
) -> Request:
    """Return the request for one gang that calls a function, without key, storage and training.

    Args:
        function: The function that each rank calls.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        settings: Settings of the gang.
        pass_local_rank: Passes the argument `local_rank`, too: the rank's index on its worker.
        code: The project's packed sources. By default, the supervisor packs them.
        execution: Flyte execution in which the user asked for the gang. None uses this thread's execution.
    """
    call, memory = packed(function, args, kwargs)
    request = _request(settings, execution or current_execution(), name=name_of(function), call=call)
    return replace(
        request,
        large=memory,
        pass_local_rank=pass_local_rank,
        code=code,
        script=function if isinstance(function, Script) else None,
        keep=(function, args, kwargs),
    )


def request_for_calls(settings: Gang) -> Request:
    """Return the request for a gang that stays, without key, storage, training and `calls`."""
    return _request(settings, current_execution(), name="gang", call=None)


def _request(settings: Gang, execution: Execution, *, name: str, call: bytes | None) -> Request:
    in_ranks = execution.in_ranks()
    return Request(
        name=name,
        call=call,
        execution=pickle.dumps(in_ranks) if in_ranks is not None else None,
        ranks_per_worker=1 if settings.ranks_per_worker == "auto" else settings.ranks_per_worker,
        settings=settings,
        gpu_check=packed_check(settings),
        observers=[make() for make in settings.observers],
    )


def packed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[bytes, SharedMemory | None]:
    """Return a pickled call, and the memory of its large arguments, or None without large arguments.

    Raises:
        TypeError: The function or an argument cannot be pickled. The message names the part.
    """
    memory: SharedMemory | None = None

    def put_aside(data: bytes | memoryview) -> bool:
        nonlocal memory
        memory = memory or _memory()
        if memory is not None:
            memory.add(data)
        return memory is not None

    return pack_call(function, args, kwargs, put_aside), memory


def packed_check(settings: Gang) -> bytes | None:
    """Return the pickled function of `Gang(gpu_check=...)`. None without a function.

    Raises:
        TypeError: The function cannot be pickled.
    """
    return None if isinstance(settings.gpu_check, str) else pack_call(settings.gpu_check, (), {})


def _memory() -> SharedMemory | None:
    """Return new shared memory. None if the call should leave the open files to others."""
    with contextlib.suppress(OSError):  # with 1000 gangs, this may mean 1000 open files
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return SharedMemory() if len(list(Path("/proc/self/fd").iterdir())) < limit // 2 else None
    return None


def check_function(function: Callable[..., Any], *, may_be_async: bool = False) -> None:
    """Check that calling the function can train. Otherwise ranks would silently return a new object.

    Args:
        function: The function.
        may_be_async: Accepts coroutine functions.

    Raises:
        TypeError: The call only makes an object. The message says what to pass instead.
    """
    name = name_of(function)
    if hasattr(function, "__dask_graph__"):
        raise TypeError(f"{name} is a dask.delayed object, whose call trains nothing: give the function itself")
    if isinstance(function, type):
        raise TypeError(f"{name} is a class, whose call only makes an object: give a function that trains")
    called = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    if inspect.iscoroutinefunction(called) and not may_be_async:
        raise TypeError(
            f"{name} is a coroutine function, whose call trains nothing: give a function that runs it, by "
            f"asyncio.run({name}(...))"
        )
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(f"{name} is a generator function, whose call trains nothing: give a function without yield")


def check_arguments(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Check that the function accepts these arguments, before any rank calls the function.

    Raises:
        TypeError: The function rejects the arguments. The message contains the function's signature.
    """
    called = function_of(function)
    with contextlib.suppress(ValueError):  # a few builtins have no signature
        signature = _signature(called)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{len(args)} by position" + "".join(f", {name}" for name in kwargs)
            raise TypeError(
                f"{name_of(function)}{signature} cannot be called with the arguments given ({what}): {error}"
            ) from error


def _signature(called: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the outermost wrapper, which may differ from the wrapped function's.

    Hydra's wrapper, for example, takes no argument.

    Raises:
        ValueError: Neither wrapper nor wrapped function has a signature.
    """
    try:
        return inspect.signature(called, follow_wrapped=False)
    except ValueError:  # the wrapper is written in C, as with `functools.lru_cache`
        return inspect.signature(called)


def storage_of(
    execution: Execution, key: str, settings: Gang, paths: StoragePaths | None = None
) -> StoragePaths | None:
    """Return the folders of a gang's checkpoints, or None if no later attempt looks for checkpoints.

    Args:
        execution: Flyte execution of the task.
        key: Key of the gang.
        settings: Settings of the gang, whose `checkpoint_uri` may name a folder for checkpoints.
        paths: Folders used instead of the execution's folders.
    """
    paths, uri = paths or execution.checkpoint_paths(key), settings.checkpoint_uri
    if uri is None:
        return paths
    if paths is None:  # no host keeps checkpoints, so the next call finds them all here
        files = Files(execution.filesystem(uri))
        own = f"{files.path(uri)}/{key}"
        files.refuse_foreign(own)  # a checkpoint is a pickle
        return StoragePaths(files=files, previous=own, own=own, is_claimed=True)
    shards, previous = (
        f"{uri.rstrip('/')}/{execution.name or key}/{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
        if folder
        else None
        for folder in (paths.own, paths.previous)
    )
    return replace(paths, shards=shards, previous_shards=previous)


class Keys:
    """Unique keys for the gangs of a task, which stay equal in all attempts of the task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: object = None
        self._taken: set[str] = set()
        self._unfinished: dict[object, list[str]] = {}
        """Failed call, as identified by `call_of` -> the keys of its gangs."""
        self._num_calls: Counter[str] = Counter()

    def take(
        self,
        function: Callable[..., Any],
        asked: str | None,
        suffixes: Sequence[str] = ("",),
        task: object = None,
        *,
        call: object = None,
    ) -> list[str]:
        """Return keys for one call's gangs: a base plus each suffix.

        The default base consists of the function's name and the call's number in the task. Keys ignore arguments,
        because pickles differ between processes, for example in set order.

        Args:
            function: The function that the gangs call.
            asked: Base that the user has set. None uses the default.
            suffixes: One suffix per gang.
            task: Object that stands for the task's execution. None without a known task, as in user threads.
            call: Result of `call_of`. A call equal to a failed call gets the failed call's keys.

        Raises:
            ValueError: Another gang of this task already uses the key `asked`.
        """
        with self._lock:
            if call is not None and (keys := self._unfinished.pop(call, None)) is not None:
                return keys
            if task is not None and task is not self._task:  # locally, many tasks run in one process
                self._task, self._taken, self._num_calls = task, set(), Counter()
            for base in [asked] if asked is not None else self._numbered(key_of(function)):
                keys = [f"{base}{suffix}" for suffix in suffixes]
                if self._taken.isdisjoint([base, *keys]) or (asked is not None and task is None):
                    self._taken.update([base, *keys])
                    return keys
        raise ValueError(
            f"Gang(key={asked!r}): another gang of this task has this key, by which the next attempt finds a gang's "
            "checkpoints. Give each gang a key of its own, or none."
        )

    def note_unfinished(self, call: object, keys: list[str]) -> None:
        """Record a failed call. The next equal call gets these keys again, and thus the failed call's checkpoints."""
        with self._lock:
            self._unfinished[call] = keys

    def _numbered(self, name: str) -> Iterator[str]:
        while True:
            self._num_calls[name] += 1
            yield f"{name}-{self._num_calls[name]}"


def take_keys(
    function: Callable[..., Any], asked: str | None, suffixes: Sequence[str] = ("",), *, call: object = None
) -> list[str]:
    """Return keys for one call's gangs in the current task: a base plus each suffix.

    Args:
        function: The function that the gangs call.
        asked: Base that the user has set. None: the function's name and the call's number in the task.
        suffixes: One suffix per gang.
        call: Result of `call_of`. A call equal to a failed call gets the failed call's keys.

    Raises:
        ValueError: Another gang of this task already uses the key `asked`.
    """
    return _keys.take(function, asked, suffixes, current_execution().task, call=call)


def note_unfinished(call: object, key: str) -> None:
    """Record a failed call and its key, which the next equal call gets again. Do nothing if `call` is None."""
    if call is not None:
        _keys.note_unfinished(call, [key])


def call_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Gang) -> object:
    """Return a value that identifies the function, its arguments and `checkpoint_uri`.

    Values from different processes may differ. The value ignores the function's code, because users may fix code
    between two calls. None inside tasks, without `checkpoint_uri`, and for calls with a key. Attempts of a task need
    equal keys.
    """
    if settings.checkpoint_uri is None or settings.key is not None or current_execution().task is not None:
        return None
    digest = xxhash.xxh3_128()

    def put_aside(memory: memoryview) -> bool:
        digest.update(memory)
        return True

    digest.update(pickling.dumps((args, kwargs), put_aside=put_aside))
    return key_of(function), settings.checkpoint_uri, digest.digest()


def start_of(storage: StoragePaths | None, settings: Gang, step: int | None) -> str | None:
    """Return a user message about the checkpoint from which a gang begins.

    Without a checkpoint, return a message only if the next call uses the same folder.

    Args:
        storage: Folders of the gang's checkpoints.
        settings: Settings of the gang.
        step: Step of the newest checkpoint. None without a checkpoint.
    """
    if storage is None or storage.previous != storage.own:
        return f"going on from the previous attempt's checkpoint of step {step}" if step is not None else None
    if step is not None:
        return f"going on from the checkpoint of step {step} in {storage.own}"
    is_later = settings.key is None and not storage.own.endswith("-1")
    more = "; each call has a folder of its own, unless Gang(key=...) names one" if is_later else ""
    return f"starting afresh, since no checkpoint is in {storage.own}{more}"


def key_of(function: Callable[..., Any]) -> str:
    """Return a function's name in a form that fits into a path: letters, digits, `_` and `-`."""
    name = name_of(function).replace("<locals>.", "")
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[-MAX_NAME:].strip("-")


_keys = Keys()
