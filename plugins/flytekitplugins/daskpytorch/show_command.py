"""Command that shows a run from its journal: `daskpytorch show FILE`. Runs in the user's terminal."""

import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from flytekitplugins.daskpytorch.display import deck, journal_file

MAX_EVENTS = 20
"""Number of newest events that the command prints."""


@click.command(short_help="Show a run from its journal, also of a driver that was killed.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="write the run's page to this HTML file")
@click.argument("journal", type=click.Path(exists=True, path_type=Path))
def show(journal: Path, page: Path | None) -> None:
    """Show the figures and the newest events of the run whose journal is the file JOURNAL, or in that folder."""
    file = journal / journal_file.NAME if journal.is_dir() else journal
    try:
        run = journal_file.run_of(file)
        if page is not None:
            page.write_text(deck.document(run), encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    console = Console(highlight=False)
    table = Table(title=f"{run.title or 'training'}: {run.phase.word}", show_header=False, title_justify="left")
    for name, value in deck.figures(run).items():
        words = [_in_words(each) for each in (value if isinstance(value, tuple) else (value,)) if each != ""]
        table.add_row(name, "  ".join(words))
    console.print(table)
    for event in run.history.events[-MAX_EVENTS:]:
        console.print(time.strftime("%H:%M:%S", time.localtime(event.time)), event.text, markup=False)
    if page is not None:
        console.print(f"page: {page}", markup=False)


def _in_words(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
