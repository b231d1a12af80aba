"""Figures for operators: scraped by Prometheus, pushed to a gateway, and read by OpenTelemetry."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import BaseServer
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from distributed import Client
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from conftest import REPOSITORY
from flytekitplugins.daskpytorch import Gang, Goodput, OpenTelemetry, Prometheus, Training, current_rank, dispatch
from flytekitplugins.daskpytorch.display import prometheus
from flytekitplugins.daskpytorch.display.figures import FIGURES, PREFIX, RESTART_KINDS, GangFigures
from processes import until
from seaweed import free_ports
from told import node, record, shape_of, usage

pytestmark = pytest.mark.timeout(200)
Labels = tuple[str, ...]


def values_of(text: str) -> dict[tuple[str, Labels], float]:
    """Return the samples of an answer, by name, the model's index, and the figure's own label."""
    found: dict[tuple[str, Labels], float] = {}
    for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
        own = [value for name, value in sample.labels.items() if name not in ("training", "model")]
        found[sample.name, (sample.labels.get("model", ""), *own)] = sample.value
    return found


def scraped(port: int) -> dict[tuple[str, Labels], float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return values_of(answer.read().decode())


@pytest.fixture
def port() -> int:
    """A port at which nothing listens."""
    return free_ports(1)[0]


def begin(figures: GangFigures, index: int | None = None) -> None:
    """Let a gang of two ranks begin."""
    figures.begins(Training(name="train", id="id", index=index))
    figures.placed(shape_of(node("a"), node("b")))


def happen(figures: GangFigures) -> None:
    """Let one of everything happen to a gang."""
    figures.formed(1.5)
    figures.logged(record(7, num_steps=10, loss=0.5, note="warm"))
    figures.logged(record(8, rank=1, num_steps=10, loss=9.0))
    figures.kept(6)
    figures.accounted(Goodput(total=3.0, starting=1.0, stepping=2.0))
    figures.used(usage(1, num_steps=8, cpu=0.9, memory=3 * 2**30, gpu_memory=2**30, gpu_utilization=0.25))
    figures.failed("lost")


def train(name: str, folder: str) -> None:
    """Log a loss, and end with the test's order."""
    current_rank().log({"loss": float(len(name))}, step=3, num_steps=4)
    while not Path(folder, "end").exists():
        time.sleep(0.02)


def train_experiment(experiment: tuple[str, str]) -> None:
    train(*experiment)


def test_a_running_sweep_is_scraped_at_one_port_which_its_end_closes(client: Client, tmp_path: Path, port: int) -> None:
    gang = Gang(observers=(Prometheus(port=port),))
    models = dispatch.map(client, train_experiment, [("a", str(tmp_path)), ("bb", str(tmp_path))], gang=gang)

    def metrics_of_both() -> Mapping[tuple[str, Labels], float]:
        try:
            found = scraped(port)
        except URLError:  # not yet
            return {}
        return found if sum(name == "daskpytorch_metric" for name, _ in found) == 2 else {}

    until(metrics_of_both, "both models to log")
    found = scraped(port)
    assert found["daskpytorch_metric", ("0", "loss")] == 1.0
    assert found["daskpytorch_metric", ("1", "loss")] == 2.0
    assert found["daskpytorch_step", ("1",)] == 3.0
    assert found["daskpytorch_ranks", ("0",)] == 1.0
    (tmp_path / "end").touch()
    models.result()
    with pytest.raises(URLError, match="refused"):
        scraped(port)


def test_each_figure_has_its_name_unit_and_labels(port: int) -> None:
    figures = Prometheus(port=port)()
    begin(figures)
    found = scraped(port)
    assert {key[1][1] for key in found if key[0] == "daskpytorch_restarts_total"} == set(RESTART_KINDS)
    assert found["daskpytorch_checkpoints_total", ("",)] == 0.0
    happen(figures)
    found = scraped(port)
    figures.ended(None)
    assert abs(found.pop(("daskpytorch_checkpoint_timestamp_seconds", ("",))) - time.time()) < 60
    assert {key: value for key, value in found.items() if value} == {
        ("daskpytorch_running", ("",)): 1.0,
        ("daskpytorch_ranks", ("",)): 2.0,
        ("daskpytorch_nodes", ("",)): 2.0,
        ("daskpytorch_step", ("",)): 7.0,
        ("daskpytorch_steps", ("",)): 10.0,
        ("daskpytorch_metric", ("", "loss")): 0.5,
        ("daskpytorch_restarts_total", ("", "lost")): 1.0,
        ("daskpytorch_forming_seconds", ("",)): 1.5,
        ("daskpytorch_goodput_seconds", ("", "starting")): 1.0,
        ("daskpytorch_goodput_seconds", ("", "stepping")): 2.0,
        ("daskpytorch_checkpoints_total", ("",)): 1.0,
        ("daskpytorch_checkpoint_step", ("",)): 6.0,
        ("daskpytorch_rank_steps", ("", "1")): 8.0,
        ("daskpytorch_rank_cpu_cores", ("", "1")): 0.9,
        ("daskpytorch_rank_memory_bytes", ("", "1")): 3.0 * 2**30,
        ("daskpytorch_rank_gpu_memory_bytes", ("", "1")): 2.0**30,
        ("daskpytorch_rank_gpu_utilization_ratio", ("", "1")): 0.25,
    }


def test_names_that_a_training_makes_up_are_limited() -> None:
    figures = GangFigures()
    begin(figures)
    for step in range(1000):
        figures.logged(record(step, **{f"loss {step}": 1.0}))
        figures.used(usage(step))
    assert len(list(figures.samples("metric"))) == 200
    assert len(list(figures.samples("rank_steps"))) == 100


def test_a_resumed_training_has_a_checkpoint_whose_age_counts() -> None:
    figures = GangFigures()
    begin(figures)
    figures.resumed(40)
    assert [value for _, value in figures.samples("checkpoint_step")] == [40]
    [(_, at)] = figures.samples("checkpoint_timestamp")
    assert abs(at - time.time()) < 60
    assert [value for _, value in figures.samples("checkpoints")] == [0]


def test_of_gangs_with_the_same_labels_the_newest_is_scraped(port: int) -> None:
    older, newer, other = (Prometheus(port=port)() for _ in range(3))
    for figures, index in ((older, None), (newer, None), (other, 7)):
        begin(figures, index)
    older.formed(1.0)
    newer.formed(2.0)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert text.count("daskpytorch_ranks{") == 2
    assert values_of(text)["daskpytorch_forming_seconds", ("",)] == 2.0
    newer.ended(None)
    assert scraped(port)["daskpytorch_forming_seconds", ("",)] == 1.0
    older.ended(None)
    other.ended(None)


def test_the_last_gang_closes_the_port_without_waiting_for_the_server_to_look(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (1000.0,))  # seconds between two looks
    for _ in range(2):  # the second gang gets the port
        figures = Prometheus(port=port)()
        begin(figures)
        assert scraped(port)
        end = threading.Thread(target=figures.ended, args=(None,), daemon=True)
        end.start()
        end.join(60)
        assert not end.is_alive()


def test_a_taken_port_costs_all_gangs_one_line(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", port)):
        for _ in range(2):
            figures = Prometheus(port=port)()
            begin(figures)
            assert not figures.places()
            figures.ended(None)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"Prometheus: 127.0.0.1:{port} cannot be opened")
    figures = Prometheus(port=port)()
    begin(figures)  # the port is free now
    figures.ended(None)
    with socket.create_server(("127.0.0.1", port)):
        begin(Prometheus(port=port)())
    assert "cannot be opened" in capsys.readouterr().err


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a gateway with a password, and what it has received: path -> text."""
    monkeypatch.setattr(prometheus, "END_TIMEOUT", 60.0)
    received: dict[str, str] = {}

    class Gateway(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            is_known = self.headers["Authorization"] == "Basic " + b64encode(b"user:w@rd").decode()
            if is_known:
                received[self.path] = text
            self.send_response(200 if is_known else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://user:w%40rd@127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_gateway_has_the_last_figures_of_a_training_by_its_name(gateway: tuple[str, dict[str, str]]) -> None:
    address, received = gateway
    figures = Prometheus(gateway=address, interval=1000.0)()
    begin(figures)
    happen(figures)
    figures.ended(None)
    [(path, text)] = received.items()
    assert path == "/metrics/job/daskpytorch/training/train"
    found = values_of(text)
    assert found["daskpytorch_step", ("",)] == 7.0
    assert found["daskpytorch_running", ("",)] == 0.0
    assert not [name for name, _ in found if name.startswith("daskpytorch_rank_")]


def test_a_gateway_has_the_first_figures_before_anything_happens(gateway: tuple[str, dict[str, str]]) -> None:
    address, received = gateway
    figures = Prometheus(gateway=address, interval=1000.0)()
    figures.begins(Training(name="train", id="id"))
    until(lambda: received, "the first push")
    [text] = received.values()
    assert values_of(text)["daskpytorch_restarts_total", ("", "lost")] == 0.0
    figures.ended(None)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_dead_gateway_costs_all_gangs_one_line(port: int, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        figures = Prometheus(gateway=f"{scheme}user:word@127.0.0.1:{port}")()
        begin(figures)
        figures.ended(None)
        figures._thread.join()
    [line] = capsys.readouterr().err.splitlines()
    assert f"the gateway http://127.0.0.1:{port} does not take the figures" in line
    assert "word" not in line


def refuse(*_: object, **__: object) -> None:
    raise ConnectionRefusedError


def test_the_last_push_is_awaited_though_an_earlier_one_was_refused(gateway: tuple[str, dict[str, str]]) -> None:
    address, received = gateway
    figures = Prometheus(gateway=address, interval=1000.0)()
    handler, figures._handler = figures._handler, refuse
    begin(figures)
    until(lambda: figures._gateway in prometheus._reported, "the refused push")
    figures._handler = handler
    figures.ended(None)
    [text] = received.values()
    assert values_of(text)["daskpytorch_running", ("",)] == 0.0
    assert "rd@" not in repr(Prometheus(gateway=address))


def test_only_the_first_gang_waits_for_a_gateway_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        first, second = (Prometheus(gateway=address)() for _ in range(2))
        for figures, limit in ((first, 0.1), (second, 1000.0)):
            monkeypatch.setattr(prometheus, "END_TIMEOUT", limit)
            begin(figures)
            figures.ended(None)
        assert second._thread.is_alive()
    for figures in (first, second):
        figures._thread.join()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_opentelemetry_reads_the_same_figures_of_running_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    older, figures = OpenTelemetry()(), OpenTelemetry()()
    begin(older)
    older.failed("lost")
    begin(figures)  # with the same labels, and therefore in place of the older one
    happen(figures)

    def read() -> dict[str, list[tuple[dict[str, object], float]]]:
        data = reader.get_metrics_data()
        found = [
            each
            for of in (data.resource_metrics if data else [])
            for scope in of.scope_metrics
            for each in scope.metrics
        ]
        return {each.name: [(dict(point.attributes), point.value) for point in each.data.data_points] for each in found}

    found = read()
    assert set(found) == {f"{PREFIX}.{name}" for name in FIGURES}
    assert found["daskpytorch.metric"] == [({"training": "train", "model": "", "metric": "loss"}, 0.5)]
    assert sum(value for _, value in found["daskpytorch.restarts"]) == 1.0
    figures.ended(None)
    older.ended(None)
    assert not read().get("daskpytorch.metric")


def test_dashboard_and_guide_ask_for_figures_and_labels_that_there_are() -> None:
    exported = {
        "_".join(filter(None, (PREFIX, each.name, each.unit, "total" if each.is_counter else ""))): set(each.labels)
        for each in FIGURES.values()
    }
    dashboard = json.loads((REPOSITORY / "docs/assets/grafana.json").read_text())
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [each["query"]["query"] for each in variables.values() if each["type"] == "query"]
    asked = set()
    for query in [*queries, *(target["expr"] for target in targets)]:
        assert set(re.findall(r"\$(\w+)", query)) <= set(variables), query
        for name, matchers in re.findall(rf"({PREFIX}_\w+)(?:{{([^}}]*)}})?", query):
            asked.add(name)
            assert set(re.findall(r"(\w+)=~?", matchers)) <= exported[name], query
    for query in queries:
        [(name, label)] = re.findall(r"^label_values\((\w+).*, (\w+)\)$", query)
        assert label in exported[name], query
    for target in targets:
        of = set.union(*(exported[name] for name in re.findall(rf"{PREFIX}_\w+", target["expr"])))
        assert set(re.findall(r"(?:ignoring|without|by|on) ?\((\w+)\)", target["expr"])) <= of, target
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= of, target
    assert len(asked) >= 14
    guide = (REPOSITORY / "docs/guides/trackers.md").read_text()
    assert set(re.findall(rf"{PREFIX}_\w+", guide)) <= set(exported)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"port": 9400, "gateway": "g:9091"},
        {"port": 0},
        {"gateway": ""},
        {"gateway": "http://user:a/word@g:9091"},
        {"gateway": "http://user:20/word@g:9091"},
        {"gateway": "user:20#word@g:9091"},
        {"gateway": "ftp://g"},
        {"port": 9400, "interval": 0},
    ],
)
def test_what_is_wrong_is_told_at_once(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"Prometheus\((port|gateway|interval)=") as caught:
        Prometheus(**options)
    assert "/word" not in str(caught.value)
    assert "#word" not in str(caught.value)
