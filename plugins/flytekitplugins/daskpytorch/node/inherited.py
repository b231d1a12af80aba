"""What ranks inherit from the fork server: modules that it has imported, and random generators, which they seed anew.

Runs in the fork server and in its ranks. For the gain of each step see benchmarks/README.md, "What each optimisation
buys".
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import random
import sys
import weakref
from collections.abc import Sequence
from importlib import import_module, metadata

from flytekitplugins.daskpytorch.process.system import optional

TRAINS = "torch._dynamo"
"""Module that every optimizer imports, and no rank that does not train. The server imports the module after a rank
has: where nobody trains, the import would take two seconds of processor time in vain."""
TRAINING_IMPORTS = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
)
"""Modules that the first optimizer imports, in pieces that can be imported alone. An optimizer asks for the last one,
which spends most of its time on the others. Where the server has not imported them, a warm gang takes 20 times as
long to its first step (`recovery.py`, rank killed, 2026-11-23).

Not wandb: its import makes a folder for media, which the first rank to end would remove for all others."""

_seed = random.Random.seed
_self_seeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
"""Generators of modules imported ahead that took their seed from the operating system, such as flytekit's."""


# ---- Modules


def import_for_ranks(others: Sequence[str]) -> None:
    """Import what every rank needs, and these modules."""
    import torch.distributed  # noqa: F401

    from flytekitplugins.daskpytorch.protocol import storages  # noqa: F401
    from flytekitplugins.daskpytorch.rank import loaders, main, process_group  # noqa: F401

    process_group.install()
    for name in others:
        with optional(f"Importing {name} ahead"):  # the rank that needs the module reports the error
            import_module(name)
    with optional("Reading the metadata of torch's plugins ahead"):
        _remember_plugins()
    _settle()


def _remember_plugins() -> None:
    """Keep the entry points of all installed packages in memory.

    Torch asks for its plugins twice with each process group. Read anew, the metadata makes a warm gang's first
    all-reduce 1.26 times as late (`launch.py`, 2026-11-23).
    """
    metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
    metadata.entry_points(group="torch.distributed.backends")


def leisure() -> float:
    """Return the seconds after which a server that has forked no rank imports what only training needs."""
    text = os.environ.get("DASKPYTORCH_LEISURE", "3")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"DASKPYTORCH_LEISURE={text!r}: must be a number of seconds, such as 3") from None


def import_quietly(name: str) -> None:
    """Import one module more for the ranks to come; pass over a module that fails."""
    with contextlib.suppress(Exception):  # the rank that needs the module reports the error
        import_module(name)
    _settle()


def _settle() -> None:
    """Make what was imported cheap to inherit: a rank copies each page of memory that the rank touches."""
    from flytekitplugins.daskpytorch.protocol import program

    # A rank's first full collection takes 0.33 s otherwise, and copies 90 MiB of shared pages (2026-11-23).
    gc.freeze()
    # Torch's finalizers undo what ends anyway. The end of a rank takes 50 to 100 ms with them, and 2 to 7 ms without
    # (2026-11-26), and many small models end one by one: `many.py --trivial`.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # noqa: SLF001 - Python 3.11 to 3.14
        finalizer.atexit = False
    program.forget_levels()


# ---- Random generators. A fork has its parent's as they are: all ranks of a fork server, and all models of a sweep
# there, would draw the same numbers.


def watch_generators() -> None:
    """Note from now on which of Python's generators seed themselves; a library's fixed seed is to stay."""
    random.Random.seed = _noted_seed  # type: ignore[method-assign]


def _noted_seed(self: random.Random, a: int | float | str | bytes | bytearray | None = None, version: int = 2) -> None:  # noqa: PYI041 - as `random` has it
    _seed(self, a, version)
    (_self_seeded.add if a is None else _self_seeded.discard)(self)


def seed_anew() -> None:
    """Seed everything in this process, a fork, that a fresh process seeds for itself. Takes 0.1 ms.

    Python seeds `random` and the names of temporary files after a fork. CUDA's generators are made in the rank.
    """
    random.Random.seed = _seed  # type: ignore[method-assign]
    for generator in list(_self_seeded):
        generator.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # `torch.seed()` would also queue a seed for CUDA
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
