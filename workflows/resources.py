"""Resources of the tasks of all workflows, for a sandbox or for a cluster with GPUs.

The environment variable `DASKPYTORCH_PROFILE` chooses between them when the workflows are registered or run here. With
`sandbox`, the default, ranks train on CPUs. With `gpu`, ranks train on one GPU of each machine. A workflow's own
variables, such as `DOGS_GPUS`, take precedence.
"""

from __future__ import annotations

import os

from flytekit import Resources

from flytekitplugins.daskpytorch import Scheduler, WorkerGroup

VARIABLE = "DASKPYTORCH_PROFILE"
PROFILES = {"sandbox": 0, "gpu": 1}
"""Number of GPUs of a machine for training, by the profile's name."""
PROFILE = os.environ.get(VARIABLE) or "sandbox"
if PROFILE not in PROFILES:
    raise ValueError(f"{VARIABLE}={PROFILE!r}: must be one of {', '.join(PROFILES)}")

SETTINGS = {VARIABLE: PROFILE}
"""Environment variables of the tasks' pods, which import this file again."""
NUM_GPUS = PROFILES[PROFILE]
SMALL = Resources(cpu="1", mem="2Gi")
"""Resources of a task that reads, evaluates or reports, and of a task whose ranks run in other pods."""
GATHERING = Resources(cpu="1", mem="4Gi")
"""Resources of a task that gathers many models, and whose ranks run in other pods."""
SCHEDULER = Scheduler(limits=SMALL)


def machine(num_gpus: int) -> Resources:
    """Return the resources of a machine with ranks: a Dask worker or a node. Each GPU has one rank."""
    if num_gpus == 0:
        return Resources(cpu="2", mem="4Gi")
    return Resources(cpu=f"{4 * num_gpus}", mem=f"{16 * num_gpus}Gi", gpu=f"{num_gpus}")


def workers(count: int, num_gpus: int = NUM_GPUS) -> WorkerGroup:
    """Return the Dask workers of a task's cluster."""
    return WorkerGroup(number_of_workers=count, limits=machine(num_gpus))


def number(variable: str, default: int, *, least: int = 1) -> int:
    """Return the whole number in an environment variable, or the default if the variable is empty or unset.

    Raises:
        ValueError: The value is not a whole number, or is below `least`.
    """
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{variable}={text!r}: must be a whole number from {least} up")
    return int(text)
