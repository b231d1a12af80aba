"""Storage of a sweep, from which a repeated call resumes. Runs in the driver.

The sweep's folder has `call.pkl`, which describes the called function, and a folder for each model, named by index. A
model's `begun.pkl` has its experiment and its records so far. `driver.vault` writes and finds the checkpoints in the
same folder. A model that has ended has `outcome.pkl`, too. Models of a data frame's keys are in one file, `keys.pkl`.
Each file appears whole or not at all.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dask.base import tokenize

from flytekitplugins.daskpytorch.checks import shown
from flytekitplugins.daskpytorch.display.training import inputs_of
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.process.streams import say, without_secrets
from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.files import Files, unusable
from flytekitplugins.daskpytorch.protocol.function import name_of
from flytekitplugins.daskpytorch.protocol.host import StoragePaths, current_execution
from flytekitplugins.daskpytorch.records import LogRecord

CALL, BEGUN, OUTCOME, KEYS = "call.pkl", "begun.pkl", "outcome.pkl", "keys.pkl"
NUM_READERS = 16
MAX_COMPARED = 1 << 16
"""Bytes of a pickled argument of a partial function. A repeated `dispatch.map` does not compare larger arguments."""
MAX_TOLD = 3
ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class KeptModel:
    experiment: Any
    records: Sequence[LogRecord] = ()
    has_ended: bool = False
    result: Any = None
    stopped: StoppedEarlyError | None = None


class SweepStorage:
    """Storage folder of one `dispatch.map`. The user owns the folder, so pickles from this folder are trusted."""

    def __init__(self, uri: str, name: str) -> None:
        folder = f"{uri.rstrip('/')}/{name}"
        self.files = Files(current_execution().filesystem(folder))
        self.folder = self.files.path(folder)

    def open(self, function: Callable[..., Any], experiments: Sequence[Any]) -> dict[int, KeptModel]:
        """Return the models' stored states by index. In a new folder, write `call.pkl`.

        Stored experiments must equal `experiments`. Raises `ValueError` if the folder belongs to
        another call or a file cannot be unpickled, and `OSError` if storage fails or another user owns or can write to
        a file.
        """
        self.files.refuse_foreign(self.folder, with_folders=True)
        try:
            return self._open(function, experiments)
        except OSError as error:
            raise unusable("dispatch.map(storage=...)", self.folder, error) from error

    def _open(self, function: Callable[..., Any], experiments: Sequence[Any]) -> dict[int, KeptModel]:
        names = [path for path in self.files.below(self.folder) if path.rpartition("/")[2] in (CALL, BEGUN, OUTCOME)]
        with ThreadPoolExecutor(NUM_READERS) as readers:
            found = dict(zip(names, readers.map(self._read, names), strict=True))
        kept = dict(_kept(found))
        mine = _described(function)
        was, is_ = found.get(CALL) or mine, mine
        for index, experiment in enumerate(experiments):
            if index in kept:
                was, is_ = was | _inputs(index, kept[index].experiment), is_ | _inputs(index, experiment)
        if differences := list(_differences(was, is_)):
            raise ValueError(
                f"dispatch.map(storage=...): the models in {self.folder} are of another call: "
                f"{'; '.join(differences[:MAX_TOLD])}. Experiments "
                "whose models have begun must stay the same, in the same order; new ones may follow. Give this call a "
                "name of its own, or remove that folder."
            )
        if found.get(CALL) is None:
            self.files.write(f"{self.folder}/{CALL}", _pickled(mine))
        return kept

    def keys(self, function: Callable[..., Any]) -> dict[Any, tuple[str, bytes]]:
        """Return the digest and the pickled value of each key that an earlier call has trained."""
        self.open(function, [])
        return self._known_keys()

    def note_keys(self, keys: Mapping[Any, tuple[str, bytes]]) -> None:
        """Add the keys of a call, which may have failed before it had trained all."""
        try:
            self.files.write(f"{self.folder}/{KEYS}", pickle.dumps({**self._known_keys(), **keys}))
        except Exception as error:  # a store's client may raise anything, and the results must not be lost
            failed = f"the models of {len(keys)} keys could not be written to {self.folder}"
            say(f"{failed} ({type(error).__name__}: {error}); a repeated call trains them again")

    def _known_keys(self) -> dict[Any, tuple[str, bytes]]:
        return self._read(KEYS) if KEYS in self.files.below(self.folder) else {}

    def model(self, index: int, about: Callable[[], dict[str, Any]]) -> ModelStorage:
        return ModelStorage(files=self.files, folder=f"{self.folder}/{index}", about=about)

    def _read(self, name: str) -> Any:
        data = self.files.read(f"{self.folder}/{name}")
        try:
            return pickle.loads(data)  # noqa: S301 - from our own sweeps, in the user's storage
        except Exception as error:  # unpickling a user's class may raise anything
            raise ValueError(
                f"{self.folder}/{name} cannot be read ({type(error).__name__}: {error}): does its class still exist "
                "under the same name, and is the file whole? Restore the class, give this call another name, or remove "
                "that file."
            ) from error


@dataclass(eq=False, kw_only=True)
class ModelStorage:
    files: Files
    folder: str
    about: Callable[[], dict[str, Any]]

    @property
    def paths(self) -> StoragePaths:
        """The model's records are written before each checkpoint."""
        folder = self.folder
        return StoragePaths(files=self.files, previous=folder, own=folder, is_claimed=True, prepare=self.note_progress)

    def note_progress(self) -> None:
        self.files.write(f"{self.folder}/{BEGUN}", _pickled(self.about()))

    def note_end(self, result: Any, error: BaseException | None, say: Callable[[str], None]) -> None:
        """Write the result or early stopping, or a failed model's records, and report a failure by `say`."""
        try:
            if error is None or isinstance(error, StoppedEarlyError):
                outcome = {**self.about(), "result": result, "stopped": error}
                self.files.write(f"{self.folder}/{OUTCOME}", _pickled(outcome))
            else:
                self.note_progress()
        except Exception as failure:  # a store's client and the pickling of a result may raise anything
            failed = f"the model's end could not be written to {self.folder}"
            say(f"{failed} ({type(failure).__name__}: {failure}); a repeated call trains it again")


def _kept(found: Mapping[str, Any]) -> Iterator[tuple[int, KeptModel]]:
    for index in sorted({int(name.partition("/")[0]) for name in found if name.partition("/")[0].isdecimal()}):
        begun, outcome = (found.get(f"{index}/{file}") for file in (BEGUN, OUTCOME))
        if (said := outcome or begun) is not None:
            # A model that was stopped early may have resumed since: `begun.pkl` is then newer than the outcome.
            records = max((each["records"] for each in (begun, outcome) if each is not None), key=len)
            yield index, KeptModel(**{**said, "records": records}, has_ended=outcome is not None)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return pickling.dumps_by_value(value)


# ---- Differences between two calls


def _described(function: Callable[..., Any]) -> dict[str, Any]:
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        here = {str(place): value for place, value in enumerate(function.args)} | function.keywords
        bound, function = here | bound, function.func
    arguments = {f"the function's argument {name}": value for name, value in bound.items() if _is_small(value)}
    return {"the function": name_of(function)} | arguments


def _inputs(index: int, experiment: Any) -> dict[str, Any]:
    return {f"experiment {index}: {name}": value for name, value in inputs_of(experiment).items()}


def _is_small(value: Any) -> bool:
    try:
        return len(_pickled(value)) <= MAX_COMPARED
    except Exception:  # an object without pickling may raise anything
        return False


def _differences(was: Mapping[str, Any], is_: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*was, *is_]):
        values = [each.get(name, ABSENT) for each in (was, is_)]
        if not _are_equal(*values):
            yield f"{name} was {_told(name, values[0])}, and is {_told(name, values[1])}"


def _told(name: str, value: Any) -> str:
    [plain] = without_secrets({name.rpartition(" ")[2]: value}).values()
    return "not there" if value is ABSENT else shown(plain)


def _are_equal(kept: Any, mine: Any) -> bool:
    try:
        if bool(kept == mine):
            return True
    except Exception:  # noqa: S110 - an array's, a tensor's or whatever a user's class raises
        pass
    return bool(tokenize(kept) == tokenize(mine))
