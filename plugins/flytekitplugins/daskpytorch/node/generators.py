"""Random generators of forked ranks: seeded anew, as in a fresh process. Runs in the fork server and in its ranks.

A fork has its parent's generators as they are. Without this module, all ranks of a fork server, and all models of a
sweep there, would draw the same numbers.
"""

import multiprocessing
import os
import random
import sys
import weakref

_seed = random.Random.seed
_self_seeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
"""Generators of modules imported ahead that took their seed from the operating system, such as flytekit's."""


def watch() -> None:
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
