"""Retrainings as processes, forked from one that has all imported: killed at a stage, or at once. A script of tests.

Each line of its input is an order, a list of runs that begin at once; it answers with their exit codes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import scipy.spatial.distance  # noqa: F401 - imported once, not in each fork

from tasks.char_lstm import Hyperparameters
from tasks.registry import Registry
from warm import answer_for_pip
from workflows.retrain import retrain

BARRIER = multiprocessing.get_context("fork").Barrier(2)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(method: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    return acting


def after(method: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def acting(*args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return act()

    return acting


def die_at_the_pointer_change() -> None:
    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.link" and "promotions" in str(args[1]):
            die()

    sys.addaudithook(watch)


def meet_at_the_pointer_change() -> None:
    Registry.promote = before(Registry.promote, BARRIER.wait)


def arm(stage: str) -> None:
    """Have this process die there, or wait for the other one."""
    match stage:
        case "before the version":
            Registry.add = before(Registry.add, die)
        case "after the version":
            Registry.add = after(Registry.add, die)
        case "at the pointer change":
            die_at_the_pointer_change()
        case "after the pointer change":
            Registry.promote = after(Registry.promote, die)
        case "together":
            meet_at_the_pointer_change()


def start(run: dict[str, Any]) -> int:
    """Fork a retraining; returns its id."""
    if child := os.fork():
        return child
    result, code = Path(run["result"]), 1
    try:
        log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(run["env"])
        arm(run["stage"])
        given = run["inputs"]
        day, hp = datetime.fromisoformat(given["kickoff_time"]), Hyperparameters(**given["hp"])
        outputs = retrain(**{**given, "kickoff_time": day, "hp": hp})
        result.write_text(json.dumps(outputs._asdict()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    answer_for_pip()
    for order in sys.stdin:
        children = [start(run) for run in json.loads(order)]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
