"""What the tasks of all workflows ask of their machines: the one place that knows a sandbox from a cluster with GPUs.

`DASKPYTORCH_PROFILE` chooses when the workflows are registered or run here: with `sandbox` (the default) ranks train on
CPUs, with `gpu` on one GPU of each machine. A workflow's own variables, such as `DOGS_GPUS`, win.
"""

from __future__ import annotations

import os

from flytekit import Resources

from flytekitplugins.daskpytorch import Scheduler, WorkerGroup

VARIABLE = "DASKPYTORCH_PROFILE"
PROFILES = {"sandbox": 0, "gpu": 1}
"""Their names -> how many GPUs a machine has that ranks train on."""
PROFILE = os.environ.get(VARIABLE) or "sandbox"
if PROFILE not in PROFILES:
    raise ValueError(f"{VARIABLE}={PROFILE!r}: must be one of {', '.join(PROFILES)}")

SETTINGS = {VARIABLE: PROFILE}
"""For the tasks' pods, which import this file again."""
NUM_GPUS = PROFILES[PROFILE]
SMALL = Resources(cpu="1", mem="2Gi")
"""For a task that reads, judges or reports, and for one whose ranks are elsewhere."""
GATHERING = Resources(cpu="1", mem="4Gi")
"""For a task that gathers many models, whose ranks are elsewhere."""
SCHEDULER = Scheduler(limits=SMALL)


def machine(num_gpus: int) -> Resources:
    """What ranks train on: a Dask worker, or a node of its own. There is a rank on every GPU."""
    if num_gpus == 0:
        return Resources(cpu="2", mem="4Gi")
    return Resources(cpu=f"{4 * num_gpus}", mem=f"{16 * num_gpus}Gi", gpu=f"{num_gpus}")


def workers(count: int, num_gpus: int = NUM_GPUS) -> WorkerGroup:
    """The Dask workers of a task's cluster."""
    return WorkerGroup(number_of_workers=count, limits=machine(num_gpus))


def number(variable: str, default: int, *, least: int = 1) -> int:
    """What an environment variable says.

    Raises:
        ValueError: It says something else than a whole number, or one that is too small.
    """
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{variable}={text!r}: must be a whole number from {least} up")
    return int(text)
