"""Retrainings as processes, forked from one that has all imported, and killed at a stage. A script of tests.

Each line of its input is the order for one run; it answers with the exit code.
"""

from __future__ import annotations

import json
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


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(method: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    def acting(*args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return act()

    return acting


def arm(stage: str) -> None:
    """Have this process die there."""
    if stage == "after the version":
        Registry.add = after(Registry.add, die)
    if stage == "after the pointer change":
        Registry.promote = after(Registry.promote, die)


def start(run: dict[str, Any]) -> int:
    """Fork a retraining; returns its id."""
    if child := os.fork():
        return child
    result, code = Path(run["result"]), 1
    try:
        log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
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
        print(os.waitstatus_to_exitcode(os.waitpid(start(json.loads(order)), 0)[1]), flush=True)
