"""Flyte's context, carried from the driver into the ranks, and rank 0's outputs, carried back as literals.

`capture`, `current_task` and `checkpoint_paths` run in the driver; `entered`, `arguments`, `literals` and `decks` run
in a rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
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

from flytekitplugins.daskpytorch.mirror import MirrorPaths
from flytekitplugins.daskpytorch.task_context import FlyteSettings

__all__ = [
    "arguments",
    "capture",
    "checkpoint_paths",
    "current_task",
    "decks",
    "entered",
    "execution_name",
    "known_to_threads",
    "literals",
]

# Flytekit puts off some imports, such as pandas', until the module is used. Where two threads use it at once (in a
# rank: the user's function, and wandb's import), one may find half of it: python/cpython#114763, mended in later
# versions.
for _module in list(sys.modules.values()):
    if object.__getattribute__(_module, "__class__") is importlib.util._LazyModule:  # type: ignore[attr-defined] # noqa: SLF001
        vars(_module)

CHECKPOINTS = "daskpytorch"
"""Our folder in an attempt's intratask checkpoint, beside what the user may write there."""


def capture(task_name: str, interface: Interface, inputs: LiteralMap, results: str) -> FlyteSettings:
    """Take what the ranks need from the current context, in the driver."""
    ctx = FlyteContextManager.current_context()
    params, mode = ctx.user_space_params, ctx.execution_state.mode
    checkpoint = getattr(params, "_checkpoint", None)
    execution, task = getattr(params, "execution_id", None), getattr(params, "_task_id", None)
    names = {
        "FLYTE_INTERNAL_EXECUTION_ID": getattr(execution, "name", None),
        "FLYTE_INTERNAL_EXECUTION_PROJECT": getattr(execution, "project", None),
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": getattr(execution, "domain", None),
        "FLYTE_INTERNAL_TASK_PROJECT": getattr(task, "project", None),
        "FLYTE_INTERNAL_TASK_DOMAIN": getattr(task, "domain", None),
        "FLYTE_INTERNAL_TASK_NAME": getattr(task, "name", None),
        "FLYTE_INTERNAL_TASK_VERSION": getattr(task, "version", None),
    }
    environment = {name: value for name, value in os.environ.items() if name.startswith(("FLYTE_", "_F_", "_FSEC_"))}
    environment |= {name: str(value) for name, value in names.items() if value}
    return FlyteSettings(
        mode=mode.name if mode else None,
        raw_output_prefix=ctx.file_access.raw_output_prefix,
        output_metadata_prefix=getattr(params, "output_metadata_prefix", None),
        checkpoint=getattr(checkpoint, "_checkpoint_dest", None),
        previous_checkpoint=getattr(checkpoint, "_checkpoint_src", None) or None,
        environment=environment,
        interface=cloudpickle.dumps((interface.inputs, interface.outputs, interface.output_tuple_name)),
        inputs=inputs.to_flyte_idl().SerializeToString(),
        task_name=task_name,
        results=results,
    )


@contextlib.contextmanager
def known_to_threads() -> Iterator[None]:
    """Have threads that the task's function starts find the task, too: flytekit's context is not theirs."""
    _contexts.append(FlyteContextManager.current_context())
    try:
        yield
    finally:
        _contexts.pop()


def _context() -> FlyteContext:
    here = FlyteContextManager.current_context()
    return _contexts[-1] if _contexts and not _is_in_task(here) else here


def _is_in_task(ctx: FlyteContext) -> bool:
    modes = (ExecutionState.Mode.TASK_EXECUTION, ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    return ctx.execution_state is not None and ctx.execution_state.mode in modes


_contexts: list[FlyteContext] = []
"""Those of the tasks that run here and have threads, the newest last."""


def execution_name() -> str | None:
    """The current execution's name; `local` in local runs."""
    params = _context().user_space_params
    return params.execution_id.name if params and params.execution_id else None


def current_task() -> object:
    """Something that is the same for as long as the current task runs, here or on a backend; None outside one."""
    ctx = _context()
    return ctx.execution_state if _is_in_task(ctx) else None


def checkpoint_paths(name: str) -> MirrorPaths | None:
    """Where the checkpoints of a gang of this name go, and where the attempt before left its own, in Flyte's storage.

    None in local runs, which have no attempts.
    """
    ctx = _context()
    if ctx.execution_state is None or ctx.execution_state.mode != ExecutionState.Mode.TASK_EXECUTION:
        return None
    checkpoint = getattr(ctx.user_space_params, "_checkpoint", None)
    own, previous = getattr(checkpoint, "_checkpoint_dest", None), getattr(checkpoint, "_checkpoint_src", None)
    if not own:
        return None
    return MirrorPaths(
        file_access=ctx.file_access,
        previous=f"{previous}/{CHECKPOINTS}/{name}" if previous else None,
        own=f"{own}/{CHECKPOINTS}/{name}",
    )


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
