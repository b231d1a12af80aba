"""What many models leave in storage, so that the same call goes on where it was. Runs in the driver.

Below the sweep's folder `call.pkl` says which function was called, and each model has a folder named by its index:
`outcome.pkl` is what came of it, and there only once it has ended; `begun.pkl` and the checkpoints beside it, which
`driver.vault` writes and finds, are those of a model that has not. Each file appears whole or not at all.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
from dask.base import normalize_token, tokenize

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.display.training import inputs_of
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.protocol.code import name_of
from flytekitplugins.daskpytorch.protocol.files import Files, unusable
from flytekitplugins.daskpytorch.protocol.host import StoragePaths, current_execution

CALL, BEGUN, OUTCOME = "call.pkl", "begun.pkl", "outcome.pkl"
NUM_READERS = 16
"""Files that are read at the same time."""
MAX_COMPARED = 1 << 16
"""Bytes of an argument bound to the function, pickled, that is kept to be compared."""
RETRY_AFTER = (1.0, 2.0, 4.0)
"""Seconds before an outcome that could not be written is written again."""
MAX_TOLD = 3
"""Experiments that an error names."""
ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is known of a model from calls before."""

    experiment: Any
    records: Sequence[LogRecord] = ()
    has_ended: bool = False
    result: Any = None
    stopped: StoppedEarlyError | None = None
    """It was ended early, and has no result."""
    trial: Any = None
    """Optuna's, as it was then, where a study has suggested the experiment."""


class SweepStorage:
    """The folder of one sweep, which is the user's own: what is pickled there is trusted."""

    def __init__(self, uri: str, name: str) -> None:
        folder = f"{uri.rstrip('/')}/{name}"
        self.files = Files(current_execution().filesystem(folder))
        self.folder = self.files.path(folder)

    def open(self, function: Callable[..., Any], experiments: Sequence[Any] | None) -> dict[int, Kept]:
        """What is kept, by the models' indexes; of a sweep that is new, have it noted what it is of.

        Args:
            function: The call's own.
            experiments: Those of the call; None: whatever they were.

        Raises:
            ValueError: It is kept of another call, or cannot be read.
            OSError: The storage cannot be read or written, or another user owns or can write to a file there.
        """
        self.files.refuse_foreign(self.folder, with_folders=True)
        try:
            return self._open(function, experiments)
        except OSError as error:
            raise unusable("dispatch.map(storage=...)", self.folder, error) from error

    def _open(self, function: Callable[..., Any], experiments: Sequence[Any] | None) -> dict[int, Kept]:
        mine = {"function": name_of(function), "arguments": _bound(function)}
        there = self.files.below(self.folder)
        found = self._read_all(sorted(path for path in there if path.rpartition("/")[2] in (CALL, BEGUN, OUTCOME)))
        kept = dict(_kept(found))
        call = found.get(CALL)
        differences = list(_call_differences(call, mine)) if call is not None else []
        differences += _experiment_differences(kept, experiments) if experiments is not None else []
        if differences:
            told = "; ".join(differences[:MAX_TOLD]) + (
                f"; and {len(differences) - MAX_TOLD} more" * (len(differences) > MAX_TOLD)
            )
            raise ValueError(
                f"dispatch.map(storage=...): what is kept in {self.folder} is of another call: {told}. Models that "
                "have begun must be given the same again, at the same places; others may follow them. Give this call a "
                "name of its own, or remove that folder."
            )
        if call is None:
            self.files.write(f"{self.folder}/{CALL}", _pickled(mine))
        return kept

    def model(self, index: int, about: Callable[[], dict[str, Any]]) -> ModelStorage:
        """One model's part."""
        return ModelStorage(files=self.files, folder=f"{self.folder}/{index}", about=about)

    def _read_all(self, names: Sequence[str]) -> dict[str, Any]:
        with ThreadPoolExecutor(NUM_READERS) as readers:
            return dict(zip(names, readers.map(self._read, names), strict=True))

    def _read(self, name: str) -> Any:
        """One file's object; None where it is torn, as stores leave it that cannot write files whole."""
        data = self.files.read(f"{self.folder}/{name}")
        try:
            return pickle.loads(data)  # noqa: S301 - from our own sweeps, in the user's storage
        except (EOFError, pickle.UnpicklingError):
            say(f"{self.folder}/{name} is not whole, and is passed over")
        except Exception as error:  # whatever is raised where classes are made anew
            raise ValueError(
                f"{self.folder}/{name} cannot be read ({type(error).__name__}: {error}): is a class that it needs "
                "gone, or called otherwise? Bring it back, give another name, or remove that file."
            ) from error


@dataclass(eq=False, kw_only=True)
class ModelStorage:
    """One model's folder."""

    files: Files
    folder: str
    about: Callable[[], dict[str, Any]]
    """The experiment, the records up to now, and Optuna's trial where there is one."""

    @property
    def paths(self) -> StoragePaths:
        """Where the model's checkpoints come from and go to. What it has logged is written before each of them."""
        folder = self.folder
        return StoragePaths(files=self.files, previous=folder, own=folder, is_claimed=True, prepare=self.note_progress)

    def note_progress(self) -> None:
        """Write what the model is trained with, and what it has logged by now."""
        self.files.write(f"{self.folder}/{BEGUN}", _pickled(self.about()))

    def note_end(self, result: Any, stopped: StoppedEarlyError | None, say: Callable[[str], None]) -> None:
        """Write what came of it; a store that does not work is given some time, and does not harm the result."""
        outcome = {**self.about(), "result": result, "stopped": stopped}
        for wait_for in (*RETRY_AFTER, None):
            try:
                return self.files.write(f"{self.folder}/{OUTCOME}", _pickled(outcome))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # whatever a store's client raises, or an object that cannot be pickled
                again = f"trying again in {wait_for:g} s" if wait_for else "the same call would train the model again"
                say(f"its outcome could not be kept in {self.folder} ({type(error).__name__}: {error}); {again}")
                time.sleep(wait_for or 0.0)
        return None


def _kept(found: Mapping[str, Any]) -> Iterator[tuple[int, Kept]]:
    for index in sorted({int(name.partition("/")[0]) for name in found if name.partition("/")[0].isdecimal()}):
        begun, outcome = (found.get(f"{index}/{file}") for file in (BEGUN, OUTCOME))
        if (said := outcome or begun) is not None:
            # Of one that was stopped, and then trained on for a while, the outcome is the older.
            records = max((each["records"] for each in (begun, outcome) if each is not None), key=len)
            yield index, Kept(**{**said, "records": records}, has_ended=outcome is not None)


def _pickled(value: Any) -> bytes:
    """By reference to classes if possible, so that those of a script are the script's own again; else by value."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(value))


# ---- What differs


def _bound(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that partials bring, by name or place; without what is large or cannot be pickled."""
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        here = {str(place): value for place, value in enumerate(function.args)} | function.keywords
        bound, function = here | bound, function.func
    return {name: value for name, value in bound.items() if _is_small(value)}


def _is_small(value: Any) -> bool:
    try:
        return len(_pickled(value)) <= MAX_COMPARED
    except Exception:  # whatever is raised by an object that takes no part in this
        return False


def _call_differences(kept: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[str]:
    if kept["function"] != mine["function"]:
        yield f"the function was {kept['function']}, and is {mine['function']}"
    else:
        yield from _field_differences("the function's argument ", kept["arguments"], mine["arguments"])


def _experiment_differences(kept: Mapping[int, Kept], experiments: Sequence[Any]) -> Iterator[str]:
    for index in sorted(kept):
        if index < len(experiments) and not _are_equal(kept[index].experiment, experiments[index]):
            was, is_ = inputs_of(kept[index].experiment), inputs_of(experiments[index])
            yield next(_field_differences(f"experiment {index}: ", was, is_), f"experiment {index} is another")


def _field_differences(where: str, kept: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*kept, *mine]):
        was, is_ = ({name: fields.get(name, ABSENT)} for fields in (kept, mine))
        if not _are_equal(was[name], is_[name]):
            yield f"{where}{name} was {_told(was)}, and is {_told(is_)}"


def _told(field_: dict[str, Any]) -> str:
    [value] = without_secrets(field_).values()
    return "not there" if value is ABSENT else shown(value)


def _are_equal(kept: Any, mine: Any) -> bool:
    """Whether they say so themselves; else, as arrays and many classes do not, whether Dask sees no difference."""
    try:
        if bool(kept == mine):
            return True
    except Exception:  # noqa: S110 - an array's, a tensor's or whatever a user's class raises
        pass
    return bool(tokenize(kept) == tokenize(mine))


@normalize_token.register_lazy("torch")  # type: ignore[no-untyped-call,untyped-decorator]
def _tell_tensors_apart() -> None:
    """Have Dask take a tensor's values for it: pickled, each is another."""
    import torch

    @normalize_token.register(torch.Tensor)  # type: ignore[no-untyped-call,untyped-decorator]
    def normalize(tensor: torch.Tensor) -> tuple[object, ...]:
        values = tensor.detach().cpu().flatten().contiguous().view(torch.uint8)
        return "tensor", str(tensor.dtype), tuple(tensor.shape), values.numpy().tobytes()
