"""Puts a gang together: the record of the core, and its parts. Runs in the driver."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from flytekitplugins.daskpytorch.driver.agents import Agents
from flytekitplugins.daskpytorch.driver.committer import Committer
from flytekitplugins.daskpytorch.driver.parts.calls import Calls
from flytekitplugins.daskpytorch.driver.parts.checkpoints import Checkpoints
from flytekitplugins.daskpytorch.driver.parts.debugger import Debugger
from flytekitplugins.daskpytorch.driver.parts.evaluation import Evaluator, MakeGang
from flytekitplugins.daskpytorch.driver.parts.goodput import Accounting
from flytekitplugins.daskpytorch.driver.parts.growth import Growth
from flytekitplugins.daskpytorch.driver.parts.hang import HangWatch
from flytekitplugins.daskpytorch.driver.parts.preemption import Preemption
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.driver.request import Request
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.protocol.debugging import Debugging
from flytekitplugins.daskpytorch.protocol.observer import Observers


@dataclass(frozen=True)
class Assembled:
    """A gang's record, and the parts that others than the core need by name."""

    state: GangState
    checkpoints: Checkpoints
    evaluator: Evaluator
    debugger: Debugger
    accounting: Accounting


def assemble(
    request: Request,
    agents: Agents,
    committer: Committer,
    observers: Observers,
    received: ReceivedResults,
    make: MakeGang,
    debugging: Debugging,
    *,
    asked_at: float,
    clock: Callable[[], float] = time.monotonic,
    running_clock: Callable[[], float] | None = None,
) -> Assembled:
    """Return a gang whose agents have not connected yet.

    Args:
        request: The gang's request.
        agents: The gang's agents.
        committer: Commits sharded checkpoints, and holds the vault of whole checkpoints.
        observers: The gang's observers.
        received: Results and return values of the ranks.
        make: Makes the gang of an evaluation.
        debugging: The driver's settings for debuggers in ranks.
        asked_at: Time of the user's request, in seconds on `clock`.
        clock: Clock of the account of time. Returns seconds, and never goes back.
        running_clock: Clock of all deadlines, which may leave out times in which the driver was suspended. None for
            `clock`.
    """
    state = GangState(request, agents, observers, received, asked_at=asked_at, clock=running_clock or clock)
    made = Assembled(
        state,
        checkpoints=Checkpoints(state, committer),
        evaluator=Evaluator(state, committer.vault, make),
        debugger=Debugger(state, debugging),
        accounting=Accounting(state, clock),
    )
    calls = [request.calls] if isinstance(request.calls, Calls) else []
    for part in calls:
        part.join(state)
    # Evaluations hold a checkpoint before it counts, and the goodput counts it before observers hear of it.
    seeing = [made.evaluator, made.accounting, made.debugger, *calls, made.checkpoints]
    state.use([*seeing, Preemption(state), HangWatch(state), Growth(state)])
    return made
