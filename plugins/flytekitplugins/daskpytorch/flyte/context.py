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

import cloudpickle
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.interface import Interface
from flytekit.models.literals import LiteralMap

from flytekitplugins.daskpytorch.driver.upload import StoragePaths
from flytekitplugins.daskpytorch.protocol.flyte_settings import FlyteSettings

__all__ = ["capture", "checkpoint_paths", "current_task", "execution_name", "known_to_threads"]

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


def checkpoint_paths(name: str) -> StoragePaths | None:
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
    return StoragePaths(
        file_access=ctx.file_access,
        previous=f"{previous}/{CHECKPOINTS}/{name}" if previous else None,
        own=f"{own}/{CHECKPOINTS}/{name}",
    )
