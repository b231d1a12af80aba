"""The Deck during a training: when and where it is published, and that a failure does no harm."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flytekit import Deck
from flytekit.configuration import DataConfig
from flytekit.core.context_manager import ExecutionParameters, ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.deck.deck import get_deck_template

from flytekitplugins.daskpytorch.display import deck as page
from flytekitplugins.daskpytorch.display.journal_file import NAME, Journal
from flytekitplugins.daskpytorch.display.run_state import RunState
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.flyte import deck
from flytekitplugins.daskpytorch.protocol.journal import Began, Training
from processes import until
from test_deck import shape, state
from told import To, record

Entered = Callable[..., Path]


@pytest.fixture
def in_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ExecutionState.Mode], None]]:
    """Makes this a task in that mode; flytekit's files lie below the test's folder."""
    monkeypatch.setattr(page, "INTERVAL", 0.01)
    monkeypatch.setattr(page, "SHARE", 1.0)
    before = FlyteContextManager.size()

    def enter(mode: ExecutionState.Mode) -> None:
        ctx = FlyteContextManager.current_context()
        access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"), DataConfig.auto())
        params = ExecutionParameters.new_builder(ctx.user_space_params).build()
        params = params.builder()
        params.decks, params.output_metadata_prefix = [], str(tmp_path / "out")
        execution = replace(ctx.execution_state, mode=mode, user_space_params=params.build())
        FlyteContextManager.push_context(ctx.with_file_access(access).with_execution_state(execution).build())

    yield enter
    while FlyteContextManager.size() > before:
        FlyteContextManager.pop_context()


def shown(state: RunState, places: Callable[[], dict[str, str]]) -> Any:
    """Stand-in for the objects of a task that its Deck reads: state, addresses and the journal's folder."""
    return SimpleNamespace(state=state, places=places, journal_folder=None)


def decks() -> list[Deck]:
    return list(FlyteContextManager.current_context().user_space_params.decks)


LOCAL, BACKEND = ExecutionState.Mode.LOCAL_TASK_EXECUTION, ExecutionState.Mode.TASK_EXECUTION


def test_the_file_is_there_at_once_and_follows_the_training(in_task: Entered) -> None:
    in_task(LOCAL)
    recorder = RunState(name="flows.train")
    with deck.published(shown(recorder, lambda: {"results": "s3://bucket/results"})):
        file = deck.local_file.get()
        assert file is not None
        assert state(file.read_text()) == "starting"
        To(recorder).placed(shape(2))
        To(recorder).formed(1.0)
        until(lambda: state(file.read_text()) == "training", "the training")
        To(recorder).logged(record(7, num_steps=9, loss=0.125))
        until(lambda: "0.125" in file.read_text(), "the loss")
        assert "s3://bucket/results" in file.read_text()
        assert [each.name for each in decks()] == ["Training"]
        assert "https://" in get_deck_template().template  # flytekit's, which asks a server for fonts
        assert "<link" not in file.read_text()
    assert "daskpytorch-deck" not in {thread.name for thread in threading.enumerate()}
    assert len(list(file.parent.iterdir())) == 1


def test_a_backend_finds_it_where_flytekit_puts_the_last_one(in_task: Entered, tmp_path: Path) -> None:
    in_task(BACKEND)
    recorder = RunState(name="flows.train")
    published, uploaded = tmp_path / "out" / "deck.html", tmp_path / "out" / NAME
    with deck.published(task := shown(recorder, dict)):
        assert deck.local_file.get() is None  # the console shows the Deck
        until(lambda: published.exists() and ">starting</span>" in published.read_text(), "the start")
        begun = Began(training=Training(name="flows.train", id="train-f3a"))
        Journal(task.journal_folder, NAME).on_event(begun)
        To(recorder).placed(shape(1))
        To(recorder).formed(1.0)
        until(lambda: ">training</span>" in published.read_text(), "the training")
        until(lambda: uploaded.exists() and "train-f3a" in uploaded.read_text(), "the journal")


@pytest.mark.parametrize(
    ("error", "word"), [(GangError("rank 1 was killed (SIGKILL)"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_what_failed_stands_at_the_top_in_the_end(in_task: Entered, error: BaseException, word: str) -> None:
    in_task(LOCAL)
    recorder = RunState(name="flows.train")
    To(recorder).logged(record(3, loss=0.5))
    with pytest.raises(type(error)), deck.published(shown(recorder, dict)):
        raise error
    [made], file = decks(), deck.local_file.get()
    assert file is not None
    assert state(file.read_text()) == state(made.html) == word
    assert "dpt-chart" in made.html
    To(recorder).noted("train: too late")
    assert "too late" not in made.html


def test_a_later_trainings_deck_takes_the_place_of_the_one_before(in_task: Entered) -> None:
    in_task(LOCAL)
    Deck("mine", "<p>own</p>")
    for name in ("first", "second"):
        with deck.published(shown(RunState(name=name), dict)):
            file = deck.local_file.get()
            assert file is not None
            assert "<p>own</p>" in file.read_text()
    assert [each.name for each in decks()] == ["Training", "mine"]
    assert "<h1>second</h1>" in decks()[0].html


def test_storage_that_does_not_answer_is_told_once_and_disturbs_nothing(
    in_task: Entered, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_task(BACKEND)
    recorder, attempts = RunState(name="flows.train"), []

    def refuse(*_: object, **__: object) -> None:
        attempts.append(1)
        raise OSError("no answer")

    monkeypatch.setattr(FileAccessProvider, "put_data", refuse)
    with caplog.at_level(logging.WARNING), deck.published(shown(recorder, dict)):
        until(lambda: attempts, "the first attempt")
        for step in range(3):
            To(recorder).logged(record(step, loss=0.5))
            until(lambda step=step: len(attempts) > step + 1, "another attempt")
    assert [entry.message for entry in caplog.records if "Deck" in entry.message] == [
        "the Deck so far could not be published (OSError('no answer')); the training goes on"
    ]


def test_the_last_page_of_a_task_is_in_the_file_of_the_live_one(in_task: Entered) -> None:
    in_task(LOCAL)
    with deck.published(shown(RunState(name="flows.train"), dict)):
        file = deck.local_file.get()
    Deck("mine", "the last one")
    deck.write_local(FlyteContextManager.current_context())
    assert file is not None
    assert "the last one" in file.read_text()
    with deck.published(shown(RunState(name="flows.other"), dict)):
        assert deck.local_file.get() != file
