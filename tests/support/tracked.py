"""Reads what MLflow and TensorBoard have been told, by their own libraries: imported late, since that takes seconds."""

from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import MLflow


class Flow:
    """One experiment of the database."""

    def __init__(self, store: Path, name: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=f"sqlite:///{store}/mlflow.db")
        self.name = name
        self.store = store

    def __call__(self, **settings: Any) -> MLflow:
        return MLflow(**{"uri": self.store, "experiment": self.name, **settings})

    @property
    def runs(self) -> list[Any]:
        found = self.client.get_experiment_by_name(self.name)
        return list(self.client.search_runs([found.experiment_id], order_by=["attributes.start_time"])) if found else []

    def points(self, run: Any, key: str = "loss") -> list[tuple[int, float]]:
        return sorted((m.step, m.value) for m in self.client.get_metric_history(run.info.run_id, key))


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def scalars(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    from tensorboard.backend.event_processing import plugin_event_accumulator

    found = plugin_event_accumulator.EventAccumulator(str(folder))  # the other one takes no texts back
    found.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors(f"{tag}/text_summary")]
