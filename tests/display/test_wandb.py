"""Weights & Biases: the right run and key, a real record, and no disturbance of the training."""

import base64
import contextlib
import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from flytekit import Secret
from PIL import Image

from flytekitplugins.daskpytorch import Histogram, Picture, Wandb
from flytekitplugins.daskpytorch.display import wandb as wandb_observer
from flytekitplugins.daskpytorch.display.training import of_model, of_task, run_id
from flytekitplugins.daskpytorch.display.wandb import RUN_IS, RankRun, WandbObserver
from flytekitplugins.daskpytorch.flyte import context as flyte_context
from flytekitplugins.daskpytorch.protocol import host
from flytekitplugins.daskpytorch.protocol.function import unpack_call
from flytekitplugins.daskpytorch.protocol.observer import Observers, Training
from flytekitplugins.daskpytorch.records import Goodput
from told import To, node, record, shape_of
from wandb_file import read_run

OURS = ("WANDB_", "FLYTE_", "_FSEC_", "NETRC")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No key, no Flyte, and a home of its own, which is the current folder."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.delenv("HOSTNAME", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home


def asked(
    wandb: Wandb | None = None, *, training: Training | None = None, execution: str | None = "f3a"
) -> tuple[Wandb, dict[str, str]]:
    """Settings and variables of the run that rank 0 opens after the gang was placed."""
    wandb = wandb or Wandb(project="names")
    observer = WandbObserver(wandb, wandb_observer.variables_of(wandb), execution)
    To(observer).begins(training or Training(name="workflows.names.train", id="train-f3a"))
    To(observer).placed(shape_of(node()))
    [part] = Observers([observer]).for_rank()
    wandb, variables = unpack_call(part).args
    return wandb, variables


# ---- Which run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hostname", "task", "id_"),
    [
        ("f3a-n1-1", "train", "f3a-n1"),  # the pod's name, without the operator's suffix
        *(
            (host, "train", "f3a-train")
            for host in ("my-laptop", "my-laptop-1", "f3a-n0-7-runner", "other-n0-1-runner")
        ),
        ("", "mod.train:x/y", "f3a-mod-train-x-y"),
    ],
)
def test_run_id_is_the_pods_name_or_execution_and_task(
    monkeypatch: pytest.MonkeyPatch, hostname: str, task: str, id_: str
) -> None:
    monkeypatch.setenv("HOSTNAME", hostname)
    monkeypatch.setenv("FLYTE_ATTEMPT_NUMBER", "1")
    assert run_id("f3a", task) == id_
    assert len(run_id("f3a", "x" * 500)) <= 128


GANG = {"gang/world_size": 1, "gang/num_workers": 1, "gang/backend": "gloo", "gang/hosts": "h", "gang/gpus": ""}


@pytest.mark.parametrize(("group", "expected"), [(None, "train-f3a"), ("ours", "ours")])
def test_models_of_a_sweep_have_a_run_each_in_one_group(group: str | None, expected: str) -> None:
    models = [of_model(asked, "train-f3a", index, {"lr": index}) for index in range(2)]
    runs = [asked(Wandb(project="names", name="mine", group=group), training=model)[0] for model in models]
    assert [(run.id, run.name, run.group, run.config["lr"]) for run in runs] == [
        (f"train-f3a-{index}", f"mine-{index}", expected, index) for index in range(2)
    ]


# ---- Which key ------------------------------------------------------------------------------------------------------


MINE = "a" * 40


def test_the_key_is_the_flyte_secrets_or_the_environments_and_no_secret_is_asked_for_offline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = Secret(group="wandb", key="api_key")
    with pytest.raises(ValueError, match="api_key"):
        asked(Wandb(project="names", secret=secret))
    assert asked(Wandb(project="names", mode="offline", secret=secret))[1] == {"WANDB_MODE": "offline"}
    monkeypatch.setenv("WANDB_API_KEY", "from the environment")
    assert asked()[1] == {"WANDB_API_KEY": "from the environment"}
    monkeypatch.setenv("_FSEC_WANDB_API_KEY", "from the secret")
    monkeypatch.setattr(host, "_hosts", [flyte_context.current])  # whatever other SDK the tests have imported
    assert asked(Wandb(project="names", secret=secret))[1] == {"WANDB_API_KEY": "from the secret"}
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert asked(Wandb(project="names", secret=secret))[1]["WANDB_API_KEY"] == "from the environment"


# ---- Real runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _wandbs_own_process_ends() -> Iterator[None]:
    yield
    _end_wandb()


def _end_wandb() -> None:
    import wandb

    for service in services():  # before wandb 0.31 they may wait for a server without a limit
        service.kill()
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()


def services() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "wandb" in process.name()]


def file_of(folder: Path) -> Path:
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return file


def run_in(folder: Path) -> dict[str, Any]:
    return read_run(file_of(folder))


def test_run_has_records_goodput_and_reason_and_the_driver_hears_where_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLYTE_EXECUTION_URL", "https://flyte.example/f3a")
    run = asked(Wandb(project="names", mode="offline", dir=str(tmp_path)), execution="local")
    tracker = RankRun(*run)
    tracker.on_begin()
    tracker.on_log(record(0, loss=3.0))
    tracker.on_log(
        record(1, loss=2.0, weights=Histogram.of([0.0, 1.0]), two=Picture.of(Image.new("L", (2, 1)), caption="two"))
    )
    tracker.on_goodput(Goodput(total=10.0, stepping=8.0, lost=2.0))
    tracker.on_end(0, "others were better")
    tracker.on_end(1)  # only the first end counts
    found = run_in(tmp_path)
    assert (found["exit_code"], found["summary"]["stopped_early"]) == (0, "others were better")
    goodput = found["summary"]["goodput"]
    assert [goodput[name] for name in ("share", "total", "stepping", "lost")] == [0.8, 10.0, 8.0, 2.0]
    assert [(row["step"], row["loss"]) for row in found["history"]] == [(0, 3.0), (1, 2.0)]
    row = found["history"][1]
    assert (row["weights._type"], sum(row["weights.values"])) == ("histogram", 2)
    shown = {part: row[f"two.{part}"] for part in ("_type", "width", "height", "caption")}
    assert shown == {"_type": "image-file", "width": 2, "height": 1, "caption": "two"}
    assert found["notes"] == "https://flyte.example/f3a"
    observer = WandbObserver(run[0], {}, None)
    To(observer).wrote(1, [f"{RUN_IS}another rank's"])
    assert observer.places() == {}
    To(observer).wrote(0, ["a line", *capsys.readouterr().err.splitlines()])
    assert observer.places() == {"Weights & Biases": f"wandb sync {file_of(tmp_path).parent}"}


@pytest.mark.parametrize(
    ("odd", "reason"), [({"odd": object()}, "not JSON serializable"), ({"\ud800": 1.0}, "surrogates not allowed")]
)
def test_what_cannot_be_shown_costs_one_notice_and_its_row_but_not_the_run(
    odd: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = RankRun(*asked(Wandb(project="names", dir=str(tmp_path), mode="offline")))
    for step in range(4):
        tracker.on_log(record(step, **odd if step in (1, 2) else {"loss": 1.0}))
    tracker.on_end(1)
    run = run_in(tmp_path)
    assert [(row["step"], row["loss"]) for row in run["history"]] == [(0, 1.0), (3, 1.0)]
    assert run["exit_code"] == 1
    assert capsys.readouterr().err.count(reason) == 1


def test_a_teardown_of_wandb_that_exits_does_not_end_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = RankRun(*asked(Wandb(project="names", mode="disabled")))
    with monkeypatch.context() as changed:
        changed.setattr("wandb.teardown", sys.exit)  # as if wandb's own process had ended by a signal
        tracker.on_end(1)
    _end_wandb()


# ---- The run, as the user's own wandb calls meet it ------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in run_in(folder)["history"]
    ]


def test_users_init_joins_the_run_which_is_there_when_the_function_begins(tmp_path: Path) -> None:
    import wandb

    wandb_of = Wandb(project="names", dir=str(tmp_path), tags=("ours",), config={"epochs": 3, "lr": 1.0})
    tracker = RankRun(*asked(wandb_of, training=of_task("train", "f3a", {"lr": 9.0, "size": 4})))
    tracker.on_begin()
    assert wandb.run is not None
    with wandb.init(project="others", tags=["theirs"]) as joined:
        assert joined is wandb.run
        assert joined.config["lr"] == 1.0  # the user's comes before the input
        joined.config.update({"lr": 0.5, "depth": 2}, allow_val_change=True)
        joined.log({"own": 1.0})
        tracker.on_log(record(1, loss=2.0))
    tracker.on_end(0)
    run = run_in(tmp_path)
    assert (run["runs"] > 0, run["id"], run["tags"]) == (True, "f3a-train", ["ours"])
    assert run["config"] == {"size": 4, "epochs": 3, "lr": 0.5, "depth": 2, **GANG}
    own, ours = rows_of(tmp_path)
    assert own["own"] == 1.0
    assert ours == {"step": 1, "loss": 2.0}


def test_what_is_logged_after_wandbs_finish_is_told_and_what_was_before_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    tracker = RankRun(*asked(Wandb(project="names", dir=str(tmp_path))))
    tracker.on_begin()
    tracker.on_log(record(1, loss=0.0))
    wandb.finish()
    for step in (2, 3):
        tracker.on_log(record(step, loss=0.0))
    tracker.on_goodput(Goodput(total=1.0, stepping=1.0))
    tracker.on_end(0, "others were better")
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    assert run_in(tmp_path)["exit_code"] == 0
    assert capsys.readouterr().err.count("takes nothing after wandb.finish()") == 1


# ---- A server --------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers wandb's requests for a run as its server does, and takes note of the keys that it is sent."""

    def do_POST(self) -> None:
        server: Any = self.server
        kind, _, sent = self.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            server.keys.add(base64.b64decode(sent).decode().partition(":")[2])
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        project = {"id": "p", "name": "names", "entity": {"id": "e", "name": "team"}}
        bucket = {"id": "b", "name": "f3a-train", "displayName": "train", "config": "{}", "project": project}
        self.send_response(200 if server.grants else 400)
        self.end_headers()
        features = {"serverInfo": {"features": []}, "QueryType": {"fields": []}, "MutationType": {"fields": []}}
        files = {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        answer = {"upsertBucket": {"bucket": bucket, "inserted": True}, **features, **files}
        self.wfile.write(json.dumps({"data": answer}).encode())

    do_GET = do_PUT = do_POST  # noqa: N815 - as the base class calls them

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made: Any = server
        made.keys, made.grants = set(), True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_drivers_key_and_server_reach_rank_0_on_another_machine(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.grants = False
    with monkeypatch.context() as of_driver:
        of_driver.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        of_driver.setenv("WANDB_API_KEY", MINE)
        of_driver.setenv("WANDB_TAGS", "a,b")
        made = asked(Wandb(project="names", dir=str(tmp_path)))
    assert "WANDB_API_KEY" not in os.environ
    tracker = RankRun(*made)
    tracker.on_begin()
    tracker.on_log(record(1, loss=0.0))
    tracker.on_end(0)
    assert server.keys == {MINE}
    assert rows_of(tmp_path) == [{"step": 1, "loss": 0.0}]  # offline, since it grants nothing
    assert run_in(tmp_path)["tags"] == ["a", "b"]


def test_without_a_key_the_run_is_offline_with_one_line_and_a_stored_key_is_found(
    home: Path, tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    without_key = RankRun(*asked(Wandb(project="names", dir=str(tmp_path))))
    without_key.on_begin()
    without_key.on_end(0)
    assert capsys.readouterr().err.count("no API key found") == 1
    assert run_in(tmp_path)["exit_code"] == 0
    assert server.keys == set()
    stored = f"machine 127.0.0.1:{server.server_port}\n  login user\n  password {MINE}\n"
    (home / ".netrc").write_text(stored)
    (home / ".netrc").chmod(0o600)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with_key = RankRun(*asked())
    with_key.on_begin()
    with_key.on_end(0)
    assert server.keys == {MINE}
    assert "no API key found" not in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_server_that_has_gone_costs_a_line_and_not_more_time_than_promised(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url := f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", MINE)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "5")
    tracker = RankRun(*asked(Wandb(project="names")))
    tracker.on_begin()
    server.shutdown()
    server.server_close()
    tracker.on_log(record(1, loss=0.0))
    tracker.on_end(0)
    said = capsys.readouterr().err
    assert os.environ["WANDB_FINISH_TIMEOUT"] == "5"  # the user's comes before ours
    assert f"{RUN_IS}{url}/team/names/runs/f3a-train" in said
    assert "has not taken the end (TimeoutError(" in said
