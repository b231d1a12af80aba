"""TensorBoard: event files of a gang's training, in a local folder or in storage. Runs in the driver."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.display.tracker import Run, State, Tracker
from flytekitplugins.daskpytorch.process.folders import scratch_folder
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import Execution, current_execution
from flytekitplugins.daskpytorch.protocol.journal import Training
from flytekitplugins.daskpytorch.records import Histogram, LogRecord, Picture

UPLOAD_INTERVAL = 15.0
UPLOAD_SHARE = 10


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """Event files of the training for TensorBoard, written in the driver: `Gang(observers=(TensorBoard(folder=...),))`.

    Each training has its own sub-folder, which all attempts of a Flyte task share. The models of one `dispatch.map`
    share a sub-folder, with a folder for each model. After a restart, TensorBoard shows the new points instead of the
    lost ones.

    Raises:
        ImportError: The extra `tensorboard` is not installed.
        ValueError: A field has an invalid value.

    Examples:
        >>> from flytekitplugins.daskpytorch import DaskDDP, Gang, TensorBoard
        >>> config = DaskDDP(gang=Gang(observers=(TensorBoard(folder="s3://bucket/runs"),)))
    """

    folder: str | os.PathLike[str]
    """Argument for `tensorboard --logdir`: a folder on the driver's machine, or an fsspec URL (`s3://bucket/prefix`).

    Files are uploaded to a URL about every 15 seconds, and at the end.
    """
    name: str | None = None
    """Name of the sub-folder. An existing sub-folder receives more event files.

    None: the name of the task or function, followed by the execution's name, or by a random id in local runs.
    """

    def __post_init__(self) -> None:
        checks.require_extra("tensorboard", "TensorBoard(...)")
        checks.Problems("TensorBoard", self, {"folder": _folder, "name": checks.optional(checks.KEY)}).raise_any()

    def __call__(self) -> Tracker:
        return Tracker(_EventFiles(self, current_execution()))


def _folder(value: object) -> str | None:
    return None if isinstance(value, os.PathLike) else checks.uri(value)


class _EventFiles(Run):
    label = "TensorBoard"

    def __init__(self, asked: TensorBoard, execution: Execution) -> None:
        self._asked = asked
        self._execution = execution
        self._ends = contextlib.ExitStack()
        self._writer: Any = None
        self._upload_at = 0.0

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        name = training.id if training.group is None else training.group
        name = f"{self._asked.name or name}{'' if training.index is None else f'/{training.index}'}"
        folder = f"{os.fspath(self._asked.folder).rstrip('/')}/{name}"
        self._storage = folder if "://" in folder else None
        self._folder = Path(folder)
        if self._storage is not None:
            self._folder = self._ends.enter_context(scratch_folder("daskpytorch-events-"))
        self.where = self._storage or str(self._folder.absolute())
        self._suffix = f".{training.id}"
        self.rewind(step)
        given = {name: value if isinstance(value, (int, float)) else str(value) for name, value in config.items()}
        self._writer.file_writer.add_summary(hparams_pb(given, trial_id=training.id), 0)

    def rewind(self, step: int | None) -> None:
        """Hide all points after `step` in TensorBoard. None hides all points."""
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is not None:
            self._writer.close()
        first = 0 if step is None else step + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=first, filename_suffix=self._suffix)

    def log(self, record: LogRecord) -> None:
        for name, value in record.numbers.items():
            self._writer.add_scalar(name, value, record.step, record.time)
        for name, text in record.texts.items():
            self._writer.add_text(name, text, record.step, record.time)

    def draw(self, record: LogRecord, name: str, drawing: Histogram | Picture) -> None:
        from numpy import asarray

        if isinstance(drawing, Picture):
            pixels = asarray(drawing.image().convert("RGBA"))
            self._writer.add_image(name, pixels, record.step, record.time, dataformats="HWC")
        else:
            first, *limits = drawing.edges
            numbers = {"min": first, "max": limits[-1], "num": sum(drawing.counts), "sum": 0.0, "sum_squares": 0.0}
            bins = {"bucket_limits": limits, "bucket_counts": drawing.counts}
            self._writer.add_histogram_raw(name, **numbers, **bins, global_step=record.step, walltime=record.time)

    def flush(self) -> None:
        self._writer.flush()
        if time.monotonic() >= self._upload_at:
            self._upload()

    def close(self, state: State, reason: str | None) -> None:
        if reason is not None:
            self._writer.add_text("reason", reason)
        self._writer.close()
        self._upload()
        self._ends.close()

    def _upload(self) -> None:
        if (where := self._storage) is None:
            return
        began_at = time.monotonic()
        self._upload_at = began_at + UPLOAD_INTERVAL
        files = Files(self._execution.filesystem(where))
        for file in self._folder.iterdir():
            files.put(file, f"{files.path(where)}/{file.name}")
        self._upload_at += UPLOAD_SHARE * (time.monotonic() - began_at)
