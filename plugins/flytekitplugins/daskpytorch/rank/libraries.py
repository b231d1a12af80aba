"""Changes of libraries in a rank: Lightning, Accelerate and Transformers find the gang, and loaders end with the rank.

On a machine without GPUs, Lightning's `Trainer()` and Accelerate assume a world of one rank: each rank would silently
train a model of its own. So they count the gang's ranks, and Trainers that do not fit are refused.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wrapt import register_post_import_hook, wrap_function_wrapper

from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.process.gpu_vendor import VISIBLE, listed

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

LIGHTNING = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))


def guide() -> None:
    os.environ.setdefault("PL_TRAINER_NUM_NODES", str(_num_nodes()))
    os.environ.setdefault("LT_NUM_NODES", str(_num_nodes()))
    if not listed(VISIBLE):
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    for pytorch, fabric in LIGHTNING:
        for package in (pytorch, fabric):
            after_import(f"{package}.accelerators.cpu", "CPUAccelerator", _count_ranks_as_devices)
        after_import(f"{pytorch}.trainer.trainer", "Trainer", _check_trainers)
        after_import(f"{fabric}.fabric", "Fabric", _check_fabrics)
    after_import("accelerate.state", "PartialState", _check_accelerators)
    after_import("transformers.training_args", "TrainingArguments", _count_over_host)


def after_import(module: str, part: str, change: Callable[[Any], object]) -> None:
    """Call `change` with a library's module once this rank has imported it.

    A program's own module of the same name, such as its `distributed.py`, lacks the library's `part` and is left alone.
    """
    register_post_import_hook(lambda found: change(found) if hasattr(found, part) else None, module)


def require(library: str, minimum: str) -> None:
    from packaging.version import Version

    found = sys.modules[library].__version__
    if Version(found) < Version(minimum):
        raise ImportError(
            f"{library} {found} is not supported in a gang, which needs {minimum} or newer: "
            f"pip install '{library.replace('_', '-')}>={minimum}', here and on the workers."
        )


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _num_devices() -> int:
    """As Lightning counts: 1 if the rank sees one GPU, else the node's ranks."""
    return 1 if len(listed(VISIBLE)) == 1 else int(os.environ["LOCAL_WORLD_SIZE"])


def _num_nodes() -> int:
    return _world_size() // _num_devices()


def _host_rank() -> int:
    """LOCAL_RANK may differ, as it is the index of the rank's GPU."""
    return int(os.environ["NODE_LOCAL_RANK"])


def _count_over_host(module: ModuleType) -> None:
    """Transformers finds a host's first process by the index on the host. The rank's device is unchanged."""
    module.TrainingArguments.local_process_index = property(lambda _: _host_rank())


def _count_ranks_as_devices(module: ModuleType) -> None:
    module.CPUAccelerator.auto_device_count = staticmethod(_num_devices)


def _check_trainers(module: ModuleType) -> None:
    wrap_function_wrapper(module, "Trainer.fit", _fit_checked)
    module.Trainer.local_rank = property(lambda _: _host_rank())  # index 0 calls `prepare_data`


def _fit_checked(fit: Callable[..., None], trainer: Any, args: Any, kwargs: Any) -> None:
    _check_strategy("Trainer", trainer.strategy)
    fit(*args, **kwargs)


def _check_fabrics(module: ModuleType) -> None:
    wrap_function_wrapper(module, "Fabric.__init__", _fabric_checked)
    module.Fabric.local_rank = property(lambda _: _host_rank())  # for `rank_zero_first(local=True)`


def _fabric_checked(begin: Callable[..., None], fabric: Any, args: Any, kwargs: Any) -> None:
    begin(*args, **kwargs)
    _check_strategy("Fabric", fabric.strategy)
    if not int(os.environ.get("LT_CLI_USED", "0")):  # else Fabric has launched itself, and refuses the call
        fabric.launch()  # a program for `fabric run` calls no `launch`, and a second call changes nothing


def _check_strategy(name: str, strategy: Any) -> None:
    num_devices = len(getattr(strategy, "parallel_devices", None) or [None])
    num_nodes = getattr(strategy, "num_nodes", 1)
    starts_processes = type(strategy.launcher).__name__ == "_MultiProcessingLauncher"
    if num_devices * num_nodes == _world_size() and not starts_processes:
        return
    would = "start processes of its own" if starts_processes else "not train with all of them"
    raise ValueError(
        f"this {name} ({type(strategy).__name__}, devices={num_devices}, num_nodes={num_nodes}) does not fit the gang "
        f"of {_world_size()} ranks, and would {would}. Leave out devices and num_nodes, whose defaults fit in a gang, "
        f"or give devices={_num_devices()}, num_nodes={_num_nodes()}; as strategy take 'auto' or 'ddp'."
    )


def _check_accelerators(module: ModuleType) -> None:
    def state_checked(begin: Callable[..., None], state: Any, args: Any, kwargs: Any) -> None:
        # `Accelerator` and `AcceleratorState` read the variable, `PartialState` alone does not (Accelerate 1.15).
        [cpu] = args or [kwargs.pop("cpu", False)]
        begin(cpu or module.parse_flag_from_env("ACCELERATE_USE_CPU"), **kwargs)
        if state.num_processes != _world_size():
            raise ValueError(
                f"Accelerate takes its world for {state.num_processes} of {state.distributed_type}, but the gang has "
                f"{_world_size()} ranks: each would train alone. On CPUs it needs ACCELERATE_USE_CPU=true in the "
                "environment, as ranks without a GPU have it."
            )

    wrap_function_wrapper(module, "PartialState.__init__", state_checked)
    # `local_process_index` stays, as Accelerate finds the rank's GPU by this index.
    module.PartialState.is_local_main_process = property(lambda _: _host_rank() == 0)


# ---- DataLoader workers


def shield() -> None:
    """Make the workers of all DataLoaders ignore SIGTERM, which Slurm sends to all processes at once."""
    from torch.utils.data import DataLoader

    wrap_function_wrapper(DataLoader, "__iter__", _iterate_shielded)
    atexit.register(_kill_daemons)  # runs before `multiprocessing` sends SIGTERM and waits for the workers' ends


def _iterate_shielded(iterate: Callable[[], Any], loader: DataLoader[Any], *_: Any) -> Any:
    given = loader.worker_init_fn
    loader.worker_init_fn = functools.partial(_begin, given)
    try:
        return iterate()
    finally:
        loader.worker_init_fn = given


def _begin(given: Callable[[int], None] | None, worker: int) -> None:
    ending.leave_sigterm_to_parent()
    if given is not None:
        given(worker)


def _kill_daemons() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
