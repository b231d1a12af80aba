"""Tables that a notebook shows of gangs, kept up to date while they train. Runs in the driver."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.report import table
from flytekitplugins.daskpytorch.report.pieces import shared

MAX_CELL = 60
"""Maximum number of characters of a cell in the table that a notebook shows of gangs."""
REFRESH = 0.5
"""Seconds between two updates of the table that a notebook shows of gangs."""


def is_notebook() -> bool:
    """Return True if this process is a notebook's kernel. Imports no module."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table with a column for each name in the rows, without secrets."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in header] for row in map(without_secrets, rows)]
    # A notebook has its own style, and every update would send ours again.
    return table([one_line(name, MAX_CELL) for name in header], cells).replace(shared(), "")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return one_line(f"{value:.4g}" if isinstance(value, float) else str(value), MAX_CELL)


def show_live(html: Callable[[], str], has_ended: Callable[[float], bool]) -> threading.Thread:
    """Show HTML in the notebook's cell, and update it in a thread until the training has ended.

    Args:
        html: Function that returns the present HTML.
        has_ended: Function that waits up to the given seconds for the training's end, and returns True at the end.

    Returns:
        The thread, which ends after the last update.
    """
    from IPython.display import HTML, display

    shown = html()
    handle = display(HTML(shown), display_id=True)

    def follow(shown: str) -> None:
        is_over = False
        while not is_over:
            is_over = has_ended(REFRESH)
            with optional("updating the notebook's table"):
                if (now := html()) != shown:
                    handle.update(HTML(shown := now))

    thread = threading.Thread(target=follow, args=(shown,), name="daskpytorch-table", daemon=True)
    thread.start()
    return thread
