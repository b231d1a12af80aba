"""Tasks whose ranks run on the task's own node."""

import os
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from flytekit import Artifact, Deck, current_context, task
from flytekit.types.file import FlyteFile
from torch.utils.data import DataLoader

from flows.arithmetic import shifted
from flytekitplugins.daskpytorch import SpawnDDP, current_rank

Scores = Artifact(name="scores", partition_keys=["kind"])


class Found(NamedTuple):
    """Several types of output."""

    total: float
    seen: dict[str, str]
    file: FlyteFile


def reduced(number: float) -> float:
    """A helper of the task's own module: the sum over ranks of number * 10^rank."""
    total = torch.tensor(number * 10 ** current_rank().rank)
    dist.all_reduce(total)
    return total.item()


def look_around(number: float, text: str, path: Path) -> Found:
    """What only a formed gang can know, and what its first rank is given."""
    from flows.lazy import ANSWER

    rank, context = current_rank(), current_context()
    total = reduced(number)
    folders = [""] * rank.world_size
    dist.all_gather_object(folders, context.working_directory)
    path.write_text(f"{text} from rank {rank.rank}")
    seen = {
        "execution": context.execution_id.name,
        "lazy": str(ANSWER),
        "rank": f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
        "folders": str(len(set(folders))),
        "threads": f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}",
    }
    return Found(
        total=shifted(total),
        seen=seen,
        file=FlyteFile(str(path)),
    )


@task(task_config=SpawnDDP(nproc=2), enable_deck=True)
def forked(number: float, text: str) -> Found:
    """Ranks come from the fork server, and use the task's context as a plain task may."""
    context = current_context()
    if current_rank().is_main:
        Deck("Made in rank 0", "<p>rank 0 was here</p>")
        context.checkpoint.write(b"kept")
    current_rank().log({"loss": 0.5}, step=1)
    current_rank().checkpoint.save({"step": 1}, step=1)
    current_rank().checkpoint.flush()
    return look_around(number, text, Path(context.working_directory, "file.txt"))


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
