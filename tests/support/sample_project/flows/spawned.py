"""Tasks whose ranks run on the task's own node."""

import os
import time
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
from flytekit import Artifact, task
from flytekit.types.file import FlyteFile
from torch.utils.data import DataLoader

from flows.training import SECRET, Outputs, train
from flytekitplugins.daskpytorch import SpawnDDP, current_rank

Scores = Artifact(name="scores", partition_keys=["kind"])


@task(task_config=SpawnDDP(nproc=2), enable_deck=True, secret_requests=[SECRET])
def forked(text: FlyteFile, number: float = 1.0) -> Outputs:
    """The same as `train`, in ranks of the fork server."""
    current_rank().checkpoint.save({"step": 1}, step=1)
    current_rank().checkpoint.flush()
    return train.task_function(text, number)


@task(task_config=SpawnDDP(nproc=1))
def surroundings() -> list[str]:
    """The fork server, and the variable, folder and module that the task's process has at this moment."""
    import only_now  # type: ignore[import-not-found]

    return [str(os.getppid()), os.environ["ONLY_NOW"], str(Path.cwd()), only_now.__file__]


@task(task_config=SpawnDDP(nproc=2))
def carded() -> Annotated[str, Scores]:
    """An output with metadata."""
    return Scores.create_from("good", kind="test")


@task(task_config=SpawnDDP(nproc=2))
def wrong_type() -> int:
    """Return a text; every start writes a line to the file that the environment names."""
    with Path(os.environ["STARTS"]).open("a") as file:
        file.write(f"{current_rank().rank}\n")
    dist.barrier()
    return "seven"  # type: ignore[return-value]


# On a busy machine Weights & Biases takes longer to close a run than rank 0 has as a rule.


@task(task_config=SpawnDDP(nproc=2))
def loading(folder: str, method: str) -> int:
    """Goes on until it is told to stop; only then it saves. Leaves traces: that it trains, and where it stops.

    Args:
        folder: Where the traces go.
        method: How the workers that load for it are started.
    """
    rank, step = current_rank(), 0
    batches = iter(DataLoader(range(1_000_000), num_workers=2, multiprocessing_context=method))
    while not rank.should_stop():
        time.sleep(0.01)
        dist.all_reduce(next(batches))
        step += 1
        Path(folder, f"trains-{rank.rank}").touch()
    rank.checkpoint.save(step, step)
    Path(folder, f"stopped-{rank.rank}").write_text(str(step))
    return step
