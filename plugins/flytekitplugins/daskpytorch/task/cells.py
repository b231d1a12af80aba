"""The magic `%%ranks`, which runs a notebook's cell in every rank of a gang that stays. Runs in the driver."""

import ast
from typing import Any

from flytekitplugins.daskpytorch.rank.cells import cell, remember
from flytekitplugins.daskpytorch.task.staying import KeptValues, StayingGang


def load(shell: Any) -> None:
    """Add `%%ranks` to IPython, on `%load_ext flytekitplugins.daskpytorch`."""

    def ranks(line: str, source: str) -> None:
        """Run a cell in every rank of the newest gang, and print the last expression's value of each rank.

        A semicolon behind the expression keeps the values from being printed, as in any cell.
        """
        __tracebackhide__ = True
        if line.strip():
            raise ValueError(f"%%ranks {line}: takes no words behind it. The cell runs in every rank")
        ast.parse(source)  # a syntax error needs no rank
        if (gang := StayingGang.newest()) is None:
            raise RuntimeError("%%ranks needs a gang that stays: begin one by gang = dispatch.gang(...)")
        remember(source)
        with gang.output_here():
            values = gang.call(cell, source, kept_of(gang, shell.user_ns)).result()
        is_quiet = shell.displayhook.semicolon_at_end_of_expression(source)
        for rank, value in enumerate(values):
            if value is not None and not is_quiet:
                print(f"[rank {rank}] {value}")

    shell.register_magic_function(ranks, "cell", "ranks")


def kept_of(gang: StayingGang, names: dict[str, Any]) -> dict[str, KeptValues]:
    """Return those of a notebook's names that refer to values in a gang's ranks."""
    return {name: value for name, value in names.items() if isinstance(value, KeptValues) and value.is_in(gang)}
