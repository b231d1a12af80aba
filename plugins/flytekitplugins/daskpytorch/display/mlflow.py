"""MLflow: one run per gang, on a tracking server or in a folder. Runs in the driver."""

from __future__ import annotations

import io
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import require_extra
from flytekitplugins.daskpytorch.display.tracker import Run, State, Tracker, knock, public
from flytekitplugins.daskpytorch.display.training import flat
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import LogRecord, Picture

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.entities import Run as MlflowRun


ID_TAG = "daskpytorch.id"
"""Name of the MLflow tag with the training's id, by which later attempts find the run."""
REASON_TAG = "daskpytorch.reason"
NOTE_TAG, PARENT_TAG, SOURCE_TAG = "mlflow.note.content", "mlflow.parentRunId", "mlflow.source.name"
STATUS: Mapping[State, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
MAX_METRICS, MAX_TAGS = 900, 100
"""Maximum number of metrics, and of tags or parameters, in one request to MLflow."""
MAX_TEXT = 5_000
"""Maximum number of characters of an MLflow tag or parameter."""
MAX_NAME = 250


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """One MLflow run for the whole gang, written in the driver: `Gang(observers=(MLflow(experiment=...),))`.

    A retry of the Flyte task resumes the run. Each model of a `dispatch.map` has a run, nested in one parent run.
    MLflow cannot remove points. Records that come again after a restart are skipped, so a curve has each step's first
    value. Credentials come from MLflow's own sources, such as `MLFLOW_TRACKING_TOKEN`.

    Raises:
        ImportError: The extra `mlflow` is not installed.
        ValueError: A field has an invalid value.

    Examples:
        >>> from flytekitplugins.daskpytorch import DaskDDP, Gang, MLflow
        >>> runs = MLflow(experiment="pet-names", uri="https://mlflow.example.com", tags={"team": "pets"})
        >>> config = DaskDDP(gang=Gang(observers=(runs,)))
    """

    experiment: str
    """Name of the MLflow experiment. A missing experiment is created."""
    uri: str | os.PathLike[str] | None = None
    """Tracking server (`https://...`, `databricks`), database (`sqlite:///...`), or folder on the driver's machine.

    A folder can be viewed by `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`. None: `MLFLOW_TRACKING_URI`.
    """
    name: str | None = None
    """Display name of the run. None: name of the task or function."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the run, in addition to those of the plugin."""

    def __post_init__(self) -> None:
        require_extra("mlflow", "MLflow(...)")
        rules = {
            "experiment": checks.text("an experiment's name"),
            "uri": checks.optional(checks.path_or("a server's address or a folder")),
            "name": checks.optional(checks.text()),
            "tags": checks.must_be(
                "a dictionary of texts",
                lambda tags: (
                    isinstance(tags, Mapping) and all(isinstance(text, str) for text in (*tags, *tags.values()))
                ),
            ),
        }
        checks.Problems("MLflow", self, rules).raise_any()

    def __call__(self) -> Tracker:
        """Return a new observer that writes the MLflow run of one gang."""
        return Tracker(_Run(self))


class _Run(Run):
    # Not MLflow's own asynchronous logging (3.17): ten threads send batches in any order, and a batch whose request has
    # failed is only logged as an error. Here, requests keep their order and wait for a server that is away.
    label = "MLflow"

    def __init__(self, asked: MLflow) -> None:
        self._asked = asked
        self._logged: dict[str, int] = {}
        """Newest logged step of each metric, by name."""
        self._hidden: dict[str, int] = {}
        """Newest step of each metric, by name, before the last restart. Later records up to this step are skipped."""
        self._metrics: list[Metric] = []
        """Queue of metrics for the next request to MLflow."""
        self._tags: dict[str, str] = {}
        """Tags for the next request to MLflow."""
        self._requests: deque[Callable[[], object]] = deque()
        """Queue of requests to MLflow. A request stays in the queue until MLflow has accepted or refused it."""
        self._notes: list[str] = []
        self._parent: str | None = None
        """Id of the MLflow run that contains the runs of all models of a `dispatch.map`. None for a single gang."""

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri, files = _store(self._asked.uri)
        self._client = MlflowClient(tracking_uri=uri)
        with _one_at_a_time.setdefault(self._client.tracking_uri, threading.Lock()):
            self._call(self._begin, training, files)
        known = self._run.data.params
        given = {_key(name): str(value)[:MAX_TEXT] for name, value in flat(config, ".").items()}
        params = [Param(name, value) for name, value in given.items() if name not in known]
        for first in range(0, len(params), MAX_TAGS):
            self._call(self._client.log_batch, self._run.info.run_id, params=params[first : first + MAX_TAGS])
        self._logged = {metric.key: metric.step for metric in self._run.data.to_proto().metrics}
        self._notes = [text for name, text in self._run.data.tags.items() if name == NOTE_TAG]
        self.where = _place(self._client.tracking_uri, self._run)
        self.rewind(step)

    def rewind(self, step: int | None) -> None:
        """Skip coming records of steps that were logged before, since MLflow cannot remove points."""
        self._hidden = dict(self._logged)

    def log(self, record: LogRecord) -> None:
        """Queue a record's metrics, texts and pictures. `flush` sends them to MLflow."""
        from mlflow.entities import Metric

        at = int(1000 * record.time)
        for name, value in record.numbers.items():
            key = _key(name)
            if record.step > self._hidden.get(key, record.step - 1):
                self._logged[key] = max(record.step, self._logged.get(key, record.step))
                self._metrics.append(Metric(key, value, at, record.step))
        self._tags |= {_key(name): value[:MAX_TEXT] for name, value in record.metrics.items() if isinstance(value, str)}
        for name, drawing in record.drawings.items():
            if isinstance(drawing, Picture):
                self._requests.append(partial(self._log_image, drawing, key=_key(name), step=record.step, timestamp=at))

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._tags[NOTE_TAG] = "\n\n".join(self._notes)[-MAX_TEXT:]

    def flush(self) -> None:
        from mlflow.entities import RunTag

        while self._metrics or self._tags:
            metrics, self._metrics = self._metrics[:MAX_METRICS], self._metrics[MAX_METRICS:]
            tags = [RunTag(*self._tags.popitem()) for _ in range(min(MAX_TAGS, len(self._tags)))]
            self._requests.append(partial(self._client.log_batch, self._run.info.run_id, metrics=metrics, tags=tags))
        while self._requests:
            request = self._requests.popleft()
            try:
                self._call(request)
            except ConnectionError:
                self._requests.appendleft(request)
                raise

    def _log_image(self, picture: Picture, **about: Any) -> None:
        from PIL import Image

        self._client.log_image(self._run.info.run_id, Image.open(io.BytesIO(picture.png)), **about)

    def close(self, state: State, reason: str | None) -> None:
        if reason is not None:
            self._tags[REASON_TAG] = reason[:MAX_TEXT]
            self.flush()
        self._call(self._client.set_terminated, self._run.info.run_id, STATUS[state])
        if self._parent is not None:  # the next model opens the parent run again
            self._call(self._client.set_terminated, self._parent, STATUS["finished"])

    def _begin(self, training: Training, files: str | None) -> None:
        """Find or create the training's MLflow run. A retry finds the run that a failed call has created."""
        experiment = _experiment(self._client, self._asked.experiment, files)
        tags = {**self._asked.tags, SOURCE_TAG: training.name}
        if training.link is not None:
            tags["daskpytorch.execution"] = training.link
        name = self._asked.name or training.name.rpartition(".")[2]
        if training.group is not None:
            self._parent = str(_found(self._client, experiment, training.group, name, tags).info.run_id)
            tags[PARENT_TAG] = self._parent
            name = f"{name}-{training.index}"
        self._run = _found(self._client, experiment, training.id, name, tags)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of MLflow's client, and return its result.

        Raises:
            ConnectionError: The tracking server does not answer.
            MlflowException: The tracking server has answered with an error.
        """
        from mlflow.exceptions import MlflowException, RestException

        try:
            knock(self._client.tracking_uri)
            return function(*args, **kwargs)
        except MlflowException as error:
            is_answer = isinstance(error, RestException) or error.error_code != "INTERNAL_ERROR"
            if is_answer and error.error_code != "TEMPORARILY_UNAVAILABLE":
                raise
            raise ConnectionError(public(f"{self._client.tracking_uri} does not answer ({error})")) from error


_one_at_a_time: dict[str, threading.Lock] = {}
"""Tracking address -> lock. Models open their runs one by one: the first creates MLflow's tables and experiment."""


def _store(uri: str | os.PathLike[str] | None) -> tuple[str | None, str | None]:
    """Return the tracking address for MLflow, and the place of files. None: MLflow's own.

    MLflow no longer accepts a folder as address, so the runs go to a database in the folder.
    """
    if uri is None or (not isinstance(uri, os.PathLike) and ("://" in uri or uri == "databricks")):
        return uri, None
    folder = Path(uri).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def _experiment(client: MlflowClient, name: str, files: str | None) -> str:
    from mlflow.exceptions import MlflowException

    if client.get_experiment_by_name(name) is None:
        try:
            client.create_experiment(name, artifact_location=files)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process has created the experiment meanwhile
                raise
    return str(client.get_experiment_by_name(name).experiment_id)


def _found(client: MlflowClient, experiment: str, id_: str, name: str, tags: Mapping[str, str]) -> MlflowRun:
    """Return the MLflow run whose tag has the training's id `id_`, set to running. Create the run if none exists."""
    runs = client.search_runs([experiment], filter_string=f"tags.`{ID_TAG}` = '{id_}'", max_results=1)
    if not runs:
        return client.create_run(experiment, run_name=name, tags={**tags, ID_TAG: id_})
    client.update_run(runs[0].info.run_id, status="RUNNING")
    return runs[0]


def _place(uri: str, run: MlflowRun) -> str:
    if urlsplit(uri).scheme in ("http", "https"):
        return f"{public(uri)}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    return f"run {run.info.run_id} in {public(uri)}"


def _key(name: str) -> str:
    """Return the name of a metric, parameter or tag as MLflow accepts it, with underscores for refused characters."""
    parts = re.sub(r"[^\w.\- /]", "_", name)[:MAX_NAME].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
