"""Values of any type as HTML: redacted, escaped, and as tables if long. Reads no file and calls no `repr`."""

import datetime as dt
import decimal
import enum
import itertools
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from flytekitplugins.daskpytorch import report
from flytekitplugins.daskpytorch.display.training import fields_of
from flytekitplugins.daskpytorch.process.streams import HIDDEN, without_secrets
from flytekitplugins.daskpytorch.report.pieces import cells_table, element, folded, text_of

MAX_SHORT = 200
"""Characters. Longer texts unfold at a click."""
MAX_OPEN = 20
"""Rows. Longer tables unfold at a click."""
MAX_ROWS = 500
"""Further rows are only counted."""
MAX_FRAME_ROWS = 10
MAX_FRAME_COLUMNS = 50
MAX_DEPTH = 4
"""Deeper values are shown by their number of entries."""
PLAIN = (dt.date, dt.time, dt.timedelta, decimal.Decimal, uuid.UUID, PurePath)


def values_table(values: Mapping[str, Any], addresses: Mapping[str, str], ready: Mapping[str, str]) -> str:
    """Values under a secret's name are hidden at every depth. `ready` has HTML in place of values."""
    rows = []
    for name, value in values.items():
        [shown] = without_secrets({name: value}).values()
        is_hidden = isinstance(shown, str) and shown == HIDDEN
        kind = type(value).__name__ if value is not None else ""
        cell = text_of(shown) if is_hidden else ready.get(name) or _cell_or_line(shown)
        if name in addresses:
            address = text_of(without_secrets(addresses[name]))
            cell = f"{cell}<br>{address}" if cell else address
        rows.append([text_of(name), text_of(kind), cell])
    return (
        report.card("", cells_table(("name", "type", "value"), rows, "dpt-values"))
        if rows
        else report.text("none", quiet=True)
    )


def _cell_or_line(value: Any) -> str:
    try:
        return _cell(value, 0)
    except Exception as error:  # a user's class may raise anything
        return text_of(f"cannot be shown ({type(error).__name__}: {error})")


def _cell(value: Any, depth: int) -> str:
    if isinstance(value, str):
        is_short = len(value) <= MAX_SHORT and "\n" not in value
        whole = element("pre", text_of(value), "dpt-pre")
        return text_of(value) if is_short else folded(f"{len(value):,} characters", whole)
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
        return _frame(value, depth)
    if (line := _line(value)) is not None:
        return text_of(line)
    if (fields := fields_of(value)) is not None:
        return _table(("name", "value"), fields.items(), len(fields), depth)
    return _sequence(value, depth) if isinstance(value, (list, tuple, set, frozenset)) else ""


def _line(value: Any) -> object | None:
    if value is None or isinstance(value, (bool, int, float, *PLAIN)):
        return str(value) if value is None or isinstance(value, PLAIN) else value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value):,} bytes"
    if isinstance(value, os.PathLike):  # flytekit's files, which `os.fspath` and `open` would download
        return ""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        num_bytes = getattr(value, "nbytes", None)
        size = f", {num_bytes:,} bytes" if isinstance(num_bytes, int) else ""
        return f"{value.dtype} {tuple(value.shape)}{size}"
    has_parameters = callable(getattr(value, "named_parameters", None))
    return f"{sum(each.numel() for each in value.parameters()):,} parameters" if has_parameters else None


def _sequence(values: Collection[Any], depth: int) -> str:
    first = list(itertools.islice(values, MAX_ROWS))
    if all(each is None or isinstance(each, (bool, int, float, str)) for each in first):
        line = ", ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in first)
        if len(values) <= MAX_ROWS and len(line) <= MAX_SHORT and "\n" not in line:
            return text_of(f"[{line}]")
    records = [fields_of(each) for each in first]
    names = list(records[0]) if records and records[0] else None
    if names and len(names) <= MAX_FRAME_COLUMNS and all(each is not None and list(each) == names for each in records):
        rows: Iterable[Sequence[Any]] = (list(each.values()) for each in records if each is not None)
        return _table([str(name) for name in names], rows, len(values), depth)
    return _table(("", "value"), enumerate(first), len(values), depth)


def _frame(frame: Any, depth: int) -> str:
    head = frame.iloc[:MAX_FRAME_ROWS, :MAX_FRAME_COLUMNS]
    size = text_of(f"{len(frame):,} rows, {len(frame.columns):,} columns")
    if head.empty:
        return size + _table([str(name) for name in head.columns], (), 0, depth)
    return size + folded(f"the first {len(head)}", _sequence(without_secrets(head.to_dict("records")), depth))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], count: int, depth: int) -> str:
    if depth >= MAX_DEPTH:
        return text_of(f"{count:,} entries")
    cells = [[_cell(cell, depth + 1) for cell in row] for row in itertools.islice(rows, MAX_ROWS)]
    written = cells_table([text_of(name) for name in header], cells)
    if count > MAX_ROWS:
        written += element("p", text_of(f"and {count - MAX_ROWS:,} more"), "dpt-soft")
    return written if count <= MAX_OPEN else folded(f"{count:,} entries", written)
