"""This package's own log on standard error: lines for people, or JSON objects with `DASKPYTORCH_LOG=json`.

JSON objects go through the loggers `flytekitplugins.daskpytorch` and its modules. Lines for people go straight to
standard error, so that the program's logging settings cannot hide them. Runs everywhere.
"""

import json
import logging
import math
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from flytekitplugins.daskpytorch.process.streams import Screen

FORMAT_VARIABLE = "DASKPYTORCH_LOG"
LEVEL_VARIABLE = "FLYTE_SDK_LOGGING_LEVEL"
"""Flyte's environment variable with the lowest level of log records that are written, a number of `logging`."""
BEGINNING = '{"time": "'
"""First characters of each JSON object in this package's log."""

logger = logging.getLogger("flytekitplugins.daskpytorch")


def is_for_machines() -> bool:
    """Return True if this package logs JSON objects, as the user chooses by `DASKPYTORCH_LOG=json`."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def set_up() -> None:
    """Make this package's loggers write JSON objects, if `DASKPYTORCH_LOG=json`."""
    if is_for_machines() and not any(isinstance(handler, _Objects) for handler in logger.handlers):
        logger.addHandler(_Objects())
        logger.propagate = False
        logger.setLevel(_least_level())


def say(text: str, level: int = logging.WARNING) -> None:
    """Write a text to this package's log: as a line, or as a JSON object if `DASKPYTORCH_LOG=json`."""
    if is_for_machines():
        tell("note", {"text": text}, level)
    elif level >= _least_level():
        Screen().write(f"{text}\n")


def tell(event: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    """Log an event as a JSON object, if `DASKPYTORCH_LOG=json`.

    Args:
        event: Name of the event.
        fields: Details of the event. None values are dropped.
        level: Level of the log record.
    """
    set_up()
    known = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, "", extra={"event": event, "fields": known})


def object_in(line: str) -> dict[str, Any] | None:
    """Return the JSON object that this package logged as `line` in another process. None for any other line."""
    if not line.startswith(BEGINNING):
        return None
    try:
        said = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(said, dict) and str(said.get("logger")).startswith(logger.name)
    return said if is_ours else None


class _Objects(logging.Handler):
    """Logging handler that writes each record as one line with a JSON object."""

    def emit(self, record: logging.LogRecord) -> None:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "event": getattr(record, "event", "log"),
            "logger": record.name,
            "host": socket.gethostname(),
        }
        if text := record.getMessage():
            said["text"] = text
        if record.exc_info:
            said["traceback"] = logging.Formatter().formatException(record.exc_info)
        said |= getattr(record, "fields", {})
        Screen().write(f"{json.dumps(_plain(said), default=str)}\n")


def _plain(value: Any) -> Any:
    """Return a value that JSON can express. Infinite numbers and NaN become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _least_level() -> int:
    asked = os.environ.get(LEVEL_VARIABLE, "")
    return int(asked) if asked.isdecimal() else logging.INFO
