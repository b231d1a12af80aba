"""Flyte's context in a rank, and rank 0's outputs on their way back as literals. Made in the driver, runs in a rank."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle
from flyteidl.core import literals_pb2
from flytekit.bin.entrypoint import setup_execution
from flytekit.configuration import StatsConfig
from flytekit.configuration.internal import StatsD
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.interface import Interface
from flytekit.core.type_engine import TypeEngine
from flytekit.interfaces.random import random
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.utils.asyn import run_sync

from flytekitplugins.daskpytorch.flyte import context, tabs
from flytekitplugins.daskpytorch.protocol.host import provide
from flytekitplugins.daskpytorch.rank.returned import check_count


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    """Rank 0's return value as Flyte has it."""

    literal_map: bytes
    """A serialised `flyteidl.core.LiteralMap`."""
    decks: list[tuple[str, str]]
    """Name and HTML of the Decks made in the rank."""
    tab: str = ""
    """The Deck's tab of the outputs, if the Deck has one."""


@dataclass(frozen=True, kw_only=True)
class FlyteRank:
    """What a rank needs to stand in the driver's Flyte execution: a `RankHost`."""

    mode: str | None
    """The name of the driver's `ExecutionState.Mode`: in a local run, secrets and Decks have local rules. None where no
    task is executed."""
    raw_output_prefix: str
    """Where files that are outputs go."""
    output_metadata_prefix: str | None
    checkpoint: str | None
    """Where this attempt's intratask checkpoint goes."""
    previous_checkpoint: str | None
    """Where the attempt before left its own."""
    interface: bytes
    """The types of the task's inputs and outputs, pickled."""
    inputs: bytes
    """The task's inputs: a serialised `flyteidl.core.LiteralMap`. Each rank makes its own values of them, and so
    downloads input files to its own disk."""
    task_name: str
    results: str
    """The folder of what the ranks submit, complete when the task has ended."""
    shows_outputs: bool = False
    """True if the task's Deck has a tab of the outputs, which rank 0 writes: the values are there alone."""

    @classmethod
    def of_current_task(
        cls, task_name: str, interface: Interface, inputs: LiteralMap, results: str, *, shows_outputs: bool = False
    ) -> Self:
        """Take what the ranks need from the current context, in the driver."""
        ctx = FlyteContextManager.current_context()
        params, mode = ctx.user_space_params, ctx.execution_state.mode
        checkpoint = getattr(params, "_checkpoint", None)
        return cls(
            mode=mode.name if mode else None,
            raw_output_prefix=ctx.file_access.raw_output_prefix,
            output_metadata_prefix=getattr(params, "output_metadata_prefix", None),
            checkpoint=getattr(checkpoint, "_checkpoint_dest", None),
            previous_checkpoint=getattr(checkpoint, "_checkpoint_src", None) or None,
            interface=cloudpickle.dumps((interface.inputs, interface.outputs, interface.output_tuple_name)),
            inputs=inputs.to_flyte_idl().SerializeToString(),
            task_name=task_name,
            results=results,
            shows_outputs=shows_outputs,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make `flytekit.current_context()` work in this rank as it does in an ordinary task."""
        finish_imports()
        provide(context.current, is_last=True)  # whatever other SDK the user's code imports
        # flytekit makes up names of folders and files by a generator of its own, which forked ranks inherit as it is.
        random.seed()
        entered = setup_execution(
            raw_output_data_prefix=self.raw_output_prefix,
            output_metadata_prefix=self.output_metadata_prefix,
            checkpoint_path=self.checkpoint,
            prev_checkpoint=self.previous_checkpoint,
        )
        with contextlib.ExitStack() as stack:
            with _statsd_by_number():
                ctx = stack.enter_context(entered)
            mode = ExecutionState.Mode[self.mode] if self.mode else None
            state = ctx.execution_state.with_params(mode=mode)
            stack.enter_context(FlyteContextManager.with_context(ctx.with_execution_state(state)))
            yield

    def arguments(self) -> dict[str, Any]:
        """The task's inputs as Python values."""
        types, _, _ = cloudpickle.loads(self.interface)  # from our own driver, by our agent's pipe
        literal_map = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(self.inputs))
        return dict(TypeEngine.literal_map_to_kwargs(FlyteContextManager.current_context(), literal_map, types))

    def outputs(self, returned: Any) -> TaskOutput:
        """Make literals of what the function returned, here where its files are; files are uploaded.

        Raises:
            TypeError: The return value does not fit the task's declared outputs.
        """
        inputs, outputs, tuple_name = cloudpickle.loads(self.interface)  # as above
        check_count(self.task_name, returned, list(outputs))
        interface = Interface(inputs=inputs, outputs=outputs, output_tuple_name=tuple_name)
        task = PythonTask(task_type="", name=self.task_name, task_config=None, interface=interface)
        # What an ordinary task calls after its function: it also adds the metadata of artifacts.
        made, values = run_sync(task._output_to_literal_map, returned, FlyteContextManager.current_context())  # noqa: SLF001
        tab = tabs.tab_of(values, outputs, made.literals) if self.shows_outputs else ""
        return TaskOutput(literal_map=made.to_flyte_idl().SerializeToString(), decks=_decks(), tab=tab)

    def results_folder(self) -> FlyteDirectory:
        """The driver brings the files there."""
        return FlyteDirectory(self.results, remote_directory=False)


def finish_imports() -> None:
    """Import what flytekit has put off until it is used, such as pandas; to be called before there are other threads.

    Where two use such a module at once (the user's function, and wandb's import), one may find half of it:
    python/cpython#114763, mended in later versions.
    """
    for module in list(sys.modules.values()):
        if object.__getattribute__(module, "__class__") is importlib.util._LazyModule:  # type: ignore[attr-defined] # noqa: SLF001
            vars(module)


@contextlib.contextmanager
def _statsd_by_number() -> Iterator[None]:
    """Have flytekit reach its default statsd, `localhost`, by number: on some machines that name does not resolve.

    flytekit looks the name up when it makes a client, which a plain local task does not have. A host that the user
    has set is left as it is.
    """
    variable = StatsD.HOST.legacy.get_env_name()
    if StatsConfig.auto().host != StatsConfig().host:
        yield
        return
    before = os.environ.get(variable)
    os.environ[variable] = "127.0.0.1"
    try:
        yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


def _decks() -> list[tuple[str, str]]:
    """The Decks made in this rank, Flyte's own time line left out."""
    params = FlyteContextManager.current_context().user_space_params
    return [(deck.name, deck.html) for deck in (params.decks if params else ()) if deck.name.lower() != "timeline"]
