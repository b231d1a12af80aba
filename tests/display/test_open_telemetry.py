"""Figures for operators, which the process's OpenTelemetry exports."""

import json
import re
from collections.abc import Callable

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

from flytekitplugins.daskpytorch import OpenTelemetry, Training
from flytekitplugins.daskpytorch.display import open_telemetry
from flytekitplugins.daskpytorch.display.open_telemetry import FIGURES, GangFigures
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


def test_names_that_a_training_makes_up_are_limited(read: Read) -> None:
    figures = begun()
    for step in range(1000):
        To(figures).logged(record(step, **{f"loss {step}": 1.0}))
        To(figures).used(usage(step))
    names = [name for name, *_ in read()]
    assert names.count("daskpytorch_metric") == 200
    assert names.count("daskpytorch_rank_steps") == 100


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
    To(figures).logged(record(7, loss=0.5))
    To(figures).used(usage(1))
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
    assert len(dict(asked)) >= 10
    for name, matchers in asked:
        assert set(re.findall(r"(\w+)=~?", matchers)) <= exported[name], name
    guide = (REPOSITORY / "docs/guides/trackers.md").read_text()
    assert set(re.findall(r"daskpytorch_\w+", guide)) <= set(exported)
