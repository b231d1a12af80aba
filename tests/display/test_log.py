"""`DASKPYTORCH_LOG=json`: one object per line for driver and ranks, at the levels of Flyte's setting."""

import json
import logging
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import told
from flytekitplugins.daskpytorch.display import terminal
from flytekitplugins.daskpytorch.display.terminal import Display, MachineLog
from flytekitplugins.daskpytorch.errors import GangError, StoppedEarlyError
from flytekitplugins.daskpytorch.process import streams
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.sweep.sweep import SweepDisplay
from told import To, node, shape_of

SHAPE = shape_of(node("ada", "ada"), node("bea", "bea"))
record = partial(told.record, num_steps=9)


@pytest.fixture(autouse=True)
def _for_machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(streams.FORMAT_VARIABLE, "json")
    monkeypatch.delenv(streams.LEVEL_VARIABLE, raising=False)
    before = streams.logger.handlers[:], streams.logger.propagate, streams.logger.level
    yield
    streams.logger.handlers[:], streams.logger.propagate = before[0], before[1]
    streams.logger.setLevel(before[2])


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Each line, without what differs from run to run."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in capsys.readouterr().err.splitlines()]
    for line in lines:
        assert line.pop("time")
        assert line.pop("logger").startswith("flytekitplugins.daskpytorch")
    return lines


def begun(observer: Observer | None = None) -> Any:
    observer = observer or MachineLog()
    To(observer).begins(Training(name="flows.train", id="train-f3a-n0", inputs={"lr": 0.5}))
    To(observer).placed(SHAPE)
    return observer


STOPPED = StoppedEarlyError("others are better", epoch=1, metric="loss", value=1.0)


@pytest.mark.parametrize(
    ("level", "error", "events"),
    [
        ("10", GangError("no"), ["began", "placed", "logged", "logged", "called", "called", "ended"]),
        ("20", STOPPED, ["began", "placed", "logged", "called", "called", "ended"]),
        ("40", STOPPED, ["called"]),
        ("40", GangError("no"), ["called", "ended"]),
    ],
)
def test_level_is_that_of_flyte_and_a_failure_is_an_error(
    level: str, error: Exception, events: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(streams.LEVEL_VARIABLE, level)
    observer = begun()
    To(observer).logged(record(1))
    To(observer).logged(record(1, rank=1))
    To(observer).called("evaluate", None)
    To(observer).called("evaluate", GangError("no"))
    To(observer).ended(error)
    assert [line["event"] for line in said(capsys)] == events


def test_what_the_package_says_in_a_rank_is_no_text_within_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    streams.set_up()
    logging.getLogger("flytekitplugins.daskpytorch.data.bucket").warning("listing takes long")
    line = capsys.readouterr().err.rstrip("\n")
    users = '{"time": "now", "event": "of the user", "self": 1, "level": []}'
    To(begun()).wrote(1, [line, users, '{"time": "broken'])
    found = said(capsys)[-3:]
    assert [(each["event"], each["level"], each["text"], each["rank"], each["host"]) for each in found] == [
        ("log", "WARNING", "listing takes long", 1, "bea"),
        ("output", "INFO", users, 1, "bea"),
        ("output", "INFO", '{"time": "broken', 1, "bea"),
    ]


def test_loggers_of_modules_say_objects_with_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    streams.set_up()
    error = OSError("the disk is full")
    logging.getLogger("flytekitplugins.daskpytorch.protocol.observer").warning("%s failed", "it", exc_info=error)
    [line] = said(capsys)
    assert (line["event"], line["text"]) == ("log", "it failed")
    assert line["traceback"].endswith("OSError: the disk is full")


def test_a_sweep_says_what_its_models_do(capsys: pytest.CaptureFixture[str]) -> None:
    board = SweepDisplay(1)
    model = board.line(0, {"lr": 1})
    To(model).begins(Training(name="train", id="sweep-f3a-0", group="sweep-f3a", index=0, inputs={"lr": 1}))
    To(model).placed(SHAPE)
    To(model).wrote(0, ["a line"])
    To(model).ended(None)
    board.count(0, None)
    lines = said(capsys)
    assert [line["event"] for line in lines] == ["began", "placed", "output", "ended", "note"]
    assert {line["model"] for line in lines[:-1]} == {0}
    assert lines[-1]["text"] == "1 of 1 models have ended: 1 finished"


def test_gangs_share_a_board_until_the_first_has_concluded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(streams.FORMAT_VARIABLE)
    monkeypatch.setattr(terminal, "_gangs", weakref.WeakSet())  # without gangs of other tests
    first, second = terminal.progress("flows.train"), terminal.progress("flows.train")
    keyed = terminal.progress("flows.train", "of.mine")
    displays = [each for each in (first, second, keyed) if isinstance(each, Display)]
    assert [each.board for each in displays] == [displays[0].board] * 3
    for display in displays:
        display.say("asked")
        To(display).noted("noted")
        display.conclude("done", {})
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("ed")]
    assert lines == ["train: asked", "noted", "train: asked", "train, noted", "of.mine: asked", "of.mine, noted"]
    alone = terminal.progress("flows.train")
    assert isinstance(alone, Display)
    assert alone.board is not displays[0].board
    To(alone).noted("noted")
    assert capsys.readouterr().err == "noted\n"
    alone.conclude("done", {})


def test_people_read_lines_and_their_logging_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(streams.FORMAT_VARIABLE)
    before = streams.logger.handlers[:]
    streams.set_up()
    streams.say("a notice")
    assert capsys.readouterr().err == "a notice\n"
    assert (streams.logger.handlers, streams.logger.propagate) == (before, True)
    assert isinstance(terminal.progress("train"), Display)
    assert isinstance(terminal.echo(), Display)
    monkeypatch.setenv(streams.LEVEL_VARIABLE, "40")
    streams.say("a notice")
    assert capsys.readouterr().err == ""
