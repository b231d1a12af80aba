"""The command `daskpytorch doctor`: checks whether gangs can train on this machine and on a cluster.

Each check yields findings. Requests to other processes have timeouts, so every check ends.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import click

from flytekitplugins.daskpytorch.checks import MAX_SECONDS
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.node import hardware
from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.process.system import check_system
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE, Gang

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher

CONNECT_TIMEOUT = 10.0
"""Seconds at most for the scheduler to answer."""
FIREWALL = (
    "Ranks open connections to this process and to each other, on any port: look for a firewall or a network policy. A "
    "scheduler behind a forwarded port of this machine does not do: run the doctor in the workers' network. "
    "On a slow or busy machine raise --timeout."
)
NUM_RANKS = 2


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    verdict: Literal["ok", "warning", "problem"] = "ok"
    """`problem`: gangs cannot run. `warning`: gangs may be slow, or unable to run."""
    advice: str = ""


@click.command(short_help="Check whether gangs can train here and on a Dask cluster.")
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    envvar=SCHEDULER_VARIABLE,
    show_envvar=True,
    help="also check the cluster of this Dask scheduler",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, MAX_SECONDS, min_open=True),
    default=60.0,
    metavar="SECONDS",
    show_default=True,
    help="timeout for the test gang, and, up to 10 s, for the scheduler's answer",
)
def doctor(*, scheduler: str | None, timeout: float) -> int:
    """Check whether gangs can train on this machine and on a Dask cluster.

    The checks cover versions, GPUs, addresses, and a test gang of two ranks. Exit code 1 if there is a problem.
    """
    has_problem = False
    for finding in examine(scheduler, timeout):
        advice = f"\n{'':37} {finding.advice}" if finding.advice else ""
        print(f"{finding.verdict:8} {finding.what:28} {finding.value}{advice}", flush=True)
        has_problem |= finding.verdict == "problem"
    return int(has_problem)


def examine(scheduler: str | None, timeout: float) -> Iterator[Finding]:
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "GPUs": gpus,
        "ranks on this node": partial(_gang_here, timeout),
    }
    if scheduler is not None:
        checks["scheduler"] = partial(examine_cluster, scheduler, timeout)
    for what, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            advice = "Mend what the error names. If no scheduler answers: look at its address, its port and its log."
            yield Finding(what, f"{type(error).__name__}: {error}", "problem", advice)


# ---- This machine


def _versions() -> Iterator[Finding]:
    check_system()
    versions = hardware.local_versions() | {"distributed": version("distributed")}
    found = ", ".join(f"{name} {number}" for name, number in versions.items())
    yield Finding("versions", f"{platform.system()} {platform.machine()}, {found}")


def gpus() -> Iterator[Finding]:
    found = hardware.require_gpus(0, platform.node())
    names = "; ".join(f"{index}: {name}" for index, name in found.names.items())
    if names or not gpu_vendor.has_driver():
        yield Finding("GPUs", names or "none; ranks train on the CPU")
    else:
        advice = (
            "The machine has a GPU driver, but torch finds no GPU. Likely causes: a torch that is built without CUDA, "
            f"a driver older than that CUDA (see {gpu_vendor.vendor_here().tool}), or "
            f"{gpu_vendor.VISIBLE}={os.environ.get(gpu_vendor.VISIBLE)!r}."
        )
        yield Finding("GPUs", f"none; ranks train on the CPU. {found.problem}", "warning", advice)


def _gang_here(timeout: float) -> Iterator[Finding]:
    from flytekitplugins.daskpytorch.node.agent import OwnNode

    yield _try_gang("ranks on this node", OwnNode(), NUM_RANKS, timeout)


# ---- The cluster


def examine_cluster(address: str, timeout: float) -> Iterator[Finding]:
    from distributed import Client

    from flytekitplugins.daskpytorch.dask import cluster
    from flytekitplugins.daskpytorch.dask.agents import HOW_TO_GET_WORKERS, DaskAgents

    limit = min(timeout, CONNECT_TIMEOUT)
    cluster.greet(address, limit)
    with Client(address, timeout=limit) as client:
        num_workers = len(client.scheduler_info(n_workers=-1)["workers"])
        yield Finding("scheduler", f"{address}, workers: {num_workers}")
        if not num_workers:
            yield Finding("workers", "none", "problem", HOW_TO_GET_WORKERS)
            return
        yield _try_gang("ranks on the cluster", DaskAgents(client, num_workers), max(NUM_RANKS, num_workers), timeout)


# ---- The trial gang


def _try_gang(what: str, launcher: AgentLauncher, num_ranks: int, timeout: float) -> Finding:
    from flytekitplugins.daskpytorch.driver.futures import GangFutures
    from flytekitplugins.daskpytorch.driver.request import request_for
    from flytekitplugins.daskpytorch.driver.supervisor import Supervisor

    began_at = time.monotonic()
    per_worker = num_ranks // launcher.num_wanted
    settings = Gang(ranks_per_worker=per_worker, max_restarts=0, start_timeout=timeout, hang_timeout=timeout)
    futures = GangFutures(Supervisor(request_for(all_reduce, (), {}, settings), launcher), num_ranks)
    try:
        places = futures.result()  # within the timeouts of the start and of a hang
    except Exception as error:
        blame = error.__cause__ if isinstance(error.__cause__, GangError) else error  # has the rank and its log's end
        return Finding(
            what, f"{type(blame).__name__}: {blame}", "problem", "" if isinstance(blame, ValueError) else FIREWALL
        )
    return Finding(
        what,
        f"{num_ranks} ranks on {', '.join(dict.fromkeys(places))} have met and summed in "
        f"{time.monotonic() - began_at:.1f} s, imports of torch included",
    )


def all_reduce() -> str:
    """Sum in all ranks, and return this rank's host and backend. Raises `ArithmeticError` if the sum is wrong."""
    import torch
    import torch.distributed as dist

    here = current_rank()
    total = torch.tensor(here.rank, device=here.device)
    dist.all_reduce(total)
    if (expected := sum(range(here.world_size))) != total.item():
        raise ArithmeticError(f"the ranks' sum is {total.item()}, not {expected}")
    return f"{platform.node()} ({dist.get_backend()})"
