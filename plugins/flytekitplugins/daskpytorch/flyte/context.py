"""Flytekit's context: as the plugin's `Execution` in the driver, and in ranks, with rank 0's outputs as literals."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from flyteidl.core import literals_pb2
from flytekit.bin.entrypoint import setup_execution
from flytekit.configuration import DataConfig
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager
from flytekit.core.data_persistence import get_fsspec_storage_options
from flytekit.core.interface import Interface
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.extend import TaskPlugins
from flytekit.interfaces.random import random
from flytekit.models.literals import LiteralMap
from flytekit.models.security import Secret
from flytekit.types.directory import FlyteDirectory
from fsspec.core import split_protocol

from flytekitplugins.daskpytorch.process.streams import say
from flytekitplugins.daskpytorch.protocol import host, pickling
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.task.config import Host
from flytekitplugins.daskpytorch.task.local_runs import LocalRun, local_run

HOST = Host(sdk="flytekit", package="flytekitplugins.daskpytorch", register=TaskPlugins.register_pythontask_plugin)
OF_EXECUTION = {"ID": "name", "PROJECT": "project", "DOMAIN": "domain"}
OF_TASK = ("project", "domain", "name", "version")
CHECKPOINTS = "daskpytorch"
"""Our folder in the attempt's intratask checkpoint, where the user may have other files."""


class FlyteExecution(host.Execution):
    def __init__(self, ctx: FlyteContext, run: LocalRun | None) -> None:
        self._ctx = ctx
        self._run = run
        self._params = params = ctx.user_space_params
        self.name = params.execution_id.name if params and params.execution_id else None
        self.task = ctx.execution_state if _is_in_task(ctx) else None

    def checkpoint_paths(self, key: str) -> host.StoragePaths | None:
        if self._run is not None:
            return self._run.paths(key)
        if not is_on_backend(self._ctx):
            return None
        checkpoint = getattr(self._params, "_checkpoint", None)
        own, previous = getattr(checkpoint, "_checkpoint_dest", None), getattr(checkpoint, "_checkpoint_src", None)
        if not own:
            return None
        files, ours = Files(self.filesystem(own)), f"{CHECKPOINTS}/{key}"
        return host.StoragePaths(
            files=files,
            previous=f"{files.path(previous)}/{ours}" if previous else None,
            own=f"{files.path(own)}/{ours}",
        )

    def opener(self) -> Callable[[str], Any]:
        return partial(opened, settings=self._ctx.file_access.data_config)

    def new_folder(self) -> str | None:
        state = self._ctx.execution_state
        is_executing = state is not None and state.mode is not None
        return str(self._ctx.file_access.get_random_remote_directory()) if is_executing else None

    def put_folder(self, folder: Path, uri: str) -> None:
        """If the upload fails, Flyte retries the task."""
        self._ctx.file_access.put_data(str(folder), uri, is_multipart=True)

    def secret(self, name: Secret) -> str:
        return str(self._params.secrets.get(name.group, name.key, name.group_version))


def opened(uri: str, settings: DataConfig) -> Any:
    protocol = split_protocol(uri)[0] or "file"
    return host.open_filesystem(uri, **get_fsspec_storage_options(protocol, settings))


def rank_environment() -> dict[str, str]:
    params = FlyteContextManager.current_context().user_space_params
    execution, task = getattr(params, "execution_id", None), getattr(params, "_task_id", None)
    names = {f"FLYTE_INTERNAL_EXECUTION_{key}": getattr(execution, name, None) for key, name in OF_EXECUTION.items()}
    names |= {f"FLYTE_INTERNAL_TASK_{name.upper()}": getattr(task, name, None) for name in OF_TASK}
    inherited = {name: value for name, value in os.environ.items() if name.startswith(("FLYTE_", "_F_", "_FSEC_"))}
    return inherited | {name: str(value) for name, value in names.items() if value}


def current() -> FlyteExecution:
    return FlyteExecution(FlyteContextManager.current_context(), local_run.get())


def is_on_backend(ctx: FlyteContext) -> bool:
    return ctx.execution_state is not None and ctx.execution_state.mode == ExecutionState.Mode.TASK_EXECUTION


def _is_in_task(ctx: FlyteContext) -> bool:
    modes = (ExecutionState.Mode.TASK_EXECUTION, ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    return ctx.execution_state is not None and ctx.execution_state.mode in modes


# ---- In a rank


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    literal_map: bytes
    """A serialised `flyteidl.core.LiteralMap`."""
    decks: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class FlyteRank:
    """Part of flytekit's context that the driver sends to ranks, so that flytekit works there."""

    mode: str | None
    setup: Mapping[str, str | None]
    """Arguments of flytekit's `setup_execution`: where outputs and checkpoints are."""
    interface: bytes
    inputs: bytes
    task_name: str
    results: str

    @classmethod
    def of_current_task(cls, task_name: str, interface: Interface, inputs: LiteralMap, results: str) -> Self:
        ctx = FlyteContextManager.current_context()
        params, mode = ctx.user_space_params, ctx.execution_state.mode
        checkpoint = getattr(params, "_checkpoint", None)
        return cls(
            mode=mode.name if mode else None,
            setup={
                "raw_output_data_prefix": ctx.file_access.raw_output_prefix,
                "output_metadata_prefix": getattr(params, "output_metadata_prefix", None),
                "checkpoint_path": getattr(checkpoint, "_checkpoint_dest", None),
                "prev_checkpoint": getattr(checkpoint, "_checkpoint_src", None) or None,  # none in the first attempt
            },
            interface=pickling.dumps((interface.inputs, interface.outputs, interface.output_tuple_name)),
            inputs=inputs.to_flyte_idl().SerializeToString(),
            task_name=task_name,
            results=results,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """During the block, make `flytekit.current_context()` work in this rank as it does in an ordinary task."""
        finish_imports()
        with setup_execution(**self.setup) as ctx:
            mode = ExecutionState.Mode[self.mode] if self.mode else None
            state = ctx.execution_state.with_params(mode=mode)
            # Known even if the user's code imports another SDK.
            with FlyteContextManager.with_context(ctx.with_execution_state(state)), host.known_to_threads(current()):
                yield

    def arguments(self) -> dict[str, Any]:
        types, _, _ = pickling.loads(self.interface)  # trusted: sent by this gang's driver
        literal_map = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(self.inputs))
        return dict(TypeEngine.literal_map_to_kwargs(FlyteContextManager.current_context(), literal_map, types))

    def outputs(self, returned: Any) -> TaskOutput:
        inputs, outputs, tuple_name = pickling.loads(self.interface)  # trusted: sent by this gang's driver
        host.check_count(self.task_name, returned, list(outputs))
        interface = Interface(inputs=inputs, outputs=outputs, output_tuple_name=tuple_name)
        task = _Returned(self.task_name, interface, returned)
        try:
            made = task.dispatch_execute(FlyteContextManager.current_context(), LiteralMap({}))
        except FlyteNonRecoverableSystemException as error:  # on a backend, around the conversion's error
            raise error.value from error.value.__cause__
        return TaskOutput(literal_map=made.to_flyte_idl().SerializeToString(), decks=_decks())

    def results_folder(self) -> FlyteDirectory:
        return FlyteDirectory(self.results, remote_directory=False)


class _Returned(PythonTask):  # type: ignore[misc]
    """Task whose function has returned. flytekit converts the value, and adds the metadata of artifacts."""

    def __init__(self, name: str, interface: Interface, value: Any) -> None:
        super().__init__(task_type="", name=name, interface=interface)
        self._value = value

    def execute(self, **_: Any) -> Any:
        return self._value


def finish_imports() -> None:
    """Import the modules that flytekit has deferred, such as pandas, before other threads start.

    A lazy module may appear half imported to a second thread (python/cpython#114763, fixed in later versions): the
    user's function and wandb's import run in different threads. The fork server calls this, too, since the imports take
    seconds.
    """
    for module in list(sys.modules.values()):
        getattr(module, "__dict__", None)  # any access loads a lazy module


def _decks() -> list[tuple[str, str]]:
    params = FlyteContextManager.current_context().user_space_params
    return [(deck.name, deck.html) for deck in (params.decks if params else ()) if deck.name.lower() != "timeline"]


@contextlib.contextmanager
def outcome_kept() -> Iterator[None]:
    """Let a task's outcome stand if its Deck cannot be written, such as by a user's renderer."""
    try:
        yield
    except Exception as error:  # any exception of a disk, a user's Deck or renderer
        say(f"the Deck could not be written ({type(error).__name__}: {error}); the task's outcome stands")


host.provide(current)
# flytekit names folders and files by a random generator of its own, and forked ranks would inherit its state.
os.register_at_fork(after_in_child=random.seed)
