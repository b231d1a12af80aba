"""Tables for notebooks. Runs in the driver."""

from collections.abc import Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.process.streams import one_line, without_secrets
from flytekitplugins.daskpytorch.report import table
from flytekitplugins.daskpytorch.report.pieces import shared

MAX_CELL = 60


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table without secrets."""
    header = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in header] for row in map(without_secrets, rows)]
    # A notebook has its own style.
    return table([one_line(name, MAX_CELL) for name in header], cells).replace(shared(), "")


def row_of(first: Mapping[str, Any], **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row. A value has its group before its name, such as `metric.`, if there is a column of the same name."""
    row = dict(first)
    for group, values in others.items():
        row |= {f"{group}.{name}" if name in row else name: value for name, value in values.items()}
    return row


def _cell(value: object) -> object:
    if isinstance(value, float):
        return value
    return "" if value is None else one_line(str(value), MAX_CELL)
