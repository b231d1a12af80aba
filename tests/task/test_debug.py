"""Debug mode: the calling process is the only rank, checkpoints and trackers work, and nothing stays behind."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import Client
from flytekit import task

from flytekitplugins.daskpytorch import (
    DaskDDP,
    Gang,
    LogRecord,
    Observer,
    Profile,
    SpawnDDP,
    StoppedEarlyError,
    current_rank,
    dispatch,
    results,
    settings,
)
from flytekitplugins.daskpytorch.errors import GangCancelledError
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.testing import one_rank  # noqa: F401

HEARD: list[Any] = []


class Ear(Observer):
    def on_formed(self, seconds: float) -> None:
        HEARD.append("formed")

    def on_log(self, record: LogRecord) -> None:
        HEARD.append(record.metrics)

    def on_checkpoint(self, step: int) -> None:
        HEARD.append(step)

    def on_end(self, error: Exception | None) -> None:
        HEARD.append(type(error))


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may ask for any."""
    HEARD.clear()
    monkeypatch.setattr(fork_client, "connect", mock.Mock(side_effect=AssertionError("a fork server was asked for")))


@pytest.fixture
def client() -> mock.Mock:
    """Client of a cluster that must not be asked for anything."""
    return mock.create_autospec(Client, instance=True)


def train(steps: int) -> list[int]:
    rank = current_rank()
    dist.init_process_group("gloo")  # as a program for torchrun says; it is there already
    total = torch.ones(1)
    dist.all_reduce(total)
    state = rank.checkpoint.load() or {"step": 0}
    for step in range(state["step"], steps):
        rank.log({"loss": 1.0 / (1 + step)}, step=step)
        rank.checkpoint.save({"step": step + 1}, step=step)
    return [os.getpid(), rank.world_size, int(total), int(os.environ["WORLD_SIZE"]), state["step"]]


@task(task_config=DaskDDP(gang=Gang(observers=(Ear,))))
def on_dask(steps: int) -> list[int]:
    return train(steps)


@task(task_config=SpawnDDP(nproc=2, gang=Gang(observers=(Ear,))))
def fails() -> int:
    weight = 1
    if weight:
        raise KeyError(weight)
    return weight


@task(task_config=SpawnDDP(nproc=2, gang=Gang(observers=(Ear,))))
def exits(code: int) -> None:
    sys.exit(code)


HERE = [os.getpid(), 1, 1, 1, 0]


@pytest.mark.usefixtures("one_rank")
def test_a_task_runs_as_the_only_rank_in_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    assert on_dask(steps=2) == HERE
    heard = [what for what in HEARD if not isinstance(what, int)]
    assert heard == ["formed", {"loss": 1.0}, {"loss": 0.5}, type(None)]
    assert [what for what in HEARD if isinstance(what, int)] == [0, 1]
    assert (
        "on_dask: debugging (DASKPYTORCH_DEBUG, Gang(debug=True)): one rank, in this process\n"
        in capfd.readouterr().err
    )
    assert dict(os.environ) == environment
    assert not dist.is_initialized()
    assert not current_rank().link.takes_results


@pytest.mark.usefixtures("one_rank")
def test_an_error_has_the_frames_that_a_post_mortem_debugger_looks_into() -> None:
    with pytest.raises(KeyError) as caught:
        fails()
    frame = list(traceback.walk_tb(caught.value.__traceback__))[-1][0]
    assert (frame.f_code.co_name, frame.f_locals["weight"]) == ("fails", 1)
    assert ["formed", KeyError] == HEARD
    assert not dist.is_initialized()


@pytest.mark.usefixtures("one_rank")
def test_dispatch_run_calls_the_function_at_once(client: mock.Mock) -> None:
    futures = dispatch.run(client, train, steps=1)
    assert futures.done()
    assert futures.result() == [HERE]
    assert isinstance(dispatch.run(client, fails).exception(), KeyError)
    assert not client.mock_calls


def profiled() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    results.DaskResultsHandler().submit_result("notes.txt", "went well")


def test_results_and_profiles_become_files(tmp_path: Path) -> None:
    futures = dispatch.run(None, profiled, gang=Gang(debug=True, profile=Profile(steps=(2, 3))))
    results.DaskResultsHandler().process_results(tmp_path, futures)
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["notes.txt", "profiles/rank-0-steps-2-3.pt.trace.json.gz"]


def learn_until(steps: int, fault: str) -> list[int]:
    """Return the steps that were trained; fails at step 1 while the file of the fault is there."""
    rank = current_rank()
    start = (rank.checkpoint.load() or {"step": -1})["step"] + 1
    for step in range(start, steps):
        if step == 1 and Path(fault).exists():
            raise RuntimeError("step 1")
        rank.checkpoint.save({"step": step}, step)
    return list(range(start, steps))


@pytest.mark.usefixtures("one_rank")
def test_a_call_goes_on_by_its_key_and_says_from_where_or_that_it_does_not(
    client: mock.Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault, uri = tmp_path / "fault", tmp_path / "checkpoints"
    fault.touch()

    def run(key: str | None = None) -> Any:
        gang = Gang(checkpoint_uri=str(uri), key=key)
        futures = dispatch.run(client, learn_until, 3, str(fault), gang=gang)
        lines = capsys.readouterr().err.splitlines()
        return futures.exception() or futures[0].result(), next(line for line in lines if "checkpoint" in line)

    error, line = run()
    assert str(error) == "step 1"
    assert line.endswith(f"starting afresh, since no checkpoint is in {uri}/learn_until-1")
    assert run()[1].endswith(
        f"starting afresh, since no checkpoint is in {uri}/learn_until-2; each call has a folder of its own, unless "
        "Gang(key=...) names one"
    )
    fault.unlink()
    line = f"learn_until: going on from the checkpoint of step 0 in {uri}/learn_until-1"
    assert run("learn_until-1") == ([1, 2], line)


@pytest.mark.usefixtures("one_rank")
def test_an_exit_code_is_that_of_this_process(client: mock.Mock) -> None:
    assert exits(code=0) is None
    assert dispatch.run(client, sys.exit).result() == [None]
    with pytest.raises(SystemExit, match="3"):
        exits(code=3)
    assert HEARD[-1] is RuntimeError


def shards(steps: int) -> int:
    checkpoint = current_rank().checkpoint
    model = torch.nn.Linear(2, 2)
    state = {"model": model.state_dict(), "step": 0}
    checkpoint.load_sharded(state)
    start = state["step"]
    for step in range(start + 1, steps + 1):
        torch.nn.init.constant_(model.weight, step)
        checkpoint.save_sharded({"model": model.state_dict(), "step": step}, step, {"loss": float(step)})
    assert checkpoint.load_sharded(state, step=steps) == steps
    assert model.weight[0, 0].item() == steps
    assert [saved.step for saved in checkpoint.list()] == [steps - 1, steps]
    return start


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_checkpoint_is_loaded_in_the_next_run(client: mock.Mock, tmp_path: Path) -> None:
    gang = Gang(checkpoint_uri=str(tmp_path), key="shards")
    assert dispatch.run(client, shards, 2, gang=gang).result() == [0]
    assert dispatch.run(client, shards, 3, gang=gang).result() == [2]


class Impatient(Observer):
    def on_log(self, record: LogRecord) -> None:
        if record.step == 1:
            raise StoppedEarlyError("step 1", epoch=1, metric="loss", value=1.0)


@pytest.mark.usefixtures("one_rank")
def test_an_observer_stops_the_training_where_it_logs(client: mock.Mock) -> None:
    futures = dispatch.run(client, train, steps=3, gang=Gang(observers=(Impatient,)))
    assert isinstance(futures.exception(), StoppedEarlyError)
    assert futures.step == 1


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("one_rank")
def test_ctrl_c_is_raised_where_the_function_is(client: mock.Mock) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        dispatch.run(client, interrupted, gang=Gang(observers=(Ear,)))
    assert caught.traceback[-1].name == "interrupted"
    assert HEARD[-1] is GangCancelledError
    assert not dist.is_initialized()


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv(settings.DEBUG_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.DEBUG_VARIABLE, value)
    assert settings.is_debugging(Gang()) is expected
