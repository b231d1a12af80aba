"""Libraries find the gang's rank and world size. test_libraries_integration.py has the refusals."""

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flytekitplugins.daskpytorch.rank import libraries


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank of four, on two workers without GPUs."""
    own = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for name in ("PL_TRAINER_NUM_NODES", "LT_NUM_NODES", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "to be removed afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setattr(libraries, "register_post_import_hook", call_if_imported)


def call_if_imported(hook: Callable[[ModuleType], object], name: str) -> None:
    """Stand for a hook's registration, which would outlive the test."""
    if name in sys.modules:
        hook(sys.modules[name])


def module_with(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A library as if it had been imported."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "on_cpu"),
    [
        pytest.param("", "2", "true", id="none: a worker is a node"),
        pytest.param("3", "4", None, id="its own: a rank is a node"),
        pytest.param("0,1", "2", None, id="all: a worker is a node"),
    ],
)
def test_the_world_is_told_by_variables(
    monkeypatch: pytest.MonkeyPatch, gpus: str, num_nodes: str, on_cpu: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    libraries.guide()
    assert os.environ["PL_TRAINER_NUM_NODES"] == os.environ["LT_NUM_NODES"] == num_nodes
    assert os.environ.get("ACCELERATE_USE_CPU") == on_cpu


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_NUM_NODES", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    libraries.guide()
    assert (os.environ["PL_TRAINER_NUM_NODES"], os.environ["ACCELERATE_USE_CPU"]) == ("1", "false")


class Trains:
    """Stands for a class of Lightning or Transformers."""

    strategy = SimpleNamespace(launcher=None, parallel_devices=["cpu"] * 2, num_nodes=2)

    def fit(self) -> None:
        """Nobody calls it."""

    def launch(self) -> None:
        """Start nothing, as in a gang."""


@pytest.mark.parametrize(("host_rank", "is_first"), [(0, True), (1, False)])
def test_the_first_rank_of_a_machine_is_told_by_its_place_there(
    monkeypatch: pytest.MonkeyPatch, host_rank: int, *, is_first: bool
) -> None:
    monkeypatch.setenv("NODE_LOCAL_RANK", str(host_rank))
    monkeypatch.setenv("LOCAL_RANK", "0")  # that of every rank with a GPU of its own
    trainer, fabric, arguments = (type(name, (Trains,), {}) for name in ("Trainer", "Fabric", "TrainingArguments"))
    module_with(monkeypatch, "lightning.pytorch.trainer.trainer", Trainer=trainer)
    module_with(monkeypatch, "lightning.fabric.fabric", Fabric=fabric)
    module_with(monkeypatch, "transformers.training_args", TrainingArguments=arguments)
    assert accelerate_with(monkeypatch)().is_local_main_process is is_first
    assert trainer().local_rank == arguments().local_process_index == fabric().local_rank == host_rank


def accelerate_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    class PartialState:
        def __init__(self, cpu: bool = False, **_: Any) -> None:
            self.num_processes, self.distributed_type = (4, "MULTI_CPU") if cpu else (1, "NO")

    flag = pytest.importorskip("accelerate.utils").parse_flag_from_env
    module_with(monkeypatch, "accelerate.state", PartialState=PartialState, parse_flag_from_env=flag)
    libraries.guide()
    return PartialState


def test_accelerate_that_takes_itself_for_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    state = accelerate_with(monkeypatch)
    with pytest.raises(ValueError, match="its world for 1 of NO, but the gang has 4 ranks: each would train alone"):
        state()


def test_a_library_that_is_too_old_for_its_callback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(__version__="1.9.5"))
    with pytest.raises(ImportError, match=r"lightning 1\.9\.5 is not supported in a gang, which needs 2\.6 or newer"):
        libraries.require("lightning", "2.6")
