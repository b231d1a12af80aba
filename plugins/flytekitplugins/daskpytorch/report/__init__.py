"""Pages for Decks: charts, tables, key figures, timelines. For tasks and workflows to use, too.

    Deck("Mine", report.page(
        report.figures({"accuracy": 0.93, "time": ("3 min", "on 2 ranks")}),
        report.line_chart("loss", {"loss": [(0, 2.3), (1, 1.1)]}, "epoch"),
        report.table(("name", "length"), [("Bello", 5)]),
    ))

Every piece is HTML that needs nothing else: it can be a Deck by itself, and pieces can be joined by `+`. What they
share, a style and the library that draws, is 70 kB; `page` has it once.
"""

from flytekitplugins.daskpytorch.report.chart import line_chart
from flytekitplugins.daskpytorch.report.curve import Curve
from flytekitplugins.daskpytorch.report.html import Link
from flytekitplugins.daskpytorch.report.pieces import (
    Picture,
    Tone,
    alert,
    card,
    details,
    document,
    figures,
    grid,
    page,
    pictures,
    section,
    shares,
    status,
    table,
    text,
)
from flytekitplugins.daskpytorch.report.timeline import Event, Span, duration, timeline

__all__ = [
    "Curve",
    "Event",
    "Link",
    "Picture",
    "Span",
    "Tone",
    "alert",
    "card",
    "details",
    "document",
    "duration",
    "figures",
    "grid",
    "line_chart",
    "page",
    "pictures",
    "section",
    "shares",
    "status",
    "table",
    "text",
    "timeline",
]
