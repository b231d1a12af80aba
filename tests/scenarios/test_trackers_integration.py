"""TensorBoard and MLflow have one run, though the gang loses a rank."""

import os
import signal
from functools import partial
from pathlib import Path

from distributed import Client

from flytekitplugins.daskpytorch import Gang, LogRecord, Observer, TensorBoard, Training, current_rank, dispatch
from processes import until
from tracked import Flow, scalars


class Own(Observer):
    """A user's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_begin(self, training: Training) -> None:
        (self.folder / "id").write_text(training.id)

    def on_log(self, record: LogRecord) -> None:
        (self.folder / f"heard-{record.step}").touch()


def train(folder: str, num_steps: int) -> None:
    """Rank 0 is killed in step 4, two steps behind its checkpoint, once the driver has heard of it."""
    rank, died = current_rank(), Path(folder, "died")
    state = rank.checkpoint.load() or {"step": 0}
    for step in range(state["step"] + 1, num_steps + 1):
        if rank.is_main:
            rank.log({"loss": float(died.exists())}, step=step)
        if step == 2:
            rank.checkpoint.save({"step": step}, step)
            rank.checkpoint.flush()
        if step == 4 and rank.is_main and not died.exists():
            until(Path(folder, f"heard-{step}").exists, "the driver to hear of the step")
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_gang_that_starts_again_has_one_run(client: Client, tmp_path: Path) -> None:
    flow = Flow(tmp_path / "mlflow", "killed")
    trackers = (TensorBoard(folder=tmp_path / "runs"), flow(), partial(Own, tmp_path))
    dispatch.run(client, train, str(tmp_path), 6, gang=Gang(observers=trackers)).result()
    id_ = (tmp_path / "id").read_text()
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name == id_
    assert scalars(folder) == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    [run] = flow.runs
    assert (run.info.status, run.data.tags["daskpytorch.id"]) == ("FINISHED", id_)
    assert flow.points(run) == [(1, 0.0), (2, 0.0), (3, 0.0), (3, 1.0), (4, 0.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert (run.data.params["num_steps"], run.data.params["gang.world_size"]) == ("6", "2")
