"""Standard streams, and texts without secrets and control characters for them. Runs everywhere."""

import argparse
import contextlib
import copy
import dataclasses
import io
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import IO, Any

SECRET = re.compile(
    r"(?i)^token$|(^|[_\W])(secret|password|passwd|passphrase|credentials?|authorization|connection_string|storage_options"
    r"|(api|access|secret|private)[-_]?key([-_]?id)?|(api|auth|access|session|bearer|hf)[-_]?token)$"
)
"""Pattern for names of secrets, such as `api_key`. Hyper-parameters such as `num_tokens` do not match."""
PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")
"""Pattern for the password in an address: `postgres://user:password@host`."""
SIGNATURE = re.compile(r"(?i)([?&](?:[\w-]*(?:signature|token|secret|password|api_?key)|sig)=)[^&#\s]+")
"""Pattern for the signature in a signed URL, which lets every holder of the URL read the object."""
HIDDEN = "(hidden)"
"""Text in place of a secret."""


def open_closed() -> None:
    """Open the null device in place of standard streams that are closed (`2>&-`).

    Otherwise a socket could get the descriptor 2, and C code would write its errors to this socket. Python has None for
    a closed stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, f"__{name}__") is None and getattr(sys, name) is None:
            setattr(sys, name, _nowhere(number, "w" if number else "r"))


def _nowhere(number: int, mode: str) -> object:
    """Return the null device as a file, with descriptor `number` if that is free."""
    found = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
    if found == number:
        os.set_inheritable(found, True)
    return os.fdopen(found, mode, closefd=False)


class Screen:
    """Standard error or output, but a write never fails: text for a closed stream or a full disk is dropped.

    No training fails because of its display.
    """

    def __init__(self, *, is_output: bool = False) -> None:
        self._is_output = is_output
        self.error: OSError | None = None
        """Error by which text was lost, such as a full disk. None also if a reader has left, as after `| head`."""
        self._file: IO[str] | None = sys.stdout if is_output else sys.stderr
        file = self._file
        if is_output and isinstance(file, io.TextIOWrapper) and file.errors in ("strict", "surrogateescape"):
            file.reconfigure(errors="backslashreplace")  # as Python sets up standard error

    def write(self, text: str) -> int:
        """Write a text to the stream. Drop the text if the stream fails."""
        try:
            if self._file is not None:
                self._file.write(text)
        except (OSError, ValueError) as error:
            self._note(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, and ignore errors."""
        try:
            if self._file is not None:
                self._file.flush()
        except BrokenPipeError:
            if self._is_output:  # as after `| head`: Python would write the rest at its exit, and complain
                _drop_output()
        except (OSError, ValueError) as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self.error = error

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the stream, such as `isatty` or `encoding`."""
        return getattr(self._file, name)


def _drop_output() -> None:
    """Have all later standard output of this process go nowhere."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)


def one_line(text: str, max_length: int) -> str:
    """Return a text with unprintable characters replaced, cut to at most `max_length` characters."""
    cut = text if len(text) <= max_length else f"{text[: max_length - 1]}…"
    return (
        cut
        if cut.isprintable()
        else "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cut)
    )


def without_secrets(value: Any) -> Any:
    """Copy a value with `(hidden)` in place of secrets, by the names of keys and fields, and within URLs.

    Descends into lists, tuples, sets, mappings, dataclasses, namespaces, named tuples and models of Pydantic.
    """
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
    """Copy a dataclass, namespace or Pydantic model as the same type. Return any other value unchanged."""
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
