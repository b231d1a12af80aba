"""The journal of a run on disk, a line of JSON for each event, and the command that shows it: `daskpytorch show`.

gang ─▶ Journal ─▶ journal.jsonl ─▶ run_of ─▶ RunState ─▶ page and figures of `daskpytorch show`
"""

import itertools
import json
import os
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import IO

import click

from flytekitplugins.daskpytorch.display import deck
from flytekitplugins.daskpytorch.display.run_state import RunState, is_kept
from flytekitplugins.daskpytorch.process.folders import local_runs_folder
from flytekitplugins.daskpytorch.process.streams import one_line
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.report.pieces import brief, name_of

VARIABLE = "DASKPYTORCH_JOURNAL"
"""Folder for journals, each named by its training's id. Empty: no journals."""
NAME = "journal.jsonl"
MAX_LINES = 10_000
"""The least time between two events of a kind is the journal's age, divided by this number."""
MAX_USAGES = 400
"""The same of usages and accounts, which come every two seconds."""


class Journal(Observer):
    """Appends the events of one gang to a file, without the ranks' output.

    Each line is in the file when `on_event` returns, so a driver that is killed loses none. Of frequent kinds, and of
    log records with the same metrics, some are left out, but never the newest before a restart or the end.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self._folder, self._name = folder, name
        self._file: IO[str] | None = None
        self._began_at = 0.0
        self._written_at: dict[Hashable, float] = {}
        self._waiting: dict[Hashable, journal.Event] = {}

    def on_event(self, event: journal.Event) -> None:
        if isinstance(event, journal.Began):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._began_at = event.time
            self._file = (self._folder / (self._name or f"{event.training.id}.jsonl")).open("a", encoding="utf-8")
        if self._file is None or not is_kept(event):
            return
        self._waiting[key := _key_of(event)] = event
        if key is None or self._is_due(event, key):
            for due in [*self._waiting] if key is None else [key]:
                self._write(self._waiting.pop(due))
        if isinstance(event, journal.Ended):
            self._file.close()
            self._file = None

    def _is_due(self, event: journal.Event, key: tuple[Hashable, ...]) -> bool:
        # Records arrive in batches. Their own times are of a rank's clock, which may be another one after a restart.
        moment = event.record.time if isinstance(event, journal.Logged) else event.time
        interval = (event.time - self._began_at) / (MAX_LINES if key[0] == "records" else MAX_USAGES)
        is_due = key not in self._written_at or abs(moment - self._written_at[key]) >= interval
        if is_due:
            self._written_at[key] = moment
        return is_due

    def _write(self, event: journal.Event) -> None:
        assert self._file is not None  # noqa: S101 - `on_event` has opened it
        self._file.write(f"{json.dumps(journal.fields_of(event))}\n")
        self._file.flush()


def _key_of(event: journal.Event) -> tuple[Hashable, ...] | None:
    """None: each such event is written. Else some with the same key may be left out."""
    match event:
        case journal.Logged(record=record):
            return "records", record.is_evaluation, frozenset(record.metrics)
        case journal.Checkpointed() | journal.Listed():
            return "records", type(event).__name__
        case journal.Used(usage=usage):
            return "usages", usage.rank
        case journal.Accounted():
            return ("accounts",)
    return None


def journal_in(folder: Path | None) -> list[Journal]:
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        return [Journal(Path(asked).expanduser().absolute())] if asked else []
    return [Journal(folder, NAME)] if folder is not None else []


def run_of(file: Path) -> RunState:
    """Return a run's state from its journal, without a torn last line.

    Raises `OSError`, and `ValueError` if the file is no journal, or of another version.
    """
    events = _events_in(file)
    if (first := next(events, None)) is None:
        raise ValueError(f"{file} has no event of a run")
    times = [first.time]
    run = RunState(clock=lambda: times[-1])
    for event in itertools.chain([first], events):
        times[:] = [event.time]
        run.on_event(event)
    run.note_silence()
    return run


def _events_in(file: Path) -> Iterator[journal.Event]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield journal.event_of(json.loads(line))
            except ValueError as error:
                if line.endswith("\n"):
                    raise ValueError(f"{file}, line {number} is no event of this version: {error}") from error


MAX_EVENTS = 20
MAX_TEXT = 1_000


@click.command(short_help="Show a run from its journal, also of a driver that was killed.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="write the run's page to this HTML file")
@click.argument("file", metavar="JOURNAL", required=False, type=click.Path(exists=True, path_type=Path))
def show(file: Path | None, page: Path | None) -> None:
    """Show the figures and the newest events of a run, whose journal is the file JOURNAL, or in that folder.

    Without JOURNAL, show this user's newest local run.
    """
    file = file or _newest()
    file = file / NAME if file.is_dir() else file
    try:
        run = run_of(file)
        if page is not None:
            page.write_text(deck.document(run), encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{run.title or 'training'}: {run.phase.word}")
    for name, value in deck.figures(run).items():
        parts = value if isinstance(value, tuple) else (value,)
        words = [brief(part) if isinstance(part, (int, float)) else str(part) for part in parts]
        click.echo(f"  {name_of(name):<18} {' '.join(words)}")
    for event in run.history[-MAX_EVENTS:]:
        click.echo(f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {one_line(event.text, MAX_TEXT)}")
    if page is not None:
        click.echo(f"page: {page}")


def _newest() -> Path:
    folder = local_runs_folder()
    found = max(folder.glob(f"*/*/{NAME}"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        raise click.ClickException(f"no local run in {folder} has a journal: name one, daskpytorch show JOURNAL")
    return found
