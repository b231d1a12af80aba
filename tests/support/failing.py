"""Exceptions of ranks, and the records that ranks make of them."""

import threading

from flytekitplugins.daskpytorch.protocol.failure import Failure


class PlainError(Exception):
    """One that pickles."""


class LockedError(Exception):
    """One that does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def failure(error: BaseException, time: float = 0.0, position: tuple[int | None, int | None] = (None, None)) -> Failure:
    """The record of an exception that was really raised, as a rank makes it."""
    try:
        _call_in_rank(error)
    except BaseException as caught:
        return Failure.of(caught, time, position)
    raise AssertionError


def _call_in_rank(error: BaseException) -> None:
    _users_function(error)


def _users_function(error: BaseException) -> None:
    raise error
