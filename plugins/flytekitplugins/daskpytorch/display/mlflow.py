"""MLflow: one run per gang, on a tracking server or in a folder. Runs in the driver."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.display.tracker import Run, State, Tracker, public
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import Histogram, LogRecord, Picture

ID_TAG = "daskpytorch.id"
REASON_TAG = "daskpytorch.reason"
PARENT_TAG, SOURCE_TAG = "mlflow.parentRunId", "mlflow.source.name"
MAX_TEXT = 5_000
MAX_NAME = 250


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """One MLflow run for the whole gang, written in the driver: `Gang(observers=(MLflow(experiment=...),))`.

    A retry of the Flyte task resumes the run. Each model of a `dispatch.map` has a run, nested in one parent run.
    MLflow cannot remove points, so a step that is repeated after a restart has a second point. Credentials come from
    MLflow's own sources, such as `MLFLOW_TRACKING_TOKEN`.

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
        checks.require_extra("mlflow", "MLflow(...)")
        rules = {
            "experiment": checks.text("an experiment's name"),
            "uri": checks.optional(checks.path_or("a server's address or a folder")),
            "name": checks.optional(checks.text()),
            "tags": checks.must_be("a dictionary of texts", _is_of_texts),
        }
        checks.Problems("MLflow", self, rules).raise_any()

    def __call__(self) -> Tracker:
        return Tracker(_Run(self))


def _is_of_texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value, *value.values()))


class _Run(Run):
    # Not MLflow's own asynchronous logging (3.17): ten threads send batches in any order, and a failed request is only
    # logged.
    label = "MLflow"

    def __init__(self, asked: MLflow) -> None:
        self._asked = asked
        self._metrics: list[Any] = []
        self._tags: dict[str, str] = {}
        self._parent: str | None = None

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri, files = _store(self._asked.uri)
        self._client = MlflowClient(tracking_uri=uri)
        with _one_at_a_time.setdefault(self._client.tracking_uri, threading.Lock()):
            self._begin(training, files)
        info, known = self._run.info, self._run.data
        given = {_key(name): str(value)[:MAX_TEXT] for name, value in config.items()}
        params = [Param(name, value) for name, value in given.items() if name not in known.params]
        self._client.log_batch(info.run_id, params=params)
        place, page = public(self._client.tracking_uri), f"#/experiments/{info.experiment_id}/runs/{info.run_id}"
        has_page = place.startswith(("http://", "https://"))
        self.where = f"{place}/{page}" if has_page else f"run {info.run_id} in {place}"

    def log(self, record: LogRecord) -> None:
        from mlflow.entities import Metric

        at = int(1000 * record.time)
        self._metrics += [Metric(_key(name), value, at, record.step) for name, value in record.numbers.items()]
        self._tags |= {_key(name): text[:MAX_TEXT] for name, text in record.texts.items()}

    def draw(self, record: LogRecord, name: str, drawing: Histogram | Picture) -> None:
        if isinstance(drawing, Picture):
            about = {"key": _key(name), "step": record.step, "timestamp": int(1000 * record.time)}
            self._client.log_image(self._run.info.run_id, drawing.image(), **about)

    def flush(self) -> None:
        from mlflow.entities import RunTag

        metrics, tags, self._metrics, self._tags = self._metrics, self._tags, [], {}
        new = [RunTag(*tag) for tag in tags.items()]
        self._client.log_batch(self._run.info.run_id, metrics=metrics, tags=new)

    def close(self, state: State, reason: str | None) -> None:
        if reason is not None:
            self._client.set_tag(self._run.info.run_id, REASON_TAG, reason[:MAX_TEXT])
        self._client.set_terminated(self._run.info.run_id, state.upper())
        if self._parent is not None:  # the next model opens the parent run again
            self._client.set_terminated(self._parent, "FINISHED")

    def _begin(self, training: Training, files: str | None) -> None:
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


_one_at_a_time: dict[str, threading.Lock] = {}
"""By tracking address. Models open their runs one by one: the first creates MLflow's tables and experiment."""


def _store(uri: str | os.PathLike[str] | None) -> tuple[str | None, str | None]:
    if uri is None or (not isinstance(uri, os.PathLike) and ("://" in uri or uri == "databricks")):
        return uri, None
    folder = Path(uri).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def _experiment(client: Any, name: str, files: str | None) -> str:
    from mlflow.exceptions import MlflowException

    if client.get_experiment_by_name(name) is None:
        try:
            client.create_experiment(name, artifact_location=files)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process has created the experiment meanwhile
                raise
    return str(client.get_experiment_by_name(name).experiment_id)


def _found(client: Any, experiment: str, id_: str, name: str, tags: Mapping[str, str]) -> Any:
    runs = client.search_runs([experiment], filter_string=f"tags.`{ID_TAG}` = '{id_}'", max_results=1)
    if not runs:
        return client.create_run(experiment, run_name=name, tags={**tags, ID_TAG: id_})
    client.update_run(runs[0].info.run_id, status="RUNNING")
    return runs[0]


def _key(name: str) -> str:
    parts = re.sub(r"[^\w.\- /]", "_", name)[:MAX_NAME].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
