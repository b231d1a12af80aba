"""Flyte 2's context in a rank, and rank 0's outputs for the driver. Made in the driver, runs in a rank."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import flyte
from flyte._context import internal_ctx
from flyte.io import Dir
from flyte.models import TaskContext
from flyte.report import Report
from flyte.storage import Storage
from flyte.syncify import syncify

from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.host import provide
from flytekitplugins.daskpytorch.rank.returned import check_count
from flyteplugins.daskpytorch import context


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    """Rank 0's return value and report tabs, which are sent to the driver."""

    value: Any
    """Return value of the user's function in rank 0."""
    tabs: Mapping[str, Sequence[str]]
    """HTML fragments of each tab in rank 0's report, by the tab's name."""


@dataclass(frozen=True, kw_only=True)
class Flyte2Rank:
    """Part of Flyte 2's context that the driver sends to ranks, so that Flyte's functions work there."""

    ctx: TaskContext
    storage: Storage | None
    inputs: bytes
    """Inputs of the task, pickled. Files, folders and data frames are references, which each rank opens itself."""
    outputs_wanted: Sequence[str]
    """Names of the task's outputs."""
    task_name: str
    results: str
    """Path or URI of the folder with the files that ranks submit. The folder is complete when the task has ended."""

    @classmethod
    def of_current_task(cls, task_name: str, inputs: Mapping[str, Any], outputs: Sequence[str], results: str) -> Self:
        """Return the part of Flyte's current context in the driver that ranks need.

        Args:
            task_name: Name of the task.
            inputs: Values of the inputs, by name.
            outputs: Names of the outputs.
            results: Path or URI of the folder for files that ranks submit.
        """
        ctx = flyte.ctx()
        return cls(
            ctx=dataclasses.replace(ctx, report=Report(ctx.report.name), compiled_image_cache=None, data={}),
            storage=context.storage(),
            inputs=pickling.dumps(dict(inputs)),
            outputs_wanted=outputs,
            task_name=task_name,
            results=results,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """During the block, make `flyte.ctx()` and Flyte's functions work in this rank as in an ordinary task."""
        _revive()
        provide(context.current, is_last=True)  # even if the user's code imports another SDK
        action, root = self.ctx.action, Path(self.ctx.run_base_dir)
        how = {"org": action.org, "project": action.project, "domain": action.domain, "root_dir": root}
        asyncio.run(flyte.init.aio(**how, storage=self.storage, sync_local_sys_paths=False))
        with internal_ctx().replace_task_context(self.ctx):
            yield

    def arguments(self) -> dict[str, Any]:
        """Return the values of the task's inputs, by name."""
        return dict(pickling.loads(self.inputs))

    def outputs(self, returned: Any) -> TaskOutput:
        """Return the user function's return value unconverted, with the tabs of this rank's report.

        Raises:
            TypeError: The number of returned values differs from the number of the task's outputs.
        """
        check_count(self.task_name, returned, self.outputs_wanted)
        tabs = {name: tab.content for name, tab in self.ctx.report.tabs.items() if tab.content}
        return TaskOutput(value=returned, tabs=tabs)

    def results_folder(self) -> Dir[Any]:
        """Return the folder to which the driver writes the files that ranks submit, as Flyte 2's type for folders."""
        return Dir(path=self.results)


def _event_loop() -> Any:
    """Return the event loop in which Flyte 2 runs its functions: a single object for all of them."""
    return syncify._bg_loop  # noqa: SLF001 - flyte 2.12


def _revive() -> None:
    """Give Flyte's event loop a new thread, since its thread in the fork server does not exist in a forked rank."""
    loop = _event_loop()
    if not loop.thread.is_alive():
        loop.__init__(loop.thread.name)


def put_to_sleep() -> None:
    """Import what ranks need, and end the thread of Flyte's event loop. Called by the fork server before it forks."""
    import flyte.types  # noqa: F401 - ranks need the module, whose import takes seconds

    _event_loop().stop()
