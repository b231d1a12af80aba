"""Function of a task without a function: runs a program, whose arguments and files are the task's inputs and outputs.

`script_definition` makes the function in the driver, and ranks call it. flytekit and Flyte 2 share both modules.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import hashlib
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.process.folders import state_of
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.script import Script, finished


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file or folder that the program leaves for an output of the task."""

    location: str
    """Path, absolute or relative to the program's working folder. May name inputs, as in `out/{inputs.name}.pt`."""
    is_folder: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskScript:
    """Function of a task that runs a program in every rank, with the task's inputs as command-line arguments."""

    name: str
    """Name of the task."""
    script: Script
    inputs: Sequence[str] = ()
    """Names of the task's inputs, in the order of their options."""
    arguments: str | None = None
    """Command line that the user has given, as in `--lr {inputs.lr}`. None: an option for each input."""
    outputs: Mapping[str, OutputFile] = field(default_factory=dict)
    """Files of the task's outputs, by the output's name."""

    def __post_init__(self) -> None:
        for attribute in ("__name__", "__qualname__"):
            object.__setattr__(self, attribute, self.name)

    @property
    def source(self) -> str:
        """Text of the program's file."""
        return self.script.source

    def __call__(self, **values: Any) -> Any:
        """Run the program in this rank.

        Returns:
            On rank 0, the task's outputs: one value, a tuple of several, or None. On other ranks None.

        Raises:
            SystemExit: The program has ended with another exit code than 0.
            FileNotFoundError: The program has ended, and has not left an output's file.
            BaseException: The program's own exception.
        """
        folder, given = Path.cwd(), _Inputs(values, self._text_of)
        places = {name: output.location.format(inputs=given) for name, output in self.outputs.items()}
        before = {name: state_of(folder / place) for name, place in places.items()}
        # The ranks of a task are in the working folder already, which may be another than at the task's definition.
        with finished():
            replace(self.script, args=tuple(self._words(given, places)), directory=str(folder))()
        if not current_rank().is_main:
            return None
        made = tuple(
            self._output_of(name, self._left(name, folder / place, before[name])) for name, place in places.items()
        )
        return made if len(made) > 1 else next(iter(made), None)

    def _words(self, given: _Inputs, places: Mapping[str, str]) -> Iterator[str]:
        """Yield the program's command-line arguments."""
        if self.arguments is None:
            for name in self.inputs:
                yield from _option(name, getattr(given, name))
            return
        for word in shlex.split(self.arguments):
            name = word.removeprefix("{inputs.").removesuffix("}")
            if word == f"{{inputs.{name}}}" and isinstance(values := getattr(given, name), list):
                yield from map(str, values)
            else:
                yield word.format(inputs=given, outputs=_Inputs(places, str))

    def _left(self, name: str, path: Path, before: tuple[int, ...] | None) -> Path:
        """Return the path of an output after a check that the program has left the file or folder there.

        Args:
            name: Name of the output.
            path: Path of the output.
            before: State of the file before the program's start. An unchanged file is reported.

        Raises:
            FileNotFoundError: The program has not left the output.
        """
        output = self.outputs[name]
        if path.is_dir() if output.is_folder else path.is_file():
            if before is not None and not output.is_folder and state_of(path) == before:
                say(f"output {name}: {path} was there before {self.script.given} started, and is unchanged")
            return path
        kind = "folder" if output.is_folder else "file"
        raise FileNotFoundError(
            f"output {name}: {self.script.given} has ended without an error, and has left no {kind} at {path} "
            f"(location {output.location!r} in the working folder {Path.cwd()} on {platform.node()}). Let rank 0 write "
            f"the {kind} there, or correct the location of {name} in output_locs."
        )

    # ---- What a host changes -----------------------------------------------------------------------------------------

    def _text_of(self, value: Any) -> Any:
        """Return an input's value in its form for the command line. Numbers and lists stay numbers and lists."""
        if isinstance(value, (list, tuple)):
            return [self._text_of(each) for each in value]
        if isinstance(value, Enum):
            return value.value
        return value.isoformat() if isinstance(value, dt.date) else value

    def _output_of(self, name: str, path: Path) -> Any:
        """Return the file of an output as a value of the host's type for files."""
        return str(path)


class _Inputs:
    """Values by name as attributes, for templates. A value is converted when a template uses the value."""

    def __init__(self, values: Mapping[str, Any], convert: Callable[[Any], Any]) -> None:
        self._values, self._convert = values, convert

    def __getattr__(self, name: str) -> Any:
        return self._convert(self._values[name])


def _option(name: str, value: Any) -> Iterator[str]:
    """Yield the words of an input's option: `--name value`, `--name` for True, and none for False and None."""
    if value is None or value is False:
        return
    if isinstance(value, str) and value.startswith("-"):  # argparse would take the value for an option
        yield f"--{name}={value}"
        return
    yield f"--{name}"
    if value is not True:
        yield from map(str, value if isinstance(value, list) else [value])


def once_per_node(key: str, make: Callable[[], str]) -> Path:
    """Return the path of a file or folder that the ranks of one node share until the gang's end.

    The first rank makes the file, while the node's other ranks wait.

    Args:
        key: Name of the file's content, such as its URL.
        make: Function that makes the file or folder and returns the path. One rank of each node calls the function.
    """
    shared = getattr(current_rank().checkpoint, "folder", None)  # the agent's, which a process outside a gang lacks
    folder = Path(shared or tempfile.mkdtemp())
    place = folder / f"input-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with (folder / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            made = Path(make())
            partial = Path(tempfile.mkdtemp(dir=folder))
            shutil.move(made, partial / made.name)
            partial.rename(place)
    [found] = place.iterdir()
    return found
