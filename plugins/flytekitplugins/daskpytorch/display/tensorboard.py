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
from flytekitplugins.daskpytorch.display.training import flat
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
        self._notes: list[str] = []
        self._upload_at = 0.0

    def open(self, training: Training, config: Mapping[str, Any], step: int | None) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        name = training.id if training.group is None else training.group
        name = f"{self._asked.name or name}{'' if training.index is None else f'/{training.index}'}"
        folder = f"{os.fspath(self._asked.folder).rstrip('/')}/{name}"
        self._storage = folder if "://" in folder else None
        self._folder = Path(folder)
        if self._storage is not None:
            self._folder = self._ends.enter_context(scratch_folder("daskpytorch-events-"))
        self.where = self._storage or str(self._folder.absolute())
        self._writer = EventFileWriter(str(self._folder), filename_suffix=f".{training.id}")
        self.rewind(step)
        given = {name: _hyperparameter(value) for name, value in flat(config, "/").items()}
        self._summary(hparams_pb(given, trial_id=training.id), 0)

    def rewind(self, step: int | None) -> None:
        """Hide all points after `step` in TensorBoard. None hides all points."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        first = 0 if step is None else step + 1
        self._event(step=first, session_log=SessionLog(status=SessionLog.START))
        for number in range(first, len(self._notes)):  # notes have numbers as steps, and must stay visible
            self._text("notes", self._notes[number], number)

    def log(self, record: LogRecord) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.numbers.items()]
        self._summary(Summary(value=values), record.step, record.time)
        for name, text in record.texts.items():
            self._text(name, text, record.step, record.time)

    def draw(self, record: LogRecord, name: str, drawing: Histogram | Picture) -> None:
        self._summary(_drawn(name, drawing), record.step, record.time)

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._text("notes", text, len(self._notes) - 1)

    def flush(self) -> None:
        self._writer.flush()
        if time.monotonic() >= self._upload_at:
            self._upload()

    def close(self, state: State, reason: str | None) -> None:
        if reason is not None:
            self.note(reason)
        self._summary(_session_end(is_success=state == "finished"), 0)
        self._writer.close()
        self._upload()
        self._ends.close()

    def _upload(self) -> None:
        if (where := self._storage) is None:
            return
        began_at = time.monotonic()
        try:
            files = Files(self._execution.filesystem(where))
            for file in self._folder.iterdir():
                files.put(file, f"{files.path(where)}/{file.name}")
        except Exception as error:  # a storage's client may raise anything
            raise ConnectionError(f"{where} cannot be written to ({type(error).__name__}: {error})") from error
        self._upload_at = time.monotonic() + max(UPLOAD_INTERVAL, UPLOAD_SHARE * (time.monotonic() - began_at))

    def _text(self, name: str, text: str, step: int, at: float | None = None) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._summary(text_pb(name, text), step, at)

    def _summary(self, summary: Any, step: int, at: float | None = None) -> None:
        self._event(at, step=step, summary=summary)

    def _event(self, at: float | None = None, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time() if at is None else at, **fields))


def _drawn(name: str, drawing: Histogram | Picture) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    if isinstance(drawing, Picture):
        size = {"height": drawing.height, "width": drawing.width, "colorspace": 4}  # colorspace: number of channels
        image = Summary.Image(encoded_image_string=drawing.png, **size)
        return Summary(value=[Summary.Value(tag=name, image=image)])
    first, *limits = drawing.edges
    bins = {"bucket_limit": limits, "bucket": drawing.counts, "num": sum(drawing.counts)}
    return Summary(value=[Summary.Value(tag=name, histo=HistogramProto(min=first, max=limits[-1], **bins))])


def _session_end(*, is_success: bool) -> Any:
    """Mark a run as succeeded or failed in TensorBoard's table of hyper-parameters.

    `hparams.summary`, TensorBoard's own function, would need TensorFlow.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if is_success else api_pb2.STATUS_FAILURE
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    about = metadata.create_summary_metadata(data)
    return Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)])


def _hyperparameter(value: Any) -> bool | float | str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return value if isinstance(value, (bool, int, float, str)) else str(value)
