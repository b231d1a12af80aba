"""TensorBoard and MLflow record what a gang reports, as their own libraries read it back."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flytekit.types.file import FlyteFile
from PIL import Image
from tensorboard.plugins.hparams import plugin_data_pb2
from werkzeug.serving import make_server

from flytekitplugins.daskpytorch import Histogram, MLflow, Picture, TensorBoard
from flytekitplugins.daskpytorch.display import tracker
from flytekitplugins.daskpytorch.display import training as trainings
from flytekitplugins.daskpytorch.display.tracker import Run, State, Tracker
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.protocol.host import Execution
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.protocol.observer import Observer
from processes import until
from seaweed import free_ports
from told import To, node, record, shape_of
from tracked import Flow, events, scalars, texts

SHAPE = shape_of(node(), per_worker=2)
PICTURE = Picture.of(Image.frombytes("L", (3, 2), bytes([0, 100, 255] * 2)))
Make = Callable[[], Observer]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer over the last records after a preemption."""
    monkeypatch.setattr(tracker, "PREEMPTED_TIMEOUT", 60.0)


def training(id_: str = "train-f3a-n0", **changes: Any) -> Training:
    return Training(name="flows.train", id=id_, **{"inputs": {"lr": 0.25, "data": "s3://names"}, **changes})


def begun(make: Make, about: Training | None = None, resumed: int | None = None) -> Observer:
    """An observer of a gang that has been formed."""
    observer = make()
    To(observer).begins(about or training())
    if resumed is not None:
        To(observer).resumed(resumed)
    To(observer).placed(SHAPE)
    return observer


def losses(observer: Observer, steps: range, loss: float) -> None:
    for step in steps:
        To(observer).logged(record(step, loss=loss))
        To(observer).logged(record(step, rank=1, loss=-1.0))


# ---- Which run


@dataclass
class Rates:
    first: float
    second: float


def named(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Training:
    execution = Execution()
    execution.name = "f3a"
    return trainings.of_call(function, "train-1", execution, args, kwargs)


def test_id_is_alike_in_all_attempts_and_tells_the_gangs_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = Execution()
    execution.name = "f3a"
    monkeypatch.setenv("FLYTE_EXECUTION_URL", "https://flyte.example/f3a")
    ids = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("HOSTNAME", f"f3a-n0-{attempt}-runner")
        monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", attempt)
        group = trainings.group_of("train-2", execution)
        made = [
            trainings.of_task("flows.names.train", "f3a", {}),
            trainings.of_call(losses, "train-1", execution, (), {}),
            trainings.of_model(losses, group, 1, {"lr": 1}),
        ]
        assert {each.link for each in made} == {"https://flyte.example/f3a"}
        ids.append([(each.id, each.group, each.index) for each in made])
    model = ("train-2-f3a-n0-1", "train-2-f3a-n0", 1)
    assert ids == [[("train-f3a-n0", None, None), ("train-1-f3a-n0", None, None), model]] * 2


def test_id_of_a_local_training_is_new_each_time() -> None:
    ids = {trainings.of_task("train", execution, {}).id for execution in ("local", None, "local")}
    assert len(ids) == 3


def test_inputs_are_the_arguments_without_secrets_and_cut() -> None:
    def train(lr: float, text: str, many: list[int], few: list[int], file: FlyteFile, api_key: str) -> None: ...

    rates, kept = Rates(0.5, 0.25), {"few": [1, 2], "file": FlyteFile("s3://b/names.csv")}
    inputs = named(train, rates, "x" * 1000, api_key="s3cret", many=[1] * 99, **kept).inputs
    rest = {"text": "x" * 499 + "…", "num_many": 99, "few": "[1, 2]", "file": "s3://b/names.csv", "api_key": "(hidden)"}
    assert inputs == {"first": 0.5, "second": 0.25, **rest}
    assert named(min, 1).inputs == {}

    def left(lr: float, momentum: float = 0.9, *rest: int, nesterov: bool = False, **more: int) -> None: ...

    expected = {"lr": 0.5, "momentum": 0.8, "rest": "(7,)", "nesterov": False}
    assert named(left, 0.5, 0.8, 7, seed=3).inputs == {**expected, "seed": 3}


# ---- TensorBoard


def board(folder: Path | str, **settings: Any) -> TensorBoard:
    return TensorBoard(folder=folder, **settings)


def session(folder: Path, part: str) -> Any:
    content = events(folder).PluginTagToContent("hparams")[f"_hparams_/session_{part}_info"]
    return getattr(plugin_data_pb2.HParamsPluginData.FromString(content), f"session_{part}_info")


def test_event_files_have_numbers_texts_and_hyperparameters(tmp_path: Path) -> None:
    observer = begun(board(tmp_path))
    To(observer).logged(record(0, loss=3.0, note="slow"))
    To(observer).logged(record(7, loss=1.5, epoch=1, odd=object()))
    To(observer).ended(None)
    folder = tmp_path / "train-f3a-n0"
    assert observer.places() == {"TensorBoard": str(folder)}
    assert scalars(folder) == [(0, 3.0), (7, 1.5)]
    assert scalars(folder, "epoch") == [(7, 1.0)]
    assert texts(folder, "note") == [(0, "slow")]
    given = {name: value.string_value or value.number_value for name, value in session(folder, "start").hparams.items()}
    gang = {"gang/world_size": 2, "gang/num_workers": 1, "gang/backend": "gloo", "gang/hosts": "h", "gang/gpus": 0.0}
    assert given == {"lr": 0.25, "data": "s3://names", **gang}


def test_event_files_have_histograms_and_pictures(tmp_path: Path) -> None:
    observer = begun(board(tmp_path))
    To(observer).logged(record(3, weights=Histogram.of([0.0, 0.0, 1.0]), sample=PICTURE))
    To(observer).ended(None)
    found = events(tmp_path / "train-f3a-n0")
    [image] = found.Images("sample")
    assert (image.step, image.width, image.height) == (3, 3, 2)
    [histogram] = found.Histograms("weights")
    value = histogram.histogram_value
    assert (histogram.step, value.min, value.max, value.num, value.bucket[0]) == (3, 0.0, 1.0, 3.0, 2.0)
    assert (len(value.bucket), value.bucket_limit[-1]) == (64, 1.0)


def test_event_files_say_why_a_training_failed_and_an_attempt_that_begins_anew_hides_its_points(tmp_path: Path) -> None:
    failed = begun(board(tmp_path, name="mine"))
    losses(failed, range(3), 1.0)
    To(failed).ended(GangError("rank 1 failed"))
    assert texts(tmp_path / "mine", "reason") == [(0, "GangError: rank 1 failed")]
    again = begun(board(tmp_path, name="mine"))
    losses(again, range(3), 2.0)
    To(again).restarting("rank 1 was lost", 1)
    losses(again, range(2, 4), 3.0)
    To(again).ended(None)
    assert scalars(tmp_path / "mine") == [(0, 2.0), (1, 2.0), (2, 3.0), (3, 3.0)]


def test_event_files_go_to_storage(tmp_path: Path) -> None:
    observer = begun(board(f"file://{tmp_path}/kept/"))
    losses(observer, range(3), 1.0)
    To(observer).ended(None)
    assert observer.places() == {"TensorBoard": f"file://{tmp_path}/kept/train-f3a-n0"}
    assert scalars(tmp_path / "kept/train-f3a-n0") == [(0, 1.0), (1, 1.0), (2, 1.0)]


# ---- MLflow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database, which takes seconds to make."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def flow(store: Path, request: pytest.FixtureRequest) -> Flow:
    return Flow(store, request.node.name)


def test_mlflow_run_has_numbers_texts_pictures_parameters_and_the_end(flow: Flow) -> None:
    observer = begun(flow(tags={"team": "names"}), training(link="https://flyte.example/f3a"))
    To(observer).logged(record(0, loss=3.0, note="slow"))
    To(observer).logged(record(7, loss=1.5, odd=object(), **{"a:b/../c": math.nan}))
    To(observer).logged(record(7, loss=1.0, sample=PICTURE, weights=Histogram.of([1.0])))
    To(observer).ended(None)
    [run] = flow.runs
    assert observer.places() == {"MLflow": f"run {run.info.run_id} in sqlite:///{flow.store}/mlflow.db"}
    assert (run.info.status, run.info.run_name) == ("FINISHED", "train")
    gang = {"gang/world_size": "2", "gang/num_workers": "1", "gang/backend": "gloo", "gang/hosts": "h", "gang/gpus": ""}
    assert run.data.params == {"lr": "0.25", "data": "s3://names", **gang}
    assert flow.points(run) == [(0, 3.0), (7, 1.0), (7, 1.5)]
    assert "a_b/_/c" in run.data.metrics
    files = [Path(file.path) for file in flow.client.list_artifacts(run.info.run_id, "images")]
    [file] = [file for file in files if file.suffix == ".png"]
    with Image.open(flow.client.download_artifacts(run.info.run_id, str(file))) as image:
        assert image.size == (3, 2)
    tags = {name: run.data.tags[name] for name in ("team", "note", "daskpytorch.execution")}
    assert tags == {"team": "names", "note": "slow", "daskpytorch.execution": "https://flyte.example/f3a"}


def test_mlflow_runs_of_many_models_are_nested_in_one(flow: Flow) -> None:
    models = [
        begun(flow(), training(f"{flow.name}-{index}", group=flow.name, index=index, inputs={"lr": index}))
        for index in (0, 1)
    ]
    for model, error in zip(models, (None, GangError("rank 1 failed")), strict=True):
        To(model).logged(record(0, loss=1.0))
        To(model).ended(error)
    parent, *nested = sorted(flow.runs, key=lambda run: run.info.run_name)
    assert [run.info.run_name for run in (parent, *nested)] == ["train", "train-0", "train-1"]
    assert [run.data.tags["mlflow.parentRunId"] for run in nested] == [parent.info.run_id] * 2
    assert [run.info.status for run in (parent, *nested)] == ["FINISHED", "FINISHED", "FAILED"]
    assert nested[1].data.tags["daskpytorch.reason"] == "GangError: rank 1 failed"
    assert [run.data.params["lr"] for run in nested] == ["0", "1"]


def test_mlflow_server_that_comes_late_has_all(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    To(begun(flow(experiment="first"))).ended(None)  # makes the database
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{flow.store}/mlflow.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(flow.store / "artifacts"))
    [port] = free_ports(1)
    observer = begun(flow(uri=f"http://127.0.0.1:{port}"))
    losses(observer, range(3), 1.0)
    time.sleep(1.0)
    assert observer.places() == {}
    from mlflow.server import app

    server = make_server("127.0.0.1", port, app, threaded=True)  # MLflow's own client tries again
    threading.Thread(target=server.serve_forever, daemon=True).start()
    To(observer).ended(None)
    server.shutdown()
    [run] = flow.runs
    assert (run.info.status, flow.points(run)) == ("FINISHED", [(0, 1.0), (1, 1.0), (2, 1.0)])
    place = f"http://127.0.0.1:{port}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert observer.places() == {"MLflow": place}


def test_mlflow_server_that_does_not_answer_costs_a_notice_without_its_password(
    flow: Flow, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    observer = begun(flow(uri=f"http://user:hush@127.0.0.1:{free_ports(1)[0]}"))
    losses(observer, range(3), 1.0)
    To(observer).ended(None)
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("MLflow: MlflowException")
    assert said.endswith("The training goes on, with records missing.")
    assert "hush" not in said


# ---- Settings


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: TensorBoard(folder="what://ever", name="a/b"), ["folder", "name"]),
        (lambda: TensorBoard(folder=""), ["folder"]),
        (lambda: MLflow(experiment="", uri="", name="", tags={"a": 1}), ["experiment", "uri", "name", "tags"]),  # type: ignore[dict-item]
    ],
)
def test_settings_that_make_no_sense_are_refused_all_at_once(make: Callable[[], Any], names: list[str]) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        make()
    assert [part.partition("=")[0].partition("(")[2] for part in str(caught.value).split("; ")] == names


# ---- The thread that feeds a tracker


class Unopened(Run):
    """A run that cannot be opened, as the test finds out at its end."""

    label = "Tracker"
    may_fail = threading.Event()
    closed = threading.Event()

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        self.may_fail.wait(60)
        raise ValueError("no such project")

    def close(self, state: State, reason: str | None) -> None:
        self.closed.set()


def test_the_end_does_not_wait_for_a_run_that_could_not_be_opened(capsys: pytest.CaptureFixture[str]) -> None:
    observer = Tracker(run := Unopened())
    begun(lambda: observer)
    ending = threading.Thread(target=To(observer).ended, args=(None,), daemon=True)
    ending.start()
    until(lambda: observer._worker.is_urgent, "the end's wait")
    run.may_fail.set()
    ending.join(30)
    assert not ending.is_alive()
    assert not run.closed.is_set()
    assert capsys.readouterr().err == (
        "Tracker: ValueError: no such project. The training goes on, with records missing.\n"
    )
