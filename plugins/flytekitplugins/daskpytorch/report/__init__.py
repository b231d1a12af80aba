"""Pages for Decks: charts, tables, key figures and events. Users' tasks and workflows may build pages, too.

    Deck("Mine", report.page(
        report.figures({"accuracy": 0.93, "time": ("3 min", "on 2 ranks")}),
        report.line_chart("loss", {"loss": [(0, 2.3), (1, 1.1)]}, "epoch"),
        report.table(("name", "length"), [("Bello", 5)]),
    ))

`page` adds the shared style and the library for drawing (70 kB), without which a piece has neither. Runs in the driver.
"""

from flytekitplugins.daskpytorch.report import chart, pieces
from flytekitplugins.daskpytorch.report.chart import *  # noqa: F403
from flytekitplugins.daskpytorch.report.pieces import *  # noqa: F403

__all__ = [*chart.__all__, *pieces.__all__]  # noqa: PLE0604
