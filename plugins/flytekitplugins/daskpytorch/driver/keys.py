"""Names the gangs of a task alike in all of its attempts, so that each finds its checkpoints. Runs in the driver."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flytekitplugins.daskpytorch.protocol import code
from flytekitplugins.daskpytorch.protocol.host import current_execution

__all__ = ["Keys", "take"]

MAX_NAME = 100
"""Characters of a function's name, of which the last count."""


class Keys:
    """Those that the gangs of the current task have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task: object = None
        self._taken: set[str] = set()
        self._num_calls: Counter[str] = Counter()

    def take(
        self, function: Callable[..., Any], asked: str | None, suffixes: Sequence[str] = ("",), task: object = None
    ) -> list[str]:
        """The keys of one call's gangs: as asked, else the function's name and which of its calls in the task this is.

        Not a word of the arguments: what pickles differs from process to process, by the order of a set, say.

        Args:
            function: What is called.
            asked: `Gang.key`.
            suffixes: What tells the gangs of one call.
            task: Stands for the task's execution; None: there is none, or nobody knows, as in a thread of the user's.

        Raises:
            ValueError: Another gang of the task has the key that is asked for.
        """
        with self._lock:
            if task is not None and task is not self._task:  # locally, many tasks run in one process
                self._task, self._taken, self._num_calls = task, set(), Counter()
            for base in [asked] if asked is not None else self._numbered(_name_of(function)):
                keys = [f"{base}{suffix}" for suffix in suffixes]
                if self._taken.isdisjoint([base, *keys]) or (asked is not None and task is None):
                    self._taken.update([base, *keys])
                    return keys
        raise ValueError(
            f"Gang(key={asked!r}): must be given to one gang of a task only, since the next attempt finds a gang's "
            "checkpoints by it, and another gang has it. Give each a key of its own, or none."
        )

    def _numbered(self, name: str) -> Iterator[str]:
        while True:
            self._num_calls[name] += 1
            yield f"{name}-{self._num_calls[name]}"


def take(function: Callable[..., Any], asked: str | None, suffixes: Sequence[str] = ("",)) -> list[str]:
    """Keys for a call in the current task, see `Keys.take`."""
    return _keys.take(function, asked, suffixes, current_execution().task)


def _name_of(function: Callable[..., Any]) -> str:
    name = code.name_of(function).replace("<locals>.", "")
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[-MAX_NAME:].strip("-")


_keys = Keys()
