"""Processes that retrain: some are killed at their n-th step, some do it at the same time. A script of the tests."""

from __future__ import annotations

import _io
import io
import itertools
import json
import multiprocessing
import os
import posix
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tasks.registry import ChampionChangedError, Registry

CHANGES = {"fsync", "link", "mkdir", "open", "replace", "sendfile", "unlink", "write"}
"""What may be asked of the operating system and leaves a trace."""
BARRIER = multiprocessing.get_context("fork").Barrier(2)


def kill_each(uri: str, options: dict[str, Any], folder: Path) -> int:
    """Have a registry for each step of a retraining, which is killed there; how many steps there are."""
    for step in itertools.count():
        child = os.fork()
        if child == 0:
            retrain_until(step, f"{uri}/{step}", options, folder)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return step
        if code != -signal.SIGKILL:
            sys.exit(f"the retraining ended with {code} at step {step}")
    raise AssertionError


def retrain_until(step: int, uri: str, options: dict[str, Any], folder: Path) -> None:
    code = 1
    try:
        registry = Registry(uri, options)
        old = registry.add({"state.pt": folder / "old"}, {"state": "old"})
        champion = registry.promote(old, instead_of=None, reason="the first")
        kill_at_file_operation(step)
        new = registry.add({"state.pt": folder / "new"}, {"state": "new"})
        registry.promote(new, instead_of=champion, reason="better")
        code = 0
    finally:
        sys.setprofile(None)
        os._exit(code)


def kill_at_file_operation(step: int) -> None:
    """Before the operating system is asked for it; after the one before."""
    steps = itertools.count()

    def watch(_: Any, event: str, function: Any) -> None:
        if event == "c_call" and is_file_operation(function) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def is_file_operation(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__self__", None)
    return function.__name__ in CHANGES and (isinstance(owner, io.IOBase) or owner in {posix, io, _io})


def race(uri: str, options: dict[str, Any], folder: Path, num_rounds: int) -> list[list[bool]]:
    """Two processes that promote at the same moment, again and again: for each, in which rounds it won."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        rivals = [pool.submit(retrain_often, uri, options, folder / name, num_rounds) for name in ("old", "new")]
        return [rival.result() for rival in rivals]


def retrain_often(uri: str, options: dict[str, Any], state: Path, num_rounds: int) -> list[bool]:
    registry = Registry(uri, options)
    return [retrains(registry, state) for _ in range(num_rounds)]


def retrains(registry: Registry, state: Path) -> bool:
    """Whether this one won."""
    champion = registry.champion()
    version = registry.add({"state.pt": state}, {"state": state.name})
    BARRIER.wait()
    try:
        registry.promote(version, instead_of=champion, reason=state.name)
    except ChampionChangedError:
        return False
    else:
        return True
    finally:
        BARRIER.wait()


if __name__ == "__main__":
    what, uri, given, folder, *rest = sys.argv[1:]
    arguments = (uri, json.loads(given), Path(folder))
    print(json.dumps(race(*arguments, int(rest[0])) if what == "race" else kill_each(*arguments)))
