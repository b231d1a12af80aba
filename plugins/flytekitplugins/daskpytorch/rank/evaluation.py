"""Calls the user's function of an evaluation, and gives it the inputs that it names. Runs in a rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.protocol.function import name_of
from flytekitplugins.daskpytorch.records import numbers


class Metrics(dict[str, float]):
    """Metrics by name. As a rank's return value, they go to the driver as they are, and not as a task's outputs."""


def evaluate(function: Callable[..., Any], names: Sequence[str], **inputs: Any) -> Metrics:
    """Call a user's function, and return its metrics as floats by name.

    Args:
        function: Function of `Evaluate`.
        names: Names of the inputs that the function gets.
        inputs: All inputs of the training, or those of `names` alone.

    Raises:
        TypeError: The function has not returned a dictionary of names and numbers.
    """
    metrics = function(**{name: inputs[name] for name in names})
    call = f"{name_of(function)} returned ("
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{call}{metrics!r:.200}): must be a dictionary of names and numbers, the metrics")
    return Metrics(numbers(metrics, call=call))
