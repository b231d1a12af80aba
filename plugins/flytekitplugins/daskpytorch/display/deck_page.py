"""Deck page of a training: state, metrics, speed, events, ranks, inputs, and addresses of outputs."""

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.context import LogRecord, SavedCheckpoint
from flytekitplugins.daskpytorch.display.metrics import MAX_CURVES, Chart, Metrics
from flytekitplugins.daskpytorch.display.story import Story
from flytekitplugins.daskpytorch.display.training import Pace, num_done, seconds_left
from flytekitplugins.daskpytorch.display.usage import QUANTITIES, STEPS, RankSpeed, Usages
from flytekitplugins.daskpytorch.goodput import MIN_TOTAL, Goodput
from flytekitplugins.daskpytorch.protocol.observer import Shape
from flytekitplugins.daskpytorch.protocol.placement import Node, Place
from flytekitplugins.daskpytorch.report import Curve

MAX_FIGURES = 6
"""Maximum number of metrics among the key figures."""
NUM_OPEN = 8
"""Number of charts that are open at first. Further charts unfold at a click."""
MAX_PAGE_POINTS = 24_000
"""Maximum number of points of all metrics' charts together. Each point takes 17 bytes."""
MAX_SHOWN_RANKS = 1_000
SPEEDS = re.compile(
    r"(?i)(samples|tokens|images|items|batches|steps|iterations?|it)_?(per|/)_?s(ec|econds?)?$|throughput"
)
PHASES = ("stepping", "data", "evaluation", "saving", "lost", "waiting", "preparing", "starting")
"""Fields of `Goodput` in the order of the bar."""


@dataclass(frozen=True)
class State:
    """State of a training, in a word or two."""

    word: str
    tone: report.Tone
    is_over: bool = False


@dataclass(kw_only=True)
class Training:
    """Content of a training's Deck. The recorder changes one object, and gives a copy to the page."""

    name: str
    story: Story
    metrics: Metrics = field(default_factory=Metrics)
    usages: Usages
    goodput: Goodput | None = None
    checkpoints: Sequence[SavedCheckpoint] = ()
    record: LogRecord | None = None
    """Newest record of rank 0."""
    rate: Pace = field(default_factory=Pace)
    """Steps per second of rank 0, from its newest records."""
    pace: Curve = field(default_factory=Curve)
    """Curve of steps per second over the seconds since the start."""
    outcome: State | None = None
    """State at the end. None before the end."""
    failure: str = ""
    """Reason for the end of an unfinished training. Empty for a finished one."""

    @property
    def state(self) -> State:
        """Present state of the training."""
        if self.outcome is not None:
            return self.outcome
        if self.story.is_training:
            return State("training", "busy")
        return State("starting again", "warn") if self.story.restarts else State("starting", "idle")

    @property
    def ranks(self) -> Sequence[RankSpeed]:
        """Newest sample of each rank, in the order of the ranks."""
        return sorted(self.usages.newest.values(), key=lambda speed: speed.usage.rank)

    @cached_property
    def charts(self) -> Sequence[Chart]:
        """Charts of the metrics. Cached for the page, whose copy never changes."""
        return list(self.metrics.charts())


def page_of(training: Training, inputs: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Return the page as HTML, with the most important sections first."""
    parts = [
        *_how_it_goes(training),
        *_learning(training),
        *_speed(training),
        report.section("What happened", report.timeline(training.story.spans, training.story.events)),
        *_who(training.story.shape),
        *_with_what(inputs),
        *_where(training.checkpoints, places),
    ]
    return report.page(*parts)


def _how_it_goes(training: Training) -> Iterable[str]:
    state, record = training.state, training.record
    share = None
    if record is not None and record.num_steps:
        share = 1.0 if state.tone == "good" else num_done(record) / record.num_steps
    moment = time.strftime("%H:%M:%S %Z", time.localtime(training.story.now))
    note = f"ended at {moment}" if state.is_over else f"as of {moment}"
    title = training.name.rpartition(".")[2] or "Training"
    yield report.status(state.word, title, tone=state.tone, note=note, done=share)
    if training.failure:
        title, _, words = training.failure.strip().partition("\n")
        yield report.alert(title, words, tone=state.tone)
    yield report.figures(_figures(training))


def _figures(training: Training) -> dict[str, object]:
    figures: dict[str, object] = {}
    record = training.record
    if training.metrics.epoch is not None:
        figures["epoch"] = training.metrics.epoch
    if record is not None:
        figures["step"] = (record.step, f"of {record.num_steps:,}" if record.num_steps else "")
        left = _seconds_left(training)
        if left is not None:
            figures["time left"] = (report.duration(left), "at the pace of the last steps")
    elif num_steps := max((rank.usage.num_steps for rank in training.ranks), default=0):
        figures["optimizer steps"] = num_steps
    figures["took" if training.state.is_over else "running for"] = report.duration(training.story.seconds)
    if training.goodput is not None and training.goodput.total >= MIN_TOTAL:
        figures["goodput"] = (f"{training.goodput.share:.0%}", "of the time in steps")
    figures |= _newest(training)
    if training.rate.per_second:
        figures["steps per second"] = training.rate.per_second
    if training.story.restarts:
        figures["restarts"] = len(training.story.restarts)
    return figures


def _newest(training: Training) -> dict[str, object]:
    """Return newest and best values of the first charts' metrics, after all values that are NaN or infinite."""
    found: dict[str, object] = {}
    newest = training.metrics.newest
    best = {name: _best_of(chart, name) for chart in training.charts for name in chart.best}
    for name in (name for chart in training.charts for name in chart.by_step):
        if name in newest and len(found) < MAX_FIGURES:
            found[name.replace("_", " ")] = (newest[name], best.get(name, ""))
    spoilt = {name.replace("_", " "): value for name, value in newest.items() if not math.isfinite(value)}
    return spoilt | found


def _best_of(chart: Chart, name: str) -> str:
    points, pick = chart.by_step[name], min if chart.best[name] == "min" else max
    if len(points) < 2:
        return ""
    x, y = pick(points, key=lambda point: point[1])
    return f"best {y:.4g} at step {x:,.0f}"


def _seconds_left(training: Training) -> float | None:
    record, speed = training.record, training.rate.per_second
    return None if training.state.tone != "busy" or record is None else seconds_left(record, speed)


def _learning(training: Training) -> Iterable[str]:
    charts = [chart for chart in training.charts if not SPEEDS.search(chart.title.replace(" ", "_"))]
    if not charts:
        if training.record is None and training.ranks:
            yield report.section("Is it learning?", report.text(_nothing_logged(training.state), quiet=True))
        return
    charts.sort(key=_is_level)
    num_lines = sum(len(chart.by_step) + len(chart.by_epoch) for chart in training.charts)
    steps = [step for step, _ in training.story.restarts]
    epochs = [epoch for step in steps if (epoch := training.metrics.epoch_at(step)) is not None]
    marks = {label: [(float(x), "started again") for x in at] for label, at in (("step", steps), ("epoch", epochs))}
    budget = max(50, MAX_PAGE_POINTS // num_lines)
    drawn = [piece for chart in charts for piece in _draw(chart, marks, budget)]
    pieces = [report.grid(*drawn[:NUM_OPEN])]
    if more := drawn[NUM_OPEN:]:
        pieces.append(report.details(f"{len(more)} more charts", report.grid(*more)))
    if training.metrics.is_crowded:
        pieces.append(report.text(f"Only the first {MAX_CURVES} metrics are drawn.", quiet=True))
    yield report.section("Is it learning?", *pieces)


def _nothing_logged(state: State) -> str:
    return (
        f"Nothing {'was' if state.is_over else 'has been'} logged{'' if state.is_over else ' yet'}. What "
        "current_rank().log({...}) is given is drawn here, and what the callbacks for Lightning and Transformers take."
    )


def _is_level(chart: Chart) -> bool:
    """Return True if no line of a chart has ever changed. Level charts come last."""
    return all(len({y for _, y in points}) < 2 < len(points) for points in chart.by_step.values())


def _draw(chart: Chart, marks: Mapping[str, Sequence[tuple[float, str]]], budget: int) -> Iterable[str]:
    for label, curves in (("step", chart.by_step), ("epoch", chart.by_epoch)):
        if curves:
            shown = {name: mode for name, mode in chart.best.items() if name in curves}
            yield report.line_chart(chart.title, curves, label, best=shown, marks=marks[label], max_points=budget)


def _speed(training: Training) -> Iterable[str]:
    pieces = []
    if training.goodput is not None:
        pieces.append(report.card("Where the gang's time went", report.shares(_seconds_of(training.goodput), unit="s")))
    charts = [
        report.line_chart(name.replace("_", " "), {name: points}, "step", from_zero=True, max_points=500)
        for chart in training.charts
        if SPEEDS.search(chart.title.replace(" ", "_"))
        for name, points in chart.by_step.items()
    ]
    usage = dict(training.usages.charts())
    if (pace := training.pace.points) and STEPS not in usage:
        charts.append(
            report.line_chart("steps per second", {"rank 0": pace}, "seconds", from_zero=True, max_points=500)
        )
    charts += [
        report.line_chart(what, lines, "seconds", from_zero=True, log=False) for what, lines in usage.items() if lines
    ]
    if charts:
        pieces.append(report.grid(*charts))
    if training.ranks:
        pieces.append(report.card("What each rank uses, and where its time goes", _ranks_table(training.ranks)))
    if pieces:
        yield report.section("Is it fast?", *pieces)


def _seconds_of(goodput: Goodput) -> dict[str, float]:
    seconds = goodput.as_dict()
    return {name: seconds[name] for name in PHASES}


def _ranks_table(ranks: Sequence[RankSpeed]) -> str:
    names = list(dict.fromkeys(name for one in ranks for name in one.usage.seconds))
    used = [title for title, (_, of) in QUANTITIES.items() if any(of(one.usage) is not None for one in ranks)]
    header = ["rank", "optimizer steps", "optimizer steps/s", *(f"{name} (s)" for name in names), *used]
    return report.table(header, [_rank_row(one, names, used) for one in ranks[:MAX_SHOWN_RANKS]])


def _rank_row(one: RankSpeed, names: Sequence[str], used: Sequence[str]) -> list[object]:
    usage = one.usage
    row: list[object] = [usage.rank, usage.num_steps, _brief(one.steps_per_second)]
    row += [f"{usage.seconds[name]:.1f}" if name in usage.seconds else "" for name in names]
    return row + [_brief(QUANTITIES[title][1](usage)) for title in used]


def _brief(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _who(shape: Shape | None) -> Iterable[str]:
    if shape is None:
        return
    rows = [
        (place.rank, place.local_rank, node.host, node.worker, _device(node, place), place.num_threads)
        for node, places in zip(shape.nodes, shape.places, strict=True)
        for place in places
    ][:MAX_SHOWN_RANKS]
    header = ("rank", "local rank", "host", "worker", "device", "threads")
    versions = {name: version for node in shape.nodes[:1] for name, version in node.versions.items()}
    pieces = [report.card("Ranks", report.table(header, rows))]
    if versions:
        pieces.append(report.card("Versions", report.table(("", ""), versions.items())))
    note = f"ranks: {shape.world_size:,}, workers: {len(shape.nodes):,}, backend: {shape.backend}"
    yield report.section("Who", report.grid(*pieces, least=300), note=note)


def _device(node: Node, place: Place) -> str:
    return "CPU" if place.gpu is None else f"{node.gpu_names[node.gpus.index(place.gpu)]} (GPU {place.gpu})"


def _with_what(inputs: Mapping[str, Any]) -> Iterable[str]:
    if inputs:
        yield report.section("With what", report.card("Inputs", report.table(("name", "value"), inputs.items())))


def _where(checkpoints: Sequence[SavedCheckpoint], places: Mapping[str, str]) -> Iterable[str]:
    rows: list[tuple[str, object]] = [(what, _address(where)) for what, where in places.items()]
    rows += [("logs", "the task's own log has all that the ranks write, each line with its rank")]
    pieces = [report.card("Places", report.table(("what", "where"), rows))]
    if checkpoints:
        pieces.append(report.card("Checkpoints", _checkpoint_table(checkpoints)))
    yield report.section("Where", report.grid(*pieces, least=380))


def _address(place: str) -> object:
    """Return a link to a local path, or any other address as text."""
    path = place.removeprefix("file://")
    return report.Link(place, Path(path).as_uri()) if path.startswith("/") else place


def _checkpoint_table(checkpoints: Sequence[SavedCheckpoint]) -> str:
    rows = [
        (
            each.step,
            ", ".join(f"{name} {value:g}" for name, value in each.metrics.items()),
            f"{each.size:,}",
            _address(each.place) if each.place else "the driver's disk",
        )
        for each in checkpoints
    ]
    return report.table(("step", "metrics", "bytes", "place"), rows)
