"""A gang whose caller holds futures, as of `dispatch.run`: named, kept, shown, and started. Runs in the driver.

Run(function, args, kwargs, settings)          its key, and the folders of its checkpoints
    .start(request, launcher, num_ranks)       ─▶ RunFutures    with any launcher: Dask's workers, or this node
    .call_here(function)                       ─▶ RunFutures    in debug mode
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display import deck, terminal, training
from flytekitplugins.daskpytorch.display.journal_file import journal_in
from flytekitplugins.daskpytorch.display.run_state import Logged, RunState, watched
from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.futures import GangFuture, GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.storage import call_of, keys, storage_of
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
from flytekitplugins.daskpytorch.task.shown import Shown

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher
    from flytekitplugins.daskpytorch.protocol.observer import Observer
    from flytekitplugins.daskpytorch.records import SavedCheckpoint

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


class RunFutures(Logged, GangFutures):
    """Futures of a running gang, one per rank, with rank 0's log and the gang's checkpoints.

    All attributes are up to date while the gang trains, and stay after its end.
    """

    def __init__(self, run: Run, supervisor: Supervisor, num_ranks: int) -> None:
        self._about = run
        self._run_state = run.state
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
        file.write_text(deck.document(self._run_state, self._about.places()), encoding="utf-8", errors="replace")
        return file


class _SettledFutures(RunFutures):
    def __init__(self, run: Run, future: GangFuture) -> None:
        self._about, self._run_state = run, run.state
        self._num_ranks, self._futures = 1, [future]


class Run:
    shown: Shown | None = None

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Gang
    ) -> None:
        """Take a key for the gang, and choose its checkpoints' folders.

        Raises `ValueError` if `DASKPYTORCH_RESUME` names no run's folder or another gang of the task has the key, and
        `PermissionError` if another user owns or can write to the earlier run's folder.
        """
        execution, self._settings = current_execution(), settings
        call = call_of(function, args, kwargs, settings)
        [self.key] = keys.take(function, settings.key, task=execution.task, call=call)
        self._note_failed = functools.partial(keys.note_unfinished, call, [self.key])
        self.training = training.of_call(function, self.key, execution, args, kwargs)
        self.keep = settings.keep
        self.state = RunState(name=self.training.name, inputs=self.training.inputs)
        self._is_alone = execution.task is None
        keeps_locally = self._is_alone and settings.checkpoint_uri is None
        self._local = local_runs.begin(place_of(function, self.key, settings.key)) if keeps_locally else None
        paths = self._local.paths(GANG) if self._local is not None else None
        self.storage = storage_of(execution, self.key, settings, paths)

    def start(self, request: Request, launcher: AgentLauncher, num_ranks: int) -> RunFutures:
        return RunFutures(self, self.supervised(request, launcher), num_ranks)

    def supervised(self, request: Request, launcher: AgentLauncher) -> Supervisor:
        self._show(request.observers, is_plain=is_interactive())
        self.state.stays = request.calls is not None
        try:
            observers = self._observers(request.observers)
            own = replace(request, key=self.key, training=self.training, storage=self.storage, observers=observers)
            return Supervisor(own, launcher)
        except BaseException as error:
            self.conclude(error)
            raise

    def call_here(self, function: Callable[[], Any]) -> RunFutures:
        from flytekitplugins.daskpytorch.task.debug import run_here

        observers = [make() for make in self._settings.observers]
        self._show(observers, is_plain=True)

        future, ended = GangFuture(ReceivedResults()), None
        try:
            returned = run_here(
                function,
                self._settings,
                future.received,
                observers=self._observers(observers),
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

    def _observers(self, asked: Sequence[Observer]) -> Sequence[Observer]:
        if self.shown is not None:
            return self.shown.all_observers()
        return watched(self.state, [terminal.echo(), *journal_in(None), *asked])

    def places(self) -> dict[str, str]:
        return self.shown.places() if self.shown is not None else {}

    def conclude(self, error: BaseException | None) -> None:
        if error is not None:
            self._note_failed()
        with optional("showing how the run has ended"):
            if self.shown is not None:
                self.shown.conclude(End.of(error).word)
        if self._local is not None:
            self._local.close()

    def _show(self, observers: Sequence[Observer], *, is_plain: bool) -> None:
        if self._is_alone:
            unsaid = (PreemptedError,) if self._local is not None else ()  # the outcome says the same
            display = terminal.progress(self.training.name, self.key, is_plain=is_plain, unsaid=unsaid)
            self.shown = Shown(display=display, state=self.state, observers=[*observers], run=self._local)
