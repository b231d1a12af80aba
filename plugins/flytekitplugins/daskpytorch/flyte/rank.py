"""Flyte's context in a rank, and rank 0's outputs as literals. Made in the driver, runs in a rank."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from flyteidl.core import literals_pb2
from flytekit.bin.entrypoint import setup_execution
from flytekit.configuration import StatsConfig
from flytekit.configuration.internal import StatsD
from flytekit.core.base_task import PythonTask
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.interface import Interface
from flytekit.core.type_engine import TypeEngine
from flytekit.deck import DeckField
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory

from flytekitplugins.daskpytorch.flyte import context, deck
from flytekitplugins.daskpytorch.protocol import pickling
from flytekitplugins.daskpytorch.protocol.host import provide
from flytekitplugins.daskpytorch.rank.link import check_count


@dataclass(frozen=True, kw_only=True)
class TaskOutput:
    literal_map: bytes
    """A serialised `flyteidl.core.LiteralMap`."""
    decks: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class FlyteRank:
    """Part of flytekit's context that the driver sends to ranks, so that flytekit works there."""

    mode: str | None
    raw_output_prefix: str
    output_metadata_prefix: str | None
    checkpoint: str | None
    previous_checkpoint: str | None
    """None in the first attempt."""
    interface: bytes
    inputs: bytes
    task_name: str
    results: str
    shows_outputs: bool = False

    @classmethod
    def of_current_task(
        cls, task_name: str, interface: Interface, inputs: LiteralMap, results: str, *, shows_outputs: bool = False
    ) -> Self:
        ctx = FlyteContextManager.current_context()
        params, mode = ctx.user_space_params, ctx.execution_state.mode
        checkpoint = getattr(params, "_checkpoint", None)
        return cls(
            mode=mode.name if mode else None,
            raw_output_prefix=ctx.file_access.raw_output_prefix,
            output_metadata_prefix=getattr(params, "output_metadata_prefix", None),
            checkpoint=getattr(checkpoint, "_checkpoint_dest", None),
            previous_checkpoint=getattr(checkpoint, "_checkpoint_src", None) or None,
            interface=pickling.dumps((interface.inputs, interface.outputs, interface.output_tuple_name)),
            inputs=inputs.to_flyte_idl().SerializeToString(),
            task_name=task_name,
            results=results,
            shows_outputs=shows_outputs,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """During the block, make `flytekit.current_context()` work in this rank as it does in an ordinary task."""
        finish_imports()
        provide(context.current, is_last=True)  # even if the user's code imports another SDK
        _reach_statsd_by_number()
        entered = setup_execution(
            raw_output_data_prefix=self.raw_output_prefix,
            output_metadata_prefix=self.output_metadata_prefix,
            checkpoint_path=self.checkpoint,
            prev_checkpoint=self.previous_checkpoint,
        )
        with entered as ctx:
            mode = ExecutionState.Mode[self.mode] if self.mode else None
            state = ctx.execution_state.with_params(mode=mode)
            with FlyteContextManager.with_context(ctx.with_execution_state(state)):
                yield

    def arguments(self) -> dict[str, Any]:
        types, _, _ = pickling.loads(self.interface)  # trusted: sent by this gang's driver
        literal_map = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(self.inputs))
        return dict(TypeEngine.literal_map_to_kwargs(FlyteContextManager.current_context(), literal_map, types))

    def outputs(self, returned: Any) -> TaskOutput:
        inputs, outputs, tuple_name = pickling.loads(self.interface)  # trusted: sent by this gang's driver
        check_count(self.task_name, returned, list(outputs))
        interface = Interface(inputs=inputs, outputs=outputs, output_tuple_name=tuple_name)
        task = _Returned(self.task_name, interface, returned, has_tab=self.shows_outputs)
        try:
            made = task.dispatch_execute(FlyteContextManager.current_context(), LiteralMap({}))
        except FlyteNonRecoverableSystemException as error:  # on a backend, around the conversion's error
            raise error.value from error.value.__cause__
        return TaskOutput(literal_map=made.to_flyte_idl().SerializeToString(), decks=_decks())

    def results_folder(self) -> FlyteDirectory:
        return FlyteDirectory(self.results, remote_directory=False)


class _Returned(deck.Written, PythonTask):  # type: ignore[misc]
    """Task whose function has returned. flytekit converts the value, and adds the metadata of artifacts and a tab."""

    def __init__(self, name: str, interface: Interface, value: Any, *, has_tab: bool) -> None:
        fields = (DeckField.OUTPUT,)
        super().__init__(task_type="", name=name, interface=interface, enable_deck=has_tab, deck_fields=fields)
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


def _reach_statsd_by_number() -> None:
    """Set flytekit's statsd host to 127.0.0.1: some machines cannot resolve `localhost`. The user's own host stays."""
    if StatsConfig.auto().host == StatsConfig().host:
        os.environ.setdefault(StatsD.HOST.legacy.get_env_name(), "127.0.0.1")


def _decks() -> list[tuple[str, str]]:
    params = FlyteContextManager.current_context().user_space_params
    return [(deck.name, deck.html) for deck in (params.decks if params else ()) if deck.name.lower() != "timeline"]
