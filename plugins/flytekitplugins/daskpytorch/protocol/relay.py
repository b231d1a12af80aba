"""What a rank reports, on its way: packed by the rank, gathered by its agent, opened by the driver."""

from __future__ import annotations

import contextlib
import io
import pickle
import select
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from flytekitplugins.daskpytorch.protocol.result_frames import is_piece

__all__ = ["gather", "pack", "unpack"]

MAX_TOGETHER = 1 << 14
"""Bytes of reports in one message; more would make what waits in the driver large, and hardly any cheaper."""


def pack(kind: str, value: object = None) -> bytes:
    """A report. Nothing of the user's is in it but plain values and bytes, so plain pickle does, and is fast."""
    return pickle.dumps((kind, value))


def gather(channel: Connection) -> list[bytes]:
    """What has come from a rank, to be passed on in order; waits for the first report.

    Small ones go together: those that come faster than they are passed on would cost a message each. Nothing waits for
    others to come, and so nothing is lost with the rank.

    Raises:
        EOFError, OSError: The channel is closed, and nothing is left in it.
    """
    together = channel.recv_bytes()
    look = select.poll()
    look.register(channel, select.POLLIN)
    with contextlib.suppress(EOFError, OSError):  # the next call says so
        while _is_small(together) and look.poll(0):
            report = channel.recv_bytes()
            if not _is_small(report):
                return [together, report]
            together += report
    return [together]


def unpack(reports: bytes) -> Iterator[tuple[str, Any]]:
    """The kind and value of each report; their pickles lie one after the other."""
    stream = io.BytesIO(reports)
    while stream.tell() < len(reports):
        yield pickle.load(stream)  # noqa: S301 - from our own rank, by its agent's connection


def _is_small(reports: bytes) -> bool:
    return len(reports) < MAX_TOGETHER and not is_piece(reports)
