"""Calls the user's function of an evaluation, and gives it the inputs that it names. Runs in a rank."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flytekitplugins.daskpytorch.protocol.code import name_of
from flytekitplugins.daskpytorch.protocol.host import RankHost
from flytekitplugins.daskpytorch.records import numbers


def evaluate(function: Callable[..., Any], names: Sequence[str], **inputs: Any) -> dict[str, float]:
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
    return numbers(metrics, call=call)


@dataclass(frozen=True, kw_only=True)
class EvaluationHost:
    """Access to the task's host in a rank that evaluates. The rank's return value does not become a task's output."""

    host: RankHost
    """Access to the host in a rank of the training."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """During the block, make the host's functions work as in a task."""
        with self.host.entered():
            yield

    def arguments(self) -> dict[str, Any]:
        """Return the task's inputs by name."""
        return self.host.arguments()

    def outputs(self, returned: Any) -> object:
        """Return the metrics unchanged."""
        return returned

    def results_folder(self) -> object:
        """Return the folder of the files that ranks submit."""
        return self.host.results_folder()
