"""Standard streams, texts without secrets and control characters for them, and this package's own log. Runs everywhere.

The log has lines for people, straight to standard error, so that the program's logging settings cannot hide them. With
`DASKPYTORCH_LOG=json` it has JSON objects, by the loggers `flytekitplugins.daskpytorch` and its modules.
"""

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import logging
import math
import os
import re
import socket
import sys
import types
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import IO, Any

SECRET = re.compile(
    r"(?i)^token$|(^|[_\W])(secret|password|passwd|passphrase|credentials?|authorization|connection_string|storage_options"
    r"|(api|access|secret|private)[-_]?key([-_]?id)?|(api|auth|access|session|bearer|hf)[-_]?token)$"
)
"""Names of secrets, such as `api_key`, but not of hyper-parameters such as `num_tokens`."""
PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")
"""Password in an address: `postgres://user:password@host`."""
SIGNATURE = re.compile(r"(?i)([?&](?:[\w-]*(?:signature|token|secret|password|api_?key)|sig)=)[^&#\s]+")
"""Signature in a signed URL, which lets every holder of the URL read the object."""
HIDDEN = "(hidden)"


class Screen:
    """Standard error or output, whose writes never fail, so that no training fails because of its display."""

    def __init__(self, *, is_output: bool = False) -> None:
        self._is_output = is_output
        self._file: IO[str] | None = sys.stdout if is_output else sys.stderr
        file = self._file
        if is_output and isinstance(file, io.TextIOWrapper) and file.errors in ("strict", "surrogateescape"):
            file.reconfigure(errors="backslashreplace")  # as Python sets up standard error

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except BrokenPipeError:
            if self._is_output:  # as after `| head`: Python would write the rest at its exit, and complain
                with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:  # noqa: PTH123
                    os.dup2(nowhere.fileno(), 1)
        except (OSError, ValueError):
            return

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def one_line(text: str, max_length: int) -> str:
    cut = text if len(text) <= max_length else f"{text[: max_length - 1]}…"
    return (
        cut
        if cut.isprintable()
        else "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cut)
    )


def without_secrets(value: Any) -> Any:
    """Copy a value with `(hidden)` in place of secrets, by the names of keys and fields, and within URLs."""
    if isinstance(value, str):
        return SIGNATURE.sub(rf"\1{HIDDEN}", PASSWORD.sub(rf"\1{HIDDEN}", value)) if "://" in value else value
    if isinstance(value, tuple) and (as_dict := getattr(value, "_asdict", None)) is not None:
        return type(value)(*_hidden_by_name(as_dict()).values())
    if type(value) in {list, tuple, set, frozenset}:
        return type(value)(map(without_secrets, value))
    try:
        if isinstance(value, Mapping):
            return _hidden_by_name(value)
        return _without_secret_fields(value)
    except Exception:  # a user's own class may raise any exception when it is read, copied or changed
        return HIDDEN


def _hidden_by_name(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        name: HIDDEN if SECRET.search(str(name)) else without_secrets(value) for name, value in list(values.items())
    }


def _without_secret_fields(value: Any) -> Any:
    if callable(getattr(type(value), "model_copy", None)):  # a model of Pydantic
        return value.model_copy(update=_hidden_by_name(dict(value)))
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, (type, os.PathLike))  # a FlyteFile is both
    if not is_record and not isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return value
    names = [field.name for field in dataclasses.fields(value)] if is_record else list(vars(value))
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    copied = copy.copy(value)
    for name, hidden in _hidden_by_name(fields).items():
        object.__setattr__(copied, name, hidden)
    return copied


# ---- This package's log

FORMAT_VARIABLE = "DASKPYTORCH_LOG"
LEVEL_VARIABLE = "FLYTE_SDK_LOGGING_LEVEL"
BEGINNING = '{"time": "'

logger = logging.getLogger("flytekitplugins.daskpytorch")


def is_for_machines() -> bool:
    return os.environ.get(FORMAT_VARIABLE) == "json"


def set_up() -> None:
    if is_for_machines() and not any(isinstance(handler, _Objects) for handler in logger.handlers):
        logger.addHandler(_Objects())
        logger.propagate = False
        logger.setLevel(_least_level())


def say(text: str, level: int = logging.WARNING) -> None:
    if is_for_machines():
        tell("note", {"text": text}, level)
    elif level >= _least_level():
        Screen().write(f"{text}\n")


def tell(event: str, fields: Mapping[str, Any], level: int = logging.INFO) -> None:
    """Log an event as a JSON object, without values that are None. Call only with `DASKPYTORCH_LOG=json`."""
    set_up()
    known = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, "", extra={"event": event, "fields": known})


def object_in(line: str) -> dict[str, Any] | None:
    if not line.startswith(BEGINNING):
        return None
    try:
        said = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(said, dict) and str(said.get("logger")).startswith(logger.name)
    return said if is_ours else None


class _Objects(logging.Handler):
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
        Screen().write(f"{json.dumps(plain(said))}\n")


def plain(value: Any) -> Any:
    """Return a value that JSON can express. Other objects than dataclasses become their `str`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    return str(value)


def _least_level() -> int:
    asked = os.environ.get(LEVEL_VARIABLE, "")
    return int(asked) if asked.isdecimal() else logging.INFO
