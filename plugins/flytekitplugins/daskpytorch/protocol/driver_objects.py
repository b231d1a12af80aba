"""Objects that hold the driver's rank and world size. Ranks get other objects in their place, or an error.

The script's own objects are pickled by value. The driver's `Accelerator` counts one process. With a copy, each rank
would train separately.
"""

import os
from collections.abc import Callable
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any
from weakref import WeakSet

REFUSED = {
    ("accelerate.accelerator", "Accelerator"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
    ("accelerate.data_loader", "DataLoaderShard"),
    ("accelerate.state", "AcceleratorState"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
}
"""Classes (module, name) whose objects keep a world size that no public call changes. `rank.libraries` refuses a
`Trainer` of Lightning when it trains."""

_Reduced = tuple[Any, ...]


# ---- In the driver --------------------------------------------------------------------------------------------------


def reduce(value: Any) -> _Reduced | None:
    """Return how to pickle an object that holds the driver's rank, as `__reduce_ex__` does. None for other objects."""
    reducer = _reducer_of(type(value))  # type: ignore[arg-type]  # mypy takes no class for hashable
    return None if reducer is None else reducer(value)


@lru_cache(1024)  # a pickle has many objects of few classes
def _reducer_of(cls: type) -> Callable[[Any], _Reduced] | None:
    reducers = (_REDUCERS.get((base.__module__, base.__qualname__)) for base in cls.__mro__)
    return next((reducer for reducer in reducers if reducer is not None), None)


def _reduce_refused(value: Any) -> _Reduced:
    make, arguments, *rest = value.__reduce_ex__(2)
    return _made_unless_in_gang, (type(value).__name__, make, arguments), *rest


def _reduce_rank(_: Any) -> _Reduced:
    return _current_rank, ()


def _reduce_partial_state(value: Any) -> _Reduced:
    return _partial_state, (type(value), vars(value).get("_cpu", False))


def _reduce_training_arguments(value: Any) -> _Reduced:
    def is_cached(name: str) -> bool:  # the prefix is that of transformers 4, whose cached properties differ
        return name.startswith("__cached_") or isinstance(getattr(type(value), name, None), cached_property)

    kept = {name: part for name, part in vars(value).items() if not is_cached(name)}
    return _training_arguments, (type(value), kept | {"distributed_state": None})


def _reduce_sampler(value: Any) -> _Reduced:
    make, arguments, *rest = value.__reduce_ex__(2)
    return _sampler, (value.num_replicas, value.rank, make, arguments), *rest


_REDUCERS: dict[tuple[str, str], Callable[[Any], _Reduced]] = dict.fromkeys(REFUSED, _reduce_refused) | {
    ("accelerate.state", "PartialState"): _reduce_partial_state,
    ("flytekitplugins.daskpytorch.context", "RankContext"): _reduce_rank,
    ("torch.utils.data.distributed", "DistributedSampler"): _reduce_sampler,
    ("transformers.training_args", "TrainingArguments"): _reduce_training_arguments,
}


# ---- In a rank ------------------------------------------------------------------------------------------------------


def _world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def _refusal(name: str, what: str) -> ValueError:
    return ValueError(
        f"this {name} was made in the driver, outside the gang's ranks: {what}. Make it inside the function that the "
        "ranks call, not at the top of the script and not as an argument."
    )


def _made_unless_in_gang(name: str, make: Callable[..., Any], arguments: _Reduced) -> Any:
    if _world_size() > 1:
        raise _refusal(
            name, f"it knows a world of one process, and each of the {_world_size()} ranks would train alone"
        )
    return make(*arguments)


def _current_rank() -> Any:
    from flytekitplugins.daskpytorch.context import current_rank

    return current_rank()


def _partial_state(cls: Any, cpu: bool) -> Any:
    return cls(cpu=cpu)


def _training_arguments(cls: Any, kept: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    vars(made).update(kept)
    _ = made.device  # makes the arguments read the world size again
    return made


def _sampler(num_replicas: int, rank: int, make: Callable[..., Any], arguments: _Reduced) -> Any:
    """Make the sampler, or raise if its world is one process.

    A sampler of another rank raises when it is iterated. An argument may hold a list of samplers, one per rank.
    """
    if num_replicas == 1 < _world_size():
        what = f"num_replicas=1 has each of the {_world_size()} ranks train on all samples"
        raise _refusal("DistributedSampler", what)
    sampler = make(*arguments)
    if num_replicas == _world_size() and rank != int(os.environ["RANK"]):
        _refuse_use(sampler)
    return sampler


def _refuse_use(sampler: Any) -> None:
    if not _of_other_ranks:
        cls = import_module("torch.utils.data.distributed").DistributedSampler
        begin = cls.__iter__

        def begin_own(sampler: Any) -> Any:
            if sampler in _of_other_ranks:
                what = f"it has the samples of rank {sampler.rank}, and rank {os.environ['RANK']} would train on them"
                raise _refusal("DistributedSampler", what)
            return begin(sampler)

        cls.__iter__ = begin_own
    _of_other_ranks.add(sampler)


_of_other_ranks: WeakSet[Any] = WeakSet()
"""Samplers that the driver made for other ranks."""
