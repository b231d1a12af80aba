"""A gang of `dispatch.run`, whose caller holds futures: named, kept, shown, started. Runs in the driver.

Run(function, args, kwargs, settings)          its key, and the folders of its checkpoints
    .supervised(request, launcher)             ─▶ Supervisor    with any launcher: Dask's workers, or this node
    .call_here(function)                       ─▶ RunFutures    in debug mode
Shown                                          display, page and file places, also of a task's gang
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display import deck, terminal, training
from flytekitplugins.daskpytorch.display.journal_file import journal_in
from flytekitplugins.daskpytorch.display.run_state import Logged, RunState, watched
from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.storage import keys, storage_of
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.errors import PreemptedError
from flytekitplugins.daskpytorch.process.ending import is_interactive
from flytekitplugins.daskpytorch.process.system import optional
from flytekitplugins.daskpytorch.protocol.failure import raisable
from flytekitplugins.daskpytorch.protocol.function import function_of, key_of
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.journal import End
from flytekitplugins.daskpytorch.settings import Gang
from flytekitplugins.daskpytorch.task import local_runs

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.display.terminal import Display, MachineLog
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher, StoragePaths
    from flytekitplugins.daskpytorch.protocol.observer import Observer
    from flytekitplugins.daskpytorch.records import SavedCheckpoint
    from flytekitplugins.daskpytorch.results import TaskResults
    from flytekitplugins.daskpytorch.task.local_runs import LocalRun

GANG = "gang"


def place_of(function: Callable[..., Any], key: str, asked: str | None) -> str:
    """Return the name of the folder with a call's local runs: module, function, and the call's number from 2 on.

    All calls of a function in a notebook or at a prompt share one folder, since their numbers differ from day to day.
    `asked`, the user's key, replaces function and number.
    """
    called = function_of(function)
    while isinstance(called, functools.partial):
        called = called.func
    name = asked if asked is not None else key_of(called) if is_interactive() else key.removesuffix("-1")
    return re.sub(r"[^\w.-]+", "-", f"{_module(called)}.{name}", flags=re.ASCII)[-local_runs.MAX_NAME :].lstrip("-.")


def _module(function: Callable[..., Any]) -> str:
    name = getattr(function, "__module__", None) or "builtins"
    if name != "__main__":
        return str(name)
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file and not is_interactive() else "interactive"


@dataclass(kw_only=True, eq=False)
class Shown:
    state: RunState
    display: Display | MachineLog | None = None
    """None: only the ranks' output is shown."""
    observers: Sequence[Observer] = ()
    run: LocalRun | None
    journal_folder: Path | None = None
    """None with a local run, whose folder has the journal."""
    results: TaskResults | None = None
    _storage: dict[str, str] = field(default_factory=dict)

    def all_observers(self) -> list[Observer]:
        journal = journal_in(self.run.folder if self.run is not None else self.journal_folder)
        return watched(self.state, [self.display or terminal.echo(), *journal, *self.observers])

    def say(self, text: str) -> None:
        if self.display is not None:
            self.display.say(text)

    def show_storage(self, storage: StoragePaths | None) -> None:
        """Log the address of the gang's checkpoints, which an aborted execution shows nowhere else."""
        if self.run is None and storage is not None:
            self._storage["checkpoints"] = storage.own
            self.say(f"its checkpoints: {storage.own}")

    def places(self) -> dict[str, str]:
        left = {"results": self.results.folder} if self.results is not None and self.results.has_files else {}
        if self.state.checkpoints:
            left |= self._storage
        if self.run is not None and self.run.newest_step() is not None:
            left["checkpoints"] = str(self.run.folder)
        for observer in self.observers:
            with contextlib.suppress(Exception):  # any exception of a user's observer
                left |= observer.places()
        return left

    def conclude(self, how: str, places: Mapping[str, str] | None = None) -> None:
        if self.display is not None:
            advice = self.run.advice() if self.run is not None and how != "done" else None
            self.display.conclude(how, {**(places or {}), **self.places()}, advice)


class RunFutures(Logged, GangFutures):
    """Futures of a running gang, one per rank, with rank 0's log and the gang's checkpoints.

    All attributes are up to date while the gang trains, and stay after its end.
    """

    def __init__(self, run: Run, supervisor: Supervisor, num_ranks: int) -> None:
        self._about = run
        self._run_state = run.shown.state
        super().__init__(supervisor, num_ranks, run.conclude)

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """Checkpoints that the gang keeps, sorted by step: step, metrics, size and place of each."""
        return list(self._run_state.checkpoints)

    @property
    def newest_checkpoint(self) -> SavedCheckpoint | None:
        """The checkpoint of the highest step. None: the gang has kept no checkpoint."""
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> SavedCheckpoint | None:
        """The best checkpoint by `Gang(keep=Keep(metric=...))`. None without a metric, or without such a checkpoint."""
        return manifest.find(self.checkpoints, self._about.keep, None)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the training's page to an HTML file: state, metrics, speed, events, ranks and checkpoints.

        A Flyte task has the same page as its Deck. During the training the page shows the present state.

        Args:
            path: Path of the file, which is replaced if it exists.

        Returns:
            The path of the file.

        Raises:
            OSError: The file cannot be written.
        """
        file = Path(path)
        file.write_text(deck.document(self._run_state, self._about.shown.places()), encoding="utf-8", errors="replace")
        return file


class _SettledFutures(RunFutures):
    def __init__(self, run: Run, future: GangFuture) -> None:
        self._about, self._run_state = run, run.shown.state
        self._num_ranks, self._futures = 1, [future]


class Run:
    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Gang
    ) -> None:
        """Take a key for the gang, and choose its checkpoints' folders.

        Raises `ValueError` if another gang of the task has the key, and `PermissionError` if another user owns or can
        write to the earlier run's folder.
        """
        execution, self._settings = current_execution(), settings
        [self.key] = keys.take(function, settings.key, task=execution.task)
        self.training = training.of_call(function, self.key, execution, args, kwargs)
        self.keep = settings.keep
        self._is_alone = execution.task is None
        keeps_locally = self._is_alone and settings.checkpoint_uri is None
        self._local = local_runs.begin(place_of(function, self.key, settings.key)) if keeps_locally else None
        paths = self._local.paths(GANG) if self._local is not None else None
        self.storage = storage_of(execution, self.key, settings, paths)
        state = RunState(name=self.training.name)
        self.shown = Shown(state=state, run=self._local)

    def supervised(self, request: Request, launcher: AgentLauncher) -> Supervisor:
        self.shown.state.stays = request.calls is not None
        try:
            observers = self._shown_to(request.observers, is_plain=is_interactive())
            own = replace(request, key=self.key, training=self.training, storage=self.storage, observers=observers)
            return Supervisor(own, launcher)
        except BaseException as error:
            self.conclude(error)
            raise

    def call_here(self, function: Callable[[], Any]) -> RunFutures:
        from flytekitplugins.daskpytorch.task.debug import run_here

        observers = self._shown_to([make() for make in self._settings.observers], is_plain=True)
        future, ended = GangFuture(ReceivedResults()), None
        try:
            returned = run_here(
                function,
                self._settings,
                future.received,
                observers=observers,
                training=self.training,
                storage=self.storage,
            )
            future.set_result(returned)
        except Exception as error:
            ended = error
            future.set_exception(raisable(error, "the function"))
        finally:
            self.conclude(ended or sys.exception())
        return _SettledFutures(self, future)

    def conclude(self, error: BaseException | None) -> None:
        with optional("showing how the run has ended"):
            self.shown.conclude(End.of(error).word)
        if self._local is not None:
            self._local.close()

    def _shown_to(self, observers: Sequence[Observer], *, is_plain: bool) -> list[Observer]:
        if self._is_alone:  # a task shows its own gang
            unsaid = (PreemptedError,) if self._local is not None else ()  # the outcome says the same
            self.shown.display = terminal.progress(self.training.name, self.key, is_plain=is_plain, unsaid=unsaid)
        self.shown.observers = observers
        return self.shown.all_observers()
