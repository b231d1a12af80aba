"""Prepares a return value for the driver, which has no GPU and no process group. Runs in a rank."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

from flytekitplugins.daskpytorch.protocol import pickler
from flytekitplugins.daskpytorch.protocol.torch_parts import reduce_storage, sharded_classes

MAX_DEPTH = 2
"""Maximum depth of nested containers in which models are unwrapped: the tuple of outputs, then a list or dict."""


def unwrapped(value: Any) -> Any:
    """Return the value with each `DistributedDataParallel` replaced by its model, also in tuples, lists and dicts.

    Raises:
        TypeError: The value is sharded over the ranks.
    """
    from torch.nn.parallel import DistributedDataParallel

    sharded = sharded_classes()

    def bare(value: Any, depth: int) -> Any:
        _refuse_sharded(value, sharded)
        if isinstance(value, DistributedDataParallel):
            return value.module
        if depth and type(value) is dict:
            return {key: bare(part, depth - 1) for key, part in value.items()}
        if depth and (type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields"))):
            parts = [bare(part, depth - 1) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    return bare(value, MAX_DEPTH)


def check_count(task: str, returned: Any, names: Sequence[str]) -> None:
    """Check that the return value of a task with several outputs is a tuple with one part per output.

    Raises:
        TypeError: The value has another number of parts.
    """
    if len(names) < 2 or (isinstance(returned, tuple) and len(returned) == len(names)):
        return
    what = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    raise TypeError(
        f"task {task} declares {len(names)} outputs ({', '.join(names)}); rank 0 returned {what}. Return a tuple of "
        f"{len(names)} values"
    )


def pickled(value: Any) -> list[memoryview]:
    """Return a pickled return value in parts, with CUDA tensors on the CPU and `DistributedDataParallel` as its model.

    Raises:
        TypeError: The value cannot be pickled, or is sharded over the ranks.
    """
    file, aside = io.BytesIO(), list[memoryview]()
    try:
        _pickler(sharded_classes())(file, protocol=5, buffer_callback=pickler.put_apart(aside)).dump(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled: {error}. "
            "Return plain data or tensors, such as a state_dict instead of a model."
        ) from error
    return [file.getbuffer(), *aside]


@functools.cache
def _pickler(sharded: tuple[type, ...]) -> type[pickler.Pickler]:
    """Return the pickler of return values. `sharded` are the classes that it refuses."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Pickler(pickler.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            _refuse_sharded(obj, sharded)
            if isinstance(obj, DistributedDataParallel):
                return _as_it_is, (obj.module,)
            # The pickle of a parameter calls this method again, for the plain tensor of the parameter's data.
            if isinstance(obj, torch.Tensor) and obj.is_cuda and not isinstance(obj, torch.nn.Parameter):
                return obj.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
            return reduce_storage(obj) or super().reducer_override(obj)

    return Pickler


def _as_it_is(value: Any) -> Any:
    return value


def _refuse_sharded(value: object, kinds: tuple[type, ...]) -> None:
    """Check that the value is not an instance of a sharded class.

    Raises:
        TypeError: The other ranks hold parts of the value.
    """
    if isinstance(value, kinds):
        raise TypeError(
            f"a {type(value).__name__} belongs to all ranks together. On all ranks call get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
            "torch.distributed.checkpoint.state_dict, or tensor.full_tensor(), and return the result. Only in a "
            "DistributedDataParallel are model.module and model.module.state_dict() whole"
        )
