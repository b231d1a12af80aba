"""One model per key of a data frame, trained by the ranks of one gang. Runs in drivers and ranks.

Results travel by the Dask scheduler's metadata, which outlive ranks and workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import pickle
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dask.base import is_dask_collection

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems, require_extra, shown
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.data.partitions import (
    DaskPartitions,
    address_for_ranks,
    client_in_rank,
    way_to_dask,
)
from flytekitplugins.daskpytorch.display.training import fields_of, row_of
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.function import check_call, name_of
from flytekitplugins.daskpytorch.protocol.pickling import dumps_by_value
from flytekitplugins.daskpytorch.settings import Gang, is_debugging
from flytekitplugins.daskpytorch.sweep.storage import SweepStorage

if TYPE_CHECKING:
    import pandas as pd
    from distributed import Client

    from flytekitplugins.daskpytorch.driver.futures import GangFutures

FOLDER = "daskpytorch-keys"
SEND_INTERVAL = 0.5
PARTS_PER_RANK = 4
MANY_RANKS = 8
Row = tuple[bytes, str | None, str | None]
"""The pickled value or the error, and the digest of the key's rows and the function if storage keeps the model."""
Known = dict[Any, tuple[str, bytes]] | None


class Grouped(Protocol):
    obj: Any

    def aggregate(self, *args: Any, **kwargs: Any) -> Any: ...


def columns_of(grouped: Any) -> list[Any] | None:
    given = grouped.by if is_dask_collection(grouped.obj) else grouped.keys
    names = given if isinstance(given, list) else [given]
    columns = getattr(grouped.obj, "columns", ())
    is_plain = all(isinstance(name, (str, int)) and name in columns for name in names)
    return names if is_plain and grouped.obj.ndim == 2 and "Series" not in type(grouped).__name__ else None


BY_COLUMNS = checks.must_be(
    "a whole frame grouped by names of its columns: frame.groupby('store') or frame.groupby(['store', 'item'])",
    lambda grouped: columns_of(grouped) is not None,
)
WITHOUT_MISSING_KEYS = checks.must_be("True", lambda dropna: dropna is not False)


def check(problems: Problems, settings: Gang) -> None:
    """Raise `ValueError` for arguments of `dispatch.map` that do not suit a data frame."""
    problems.check("experiments", BY_COLUMNS)
    problems.check("experiments.dropna", WITHOUT_MISSING_KEYS)
    problems.check("models_per_worker", checks.optional(checks.COUNT))
    for name in ("stop_early", "wandb"):
        problems.check(name, checks.left_out(" for a data frame"))
    problems.check("workers", checks.must_be("left out for a data frame, which takes all workers", lambda n: n == 1))
    problems.unless(settings.ranks_per_worker == "auto", "gang", "without ranks_per_worker: see models_per_worker")
    problems.unless(not is_debugging(settings), "gang", "without debug mode: call the function with a key's rows")
    problems.raise_any()


def each_key(
    client: Client, train: Callable[..., Any], grouped: Any, per_worker: int | None, storage: SweepStorage | None
) -> EachKey:
    check_call(train, None, None)
    by, name = columns_of(grouped) or [], uuid.uuid4().hex
    known = storage.keys(train) if storage is not None else None
    return EachKey(train, by, _parts_of(client, grouped, by, per_worker), name, address_for_ranks(client), known)


def _parts_of(client: Client, grouped: Any, by: list[Any], per_worker: int | None) -> Any:
    num_parts = PARTS_PER_RANK * (per_worker or MANY_RANKS) * max(1, len(client.nthreads()))
    frame = grouped.obj
    parts: Any
    if is_dask_collection(frame):
        frame = client.persist(frame.shuffle(on=by, npartitions=max(frame.npartitions, num_parts)))
        num_rows, parts = client.compute(frame.shape[0]).result(), DaskPartitions(client, frame)
    else:
        num_rows, numbers = len(frame), (grouped.ngroup() % num_parts).to_numpy()
        parts = [rows for _, rows in frame.groupby(numbers)]
    if num_rows == 0:
        raise ValueError(f"dispatch.map(frame.groupby({shown(by)})): the frame has no rows, so no model can be trained")
    return parts


# ---- In the ranks


@dataclass(eq=False, repr=False)
class EachKey:
    train: Callable[..., Any]
    by: list[Any]
    parts: Any
    name: str
    scheduler: str | None
    known: Known

    def __post_init__(self) -> None:
        self.source = _source_of(self.train)
        self.__qualname__, self.__module__ = name_of(self.train), self.train.__module__  # the gang has this name

    def __call__(self) -> None:
        rank, by, parts = current_rank(), self.by, self.parts
        share = parts.share() if isinstance(parts, DaskPartitions) else parts[rank.rank :: rank.world_size]
        results = _Results(client_in_rank(way_to_dask(self.scheduler)), self.name)
        for part in share:
            for key, rows in part.groupby(by if len(by) > 1 else by[0], observed=True):
                if key not in results.done:
                    results.add(key, self._row(key, rows))
                    rank.progress.move()
        results.send()

    def _row(self, key: Any, rows: pd.DataFrame) -> Row:
        digest = _digest(rows, self.source) if self.known is not None else None
        before, value = (self.known or {}).get(key, (None, b""))
        if digest is not None and digest == before:
            return value, None, digest
        try:
            return dumps_by_value(self.train(key, rows)), None, digest
        except Exception as error:  # any error of the user's function, or of a value that cannot be pickled
            place = traceback.extract_tb(error.__traceback__)[-1]
            return b"", f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})", None


def _source_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # a builtin, or an object with `__call__`
        return ""


def _digest(rows: pd.DataFrame, source: str) -> str | None:
    """Return a digest of a key's rows in any order, or None for values that pandas cannot hash, such as lists."""
    from pandas.util import hash_pandas_object

    try:
        hashes = sorted(hash_pandas_object(rows, index=False).tolist())
    except TypeError:
        return None
    return hashlib.sha256(repr([source, [*rows.dtypes.items()], hashes]).encode()).hexdigest()


class _Results:
    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self.done = set(_read(client.get_metadata([FOLDER, name], {})))
        self._rows: dict[Any, Row] = {}
        self._sent_at = time.monotonic()

    def add(self, key: Any, row: Row) -> None:
        self._rows[key] = row
        if time.monotonic() - self._sent_at >= SEND_INTERVAL:
            self.send()

    def send(self) -> None:
        if self._rows:
            self._client.set_metadata([FOLDER, self._name, uuid.uuid4().hex], pickle.dumps(self._rows))
        self._rows, self._sent_at = {}, time.monotonic()


def _read(batches: dict[str, bytes]) -> dict[Any, Row]:
    rows: dict[Any, Row] = {}
    for batch in batches.values():
        rows |= pickle.loads(batch)  # noqa: S301 - from our own ranks
    return rows


# ---- In the driver


class KeyedModels:
    """Models of a data frame's keys."""

    def __init__(self, client: Client, each: EachKey, gang: GangFutures, storage: SweepStorage | None) -> None:
        self._by, self._gang, self._storage = each.by, gang, storage
        self._rows: Future[list[dict[str, Any]]] = Future()
        name = each.name  # alone: the callback must not keep the parts
        gang[0].add_done_callback(lambda _: self._collect(client, name))

    def to_frame(self, timeout: float | None = None) -> pd.DataFrame:
        """Wait for all models, and return a table with a row for each key.

        Columns are the key's, the fields of the function's value, or else `result`, and `error`.

        Raises:
            TimeoutError: The training goes on after `timeout` seconds.
            Exception: The gang failed.
        """
        wait([self._rows], timeout)  # storage has the models, also those of a failed gang
        self._gang.result(timeout)
        require_extra("dataframe", "to_frame()")
        import pandas as pd

        keys = [*map(str, self._by)]
        table = pd.DataFrame(self._rows.result())
        columns = [*keys, *(name for name in table if name not in keys and name != "error"), "error"]
        table = table.reindex(columns=columns)
        with contextlib.suppress(TypeError):  # keys of several types have no order
            table = table.sort_values(keys, ignore_index=True)
        return table

    def done(self) -> bool:
        return self._rows.done()

    def cancel(self) -> bool:
        return self._gang.cancel()

    def _collect(self, client: Client, name: str) -> None:
        try:
            found = _read(client.get_metadata([FOLDER, name], {}))
            client.set_metadata([FOLDER, name], {})
            if self._storage is not None:
                self._storage.note_keys({key: (digest, value) for key, (value, _, digest) in found.items() if digest})
            self._rows.set_result([self._row(key, *row[:2]) for key, row in found.items()])
        except BaseException as error:  # the scheduler is lost, or a value cannot be unpickled
            self._rows.set_exception(raisable(error, "reading the models' results"))

    def _row(self, key: Any, value: bytes, error: str | None) -> dict[str, Any]:
        keys = dict(zip(map(str, self._by), key if len(self._by) > 1 else [key], strict=True))
        result = None if error else pickle.loads(value)  # noqa: S301 - from our own ranks
        fields = fields_of(result)
        named = {} if error else {"result": result} if fields is None else {str(each): fields[each] for each in fields}
        return row_of(keys | {"error": error}, result=named)
