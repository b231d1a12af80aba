"""Flyte's context in a rank, and rank 0's outputs on their way back as literals. Runs in a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cloudpickle
from flyteidl.core import literals_pb2
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.interface import Interface
from flytekit.core.type_engine import TypeEngine
from flytekit.interfaces.random import random
from flytekit.models.literals import LiteralMap
from flytekit.utils.asyn import run_sync

from flytekitplugins.daskpytorch.protocol.flyte_settings import FlyteSettings

__all__ = ["arguments", "decks", "entered", "literals"]


@contextlib.contextmanager
def entered(settings: FlyteSettings) -> Iterator[FlyteContext]:
    """Make `flytekit.current_context()` work in this rank as it does in an ordinary task."""
    # flytekit makes up names of folders and files by a generator of its own, which forked ranks inherit as it is.
    random.seed()
    with setup_execution(
        raw_output_data_prefix=settings.raw_output_prefix,
        output_metadata_prefix=settings.output_metadata_prefix,
        checkpoint_path=settings.checkpoint,
        prev_checkpoint=settings.previous_checkpoint,
    ) as ctx:
        mode = ExecutionState.Mode[settings.mode] if settings.mode else None
        state = ctx.execution_state.with_params(mode=mode)
        with FlyteContextManager.with_context(ctx.with_execution_state(state)) as rank_ctx:
            yield rank_ctx


def arguments(settings: FlyteSettings, ctx: FlyteContext) -> dict[str, Any]:
    """The task's inputs as Python values."""
    types, _, _ = cloudpickle.loads(settings.interface)  # from our own driver, by our agent's pipe
    literal_map = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(settings.inputs))
    return dict(TypeEngine.literal_map_to_kwargs(ctx, literal_map, types))


def literals(settings: FlyteSettings, returned: Any, ctx: FlyteContext) -> LiteralMap:
    """Make literals of what the function returned, here where its files are; files are uploaded.

    Raises:
        TypeError: The return value does not fit the task's declared outputs.
    """
    inputs, outputs, tuple_name = cloudpickle.loads(settings.interface)  # as above
    _check_count(settings.task_name, returned, list(outputs))
    interface = Interface(inputs=inputs, outputs=outputs, output_tuple_name=tuple_name)
    task = PythonTask(task_type="", name=settings.task_name, task_config=None, interface=interface)
    # What an ordinary task calls after its function: it also adds the metadata of artifacts.
    made, _ = run_sync(task._output_to_literal_map, returned, ctx)  # noqa: SLF001
    return made


def _check_count(task_name: str, returned: Any, names: list[str]) -> None:
    if len(names) < 2 or (isinstance(returned, tuple) and len(returned) == len(names)):
        return
    what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    raise TypeError(f"task {task_name} declares {len(names)} outputs ({', '.join(names)}); rank 0 returned {what}")


def decks(ctx: FlyteContext) -> list[tuple[str, str]]:
    """The Decks made in this rank, Flyte's own time line left out."""
    made = ctx.user_space_params.decks if ctx.user_space_params else []
    return [(deck.name, deck.html) for deck in made if deck.name.lower() != "timeline"]
