"""Weights & Biases: which run, with which key, and one that is really recorded; never in the way of the training."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from flytekit import Secret
from flytekit.types.file import FlyteFile

from flytekitplugins.daskpytorch import Histogram, Picture, Wandb
from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display import wandb as wandb_observer
from flytekitplugins.daskpytorch.display import wandb_run
from flytekitplugins.daskpytorch.display.training import inputs_of, run_config
from flytekitplugins.daskpytorch.display.wandb import WandbObserver
from flytekitplugins.daskpytorch.display.wandb_run import RUN_IS, RunSettings, Tracker
from flytekitplugins.daskpytorch.flyte import context as flyte_context
from flytekitplugins.daskpytorch.goodput import Goodput
from flytekitplugins.daskpytorch.protocol import host
from flytekitplugins.daskpytorch.protocol.code import unpack_call
from flytekitplugins.daskpytorch.protocol.observer import Observers, Shape
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from processes import until
from wandb_file import read_records, read_run

OURS = ("WANDB_", "FLYTE_", "_FSEC_", "NETRC")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no Flyte, and a home of its own."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.delenv("HOSTNAME", raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def settings(wandb: Wandb | None = None, **changes: Any) -> RunSettings:
    given: dict[str, Any] = {"task": "workflows.names.train", "execution": "f3a"}
    return wandb_observer.settings(wandb or Wandb(project="names"), **{**given, **changes})


# ---- Which run ------------------------------------------------------------------------------------------------------


def test_run_id_is_the_pods_name_without_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = set()
    for attempt in ("0", "1", "11"):
        monkeypatch.setenv("HOSTNAME", f"f3a-n0-{attempt}-runner")
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", attempt)
        ids.add(wandb_observer.run_id("f3a", "train"))
    assert ids == {"f3a-n0"}


def test_run_id_is_the_pods_name_also_without_the_operators_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "f3a-n1-2")
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "2")
    assert wandb_observer.run_id("f3a", "train") == "f3a-n1"


@pytest.mark.parametrize("hostname", ["my-laptop", "my-laptop-1", "f3a-n0-7-runner", "other-n0-1-runner"])
def test_run_id_is_execution_and_task_where_the_host_is_not_named_so(
    monkeypatch: pytest.MonkeyPatch, hostname: str
) -> None:
    monkeypatch.setenv("HOSTNAME", hostname)
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    assert wandb_observer.run_id("f3a", "train") == "f3a-train"


@pytest.mark.parametrize("execution", [None, "", "local"])
def test_every_local_run_has_a_new_id(execution: str | None) -> None:
    ids = {wandb_observer.run_id(execution, "train") for _ in range(5)}
    assert len(ids) == 5
    assert all(id_.isalnum() for id_ in ids)


def test_run_id_has_only_characters_that_wandb_takes() -> None:
    assert wandb_observer.run_id("f3a", "mod.train:x/y") == "f3a-mod-train-x-y"
    assert len(wandb_observer.run_id("f3a", "x" * 500)) <= 128


def test_id_and_name_that_are_given_win() -> None:
    made = settings(Wandb(project="names", id="mine", name="my run"))
    assert (made.id, made.name) == ("mine", "my run")


def test_default_name_is_the_tasks_short_name() -> None:
    assert (settings().name, settings().id) == ("train", "f3a-train")


def opened(run: RunSettings, inputs: Any, *shapes: Shape) -> RunSettings:
    """What rank 0 opens after the gang was placed so."""
    observer = WandbObserver(run, inputs)
    for shape in shapes:
        observer.placed(shape)
    [part] = Observers([observer]).for_rank()
    made: RunSettings = unpack_call(part).function.args[0]  # type: ignore[attr-defined]
    return made


def test_config_is_the_tasks_with_the_users_own_on_top_and_that_of_the_first_attempt() -> None:
    run = settings(Wandb(project="names", config={"lr": 1, "team": "a"}))
    made = opened(run, {"lr": 0, "epochs": 3}, shape_of(1), shape_of(2))
    gang = {"world_size": 1, "num_workers": 1, "backend": "gloo", "hosts": ["h"], "gpus": []}
    assert made.config == {"lr": 1, "team": "a", "epochs": 3, "gang": gang}


def test_notes_are_the_link_to_flytes_console(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().notes is None
    monkeypatch.setenv("FLYTE_EXECUTION_URL", "https://flyte.example/f3a")
    assert settings().notes == "https://flyte.example/f3a"


def test_config_of_a_run_has_inputs_and_gang() -> None:
    @dataclass
    class Rates:
        first: float
        second: float

    node = Node(worker="w", host="h", num_cores=2, gpus=("0",), gpu_names=("H100",), interface=None, versions={})
    shape = Shape(name="train", backend="gloo", nodes=[node], places=place_ranks([node], 2))
    inputs = {"file": FlyteFile("s3://b/names.csv"), "rates": Rates(0.5, 0.25), "names": ["a"] * 21, "few": [1, 2]}
    assert run_config(inputs, shape) == {
        "file": "s3://b/names.csv",
        "first": 0.5,
        "second": 0.25,
        "num_names": 21,
        "few": "[1, 2]",
        "gang": {"world_size": 2, "num_workers": 1, "backend": "gloo", "hosts": ["h"], "gpus": ["H100"]},
    }


# ---- Many runs


@dataclass
class Grid:
    lr: float
    layers: tuple[int, ...]


def shape_of(num_ranks: int) -> Shape:
    node = Node(worker="w", host="h", num_cores=2, gpus=(), gpu_names=(), interface=None, versions={})
    return Shape(name="train", backend="gloo", nodes=[node], places=place_ranks([node], num_ranks))


def runs_of(wandb: Wandb, experiments: list[Any], execution: str | None = "f3a") -> list[RunSettings]:
    shared = wandb_observer.sweep_settings(wandb, function="outer.<locals>.train", execution=execution)
    runs = [
        wandb_observer.model_settings(shared, index=index, key=f"train-0123456789ab-{index + 1}")
        for index in range(len(experiments))
    ]
    return [opened(run, inputs_of(experiment), shape_of(1)) for run, experiment in zip(runs, experiments, strict=True)]


def test_runs_of_many_models_have_a_group_and_differ_in_id_name_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    runs = runs_of(Wandb(project="names", config={"team": "a"}), [{"lr": 0.1}, Grid(lr=0.2, layers=(1, 2)), 3, (4, 5)])
    assert [run.wandb.group for run in runs] == ["train-f3a"] * 4
    assert [run.name for run in runs] == ["train-0", "train-1", "train-2", "train-3"]
    assert [run.id for run in runs] == [f"f3a-train-train-0123456789ab-{number}" for number in (1, 2, 3, 4)]
    gang = {"world_size": 1, "num_workers": 1, "backend": "gloo", "hosts": ["h"], "gpus": []}
    assert [run.config for run in runs] == [
        {"lr": 0.1, "gang": gang, "team": "a"},
        {"lr": 0.2, "layers": "(1, 2)", "gang": gang, "team": "a"},
        {"experiment": 3, "gang": gang, "team": "a"},
        {"experiment": "(4, 5)", "gang": gang, "team": "a"},
    ]
    assert capsys.readouterr().err.count("no API key found") == 1


def test_ids_of_many_models_are_alike_in_every_attempt_and_differ_in_every_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("HOSTNAME", f"f3a-n0-{attempt}-runner")
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", attempt)
        ids.append([run.id for run in runs_of(Wandb(project="names"), [1, 2])])
    assert ids == [["f3a-n0-train-0123456789ab-1", "f3a-n0-train-0123456789ab-2"]] * 2


@pytest.mark.parametrize("execution", [None, "local"])
def test_local_sweeps_have_groups_and_ids_of_their_own(execution: str | None) -> None:
    first, second = (runs_of(Wandb(project="names", name="mine"), [1], execution)[0] for _ in range(2))
    assert first.wandb.group != second.wandb.group
    assert first.id != second.id
    assert (first.wandb.group or "").startswith("mine-")
    assert (runs_of(Wandb(project="names"), [1], execution)[0].wandb.group or "").startswith("train-")
    assert first.name == "mine-0"


def test_a_group_that_is_given_wins_and_an_id_is_refused() -> None:
    assert runs_of(Wandb(project="names", group="ours"), [1])[0].wandb.group == "ours"
    with pytest.raises(ValueError, match=r"Wandb\(id='mine'\): must be left out for many models"):
        runs_of(Wandb(project="names", id="mine"), [1])


def test_long_names_leave_ids_short_and_different() -> None:
    shared = wandb_observer.sweep_settings(Wandb(project="names"), function="f" * 200, execution="e" * 30)
    ids = {
        wandb_observer.model_settings(shared, index=index, key=f"{'f' * 200}-0123456789ab-{index}").id
        for index in range(3)
    }
    assert len(ids) == 3
    assert all(len(id_) <= 128 and id_.startswith("e" * 30) for id_ in ids)


def test_console_link_has_project_host_and_type() -> None:
    link = wandb_observer.console_link(Wandb(project="names", host="https://wandb.example"))
    assert link == {"project": "names", "host": "https://wandb.example", "link_type": wandb_observer.LINK_TYPE}


def test_console_link_has_entity_and_id_where_they_are_given() -> None:
    link = wandb_observer.console_link(Wandb(project="names", entity="team", id="mine"))
    assert (link["entity"], link["id"]) == ("team", "mine")


# ---- Which key ------------------------------------------------------------------------------------------------------


def test_without_a_key_the_run_is_offline_with_one_line_of_notice(capsys: pytest.CaptureFixture[str]) -> None:
    made = settings()
    assert (made.mode, made.key) == ("offline", None)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "WANDB_API_KEY" in err
    assert "wandb sync" in err


def test_key_from_the_environment_makes_the_run_online_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    made = settings()
    assert (made.mode, made.key) == ("online", "k" * 40)
    assert capsys.readouterr() == ("", "")


def test_key_from_a_flyte_secret_goes_before_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "from the environment")
    monkeypatch.setenv("_FSEC_WANDB_API_KEY", "from the secret")
    monkeypatch.setattr(host, "_hosts", [flyte_context.current])  # whatever other SDK the tests have imported
    made = settings(Wandb(project="names", secret=Secret(group="wandb", key="api_key")))
    assert (made.mode, made.key) == ("online", "from the secret")


def test_named_secret_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="api_key"):
        settings(Wandb(project="names", secret=Secret(group="wandb", key="api_key")))


def test_key_from_netrc(tmp_path: Path) -> None:
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password from-netrc\n")
    netrc.chmod(0o600)
    assert wandb_observer.api_key(Wandb(project="names")) == "from-netrc"


def test_netrc_of_another_server_or_a_broken_one_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password from-netrc\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert wandb_observer.api_key(Wandb(project="names")) is None
    netrc.write_text("what is this")
    assert wandb_observer.api_key(Wandb(project="names")) is None


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_mode_that_needs_no_key_asks_for_none_and_says_nothing(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = settings(Wandb(project="names", mode=mode, secret=Secret(group="wandb", key="not_there")))
    assert (made.mode, made.key) == (mode, None)
    assert capsys.readouterr() == ("", "")


def test_mode_of_the_environment_counts_where_the_user_gave_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert settings().mode == "disabled"
    assert settings(Wandb(project="names", mode="online")).mode == "online"


def test_settings_travel_pickled() -> None:
    made = settings(Wandb(project="names", tags=("a",), secret=Secret(group="g", key="k"), mode="offline"))
    assert pickle.loads(pickle.dumps(made)) == made


# ---- Real runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _wandbs_own_process_ends() -> Iterator[None]:
    yield
    _end_wandb()


def _end_wandb() -> None:
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown()


def record(step: int, **metrics: Any) -> LogRecord:
    return LogRecord(rank=0, step=step, num_steps=None, time=time.time(), metrics=metrics)


def file_of(folder: Path) -> Path:
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return file


def run_in(folder: Path) -> dict[str, Any]:
    return read_run(file_of(folder))


def test_offline_run_has_config_history_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_EXECUTION_URL", "https://flyte.example/f3a")
    config = {"lr": 0.25, "gang": {"world_size": 2, "hosts": ["h", "i"]}}
    tracker = Tracker(
        settings(Wandb(project="names", group="sweep", tags=("a", "b"), dir=str(tmp_path), config=config))
    )
    tracker.logged(record(0, loss=3.0))
    tracker.logged(record(1, loss=2.0, note="half way"))
    tracker.logged(record(7, loss=1.5, epoch=1))
    tracker.close(0)

    run = run_in(tmp_path)
    assert run["runs"] == 1
    assert (run["id"], run["project"], run["name"]) == ("f3a-train", "names", "train")
    assert (run["group"], run["tags"], run["notes"]) == ("sweep", ["a", "b"], "https://flyte.example/f3a")
    assert run["config"] == {"lr": 0.25, "gang": {"world_size": 2, "hosts": ["h", "i"]}}
    rows = [{name: value for name, value in row.items() if not name.startswith("_")} for row in run["history"]]
    assert rows == [
        {"step": 0, "loss": 3.0},
        {"step": 1, "loss": 2.0, "note": "half way"},
        {"step": 7, "loss": 1.5, "epoch": 1},
    ]
    assert run["exit_code"] == 0


def test_the_driver_hears_where_the_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = settings(Wandb(project="names", mode="offline", dir=str(tmp_path)))
    Tracker(run).close(0)
    observer = WandbObserver(run, {})
    observer.wrote(1, [f"{RUN_IS}another rank's"])
    assert observer.where is None
    observer.wrote(0, ["a line", *capsys.readouterr().err.splitlines()])
    assert observer.where is not None
    command, folder = observer.where.rsplit(" ", 1)
    assert command == "wandb sync"
    assert Path(folder) == file_of(tmp_path).parent


def test_run_of_a_failed_task_has_exit_code_1_and_only_the_first_end_counts(tmp_path: Path) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path))))
    tracker.logged(record(0, loss=3.0))
    tracker.close(1)
    tracker.close(0)
    run = run_in(tmp_path)
    assert run["exit_code"] == 1
    assert [row["loss"] for row in run["history"]] == [3.0]


def test_run_of_a_training_that_was_stopped_early_says_why(tmp_path: Path) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path))))
    tracker.logged(record(0, loss=3.0))
    tracker.close(0, "others were better")
    run = run_in(tmp_path)
    assert run["exit_code"] == 0
    assert run["summary"]["stopped_early"] == "others were better"


def test_run_says_in_its_summary_where_the_time_went(tmp_path: Path) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path))))
    tracker.logged(record(0, loss=3.0))
    tracker.accounted(Goodput(total=10.0, stepping=8.0, lost=2.0))
    tracker.close(0)
    run = run_in(tmp_path)
    goodput = run["summary"]["goodput"]
    assert [goodput[name] for name in ("share", "total", "stepping", "lost")] == [0.8, 10.0, 8.0, 2.0]
    assert run["history"][0]["loss"] == 3.0


def test_histograms_of_gradients_go_with_the_next_record(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unwatched = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path))))
    tracker.watch(model, log_freq=2)
    for step in range(1, 5):
        model(torch.ones(4, 3)).sum().backward()
        if step == 4:
            model[0].weight.grad[0, 0] = math.nan  # type: ignore[index]
        optimizer.step()
        unwatched.step()
        if step != 2:
            tracker.logged(record(step, loss=1.0))
    tracker.close(0)
    rows = {row["step"]: row for row in run_in(tmp_path)["history"]}
    histograms = {step: {name for name, value in row.items() if value == "histogram"} for step, row in rows.items()}
    names = {f"gradients/{layer}.{part}._type" for layer in "01" for part in ("weight", "bias")}
    assert histograms == {1: set(), 3: names, 4: names}  # in step 3 those of step 2
    counts, bins = (rows[4][f"gradients/0.weight.{part}"] for part in ("values", "bins"))
    assert (sum(counts), len(counts), len(bins)) == (5, 64, 65)  # the finite ones


def test_histograms_and_pictures_are_wandbs_own(tmp_path: Path) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path))))
    tracker.logged(record(1, weights=Histogram.of([0.0, 1.0]), sample=Picture.of([[0, 255]], caption="two")))
    tracker.close(0)
    [row] = run_in(tmp_path)["history"]
    assert (row["weights._type"], sum(row["weights.values"])) == ("histogram", 2)
    shown = {part: row[f"sample.{part}"] for part in ("_type", "width", "height", "caption")}
    assert shown == {"_type": "image-file", "width": 2, "height": 1, "caption": "two"}


def test_long_run_is_read_over_many_blocks(tmp_path: Path) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path))))
    for step in range(3):
        tracker.logged(record(step, text=str(step) * 50_000))
    tracker.close(0)
    assert [row["text"] for row in run_in(tmp_path)["history"]] == [str(step) * 50_000 for step in range(3)]
    assert sum(r.WhichOneof("record_type") == "exit" for r in read_records(file_of(tmp_path))) == 1


def test_value_that_cannot_be_shown_costs_one_notice_and_neither_its_row_nor_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path), mode="offline")))
    for step in range(3):
        tracker.logged(record(step, loss=float(step), odd=object()))
    tracker.close(1)
    run = run_in(tmp_path)
    assert [(row["step"], row["loss"]) for row in run["history"]] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert run["exit_code"] == 1
    assert capsys.readouterr().err.count("not JSON serializable") == 1


def test_name_that_cannot_be_shown_costs_one_notice_and_its_row_but_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path), mode="offline")))
    for step in range(4):
        tracker.logged(record(step, **{"\ud800" if step in (1, 2) else "loss": 1.0}))
    tracker.close(0)
    run = run_in(tmp_path)
    assert [(row["step"], row["loss"]) for row in run["history"]] == [(0, 1.0), (3, 1.0)]
    assert run["exit_code"] == 0
    assert capsys.readouterr().err.count("surrogates not allowed") == 1


def test_run_that_the_server_does_not_take_is_recorded_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(settings(Wandb(project="names", mode="online", dir=str(tmp_path))))  # without a key
    for step in range(3):
        tracker.logged(record(step, loss=0.0))
    tracker.close(0)
    assert "The run is recorded offline" in capsys.readouterr().err
    assert [row["step"] for row in run_in(tmp_path)["history"]] == [0, 1, 2]


def test_run_that_cannot_be_opened_costs_a_notice_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = Tracker(settings(Wandb(project="no/such:name", mode="offline")))
    for step in range(100):
        tracker.logged(record(step, loss=0.0))
    tracker.close(0)
    assert "The training goes on." in capsys.readouterr().err
    assert not list(tmp_path.glob("wandb/*/run-*.wandb"))


def test_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path / "file"), mode="offline")))
    tracker.logged(record(0, loss=0.0))
    tracker.close(0)


def test_records_that_cannot_be_taken_in_time_are_dropped_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_run, "MAX_WAITING", 0)
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path), mode="disabled")))
    for step in range(5):
        tracker.logged(record(step, loss=0.0))
    tracker.close(0)
    assert "5 records were dropped" in capsys.readouterr().err


def test_death_of_wandbs_own_process_costs_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _end_wandb()
    tracker = Tracker(settings(Wandb(project="names", dir=str(tmp_path), mode="offline")))
    tracker.logged(record(0, loss=0.0))
    until(lambda: list(tmp_path.glob("wandb/*/run-*.wandb")), "the run's file")
    services = [p for p in psutil.Process().children(recursive=True) if "wandb" in p.name()]
    assert services
    for service in services:
        service.kill()
    tracker.close(0)
    assert "The training goes on." in capsys.readouterr().err
