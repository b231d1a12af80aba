"""What one gang is asked to do, and what it is called in all attempts of its task. Made by whoever starts it."""

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

from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.code import Code, name_of, pack_call
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import Execution, StoragePaths, current_execution
from flytekitplugins.daskpytorch.protocol.observer import Observer, Training
from flytekitplugins.daskpytorch.protocol.segments import SharedMemory
from flytekitplugins.daskpytorch.settings import Gang

MAX_NAME = 100
"""Characters of a function's name, of which the last count."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One training run, ready to go."""

    name: str
    call: bytes
    large: SharedMemory | None = field(default=None, repr=False)
    """What is large in the call; None: nothing is."""
    ranks_per_worker: int
    num_gpus: int = 0
    """GPUs that the limits of each worker, or of the task, ask for; 0 where nobody knows."""
    settings: Gang
    pass_local_rank: bool = False
    host: bytes | None = field(default=None, repr=False)
    """A pickled `RankHost`; None where the function is not that of a task."""
    execution: bytes | None = field(default=None, repr=False)
    """What its ranks have in place of one: a pickled `Execution`, see there."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The host's variables for the ranks; they may hold secrets."""
    observers: Sequence[Observer] = ()
    """Of this gang alone."""
    training: Training | None = None
    """What these are told that it is."""
    storage: StoragePaths | None = None
    """Where the checkpoints of other attempts are; None where there are no other attempts."""
    code: Code | None = None
    """The project's sources, where they are packed already."""
    key: str = ""
    """Names it among the gangs of its task, alike in every attempt; empty where there is only one."""
    keep: object = field(default=None, repr=False, compare=False)
    """What the call was made of: what Dask holds for it, it holds for as long as the driver has this."""


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
    """One gang's call of a function, ready to go, but for a name where its task has several.

    `execution`: that of the thread that asked for it, where this is another's.
    """
    in_ranks = (execution or current_execution()).in_ranks()
    memory = _memory()
    call = pack_call(function, args, kwargs, memory.add if memory is not None else None)
    if memory is not None and not memory.address.segments:
        memory.close()  # now: picklers live on until garbage is collected, and hold what they were given
        memory = None
    return Request(
        name=name_of(function),
        call=call,
        large=memory,
        execution=pickle.dumps(in_ranks) if in_ranks is not None else None,
        ranks_per_worker=1 if settings.ranks_per_worker == "auto" else settings.ranks_per_worker,
        settings=settings,
        pass_local_rank=pass_local_rank,
        code=code,
        keep=(function, args, kwargs),
        observers=[make() for make in settings.observers],
    )


def _memory() -> SharedMemory | None:
    with contextlib.suppress(OSError):  # of a thousand gangs each may have some, which is an open file
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return SharedMemory() if len(list(Path("/proc/self/fd").iterdir())) < limit // 2 else None
    return None


def check_function(function: Callable[..., Any], *, may_be_async: bool = False) -> None:
    """See to it that calling this trains: a rank would make an object, and return it, and nobody would notice.

    Raises:
        TypeError: It does not; the message says what to give instead.
    """
    name = name_of(function)
    if hasattr(function, "__dask_graph__"):
        raise TypeError(f"{name} is a dask.delayed object, which a call only makes longer: give the function itself")
    if isinstance(function, type):
        raise TypeError(f"{name} is a class, which a call makes an object of: give a function that trains")
    called = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    if inspect.iscoroutinefunction(called) and not may_be_async:
        raise TypeError(f"{name} is a coroutine function: give a function that runs it, by asyncio.run({name}(...))")
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(f"{name} is a generator function, which does nothing until somebody asks for its values")


def check_arguments(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """See to it that the function takes these arguments, before anybody is asked to run it.

    Raises:
        TypeError: It does not; the message has its signature.
    """
    called = getattr(function, "_task_function", function)  # of a Flyte task
    with contextlib.suppress(ValueError):  # of something that has no signature, such as a few builtins
        signature = _signature(called)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{len(args)} by position" + "".join(f", {name}" for name in kwargs)
            raise TypeError(
                f"{name_of(function)}{signature} cannot be called with the arguments given ({what}): {error}"
            ) from error


def _signature(called: Callable[..., Any]) -> inspect.Signature:
    """Return how a call is taken, which need not be as the wrapped function takes it: Hydra's takes no argument.

    Raises:
        ValueError: Neither has a signature.
    """
    try:
        return inspect.signature(called, follow_wrapped=False)
    except ValueError:  # what is written in C, such as `functools.lru_cache`
        return inspect.signature(called)


def named(request: Request, key: str) -> Request:
    """The same under a key, by which its checkpoints are found in storage."""
    return replace(request, key=key, storage=storage_of(current_execution(), key, request.settings))


def storage_of(
    execution: Execution, key: str, settings: Gang, paths: StoragePaths | None = None
) -> StoragePaths | None:
    """Where the gang of this key keeps its checkpoints; `paths` in place of what the host says of it."""
    paths, uri = paths or execution.checkpoint_paths(key), settings.checkpoint_uri
    if uri is None:
        return paths
    if paths is None:  # nobody else keeps anything: all that the next call needs is there
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
    """Those that the gangs of the current task have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: object = None
        self._taken: set[str] = set()
        self._unfinished: dict[object, list[str]] = {}
        """Calls that have not ended well -> their keys."""
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
        """The keys of one call's gangs: as asked, else the function's name and which of its calls in the task this is.

        Not a word of the arguments: what pickles differs from process to process, by the order of a set, say. The
        suffixes tell the gangs of one call. `task` stands for the task's execution; None: there is none, or nobody
        knows, as in a thread of the user's.

        A `call` that is equal to one that has not ended well has the same keys as that.

        Raises:
            ValueError: Another gang of the task has the key that is asked for.
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
            f"Gang(key={asked!r}): must be given to one gang of a task only, since the next attempt finds a gang's "
            "checkpoints by it, and another gang has it. Give each a key of its own, or none."
        )

    def note_unfinished(self, call: object, keys: list[str]) -> None:
        """Have the next call that is equal to this one go on from its checkpoints."""
        with self._lock:
            self._unfinished[call] = keys

    def _numbered(self, name: str) -> Iterator[str]:
        while True:
            self._num_calls[name] += 1
            yield f"{name}-{self._num_calls[name]}"


def take_keys(
    function: Callable[..., Any], asked: str | None, suffixes: Sequence[str] = ("",), *, call: object = None
) -> list[str]:
    """Keys for a call in the current task, see `Keys.take`."""
    return _keys.take(function, asked, suffixes, current_execution().task, call=call)


def note_unfinished(call: object, key: str) -> None:
    """Note that a call with this key has not ended well, see `Keys.take`; None: of one that is not to go on so."""
    if call is not None:
        _keys.note_unfinished(call, [key])


def call_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Gang) -> object:
    """Return what is equal in this process for calls of one function with equal arguments and place of checkpoints.

    None for a call that has a key of its own, in a task, where attempts are to agree on keys, or without a place. The
    function's code does not count: it may have been mended.
    """
    if settings.checkpoint_uri is None or settings.key is not None or current_execution().task is not None:
        return None
    digest = xxhash.xxh3_128()
    digest.update(pickling.dumps((args, kwargs), put_aside=digest.update))
    return key_of(function), settings.checkpoint_uri, digest.digest()


def start_of(storage: StoragePaths | None, settings: Gang, steps: Sequence[int]) -> str | None:
    """Say from where a gang goes on, or that it does not; `steps` are those of the newest checkpoints it has found."""
    if storage is None or storage.previous != storage.own:
        return f"going on from the previous attempt's checkpoint of step {max(steps)}" if steps else None
    if steps:
        return f"going on from the checkpoint of step {max(steps)} in {storage.own}"
    is_later = settings.key is None and not storage.own.endswith("-1")
    more = "; each call has a folder of its own, unless Gang(key=...) names one" if is_later else ""
    return f"starting afresh, since no checkpoint is in {storage.own}{more}"


def key_of(function: Callable[..., Any]) -> str:
    """A function's name as part of a path."""
    name = name_of(function).replace("<locals>.", "")
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[-MAX_NAME:].strip("-")


_keys = Keys()
