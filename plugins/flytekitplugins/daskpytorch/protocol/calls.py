"""Messages about the calls of a gang that stays: orders of the driver to its ranks, and the ranks' report."""

from dataclasses import dataclass, field
from typing import Any

from flytekitplugins.daskpytorch.protocol.code import Code
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.payload import Address


@dataclass(frozen=True, kw_only=True)
class NextCall:
    """Order to a rank: call a function, and report how the call has ended."""

    number: int
    """Number of the call in its gang, from 1."""
    call: bytes = field(repr=False)
    """The pickled call. Empty if `large` has the call."""
    code: Code | None = field(default=None, repr=False)
    """The project's sources, if the driver has imported more modules since the gang's start. None otherwise."""
    large: Address | None = None
    """The driver's shared memory with a large call. None for a small call."""
    keeps: bool = False
    """True if the rank keeps the return value, under the call's number, instead of sending the value."""


@dataclass(frozen=True)
class EndCall:
    """Order to a rank that has halted (`Question.HALT`): end a call by `KeyboardInterrupt`, if the call still runs."""

    number: int
    """Number of the call."""
    at: int
    """Number of the collective after which the rank leaves the call."""


@dataclass(frozen=True)
class Forget:
    """Order to a rank: free the value that it has kept under the number of this call."""

    number: int


@dataclass(frozen=True)
class Finish:
    """Order to a rank: run no more calls and return, since the gang closes."""


CallOrder = NextCall | Forget | Finish
"""Orders that a rank's main thread follows, one after the other."""


@dataclass(frozen=True, kw_only=True)
class CallEnded:
    """Report that a call has returned or raised in the rank."""

    number: int
    value: bytes | None = field(default=None, repr=False)
    """Pickled return value. None if the value was sent in pieces, or the call has failed."""
    failure: Failure | None = None
    """The exception that the call has raised. None if the call has returned."""


values: dict[int, Any] = {}
"""Values that this rank keeps, by the number of the call that has returned the value. Empty in other processes."""


def kept_value(number: int) -> Any:
    """Return the value that this rank keeps from the call with this number. Pickled references call this function.

    Raises:
        LookupError: The rank keeps no such value.
    """
    try:
        return values[number]
    except KeyError:
        raise LookupError(
            f"this rank keeps no value of call {number}: gang.keep returned its reference in another gang, or the "
            "value was freed with its reference"
        ) from None
