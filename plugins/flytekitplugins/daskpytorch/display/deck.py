"""Deck of a training: the page with state, metrics, speed, events and ranks, and the thread that keeps it up to date.

Runs in the driver.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.checks import direction_of
from flytekitplugins.daskpytorch.display.run_state import RunState
from flytekitplugins.daskpytorch.display.training import (
    HELD_OUT,
    LABELS,
    amounts,
    is_held_out,
    num_done,
    seconds_left,
    size_of,
)
from flytekitplugins.daskpytorch.protocol.journal import Shape
from flytekitplugins.daskpytorch.records import MIN_TOTAL, SavedCheckpoint
from flytekitplugins.daskpytorch.report.chart import Points

TITLE = "Training"
TRAINING = re.compile(r"^(train|training)[_/.-]|[_/.-](train|training)$")
KIND = re.compile(r"_(step|epoch)$")
"""Suffixes that Lightning adds."""
MAX_FIGURES = 6
MAX_PAGE_POINTS = 24_000
"""Points of all charts together. Each adds 17 bytes to the page."""
MAX_SHOWN_RANKS = 1_000


def html(run: RunState, places: Mapping[str, str] | None = None) -> str:
    return report.page(*_pieces_of(run, places or {}))


def document(run: RunState, places: Mapping[str, str] | None = None) -> str:
    return report.document(run.title, *_pieces_of(run, places or {}))


# ---- The page


def _pieces_of(run: RunState, places: Mapping[str, str]) -> list[str]:
    with run.lock:  # observers wait meanwhile, so charts and events are drawn afterwards
        head, ranks = [*_how_it_goes(run)], _ranks(run)
        metrics, usage, history = charts_of(run.curves), run.usage_charts, [*run.history]
    return [
        *head,
        *_metrics(metrics, run.restarts),
        *_time_and_machines(run, usage, ranks),
        report.section("What happened", report.timeline(history, run.began_at)),
        *_tables_of(run, places),
    ]


def _how_it_goes(run: RunState) -> Iterable[str]:
    phase, record = run.phase, run.values.record
    share = None
    if record is not None and record.num_steps:
        share = 1.0 if phase.tone == "good" else num_done(record) / record.num_steps
    moment = time.strftime("%H:%M:%S %Z", time.localtime(run.now))
    note = f"ended at {moment}" if run.end is not None else f"as of {moment}"
    yield report.status(phase.word, run.title or TITLE, tone=phase.tone, note=note, done=share)
    if run.end is not None and run.end.error:
        title, _, words = run.end.text.strip().partition("\n")
        yield report.alert(title, words, tone=phase.tone)
    yield report.figures(figures(run))


def figures(run: RunState) -> dict[str, object]:
    figures: dict[str, object] = {}
    record = run.values.record
    if (epoch := run.values.numbers.get("epoch")) is not None:
        figures["epoch"] = epoch
    if record is not None:
        figures["step"] = (record.step, f"of {record.num_steps:,}" if record.num_steps else "")
        left = seconds_left(record, run.rate.per_second) if run.phase.tone == "busy" else None
        if left is not None:
            figures["time left"] = (report.duration(left), "at the pace of the last steps")
    elif num_steps := max((usage.num_steps for usage in run.usages.values()), default=0):
        figures["optimizer steps"] = num_steps
    figures["took" if run.end is not None else "running for"] = report.duration(run.now - run.began_at)
    if run.goodput is not None and run.goodput.total >= MIN_TOTAL:
        figures["goodput"] = (f"{run.goodput.share:.0%}", "of the time in steps")
        figures |= _bill(run.goodput.bill)
    figures |= _newest(run)
    if run.rate.per_second:
        figures["steps per second"] = run.rate.per_second
    if run.num_checkpoints and run.checkpoint is not None:
        figures["checkpoints"] = (run.num_checkpoints, f"the newest of step {run.checkpoint[0]:,}")
    if run.restarts:
        figures["restarts"] = len(run.restarts)
    return figures


def _bill(bill: Mapping[str, float]) -> dict[str, object]:
    words = {"gpu_hours": "GPU hours", "core_hours": "core hours"}
    shown = {words[name]: (bill[name], f"{bill['trained_share']:.0%} in kept steps") for name in words if name in bill}
    return shown | ({"cost": f"{bill['cost']:,.2f}"} if "cost" in bill else {})


def _newest(run: RunState) -> dict[str, object]:
    found: dict[str, object] = {}
    newest = run.values.numbers
    for name in (name for chart in charts_of(run.curves) for name in chart.curves):
        if name in newest and len(found) < MAX_FIGURES:
            found[name.replace("_", " ")] = newest[name]
    spoilt = {name.replace("_", " "): value for name, value in newest.items() if not math.isfinite(value)}
    return spoilt | found


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    curves: Mapping[str, Points]
    best: Mapping[str, Literal["min", "max"]]


def charts_of(curves: Mapping[str, report.Curve]) -> list[Chart]:
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in curves:
        groups[_base_of(name)].append(name)
    charts = []
    for base, names in sorted(groups.items(), key=lambda group: _rank_of(*group)):
        names.sort(key=is_held_out)
        held_out = [name for name in names if is_held_out(name)]
        chart = Chart(
            title=(base if len(names) > 1 else names[0]).replace("_", " "),
            curves={name: curves[name].points for name in names},
            best={name: mode for name in held_out or names if (mode := direction_of(name)) is not None},
        )
        charts.append(chart)
    return charts


def _base_of(name: str) -> str:
    """Return a name without the part that names the data: `loss` for `val_loss` or `train_loss`."""
    bare = HELD_OUT.sub("", TRAINING.sub("", name))
    if bare != name:
        bare = KIND.sub("", bare)
    return bare or name


def _rank_of(base: str, names: list[str]) -> tuple[bool, bool, bool]:
    return base != "loss", direction_of(base) is None, not any(map(is_held_out, names))


def _metrics(charts: Sequence[Chart], restarts: Sequence[tuple[int, str]]) -> Iterable[str]:
    if not charts:
        return
    marks = [(float(step), "started again") for step, _ in restarts]
    budget = max(50, MAX_PAGE_POINTS // sum(len(chart.curves) for chart in charts))
    drawn = [
        report.line_chart(chart.title, chart.curves, "step", best=chart.best, marks=marks, max_points=budget)
        for chart in charts
    ]
    yield report.section("Metrics", report.grid(*drawn))


def _time_and_machines(
    run: RunState, usage: Mapping[str, Mapping[str, Points]], ranks: tuple[list[str], list[list[object]]]
) -> Iterable[str]:
    pieces = []
    if run.goodput is not None:
        total, *uses = run.goodput.as_dict().items()
        rows = [(use, f"{seconds:.1f}", f"{seconds / total[1]:.0%}") for use, seconds in uses if seconds >= 0.05]
        pieces.append(report.card("Where the gang's time went", report.table(("use", "seconds", "share"), rows)))
    if usage:
        drawn = [report.line_chart(what, lines, "seconds", from_zero=True) for what, lines in usage.items()]
        pieces.append(report.grid(*drawn))
    if pieces or ranks[1]:
        note = f"{size_of(run.shape)}, {run.shape.backend}" if run.shape is not None else ""
        yield report.section("Time and machines", *pieces, _card("Ranks", *ranks), note=note)


def _ranks(run: RunState) -> tuple[list[str], list[list[object]]]:
    """Return the header and the rows of the ranks' table. No rows before the gang's start."""
    places = {} if run.shape is None else dict(_places_of(run.shape))
    rows: list[dict[str, object]] = []
    for rank in sorted({*run.usages, *places})[:MAX_SHOWN_RANKS]:
        row: dict[str, object] = {"rank": rank, **places.get(rank, {})}
        if (usage := run.usages.get(rank)) is not None:
            row |= {"optimizer steps": usage.num_steps, "steps/s": run.speeds[rank].per_second or ""}
            row |= {f"{name} (s)": seconds for name, seconds in usage.seconds.items() if seconds}
            row |= {LABELS[name]: amount for name, amount in amounts(usage).items()}
        rows.append(row)
    header = list(dict.fromkeys(name for row in rows for name in row))
    return header, [[row.get(name, "") for name in header] for row in rows]


def _places_of(shape: Shape) -> Iterator[tuple[int, dict[str, object]]]:
    for node, places in zip(shape.nodes, shape.places, strict=True):
        names = dict(zip(node.gpus, node.gpu_names, strict=True))
        for place in places:
            device = "CPU" if place.gpu is None else f"{names[place.gpu]} (GPU {place.gpu})"
            yield place.rank, {"host": node.host, "worker": node.worker, "device": device}


def _tables_of(run: RunState, places: Mapping[str, str]) -> Iterable[str]:
    versions = run.shape.nodes[0].versions if run.shape is not None and run.shape.nodes else {}
    inputs = _card("Inputs", ("name", "value"), run.inputs.items())
    if given := inputs + _card("Versions", ("package", "version"), versions.items()):
        yield report.section("With what", report.grid(given, least=300))
    rows = [_row_of(each) for each in run.checkpoints]
    checkpoints = _card("Checkpoints", ("step", "metrics", "bytes", "place"), rows)
    if kept := _card("Places", ("what", "where"), places.items()) + checkpoints:
        yield report.section("Where", report.grid(kept, least=380))


def _card(title: str, header: Sequence[str], rows: Collection[Sequence[object]]) -> str:
    """Return a table under a heading, or nothing without rows."""
    return report.card(title, report.table(header, rows)) if rows else ""


def _row_of(checkpoint: SavedCheckpoint) -> Sequence[object]:
    metrics = ", ".join(f"{name} {value:g}" for name, value in checkpoint.metrics.items())
    return checkpoint.step, metrics, f"{checkpoint.size:,}", checkpoint.place or "the driver's disk"


INTERVAL = 3.0
"""Seconds after which the page is written if it has changed."""
SHARE = 0.02
"""Share of time, from 0 to 1, that writing and uploading may take. A slow page is written less often."""
MAX_INTERVAL = 60.0
MAX_WAIT = 30.0

logger = logging.getLogger("flytekitplugins.daskpytorch")


@contextlib.contextmanager
def kept_up_to_date(
    state: RunState,
    places: Callable[[], Mapping[str, str]],
    show: Callable[[str], object],
    publish: Callable[[], object],
    *,
    at_once: bool,
) -> Iterator[None]:
    """During the block, show and publish a training's page in a thread whenever it has changed.

    `at_once` publishes the page before the training begins, too.
    """
    is_over, has_failed = threading.Event(), threading.Event()

    def write() -> None:
        try:
            show(html(state, places()))
            publish()
        except Exception as error:  # a full disk, a storage that does not answer, an observer's error
            if not has_failed.is_set():
                logger.warning("the Deck so far could not be published (%r); the training goes on", error)
            has_failed.set()

    work = functools.partial(contextvars.copy_context().run, _write_all, state, write, is_over)
    thread = threading.Thread(target=work, name="daskpytorch-deck", daemon=True)
    if at_once:
        write()
    thread.start()
    try:
        yield
    except BaseException as error:
        state.conclude(error)
        raise
    finally:
        is_over.set()
        thread.join(MAX_WAIT)
        write()


def _write_all(state: RunState, write: Callable[[], None], is_over: threading.Event) -> None:
    seen, pause = -1, 0.0
    while not is_over.wait(pause):
        pause = INTERVAL
        if state.num_changes != seen:
            seen, began_at = state.num_changes, time.monotonic()
            write()
            pause = min(MAX_INTERVAL, max(INTERVAL, (time.monotonic() - began_at) / SHARE))
