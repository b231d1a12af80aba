"""A sweep on a real cluster stops poor models early, streams records, and gives every model its own run."""

import os
import signal
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import EarlyStopping, Gang, StoppedEarlyError, Wandb, current_rank, dispatch
from flytekitplugins.daskpytorch.sweep.early_stopping import Rungs
from processes import until
from wandb_file import read_run

NUM_EPOCHS = 12
HALVE = EarlyStopping(metric="loss", reduction_factor=2)


# ---- What the ranks run


@dataclass(frozen=True)
class Experiment:
    """One model, whose loss after each epoch is known."""

    level: float
    folder: str
    kill_in: int = 0
    """The epoch in which its rank is killed, once."""

    def loss(self, epoch: int) -> float:
        return self.level + 1 / epoch


def descend(experiment: Experiment) -> float:
    """Leaves a trace of each epoch; waits in between, so that others have their say."""
    rank, folder = current_rank(), Path(experiment.folder)
    first = (rank.checkpoint.load() or 0) + 1
    for epoch in range(first, NUM_EPOCHS + 1):
        (folder / f"{experiment.level:g}-{epoch}").touch()
        killed = folder / f"{experiment.level:g}-killed"
        if epoch == experiment.kill_in and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rank.log({"epoch": epoch, "loss": experiment.loss(epoch), "pid": os.getpid()}, step=epoch)
        time.sleep(0.15)
        if epoch == 2 and experiment.kill_in:
            rank.checkpoint.save(epoch, epoch)
            rank.checkpoint.flush()
    return experiment.loss(NUM_EPOCHS)


def follow(plan: dict[str, Any]) -> float:
    """Some epochs, the first after there is one file, the second after there is another; then success or failure."""
    for epoch in range(1, plan["epochs"] + 1):
        waits_for = plan.get(f"epoch-{epoch}-after")
        while waits_for and not Path(waits_for).exists():
            time.sleep(0.01)
        current_rank().log({"epoch": epoch, "loss": plan["level"] / epoch}, step=epoch)
    if plan["fails"]:
        raise LookupError("no good")
    return float(plan["level"])


# ---- What is done with them


def test_a_restarted_model_is_not_judged_twice_and_its_records_come_once(client: Client, tmp_path: Path) -> None:
    restarted = Experiment(level=1.0, folder=str(tmp_path), kill_in=5)
    began_at = time.monotonic()
    models = dispatch.map(client, descend, [restarted], stop_early=HALVE)
    assert models.result() == [restarted.loss(NUM_EPOCHS)]
    wall = time.monotonic() - began_at
    assert (tmp_path / "1-killed").exists()
    records = models[0].records
    assert [record.step for record in records] == list(range(1, NUM_EPOCHS + 1))
    assert len({record.numbers["pid"] for record in records}) == 2
    spent = models[0].goodput
    assert spent is not None
    assert min(spent.starting, spent.stepping) > 0
    assert records[-1].time - records[0].time <= spent.total <= wall


def plan(level: float, epochs: int = 1, *, fails: bool = False, **after: Path) -> dict[str, Any]:
    return {"level": level, "epochs": epochs, "fails": fails} | {
        f"epoch-{name[-1]}-after": str(path) for name, path in after.items()
    }


def test_stopped_and_cancelled_are_two_things(client: Client, tmp_path: Path) -> None:
    go, never = tmp_path / "go", tmp_path / "never"
    models = dispatch.map(
        client, follow, [plan(1.0, 2, after_2=never), plan(9.0, 2, after_1=go, after_2=never)], stop_early=HALVE
    )
    until(lambda: models[0].records, "the better one to be the first")
    go.touch()
    assert isinstance(models[1].exception(), StoppedEarlyError)
    assert models[0].cancel()
    with pytest.raises(CancelledError):
        models[0].result()
    with pytest.raises(CancelledError):
        models.result()
    assert isinstance(models.exception(), CancelledError)
    assert not models[1].cancel()


def test_who_ends_while_it_is_being_stopped_has_ended(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide_slowly(*_: object) -> bool:
        time.sleep(2.0)  # on the gang's own thread: its rank returns meanwhile
        return True

    monkeypatch.setattr(Rungs, "falls_behind", decide_slowly)
    models = dispatch.map(client, follow, [plan(1.0), plan(2.0)], stop_early=HALVE)
    assert models.result() == [1.0, 2.0]
    assert dispatch.map(client, follow, [plan(3.0)] * 2).result() == [3.0, 3.0]  # the workers are free again


def test_every_model_has_a_run_in_one_group(client: Client, tmp_path: Path) -> None:
    """One is trained to its end, one fails, and one is stopped early, since its loss is the greatest."""
    go = tmp_path / "go"  # the best must not see how good the failing one is
    experiments = [plan(0.5, 3), plan(-1.0, fails=True, after_1=go), plan(9.0, 2, after_2=tmp_path / "never")]
    models = dispatch.map(
        client,
        follow,
        experiments,
        gang=Gang(max_restarts=0),
        stop_early=HALVE,
        wandb=Wandb(project="sweeps", mode="offline", dir=str(tmp_path), tags=("tests",), config={"team": "a"}),
    )
    assert models[0].result() == 0.5
    go.touch()
    assert isinstance(models[1].exception(), LookupError)
    assert isinstance(models[2].exception(), StoppedEarlyError)

    runs = {run["name"]: run for run in map(read_run, tmp_path.glob("wandb/offline-run-*/run-*.wandb"))}
    assert sorted(runs) == ["follow-0", "follow-1", "follow-2"]
    ended, failed, stopped = (runs[f"follow-{index}"] for index in range(3))
    assert len({run["id"] for run in runs.values()}) == 3
    assert {run["group"] for run in runs.values()} == {ended["group"]}
    assert ended["group"].startswith("follow-")
    for index, run in enumerate((ended, failed, stopped)):
        config = run["config"]
        assert (config["gang/world_size"], config["gang/backend"]) == (1, "gloo")
        users = {name: value for name, value in config.items() if not name.startswith("gang/")}
        assert users == {**experiments[index], "team": "a"}
        assert (run["project"], run["tags"]) == ("sweeps", ["tests"])
        assert [(row["epoch"], row["loss"]) for row in run["history"]] == [
            (record.numbers["epoch"], record.numbers["loss"]) for record in models[index].records
        ]
    assert [len(run["history"]) for run in (ended, failed, stopped)] == [3, 1, 1]
    assert [run["exit_code"] for run in (ended, failed, stopped)] == [0, 1, 0]
    assert stopped["summary"]["stopped_early"] == str(models[2].exception())
    assert "stopped_early" not in ended["summary"]
