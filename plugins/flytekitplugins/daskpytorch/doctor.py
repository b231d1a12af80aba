"""The command `daskpytorch doctor`: checks whether gangs can train on this machine and on a cluster.

Each check returns its line, or raises an error. Requests to other processes have timeouts, so every check ends.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import click

from flytekitplugins.daskpytorch.checks import MAX_SECONDS
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.errors import GangError, GangStartError
from flytekitplugins.daskpytorch.node import hardware
from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.process.system import check_system
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE, Gang

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher

FIREWALL = (
    "Mend what the errors name. If ranks do not meet: they open connections to this process and to each other, on any "
    "port. Look for a firewall or a network policy. A scheduler behind a forwarded port of this machine does not do: "
    "run the doctor in the workers' network. On a slow or busy machine raise --timeout."
)
NUM_RANKS = 2


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
@click.option("--json", "is_json", is_flag=True, help="print each check as a line of JSON: what, verdict and text")
def doctor(*, scheduler: str | None, timeout: float, is_json: bool) -> int:
    """Check whether gangs can train on this machine and on a Dask cluster.

    The checks cover versions, GPUs, addresses, and a test gang of two ranks. Exit code 1 if there is a problem.
    """
    checks: dict[str, Callable[[], str]] = {
        "versions": versions,
        "GPUs": gpus,
        "ranks on this node": partial(try_here, timeout),
    }
    if scheduler is not None:
        checks["ranks on the cluster"] = partial(try_cluster, scheduler, timeout)
    has_problem = False
    for what, check in checks.items():
        try:
            verdict, said = "ok", check()
        except Exception as error:  # the other checks may find more
            # A `GangError` has the rank and its log's end.
            blame = error.__cause__ if isinstance(error.__cause__, GangError) else error
            verdict, said, has_problem = "problem", f"{type(blame).__name__}: {blame}", True
        line = f"{verdict:8} {what:21} {said}"
        print(json.dumps({"what": what, "verdict": verdict, "text": said}) if is_json else line, flush=True)
    if has_problem and not is_json:
        print(FIREWALL)
    return int(has_problem)


def versions() -> str:
    check_system()
    found = hardware.local_versions() | {"distributed": version("distributed")}
    return f"{platform.system()} {platform.machine()}, {', '.join(' '.join(each) for each in found.items())}"


def gpus() -> str:
    found = hardware.require_gpus(0, platform.node())
    if found.names:
        return "; ".join(f"{index}: {name}" for index, name in found.names.items())
    if not gpu_vendor.has_driver():
        return "none; ranks train on the CPU"
    return (
        f"none, though there is a GPU driver; ranks train on the CPU. {found.problem}. Likely causes: a torch that is "
        f"built without CUDA, a driver older than that CUDA (see {gpu_vendor.vendor_here().tool}), or "
        f"{gpu_vendor.VISIBLE}={os.environ.get(gpu_vendor.VISIBLE)!r}"
    )


def try_here(timeout: float) -> str:
    from flytekitplugins.daskpytorch.node.agent import OwnNode

    return _try_gang(OwnNode(), NUM_RANKS, timeout)


def try_cluster(address: str, timeout: float) -> str:
    from distributed import Client

    from flytekitplugins.daskpytorch.dask import cluster
    from flytekitplugins.daskpytorch.dask.agents import HOW_TO_GET_WORKERS, DaskAgents

    limit = min(timeout, cluster.CONNECT_TIMEOUT)
    cluster.greet(address, limit)
    with Client(address, timeout=limit) as client:
        num_workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not num_workers:
            raise GangStartError(f"{address} has no workers. {HOW_TO_GET_WORKERS}")
        return _try_gang(DaskAgents(client, num_workers), max(NUM_RANKS, num_workers), timeout)


def _try_gang(launcher: AgentLauncher, num_ranks: int, timeout: float) -> str:
    from flytekitplugins.daskpytorch.driver.futures import GangFutures
    from flytekitplugins.daskpytorch.driver.request import request_for
    from flytekitplugins.daskpytorch.driver.supervisor import Supervisor

    began_at, per_worker = time.monotonic(), num_ranks // launcher.num_wanted
    settings = Gang(ranks_per_worker=per_worker, max_restarts=0, start_timeout=timeout, hang_timeout=timeout)
    futures = GangFutures(Supervisor(request_for(all_reduce, (), {}, settings), launcher), num_ranks)
    places = ", ".join(dict.fromkeys(futures.result()))  # within the timeouts of the start and of a hang
    met = f"have met this process at {launcher.host} ({hardware.interface_of(launcher.host)})"
    return f"{num_ranks} on {places} {met} and summed in {time.monotonic() - began_at:.1f} s"


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
