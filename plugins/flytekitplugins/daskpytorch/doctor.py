"""The command `daskpytorch doctor`: checks whether gangs can train on this machine and on a cluster.

Each check yields findings. Requests to other processes have timeouts, so every check ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

import click

from flytekitplugins.daskpytorch.checks import MAX_SECONDS
from flytekitplugins.daskpytorch.context import current_rank
from flytekitplugins.daskpytorch.errors import GangError
from flytekitplugins.daskpytorch.node.hardware import local_versions
from flytekitplugins.daskpytorch.process.system import runs_gangs
from flytekitplugins.daskpytorch.protocol.observer import Observer
from flytekitplugins.daskpytorch.settings import SCHEDULER_VARIABLE, Gang

if TYPE_CHECKING:
    from distributed import Client

    from flytekitplugins.daskpytorch.protocol.host import AgentLauncher

Verdict = Literal["ok", "warning", "problem"]

CONNECT_TIMEOUT = 10.0
"""Seconds at most for the scheduler to answer, and for all workers to report their versions."""
GRACE = 20.0
"""Seconds for the test gang to end after its own timeouts, and again after a cancellation."""
FIREWALL = (
    "Ranks open connections to this process and to each other, on any port: look for a firewall or a network policy. "
    "On a slow or busy machine raise --timeout."
)
MAX_NAMES = 4
NUM_RANKS = 2
NUM_VALUES = 2**18


@dataclass(frozen=True)
class Finding:
    what: str
    value: str
    verdict: Verdict = "ok"
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
@click.option("--gang/--no-gang", default=True, help="run or skip the test gang of two ranks, which takes seconds")
@click.option(
    "--timeout",
    type=click.FloatRange(0, MAX_SECONDS, min_open=True),
    default=60.0,
    metavar="SECONDS",
    show_default=True,
    help="timeout for the test gang, and, up to 10 s, for the scheduler's answer",
)
@click.option("--json", "is_json", is_flag=True, help="print the findings as JSON: what, value, verdict and advice")
def doctor(*, scheduler: str | None, gang: bool, timeout: float, is_json: bool) -> int:
    """Check whether gangs can train on this machine and on a Dask cluster.

    The checks cover versions, GPUs, addresses, and a test gang of two ranks. Exit code 1 if there is a problem.
    """
    found = []
    for finding in examine(scheduler, with_gangs=gang, timeout=timeout):
        found.append(finding)
        if not is_json:
            advice = f"\n{'':37} {finding.advice}" if finding.advice else ""
            print(f"{finding.verdict:8} {finding.what:28} {finding.value}{advice}", flush=True)
    if is_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    return int(any(finding.verdict == "problem" for finding in found))


def examine(scheduler: str | None, *, with_gangs: bool = True, timeout: float = 60.0) -> Iterator[Finding]:
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": _versions,
        "GPUs": _gpus,
        "ranks on this node": lambda: _gang_here(timeout) if with_gangs else (),
        "scheduler": lambda: examine_cluster(scheduler, with_gangs=with_gangs, timeout=timeout),
    }
    for what, check in checks.items():
        yield from surviving(what, check)


def surviving(what: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        advice = "The check ended with this error. Mend what the error names, and run the check again."
        yield Finding(what, f"{type(error).__name__}: {error}", "problem", advice)


# ---- This machine


def _versions() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}"
    advice = "Gangs run on Linux; here train with DASKPYTORCH_DEBUG=1, in one rank."
    yield Finding("system", system) if runs_gangs() else Finding("system", system, "problem", advice)
    versions = local_versions() | {"python": platform.python_version(), "distributed": version("distributed")}
    yield Finding("versions", ", ".join(f"{name} {found}" for name, found in versions.items()))


def _gpus() -> Iterator[Finding]:
    from flytekitplugins.daskpytorch.node import hardware

    gpus = hardware.require_gpus(0, platform.node())
    if gpus.names:
        yield Finding("GPUs", "; ".join(f"{index}: {name}" for index, name in gpus.names.items()))
    elif not hardware.has_driver():
        yield Finding("GPUs", "none; ranks train on the CPU")
    else:
        advice = (
            "The machine has a GPU driver, but torch finds no GPU. Likely causes: a torch that is built without CUDA, "
            "a driver older than that CUDA (see nvidia-smi), or "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}."
        )
        yield Finding("GPUs", f"none; ranks train on the CPU. {gpus.problem}".strip(), "warning", advice)


def _gang_here(timeout: float) -> Iterator[Finding]:
    from flytekitplugins.daskpytorch.node import fork_client
    from flytekitplugins.daskpytorch.node.agent import OwnNode

    try:
        yield try_gang("ranks on this node", OwnNode(), NUM_RANKS, timeout)
    finally:
        fork_client.shutdown()


# ---- The cluster


def examine_cluster(address: str | None, *, with_gangs: bool = True, timeout: float = 60.0) -> Iterator[Finding]:
    if address is None:
        yield Finding("scheduler", f"none named: neither --scheduler nor {SCHEDULER_VARIABLE}")
        return
    from distributed import Client

    from flytekitplugins.daskpytorch.dask import cluster

    limit = min(timeout, CONNECT_TIMEOUT)
    with contextlib.ExitStack() as stack:
        try:
            cluster.greet(address, limit)
            client = stack.enter_context(Client(address, timeout=limit))  # warns if Dask's own versions differ
        except (OSError, TimeoutError, ValueError) as error:
            advice = (
                "Is the address right (tcp://HOST:8786), and the port open to this machine? Has the scheduler started: "
                "in Kubernetes see its pod's log; an image without this package lacks the command that Flyte starts "
                "(Flyte 1: dask-scheduler, Flyte 2: dask scheduler)."
            )
            cause = f" ({error.__cause__})" if isinstance(error.__cause__, OSError) else ""
            yield Finding("scheduler", f"no answer from {address}: {error}{cause}", "problem", advice)
            return
        yield from _connected(client, with_gangs, timeout)


def _connected(client: Client, with_gangs: bool, timeout: float) -> Iterator[Finding]:
    from distributed.comm import get_address_host

    from flytekitplugins.daskpytorch.dask.agents import DaskAgents

    agents = DaskAgents(client)
    yield Finding("scheduler", f"{agents.scheduler}, workers: {len(agents.workers)}")
    if not agents.workers:
        advice = "Start dask worker with this package; in Kubernetes: are the worker pods pending, or do they crash?"
        yield Finding("workers", "none", "problem", advice)
        return
    yield (versions := _versions_on(client, min(timeout, CONNECT_TIMEOUT)))
    hosts = [get_address_host(address) for address in agents.addresses.values()]
    yield (meeting := meeting_point("meeting point on the cluster", agents.host, hosts))
    if not with_gangs:
        return
    if "problem" in (versions.verdict, meeting.verdict):
        advice = "Mend the problems above first: a gang would be refused, or would not meet."
        yield Finding("ranks on the cluster", "not tried", "warning", advice)
        return
    num_workers = min(NUM_RANKS, len(agents.workers))
    yield try_gang("ranks on the cluster", DaskAgents(client, num_workers), NUM_RANKS // num_workers, timeout)


def _versions_on(client: Client, timeout: float) -> Finding:
    what, mine = "versions on the cluster", local_versions()
    try:
        # `get_versions` needs only Dask on the workers.
        found = client.sync(client.get_versions, packages=[*(mine.keys() - {"python"})], callback_timeout=timeout)
    except TimeoutError:
        advice = "A worker is suspended, swaps, or holds the GIL: see the workers' logs, and restart what hangs."
        return Finding(what, f"some workers did not answer within {timeout:g} s", "problem", advice)
    packages = {who: each["packages"] for who, each in found["workers"].items()}
    packages["the scheduler"] = found["scheduler"]["packages"] | {"torch": mine["torch"]}  # which needs no torch
    differing = []
    for who, theirs in packages.items():
        theirs["python"] = ".".join(theirs["python"].split(".")[:2])
        differing += [f"{name} {theirs[name]} on {who}" for name, here in mine.items() if theirs[name] != here]
    if differing:
        advice = "Use one image, or one set of pinned packages, for all processes."
        here = ", ".join(f"{name} {found}" for name, found in mine.items())
        return Finding(what, f"{_few(differing)}; here: {here}", "problem", advice)
    return Finding(what, "those of the scheduler and of all workers are as here")


def _few(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMES
    return f"{', '.join(names[:MAX_NAMES])}{f' and {rest} more' if rest > 0 else ''}"


def meeting_point(what: str, host: str, worker_hosts: Iterable[str]) -> Finding:
    from flytekitplugins.daskpytorch.node.hardware import interface_of

    interface = interface_of(host)
    value = f"{host} (interface {interface or 'unknown'})"
    away = [other for other in dict.fromkeys(worker_hosts) if interface_of(other) is None]
    if interface == "lo" and away:
        advice = (
            "The scheduler is reached through this machine's loopback address, as by a forwarded port, so that workers "
            "elsewhere cannot connect to this process. Run it in their network, and name the scheduler's address there."
        )
        value = f"{value}, which the workers on {_few(away)} cannot reach"
        return Finding(what, value, "problem", advice)
    return Finding(what, value)


# ---- Two ranks


def try_gang(what: str, launcher: AgentLauncher, ranks_per_worker: int, timeout: float) -> Finding:
    from flytekitplugins.daskpytorch.driver.futures import GangFutures
    from flytekitplugins.daskpytorch.driver.request import request_for
    from flytekitplugins.daskpytorch.driver.supervisor import Supervisor

    settings = Gang(ranks_per_worker=ranks_per_worker, max_restarts=0, start_timeout=timeout, hang_timeout=timeout)
    start = _Start()
    request = replace(request_for(all_reduce, (), {}, settings), observers=[start])
    futures = GangFutures(Supervisor(request, launcher), NUM_RANKS)
    limit = 2 * timeout + GRACE  # one timeout for the start, one for a hang
    try:
        seconds, places = zip(*futures.result(limit), strict=True)
    except Exception as error:
        futures.cancel()
        wait(futures, GRACE)
        return Finding(what, _in_words(error, limit), "problem", FIREWALL)
    return Finding(
        what,
        f"{NUM_RANKS} ranks on {', '.join(dict.fromkeys(places))} met in {start.seconds:.1f} s, imports of torch "
        f"included; an all-reduce of {NUM_VALUES * 4 // 2**20} MiB takes {1000 * max(seconds):.1f} ms",
    )


def all_reduce() -> tuple[float, str]:
    """Do two all-reduces in a rank. Return the seconds of the second one, and the rank's host, backend and threads.

    Raises `ArithmeticError` if the first all-reduce has a wrong sum.
    """
    import torch
    import torch.distributed as dist

    here = current_rank()
    values = torch.full((NUM_VALUES,), 10.0**here.rank, device=here.device)
    dist.all_reduce(values)
    expected = sum(10.0**rank for rank in range(here.world_size))
    if not bool((values == expected).all()):
        raise ArithmeticError(
            f"the sum over {here.world_size} ranks is {values.min()} to {values.max()}, not {expected}"
        )
    began_at = time.perf_counter()
    dist.all_reduce(values)
    values[0].item()  # waits for the GPU
    return time.perf_counter() - began_at, (
        f"{platform.node()} ({dist.get_backend()}; threads of each: {torch.get_num_threads()})"
    )


class _Start(Observer):
    seconds = 0.0

    def on_formed(self, seconds: float) -> None:
        self.seconds = seconds


def _in_words(error: Exception, limit: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"the ranks had not met and summed within {limit:g} s"
    blame = error.__cause__ if isinstance(error.__cause__, GangError) else error  # has the rank and its log's end
    return f"{type(blame).__name__}: {blame}"
