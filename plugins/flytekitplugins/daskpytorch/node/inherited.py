"""State that ranks inherit from the fork server: imported modules, environment, and random generators.

Runs in the fork server and in its ranks. See benchmarks/README.md, "What each optimisation buys", for the gain of each
step.
"""

import contextlib
import functools
import gc
import math
import mmap
import multiprocessing
import os
import random
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

from wrapt import register_post_import_hook

from flytekitplugins.daskpytorch.process.system import optional

TRAINS = "torch._dynamo"
"""Module that every optimizer imports, and other code does not. Its import shows that a rank trains."""
TRAINING_IMPORTS = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""Modules that the first optimizer of a process imports: the last one directly, and by way of that one the others.

Without these imports in the fork server, a warm gang's first step comes 20 times as late (`recovery.py`, rank killed,
2026-11-23). For ranks that do not train, the imports would waste two seconds of processor time.

wandb is left out. The import of wandb makes a media folder, which the first rank to end would remove for all ranks."""

_seed = random.Random.seed
_self_seeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
"""Random generators that took their seeds from the operating system at import, such as flytekit's. A forked rank seeds
them anew."""


# ---- Modules


@contextlib.contextmanager
def _without_finalizers() -> Iterator[None]:
    """During the block, keep each new `weakref.finalize` from running its callback at the process's exit.

    Torch's finalizers free objects that end with the process anyway. A rank's exit takes 50 to 100 ms with them, and 2
    to 7 ms without (2026-11-26). Sweeps of small models have many exits (`many.py --trivial`).
    """
    begin = weakref.finalize.__init__

    def begin_quietly(finalizer: Any, *args: Any, **kwargs: Any) -> None:
        begin(finalizer, *args, **kwargs)
        finalizer.atexit = False

    weakref.finalize.__init__ = begin_quietly  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        weakref.finalize.__init__ = begin  # type: ignore[method-assign]


@_without_finalizers()
def import_for_ranks(others: Sequence[str]) -> None:
    """Import the modules that every rank needs, and the named others. For `module:function`, also call the function.

    Garbage is not collected during the imports. Collections would take 0.15 s of a first gang's two seconds
    (2026-11-26).
    """
    gc.disable()
    try:
        import torch.distributed  # noqa: F401

        from flytekitplugins.daskpytorch.rank import loaders, main, process_group  # noqa: F401

        process_group.install()
        for name in others:
            with optional(f"Importing {name} ahead"):  # the rank that needs the module reports the error
                module, _, function = name.partition(":")
                imported = import_module(module)
                if function:
                    getattr(imported, function)()
        with optional("Reading the metadata of torch's plugins ahead"):
            _remember_plugins()
        _settle()
    finally:
        gc.enable()


def _remember_plugins() -> None:
    """Keep the entry points of all installed packages in memory.

    Torch looks for its plugins twice with each process group. Without the cache, a warm gang's first all-reduce comes
    1.26 times as late (`launch.py`, 2026-11-23).
    """
    metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
    metadata.entry_points(group="torch.distributed.backends")


class Leisure:
    """Imports modules for training in the fork server while no rank runs, one at a time, with forks between.

    All imports together take seconds, during which no gang could start. Running ranks import these modules themselves,
    so the fork server's imports would take the same memory once more: a first gang of four workers would take 1.32 x
    `torchrun`'s memory, not 1.18 x (`memory.py`, 2026-11-26).
    """

    def __init__(self) -> None:
        self._has_trained = mmap.mmap(-1, 1)
        """A byte that the fork server shares with its ranks: 1 once a rank has trained."""
        self._names = deque(TRAINING_IMPORTS)
        self._at = math.inf
        """Time of the next import, on the monotonic clock. Infinite while ranks run or no module is left."""

    def begin(self) -> None:
        """Import after some seconds without a rank, since the fork server was then started ahead."""
        text = os.environ.get("DASKPYTORCH_LEISURE", "3")
        try:
            self._at = time.monotonic() + float(text)
        except ValueError:
            raise ValueError(f"DASKPYTORCH_LEISURE={text!r}: must be a number of seconds, such as 3") from None

    def pause(self) -> None:
        """Import nothing, since a rank starts."""
        self._at = math.inf

    def go_on(self) -> None:
        """Import at once if a rank has trained, since no rank runs any more."""
        if self._has_trained[0] and self._names:
            self._at = time.monotonic()

    def patience(self) -> float | None:
        """Return the seconds until the next import. None: no import is due."""
        return max(0.0, self._at - time.monotonic()) if self._at < math.inf else None

    def import_next(self) -> None:
        """Import a module, if one is due."""
        if time.monotonic() >= self._at:
            import_quietly(self._names.popleft())
            self._at = time.monotonic() if self._names else math.inf

    def watch_for_training(self) -> None:
        """In a forked rank, tell the fork server once the rank trains."""
        register_post_import_hook(lambda _: self._has_trained.__setitem__(0, 1), TRAINS)


@_without_finalizers()
def import_quietly(name: str) -> None:
    """Import one more module for later ranks. Ignore an error of the import."""
    with contextlib.suppress(Exception):  # the rank that needs the module reports the error
        import_module(name)
    _settle()


def _settle() -> None:
    """Make the imported modules cheap for forked ranks, as a rank copies each page of memory that it writes to."""
    # Otherwise a rank's first full garbage collection takes 0.33 s, and copies 90 MiB of shared pages (2026-11-23).
    gc.freeze()


# ---- Environment


def set_environment(variables: Mapping[str, str]) -> None:
    """Give this forked process exactly these environment variables, also those that Python keeps values of."""
    for name in set(os.environ).difference(variables):
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    time.tzset()  # reads TZ
    tempfile.tempdir = None  # of TMPDIR, at the next temporary file


# ---- Random generators. A fork inherits its parent's generators. Without new seeds, all ranks of a fork server, and
# all models of a sweep there, would draw the same numbers.


def watch_generators() -> None:
    """Record which `random.Random` generators seed themselves from now on. Forked ranks seed only these anew."""
    random.Random.seed = _noted_seed  # type: ignore[method-assign]


def _noted_seed(self: random.Random, a: int | float | str | bytes | bytearray | None = None, version: int = 2) -> None:  # noqa: PYI041 - as `random` has it
    _seed(self, a, version)
    (_self_seeded.add if a is None else _self_seeded.discard)(self)


def seed_anew() -> None:
    """Seed all generators in this forked process that a fresh process would seed for itself. Takes 0.1 ms.

    Python itself seeds `random` and the names of temporary files after a fork. CUDA's generators begin in the rank.
    """
    random.Random.seed = _seed  # type: ignore[method-assign]
    for generator in list(_self_seeded):
        generator.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # `torch.seed()` would also queue a seed for CUDA
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
