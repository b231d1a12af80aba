"""A retraining that dies at a stage. A script of tests; its last line is what the retraining returned."""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tasks.char_lstm import Hyperparameters
from tasks.registry import Registry
from workflows.retrain import retrain


def dies_after(method: Callable[..., Any]) -> Callable[..., Any]:
    def dying(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    return dying


if __name__ == "__main__":
    stage, given = sys.argv[1], json.loads(sys.argv[2])
    if stage == "after the version":
        Registry.add = dies_after(Registry.add)
    if stage == "after the pointer change":
        Registry.promote = dies_after(Registry.promote)
    day, hp = datetime.fromisoformat(given.pop("kickoff_time")), Hyperparameters(**given.pop("hp"))
    print(json.dumps(retrain(**given, kickoff_time=day, hp=hp)._asdict()))
