"""Display, page and file places of a gang of a task or of `dispatch`. Runs in the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flytekitplugins.daskpytorch.display.journal_file import journal_in
from flytekitplugins.daskpytorch.display.run_state import RunState, watched
from flytekitplugins.daskpytorch.display.terminal import Display, MachineLog

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.host import StoragePaths
    from flytekitplugins.daskpytorch.protocol.observer import Observer
    from flytekitplugins.daskpytorch.results import TaskResults
    from flytekitplugins.daskpytorch.task.local_runs import LocalRun


@dataclass(kw_only=True, eq=False)
class Shown:
    display: Display | MachineLog
    state: RunState
    observers: list[Observer]
    run: LocalRun | None
    journal_folder: Path | None = None
    """None with a local run, whose folder has the journal."""

    def all_observers(self) -> list[Observer]:
        journal = journal_in(self.run.folder if self.run is not None else self.journal_folder)
        return watched(self.state, [self.display, *journal, *self.observers])

    def places(self) -> dict[str, str]:
        has_checkpoint = self.run is not None and self.run.newest_step() is not None
        left = {"checkpoints": str(self.run.folder)} if self.run is not None and has_checkpoint else {}
        shape = self.state.shape
        if shape is not None and shape.log_folder is not None and Path(shape.log_folder).is_dir():
            left["logs"] = shape.log_folder
        for observer in self.observers:
            with contextlib.suppress(Exception):  # any exception of a user's observer
                left |= observer.places()
        return left

    def conclude(self, how: str, places: Mapping[str, str] | None = None) -> None:
        advice = self.run.advice() if self.run is not None and how != "done" else None
        self.display.conclude(how, {**(places or {}), **self.places()}, advice)


@dataclass(kw_only=True, eq=False)
class ShownTask(Shown):
    results: TaskResults
    _storage: dict[str, str] = field(default_factory=dict)

    def show_storage(self, storage: StoragePaths | None) -> None:
        """Log the address of the gang's checkpoints, which an aborted execution shows nowhere else."""
        if self.run is None and storage is not None:
            self._storage["checkpoints"] = storage.own
            self.display.say(f"its checkpoints: {storage.own}")

    def places(self) -> dict[str, str]:
        kept = self._storage if self.state.checkpoints else {}
        return ({"results": self.results.folder} if self.results.has_files else {}) | kept | super().places()

    def files(self) -> dict[str, str]:
        return self.places() | self.results.profiles()
