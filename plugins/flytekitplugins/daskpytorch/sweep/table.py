"""Tables of many models, with a row for each: for `to_frame` and for notebooks. Runs in the driver."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from flytekitplugins.daskpytorch.display.training import inputs_of
from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.report import table
from flytekitplugins.daskpytorch.report.html import shared

STATUSES = ("training", "failed", "finished", "stopped early", "cancelled", "waiting")
"""States of a model, most interesting first."""
MAX_ROWS = 100
"""Maximum number of models in a notebook's table."""
MAX_CELL = 60
"""Maximum number of characters of a cell."""
REFRESH = 0.5
"""Seconds between two updates of a notebook's table."""


class Model(Protocol):
    """Fields of a row, as in `ModelFuture`."""

    index: int
    experiment: Any

    @property
    def status(self) -> str:
        """One of `STATUSES`."""

    @property
    def step(self) -> int | None:
        """Newest step of rank 0's records. None without records."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Newest value of each metric, by name."""


def rows_of(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Return a row for each model: index, status, step, experiment's fields and newest value of each metric.

    If a column of the same name exists, a field has the prefix `experiment.` and a metric the prefix `metric.`.
    """
    rows = []
    for model in models:
        row: dict[str, Any] = {"model": model.index, "status": model.status, "step": model.step}
        for kind, values in (("experiment", inputs_of(model.experiment)), ("metric", model.metrics)):
            row |= {f"{kind}.{name}" if name in row else name: value for name, value in values.items()}
        rows.append(row)
    return rows


def counted(models: Sequence[Model]) -> str:
    """Return the number of models by status, for example `8 models: 2 training, 5 finished, 1 waiting`."""
    counts = Counter(model.status for model in models)
    each = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return f"{len(models)} model{'' if len(models) == 1 else 's'}{each and ': '}{each}"


def as_html(models: Sequence[Model]) -> str:
    """Return an HTML table of at most `MAX_ROWS` models, most interesting first, without secrets."""
    chosen = sorted(models, key=lambda model: STATUSES.index(model.status))[:MAX_ROWS]
    rows = rows_of(sorted(chosen, key=lambda model: model.index))
    header = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in header] for row in map(without_secrets, rows)]
    rest = f"<p>and {len(models) - MAX_ROWS} more</p>" if len(models) > MAX_ROWS else ""
    # A notebook has its own style, and every update would send ours again.
    bare = table([one_line(name, MAX_CELL) for name in header], cells).replace(shared(), "")
    return f"<p>{counted(models)}</p>{bare}{rest}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return one_line(f"{value:.4g}" if isinstance(value, float) else str(value), MAX_CELL)


def is_notebook() -> bool:
    """Return True if this process is a notebook's kernel. Imports no module."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def show_live(futures: Sequence[Future[Any]], html: Callable[[], str]) -> None:
    """Show a table in the output of a notebook's cell, and update the table until all futures are done."""
    from IPython.display import HTML, display

    shown = html()
    handle = display(HTML(shown), display_id=True)

    def follow(shown: str) -> None:
        are_waiting = True
        while are_waiting:
            are_waiting = bool(wait(futures, REFRESH).not_done)
            if (now := html()) != shown:
                handle.update(HTML(shown := now))

    threading.Thread(target=follow, args=(shown,), name="daskpytorch-table", daemon=True).start()
