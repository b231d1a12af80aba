"""Tasks that show what a rank is given, and fail in chosen ways."""

import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from flytekit import Deck, Secret, current_context, task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flows.arithmetic import shifted
from flytekitplugins.daskpytorch import DaskDDP, Gang, MLflow, TensorBoard, Wandb, current_rank
from flytekitplugins.daskpytorch.results import DaskResultsHandler

handler = DaskResultsHandler()
SECRET = Secret(group="tests", key="token")


class Outputs(NamedTuple):
    """What the ranks found."""

    total: float
    seen: dict[str, str]
    model_state: PythonPickledFile
    results: FlyteDirectory


@task(task_config=DaskDDP(), enable_deck=True, secret_requests=[SECRET])
def train(text: FlyteFile, number: float = 1.0) -> Outputs:
    """Return what only a formed gang can know, and what Flyte's context gives a rank."""
    from flows.lazy import ANSWER

    rank = current_rank()
    total = torch.tensor(number * 10**rank.rank)
    dist.all_reduce(total)
    context, folders = current_context(), [""] * rank.world_size
    dist.all_gather_object(folders, context.working_directory)
    if rank.is_main:
        Deck("Made in rank 0", f"<p>the sum is {total.item()}</p>")
        context.checkpoint.write(b"kept")
    rank.log({"epoch": 1, "loss": 0.5})
    path = Path(context.working_directory, "state.pt")
    torch.save({"weight": total}, path)
    seen = {
        "execution": context.execution_id.name,
        "secret": context.secrets.get(SECRET.group, SECRET.key),
        "text": Path(text.download()).read_text(),
        "lazy": str(ANSWER),
        "rank": f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
        "folders": str(len(set(folders))),
        "threads": f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}",
    }
    time.sleep(0.5 * rank.rank)  # the others submit after rank 0 has returned
    handler.submit_result(f"rank-{rank.rank}/total.json", json.dumps({"total": total.item()}))
    return Outputs(
        total=shifted(total.item()),
        seen=seen,
        model_state=PythonPickledFile(path=str(path)),
        results=handler.directory(),
    )


FAILING = DaskDDP(gang=Gang(start_timeout=float(os.environ.get("START_TIMEOUT", "600")), max_restarts=0))


@task(task_config=FAILING, enable_deck=True)
def fail(how: str) -> float:
    """Rank 1 fails; rank 0 waits for it."""
    handler.submit_result(f"last-words-{current_rank().rank}", how)
    if current_rank().rank == 0:
        dist.barrier()
    match how:
        case "value":
            raise ValueError("the numbers do not add up")
        case "recoverable":
            raise FlyteRecoverableException("try again")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


TRACKED = os.environ.get("TRACKED")
"""A folder for trackers; set in the driver alone."""
TRACKERS = (TensorBoard(folder=TRACKED), MLflow(uri=TRACKED, experiment="tests")) if TRACKED else ()
RESUMABLE = DaskDDP(gang=Gang(max_restarts=0, observers=TRACKERS), wandb=Wandb(project="tests"))


@task(task_config=RESUMABLE, enable_deck=True)
def resumable(folder: str, epochs: int, saves_every: int = 1, pace: float = 0.0) -> float:
    """A value that depends on every epoch and rank. Leaves traces in the folder: where it starts and stops, and when.

    Args:
        folder: Where the traces go.
        epochs: How many there are.
        saves_every: Epochs between two checkpoints; one told to stop saves another.
        pace: Seconds per epoch.
    """
    rank, attempt = current_rank(), int(os.environ["FLYTE_ATTEMPT_NUMBER"])
    state = rank.checkpoint.load() or {"epoch": 0, "value": 0.0}
    value = state["value"]
    _leave(folder, "pids", os.getpid())
    _leave(folder, f"start-{attempt}-{rank.rank}", state["epoch"])
    for epoch in range(state["epoch"] + 1, epochs + 1):
        time.sleep(pace)
        share = torch.tensor(10.0 * epoch + rank.rank, dtype=torch.float64)
        dist.all_reduce(share)
        value = 0.5 * value + share.item()
        rank.log({"value": value}, step=epoch)
        _leave(folder, f"epochs-{attempt}-{rank.rank}", time.time())
        stops = rank.should_stop()
        if stops or epoch % saves_every == 0:
            rank.checkpoint.save({"epoch": epoch, "value": value}, epoch)
        if stops:
            _leave(folder, f"stopped-{attempt}-{rank.rank}", epoch)
            break
    return value


def _leave(folder: str, name: str, line: object) -> None:
    with Path(folder, name).open("a") as file:
        file.write(f"{line}\n")
