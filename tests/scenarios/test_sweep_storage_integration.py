"""Interrupted sweeps continue from their storage."""

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import EarlyStopping, Gang, LogRecord, StoppedEarlyError, current_rank, dispatch
from flytekitplugins.daskpytorch.protocol.files import Files
from pages import REPOSITORY
from processes import Cluster, is_alive, run_program, running, until

VICTIM = REPOSITORY / "tests/support/sweep_victim.py"


def allow(folder: Path, limit: int) -> None:
    """Models below this index may end."""
    (folder / "new").write_text(str(limit))
    (folder / "new").replace(folder / "limit")


def test_a_sweep_that_is_killed_goes_on_and_trains_no_model_twice_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    command = [VICTIM, cluster.address, str(tmp_path), "6"]
    kept = tmp_path / "kept" / "grid"
    allow(tmp_path, 2)
    with running(command, cwd=tmp_path, log=tmp_path / "log"):
        ended = [kept / f"{index}/outcome.pkl" for index in range(2)]
        begun = [kept / f"{index}/manifest.json" for index in (2, 3)]
        until(lambda: all(path.exists() for path in ended + begun), "two to end, and the next two to begin")
        until(lambda: all(b'"step": 3' in path.read_bytes() for path in begun), "their last checkpoints")
    ranks = [int((tmp_path / f"pid-{index}").read_text()) for index in (2, 3)]
    until(lambda: not any(map(is_alive, ranks)), "the ranks to end as their driver has")

    allow(tmp_path, 6)
    done = run_program(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results, steps = json.loads(done.stdout)
    assert results == [index * index for index in range(6)]
    assert steps == [[1, 2, 3]] * 6
    traces = [(tmp_path / f"trace-{index}").read_text().split() for index in range(6)]
    assert traces == [["1", "2", "3", "end"]] * 6  # what was begun was taken up after its last epoch
    assert f"2 of 6 models have ended before, as {kept} has it" in done.stderr


def is_stored(trace: Path, epoch: int) -> bool:
    manifest = trace.parent / "kept" / "grid" / trace.name / "manifest.json"
    return manifest.exists() and f'"step": {epoch}' in manifest.read_text()


def follow(experiment: dict[str, object]) -> float:
    """Epochs with a checkpoint after each, and a line in a file; the number that it is to fail in, once."""
    rank, trace = current_rank(), Path(str(experiment["trace"]))
    first = (rank.checkpoint.load() or 0) + 1
    for epoch in range(first, 5):
        with trace.open("a") as file:
            file.write(f"{epoch}\n")
        rank.checkpoint.save(epoch, epoch)
        rank.checkpoint.flush()
        while epoch == experiment.get("fails_in") and not is_stored(trace, epoch):
            time.sleep(0.01)  # so that what is logged now belongs to no checkpoint
        rank.log({"epoch": epoch, "loss": experiment["loss"]}, step=epoch)
        if epoch == experiment.get("fails_in") and not trace.with_suffix(".failed").exists():
            trace.with_suffix(".failed").touch()
            raise LookupError("no good")
        while epoch == 2 and "waits_for" in experiment and not Path(str(experiment["waits_for"])).exists():
            time.sleep(0.01)
    return float(str(experiment["loss"]))


def traced(folder: Path, number: int) -> list[int]:
    return [int(line) for line in (folder / f"{number}").read_text().split()]


def numbered(records: list[LogRecord]) -> list[int]:
    return [record.step for record in records]


def test_a_stopped_model_keeps_its_last_value_and_checkpoint(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is stopped after its first epoch that counts, since the first has been there with a better loss."""
    put = Files.put

    def put_slowly(*args: Any) -> None:
        time.sleep(1.0)  # a checkpoint is on its way when its model is stopped
        put(*args)

    monkeypatch.setattr(Files, "put", put_slowly)
    never = tmp_path / "never"
    grid = [
        {"trace": str(tmp_path / "0"), "loss": 1.0},
        {"trace": str(tmp_path / "1"), "loss": 2.0, "waits_for": str(never)},
    ]
    halve = EarlyStopping(metric="loss", reduction_factor=2, grace_period=2)
    best = dispatch.map(client, follow, grid[:1], stop_early=halve, storage=str(tmp_path / "kept"))
    assert best.result() == [1.0]
    models = dispatch.map(client, follow, grid, stop_early=halve, storage=str(tmp_path / "kept"))
    assert models.result() == [1.0, None]  # the first is compared with, though it is not trained
    assert (traced(tmp_path, 0), traced(tmp_path, 1)) == ([1, 2, 3, 4], [1, 2])

    again = dispatch.map(client, follow, grid, stop_early=halve, storage=str(tmp_path / "kept"))
    assert again.done()
    error = again[1].exception()
    assert isinstance(error, StoppedEarlyError)
    assert (error.epoch, error.metric, error.value) == (2, "loss", 2.0)
    assert again[1].metrics == {"epoch": 2, "loss": 2.0}
    assert [future.status for future in again] == ["finished", "stopped early"]
    assert [numbered(future.records) for future in again] == [[1, 2, 3, 4], [1, 2]]

    never.touch()
    on = dispatch.map(client, follow, grid, storage=str(tmp_path / "kept"))
    assert on.result() == [1.0, 2.0]
    assert (traced(tmp_path, 0), traced(tmp_path, 1)) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert numbered(on[1].records) == [1, 2, 3, 4]


def test_a_failed_model_is_trained_on_and_others_are_appended(client: Client, tmp_path: Path) -> None:
    grid = [
        {"trace": str(tmp_path / "0"), "loss": 1.0, "fails_in": 3},
        {"trace": str(tmp_path / "1"), "loss": 2.0},
        {"trace": str(tmp_path / "2"), "loss": 3.0},
    ]
    once = Gang(max_restarts=0)
    models = dispatch.map(client, follow, grid[:2], gang=once, storage=str(tmp_path / "kept"), name="grid")
    assert isinstance(models[0].exception(), LookupError)
    assert models[1].result() == 2.0
    begun = pickle.loads((tmp_path / "kept" / "grid" / "0" / "begun.pkl").read_bytes())
    assert numbered(begun["records"]) == [1, 2, 3]  # the last, after the checkpoint
    models = dispatch.map(client, follow, grid, gang=once, storage=str(tmp_path / "kept"), name="grid")
    assert models.result() == [1.0, 2.0, 3.0]
    assert [traced(tmp_path, number) for number in range(3)] == [[1, 2, 3, 4]] * 3
    assert [numbered(model.records) for model in models] == [[1, 2, 3, 4]] * 3
    with pytest.raises(ValueError, match=r"experiment 1: loss was 2\.0, and is 5\.0"):
        dispatch.map(client, follow, [grid[0], {**grid[1], "loss": 5.0}], storage=str(tmp_path / "kept"), name="grid")
