"""Flyte 2's context in a rank, and rank 0's outputs on their way back. Made in the driver, runs in a rank."""

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
    """What rank 0 has for the driver."""

    value: Any
    """What the function returned."""
    tabs: Mapping[str, Sequence[str]]
    """What it has logged to its own report."""


@dataclass(frozen=True, kw_only=True)
class Flyte2Rank:
    """What a rank needs to stand in the driver's Flyte execution: a `RankHost`."""

    ctx: TaskContext
    storage: Storage | None
    inputs: bytes
    """The task's inputs, pickled: files, folders and frames are references for Flyte, which each rank opens itself."""
    outputs_wanted: Sequence[str]
    """Their names."""
    task_name: str
    results: str
    """The folder of what the ranks submit, complete when the task has ended."""

    @classmethod
    def of_current_task(cls, task_name: str, inputs: Mapping[str, Any], outputs: Sequence[str], results: str) -> Self:
        """Take what the ranks need from the current context, in the driver."""
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
        """Make `flyte.ctx()` and what goes through it work in this rank as in an ordinary task."""
        revive()
        provide(context.current, is_last=True)  # whatever other SDK the user's code imports
        action, root = self.ctx.action, Path(self.ctx.run_base_dir)
        how = {"org": action.org, "project": action.project, "domain": action.domain, "root_dir": root}
        asyncio.run(flyte.init.aio(**how, storage=self.storage, sync_local_sys_paths=False))
        with internal_ctx().replace_task_context(self.ctx):
            yield

    def arguments(self) -> dict[str, Any]:
        """The task's inputs."""
        return dict(pickling.loads(self.inputs))

    def outputs(self, returned: Any) -> TaskOutput:
        """What rank 0 returned, as it is: what it has uploaded is a reference.

        Raises:
            TypeError: It does not fit the number of the task's outputs.
        """
        check_count(self.task_name, returned, self.outputs_wanted)
        tabs = {name: tab.content for name, tab in self.ctx.report.tabs.items() if tab.content}
        return TaskOutput(value=returned, tabs=tabs)

    def results_folder(self) -> Dir[Any]:
        """The driver brings the files there."""
        return Dir(path=self.results)


def revive() -> None:
    """Give Flyte's event loop a new thread: that of the process that this one was forked from is not here."""
    loop = syncify._bg_loop  # noqa: SLF001 - of which every wrapper of Flyte's has the same object
    if not loop.thread.is_alive():
        loop.__init__(loop.thread.name)


def put_to_sleep() -> None:
    """End that thread, before anything is forked from here."""
    syncify._bg_loop.stop()  # noqa: SLF001 - as above
