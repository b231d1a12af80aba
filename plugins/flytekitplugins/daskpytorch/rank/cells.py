"""Runs a notebook's cell in a rank. Called by name, as the function of a call of a gang that stays."""

import ast
import linecache
import sys
from collections.abc import Mapping
from typing import Any

FILE = "<cell of all ranks>"
"""File name of the cell in tracebacks."""


def remember(source: str) -> None:
    """Have tracebacks of this process show the lines of a cell. `linecache` keeps the newest cell."""
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)


def cell(source: str, kept: Mapping[str, Any]) -> str | None:
    """Run a cell in this rank's `__main__`, and return its last expression's value as text.

    Args:
        source: Python code of the cell.
        kept: Values that the rank keeps, by the name of their reference in the notebook. The cell sees them by name.

    Returns:
        The `repr` of the value. None if the cell does not end with an expression, or the value is None.
    """
    main = vars(sys.modules["__main__"])
    remember(source)
    tree = ast.parse(source, FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    main.update(kept)
    try:
        exec(compile(tree, FILE, "exec"), main)  # noqa: S102 - the user's own cell
        value = eval(compile(ast.Expression(last.value), FILE, "eval"), main) if isinstance(last, ast.Expr) else None  # noqa: S307
        return None if value is None else repr(value)
    finally:
        for name, each in kept.items():
            if main.get(name) is each:  # else the value would stay here without its reference
                del main[name]
