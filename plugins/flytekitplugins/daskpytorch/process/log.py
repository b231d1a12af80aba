"""What this package itself has to say: lines for people, or with `DASKPYTORCH_LOG=json` objects for machines.

Both go to standard error. One hierarchy of loggers, `flytekitplugins.daskpytorch` and its modules, says it to machines;
people read it as lines, which no logger of a program's own need let through. Runs everywhere.
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
"""Flyte's own: a number, as `logging` has them."""
BEGINNING = '{"time": "'
"""Of each object."""

logger = logging.getLogger("flytekitplugins.daskpytorch")


def is_for_machines() -> bool:
    """Whether objects are asked for."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def set_up() -> None:
    """Have the hierarchy of loggers write objects, if they are asked for."""
    if is_for_machines() and not any(isinstance(handler, _Objects) for handler in logger.handlers):
        logger.addHandler(_Objects())
        logger.propagate = False
        logger.setLevel(_least_level())


def say(text: str, level: int = logging.WARNING) -> None:
    """Say a line."""
    if is_for_machines():
        tell("note", {"text": text}, level)
    elif level >= _least_level():
        Screen().write(f"{text}\n")


def tell(event: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    """Say it to machines: what has happened, and more about it; fields that are None are left out."""
    set_up()
    known = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, "", extra={"event": event, "fields": known})


def object_in(line: str) -> dict[str, Any] | None:
    """What this package says in another process by a line of its output; None: it is just a line."""
    if not line.startswith(BEGINNING):
        return None
    try:
        said = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(said, dict) and str(said.get("logger")).startswith(logger.name)
    return said if is_ours else None


class _Objects(logging.Handler):
    """Writes each record as one line: a JSON object."""

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
    """What JSON has words for: a number that is none is a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _least_level() -> int:
    asked = os.environ.get(LEVEL_VARIABLE, "")
    return int(asked) if asked.isdecimal() else logging.INFO
