"""A sweep in a process of its own, for tests that kill it: python sweep_victim.py SCHEDULER FOLDER NUM_MODELS.

A model of three epochs saves a checkpoint after each, and ends when the file `limit` allows models of its index to.
Files called `pid-0` and so on say in which process each model is.
"""

import json
import os
import sys
import time
from pathlib import Path

from distributed import Client

from flytekitplugins.daskpytorch import current_rank, dispatch

NUM_EPOCHS = 3


def train(experiment: tuple[int, str]) -> int:
    """Leaves a line for each epoch, and one for its end."""
    index, folder = experiment
    rank, trace = current_rank(), Path(folder, f"trace-{index}")
    Path(folder, f"pid-{index}").write_text(str(os.getpid()))
    first = (rank.checkpoint.load() or 0) + 1
    for epoch in range(first, NUM_EPOCHS + 1):
        with trace.open("a") as file:
            file.write(f"{epoch}\n")
        rank.log({"epoch": epoch, "loss": index + 1 / epoch}, step=epoch)
        rank.checkpoint.save(epoch, epoch)
        rank.checkpoint.flush()
    while index >= int(Path(folder, "limit").read_text() or 0):
        time.sleep(0.02)
    with trace.open("a") as file:
        file.write("end\n")
    return index * index


def main() -> None:
    """Train all, and say what came of it."""
    scheduler, folder, num_models = sys.argv[1:]
    experiments = [(index, folder) for index in range(int(num_models))]
    with Client(scheduler) as client:
        models = dispatch.map(client, train, experiments, storage=f"{folder}/kept", name="grid")
        print(json.dumps([models.result(), [[record.step for record in model.records] for model in models]]))


if __name__ == "__main__":
    main()
