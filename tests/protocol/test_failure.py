"""A rank's exception reaches the driver as a record, and is rebuilt there in its own type where possible."""

import asyncio
import builtins
import copyreg
import pickle
import threading
import traceback
from bdb import BdbQuit
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from failing import LockedError, PlainError, failure
from flytekitplugins.daskpytorch.protocol.failure import MAX_PICKLED, MAX_TEXT


class LockedValueError(ValueError):
    """A subclass of a builtin that does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class CodedError(Exception):
    """One whose `__init__` needs more than what `args` holds."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


class KeywordError(OSError):
    """One whose `__init__` takes keywords alone."""

    def __init__(self, *, path: str) -> None:
        super().__init__(2, "no such shard", path)
        self.path = path


class MuteError(Exception):
    """One that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class PanicError(BaseException):
    """As extensions written in Rust raise."""


class PanickingError(Exception):
    """One whose every use panics."""

    def __str__(self) -> str:
        raise PanicError

    def __reduce__(self) -> tuple[Any, ...]:
        raise PanicError


# ---- The records ----------------------------------------------------------------------------------------------------


def test_failure_keeps_type_text_and_a_traceback_from_the_users_function_on() -> None:
    record = failure(PlainError("bad"), time=12.5)
    assert (record.type_name, record.message, record.time) == ("PlainError", "bad", 12.5)
    assert record.traceback.startswith("Traceback (most recent call last)")
    assert "in _users_function" in record.traceback
    assert record.traceback.rstrip().endswith("PlainError: bad")
    assert "in failure" not in record.traceback  # the rank's own frame


# ---- Exceptions made again in the driver ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PlainError("a", 2), PlainError),
        (CodedError(3, "x"), CodedError),
        (KeyError("name"), KeyError),
        (FlyteRecoverableException("again"), FlyteRecoverableException),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError),
        (LockedError("x"), None),
        (LockedValueError("x"), None),
        *((error, None) for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError())),
    ],
)
def test_exception_is_rebuilt_in_its_own_type_unless_it_cannot_be_or_would_end_the_driver(
    error: BaseException, kind: type[Exception] | None
) -> None:
    rebuilt = failure(error).rebuilt()
    assert rebuilt is not error
    assert type(rebuilt) is (kind or type(None))
    assert rebuilt is None or rebuilt.args == error.args


TEXT_ERRORS = {
    UnicodeDecodeError: ("utf-8", b"\xe9", 0, 1, "unexpected end of data"),
    UnicodeEncodeError: ("ascii", "\xe9", 0, 1, "ordinal not in range(128)"),
    UnicodeTranslateError: ("abc", 1, 2, "why"),
    **dict.fromkeys((SyntaxError, IndentationError, TabError), ("bad line", ("train.conf", 3, 1, "x = =", 3, 2))),
    **dict.fromkeys((BaseExceptionGroup, ExceptionGroup), ("two", [ValueError("one"), KeyError("other")])),
}
"""What builtin exceptions are made of, where a text alone is not enough."""
OF_PYTHON = sorted(
    {kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize(
    "error",
    [
        *(kind(*TEXT_ERRORS.get(kind, ("text",))) for kind in OF_PYTHON),
        FileNotFoundError(2, "No such file", "data.csv"),
        OSError(18, "Cross-device link", "a", None, "b"),
        ImportError("no name", name="module", path="/path"),
        AttributeError("no attribute", obj=threading.Lock()),
        StopIteration(3),
        KeywordError(path="shard-0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_keep_text_fields_notes_and_causes_and_plain_pickle_is_as_before(error: BaseException) -> None:
    error.__cause__, error.__context__ = ValueError("cause"), KeyError("context")
    error.add_note("a note")
    before = dict(copyreg.dispatch_table)
    record = failure(error)
    assert record.pickled is not None
    rebuilt = pickle.loads(record.pickled)
    assert (type(rebuilt), str(rebuilt), repr(rebuilt.args)) == (type(error), str(error), repr(error.args))
    for name in {name for name in dir(error) if not name.startswith("_")} - {"obj", "add_note", "with_traceback"}:
        if not callable(value := getattr(error, name, None)):
            assert repr(getattr(rebuilt, name, None)) == repr(value), name
    shown = traceback.format_exception(rebuilt)
    assert shown[-2:] == traceback.format_exception(error)[-2:]
    assert {"ValueError: cause\n"} < set(shown)
    assert copyreg.dispatch_table == before  # others in this process pickle exceptions in their own way


def test_pickle_that_does_not_open_here_gives_no_exception() -> None:
    assert replace(failure(ValueError("bad")), pickled=b"garbage").rebuilt() is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StopIteration(), "a rank's function raised StopIteration"),
        (StopIteration("the batch"), "a rank's function raised StopIteration: the batch"),
        (StopAsyncIteration(), "a rank's function raised StopAsyncIteration"),
        (CancelledError(), "a rank's function raised CancelledError"),
        (BdbQuit(), "a rank's function raised BdbQuit"),
    ],
)
def test_what_ends_a_catchers_loop_without_an_error_is_rebuilt_as_a_runtime_error(error: Exception, said: str) -> None:
    rebuilt = failure(error).rebuilt()
    assert type(rebuilt) is RuntimeError
    assert str(rebuilt) == said
    assert type(rebuilt.__cause__) is type(error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MuteError(), "<exception str() failed>"),
        (PanickingError(), "<exception str() failed>"),
        (SystemExit(None), "exit code 0"),
        (SystemExit(3), "exit code 3"),
        (SystemExit(True), "exit code 1"),
        (SystemExit("no such file"), "exit code 1 (no such file)"),
    ],
)
def test_exit_says_its_code_and_exception_without_a_text_can_be_recorded(error: BaseException, message: str) -> None:
    record = failure(error)
    assert record.message == message
    assert "in _users_function" in record.traceback


def test_of_an_endless_message_both_ends_are_kept() -> None:
    record = failure(ValueError("it began " + "x" * 10 * MAX_TEXT + " so it ended"))
    for text in (record.message, record.traceback.rstrip()):
        assert len(text) < MAX_TEXT + 100
        assert "it began" in text
        assert "characters left out" in text
        assert text.endswith("so it ended")


def test_an_exception_that_holds_too_much_goes_as_text() -> None:
    error = PlainError("bad batch")
    error.batch = b"x" * MAX_PICKLED  # type: ignore[attr-defined]
    assert failure(error).pickled is None
    assert failure(error).message == "bad batch"
