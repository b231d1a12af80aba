"""Figures for operators, which the process's OpenTelemetry exports."""

import json
import re
import time
from collections.abc import Callable

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

from flytekitplugins.daskpytorch import Goodput, OpenTelemetry, Training
from flytekitplugins.daskpytorch.display import open_telemetry
from flytekitplugins.daskpytorch.display.open_telemetry import FIGURES, RESTART_KINDS, GangFigures
from otlp import name_in_prometheus
from pages import REPOSITORY
from told import To, node, record, shape_of, usage

Read = Callable[[], dict[tuple[str, ...], float]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return the figures of the process's provider: name in Prometheus and attributes with a value -> value."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(open_telemetry, "_gangs", [])

    def values() -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        data = reader.get_metrics_data()
        for scope in (scope for of in (data.resource_metrics if data else []) for scope in of.scope_metrics):
            for each in scope.metrics:
                name = name_in_prometheus(each.name, each.unit, is_counter=isinstance(each.data, Sum))
                for point in each.data.data_points:
                    found[name, *(str(value) for value in point.attributes.values() if value)] = point.value
        return found

    return values


def begun(index: int | None = None) -> GangFigures:
    """The figures of a gang of two ranks that has begun."""
    figures = OpenTelemetry()()
    To(figures).begins(Training(name="train", id="id", index=index))
    To(figures).placed(shape_of(node("a"), node("b")))
    return figures


def happen(figures: GangFigures) -> None:
    """Let one of everything happen to a gang."""
    To(figures).formed(1.5)
    To(figures).logged(record(7, num_steps=10, loss=0.5, note="warm"))
    To(figures).logged(record(8, rank=1, num_steps=10, loss=9.0))
    To(figures).kept(6)
    To(figures).accounted(Goodput(total=3.0, starting=1.0, stepping=2.0, core_hours=8.0, trained_hours=6.0, cost=0.5))
    To(figures).used(usage(1, num_steps=8, cpu=0.9, memory=3 * 2**30, gpu_memory=2**30, gpu_utilization=0.25))
    To(figures).restarting("a rank was lost", 7, "lost")


def test_each_figure_has_its_name_unit_and_labels(read: Read) -> None:
    figures = begun()
    found = read()
    assert {key[2] for key in found if key[0] == "daskpytorch_restarts_total"} == set(RESTART_KINDS)
    assert found["daskpytorch_checkpoints_total", "train"] == 0.0
    happen(figures)
    found = read()
    assert abs(found.pop(("daskpytorch_checkpoint_timestamp_seconds", "train")) - time.time()) < 60
    assert {key: value for key, value in found.items() if value} == {
        ("daskpytorch_running", "train"): 1.0,
        ("daskpytorch_ranks", "train"): 2.0,
        ("daskpytorch_nodes", "train"): 2.0,
        ("daskpytorch_step", "train"): 7.0,
        ("daskpytorch_steps", "train"): 10.0,
        ("daskpytorch_metric", "train", "loss"): 0.5,
        ("daskpytorch_restarts_total", "train", "lost"): 1.0,
        ("daskpytorch_forming_seconds", "train"): 1.5,
        ("daskpytorch_goodput_seconds", "train", "starting"): 1.0,
        ("daskpytorch_goodput_seconds", "train", "stepping"): 2.0,
        ("daskpytorch_bill", "train", "core_hours"): 8.0,
        ("daskpytorch_bill", "train", "trained_share"): 0.75,
        ("daskpytorch_bill", "train", "cost"): 0.5,
        ("daskpytorch_checkpoints_total", "train"): 1.0,
        ("daskpytorch_checkpoint_step", "train"): 6.0,
        ("daskpytorch_rank_steps", "train", "1"): 8.0,
        ("daskpytorch_rank_cpu_cores", "train", "1"): 0.9,
        ("daskpytorch_rank_memory_bytes", "train", "1"): 3.0 * 2**30,
        ("daskpytorch_rank_gpu_memory_bytes", "train", "1"): 2.0**30,
        ("daskpytorch_rank_gpu_utilization_ratio", "train", "1"): 0.25,
    }


def test_names_that_a_training_makes_up_are_limited(read: Read) -> None:
    figures = begun()
    for step in range(1000):
        To(figures).logged(record(step, **{f"loss {step}": 1.0}))
        To(figures).used(usage(step))
    names = [name for name, *_ in read()]
    assert names.count("daskpytorch_metric") == 200
    assert names.count("daskpytorch_rank_steps") == 100


def test_a_resumed_training_has_a_checkpoint_whose_age_counts(read: Read) -> None:
    To(begun()).resumed(40)
    found = read()
    assert found["daskpytorch_checkpoint_step", "train"] == 40
    assert abs(found["daskpytorch_checkpoint_timestamp_seconds", "train"] - time.time()) < 60
    assert found["daskpytorch_checkpoints_total", "train"] == 0


def test_of_gangs_with_the_same_labels_the_newest_is_exported(read: Read) -> None:
    older, newer, other = begun(), begun(), begun(index=7)
    To(older).formed(1.0)
    To(newer).formed(2.0)
    To(other).formed(3.0)
    found = read()
    assert found["daskpytorch_forming_seconds", "train"] == 2.0
    assert found["daskpytorch_forming_seconds", "train", "7"] == 3.0


def test_the_last_figures_of_a_gang_are_exported_for_a_while(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = begun()
    happen(figures)
    To(figures).ended(None)
    found = read()
    assert found["daskpytorch_running", "train"] == 0.0
    assert found["daskpytorch_step", "train"] == 7.0
    assert not [name for name, *_ in found if name.startswith("daskpytorch_rank_")]
    monkeypatch.setattr(open_telemetry, "SHOWN_AFTER_END", 0.0)
    assert not read()
    newer = begun()
    assert open_telemetry._gangs == [newer]


def test_dashboard_and_guide_ask_for_figures_and_labels_that_there_are() -> None:
    exported = {}
    for each in FIGURES:
        name = name_in_prometheus(f"daskpytorch.{each.name}", each.unit, is_counter=each.is_counter)
        exported[name] = {"training", "model", each.label}
    dashboard = json.loads((REPOSITORY / "docs/assets/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    asked = re.findall(r"(daskpytorch_\w+)(?:{([^}]*)})?", "\n".join(queries))
    assert len(dict(asked)) >= 14
    for name, matchers in asked:
        assert set(re.findall(r"(\w+)=~?", matchers)) <= exported[name], name
    guide = (REPOSITORY / "docs/guides/trackers.md").read_text()
    assert set(re.findall(r"daskpytorch_\w+", guide)) <= set(exported)
