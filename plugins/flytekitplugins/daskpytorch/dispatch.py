"""Runs a PyTorch function as a gang on any Dask cluster. Runs in the driver; its `_serve` runs on the workers.

For example `first, *others = dispatch.run(client, train, epochs=5).result()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary

from distributed import Client, Worker, WorkerPlugin, get_worker, secede
from distributed import Future as DaskFuture
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.utils import get_ip

from flytekitplugins.daskpytorch import agent, cluster, forkserver, keys, node, placement, resident, ship, worker_data
from flytekitplugins.daskpytorch.blame import GangStartError
from flytekitplugins.daskpytorch.gang import GangCancelledError, Supervisor
from flytekitplugins.daskpytorch.inbox import GangFuture
from flytekitplugins.daskpytorch.messages import AgentOrder
from flytekitplugins.daskpytorch.observer import Observer
from flytekitplugins.daskpytorch.placement import worker_order
from flytekitplugins.daskpytorch.request import Request
from flytekitplugins.daskpytorch.roster import OnFailure
from flytekitplugins.daskpytorch.screen import Screen
from flytekitplugins.daskpytorch.settings import EarlyStopping, Gang, Problems, Wandb

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.many import ModelFutures
    from flytekitplugins.daskpytorch.mirror import MirrorPaths

__all__ = ["DaskAgents", "Echo", "GangFutures", "map", "named", "request_for", "run"]

HostAndGpus = tuple[str, tuple[str, ...]]

AGENT_PRIORITY = 1_000
"""Dask's priority of an agent; other tasks have 0."""
LOOK_TIMEOUT = 2.0
"""Seconds for the scheduler to say which workers it has, to a gang that has other things to do and asks again."""
FIRST_LOOK_TIMEOUT = 30.0
"""The same for one that cannot begin without: a busy scheduler is none that is lost. Dask's own for connecting."""
NANNYS_TIME = 2.0
"""Seconds for a nanny to tell its worker to close, when both have SIGTERM."""
GPUS_TIMEOUT = 30.0
"""Seconds for a worker to say which GPUs it has; where it has some, it starts a process with torch to know."""


def run(
    client: Client,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: Literal["auto", "gloo", "nccl"] = "auto",
    pass_local_rank: bool = False,
    gang: Gang | None = None,
    **kwargs: Any,
) -> GangFutures:
    """Call a function in every rank of a new gang on the client's workers, all of which take part.

    Inside it `torch.distributed` is initialised and `current_rank()` tells which rank it is. Every call trains anew,
    and gangs may run side by side on one cluster.

    In a Flyte task that is tried again, a call goes on from the newest checkpoint of the same call in the attempt
    before: the function's first, second, ... in the task, whatever its arguments, or the one with the same `gang.key`.

    Args:
        client: Connected to any Dask cluster whose workers have this package.
        pytorch_function: What each rank calls. Its module need not exist on the workers.
        *args: Its positional arguments, the same in every rank; they must pickle.
        backend: Overrides `gang.backend` unless it is `auto`.
        pass_local_rank: Also pass `local_rank`, the rank's index among those of its worker.
        gang: How to form it.
        **kwargs: Its keyword arguments.

    Returns:
        One future per rank, in the order of the ranks; the whole has `result`, `exception` and `cancel` too.

    Raises:
        GangStartError: The cluster has no workers, or fewer than `gang.min_workers`, or its scheduler does not answer.
        ValueError: An argument is of the wrong kind, the workers have unequal numbers of GPUs while
            `gang.ranks_per_worker` is `auto`, or another gang of the task has the same `gang.key`.
        TypeError: The function or an argument cannot be pickled.
    """
    problems = _checked("dispatch.run", client, pytorch_function, gang)
    problems.unless(isinstance(pass_local_rank, bool), "pass_local_rank", pass_local_rank, "True or False")
    problems.raise_any()
    settings = gang or Gang()
    if not isinstance(backend, str) or backend != "auto":
        settings = replace(settings, backend=backend)
    agents = DaskAgents(client)
    if len(agents.workers) < (settings.min_workers or 1):
        raise GangStartError(
            f"the cluster at {agents.scheduler} has {len(agents.workers)} workers, "
            f"but needs {settings.min_workers or 1}. Start workers, or wait for them with client.wait_for_workers(n)."
        )
    settings = replace(settings, ranks_per_worker=agents.ranks_per_worker(settings))
    request = request_for(pytorch_function, args, kwargs, settings, pass_local_rank=pass_local_rank)
    request = named(request, *keys.take(pytorch_function, settings.key))
    return GangFutures(Supervisor(request, agents, [Echo()]), len(agents.workers) * request.ranks_per_worker)


def map(  # noqa: A001 - what it is to the builtin, `run` is to a call
    client: Client,
    pytorch_function: Callable[..., Any],
    experiments: Iterable[Any],
    *,
    workers: int | Callable[[Any], int] = 1,
    gang: Gang | None = None,
    stop_early: EarlyStopping | None = None,
    wandb: Wandb | None = None,
) -> ModelFutures:
    """Train one model per experiment, as many at once as the client's workers can carry, each as its own gang.

    A gang starts when all its workers are free, the largest first; smaller ones fill the gaps. Faults and restarts
    concern one gang alone: what it loses comes from the free workers.

    Args:
        client: Connected to any Dask cluster whose workers have this package.
        pytorch_function: What each rank calls with its experiment. Its module need not exist on the workers.
        experiments: What the models differ in; anything that pickles. In an order that is the same in every attempt of
            a Flyte task, since by its index a model finds its checkpoints; so in no set.
        workers: How many workers each experiment takes, or a function of the experiment that says so.
        gang: How to form each gang.
        stop_early: Stop models that fall behind the others, so that their workers are free for the next ones. A
            stopped model's future raises `StoppedEarlyError`, and `result` of the whole has None in its place. None:
            train all to their ends.
        wandb: Record each model in a Weights & Biases run of its own, whose configuration is the experiment. Each is
            called `wandb.name`, or like the function, with the experiment's index. All are in one group:
            `wandb.group`, or that name with the execution's, or with a random one in local runs. Runs of finished
            and of stopped models have exit code 0, those of failed ones 1. Offline runs are written where their rank
            0 is. In a Flyte task a `wandb.secret` must be among the task's `secret_requests`.

    Returns:
        One future per experiment, in their order, with rank 0's return value and, as `records`, what rank 0 has logged
        so far; the whole has `result`, `exception`, `cancel` and `as_completed` too. A failed experiment fails alone.

    Raises:
        ValueError: An argument is of the wrong kind, a number of workers is not a whole number from 1 up, `wandb` has
            an id, or what `run` says of `gang`.
        GangStartError: The cluster has fewer workers than some experiment takes.
        TypeError: The function or an experiment cannot be pickled.
        ImportError: `stop_early` needs Optuna, which is not installed.
    """
    from flytekitplugins.daskpytorch import many

    problems = _checked("dispatch.map", client, pytorch_function, gang)
    is_ordered = isinstance(experiments, Iterable) and not isinstance(
        experiments, (str, bytes, Mapping, set, frozenset)
    )
    problems.unless(is_ordered, "experiments", experiments, "a list or another iterable that has an order")
    problems.unless(
        isinstance(stop_early, (EarlyStopping, NoneType)), "stop_early", stop_early, "None or an EarlyStopping"
    )
    problems.unless(isinstance(wandb, (Wandb, NoneType)), "wandb", wandb, "None or a Wandb")
    problems.raise_any()
    return many.train_all(
        client,
        pytorch_function,
        list(experiments),
        workers=workers,
        settings=gang or Gang(),
        stop_early=stop_early,
        wandb=wandb,
    )


def request_for(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Gang,
    *,
    pass_local_rank: bool = False,
    code: ship.Code | None = None,
) -> Request:
    """One gang's call of a function, ready to go, but for a name where its task has several."""
    return Request(
        name=ship.name_of(function),
        call=ship.pack_call(function, args, kwargs),
        ranks_per_worker=1 if settings.ranks_per_worker == "auto" else settings.ranks_per_worker,
        settings=settings,
        pass_local_rank=pass_local_rank,
        code=code,
        keep=(function, args, kwargs),
    )


def named(request: Request, key: str) -> Request:
    """The same under a key, by which its checkpoints are found in Flyte's storage."""
    return replace(request, key=key, mirror=_checkpoint_paths(key))


def _checkpoint_paths(key: str) -> MirrorPaths | None:
    """Where Flyte's storage has the gang's checkpoints; None outside a Flyte task, where nobody waits for flytekit."""
    if "flytekit" not in sys.modules:
        return None
    from flytekitplugins.daskpytorch import flyte

    return flyte.checkpoint_paths(key)


def _checked(caller: str, client: object, function: object, gang: object) -> Problems:
    """A list of problems to add to, with those of what `run` and `map` share."""
    problems = Problems(caller)
    problems.unless(isinstance(client, Client), "client", client, "a distributed.Client")
    problems.unless(callable(function), "pytorch_function", function, "something that can be called")
    problems.unless(isinstance(gang, (Gang, NoneType)), "gang", gang, "None or a Gang")
    return problems


class GangFutures(Sequence["Future[Any]"]):
    """One future per rank of a running gang, in the order of the ranks. They are all settled when the gang ends.

    Of a gang that has ended with fewer workers than it was to have, as its `min_workers` allows, the futures of the
    ranks that there were not raise a `GangStartError`; `result` has the results of the others.
    """

    def __init__(self, supervisor: Supervisor, world_size: int) -> None:
        self._supervisor = supervisor
        self._num_ranks = world_size
        self._futures: list[GangFuture] = [GangFuture(supervisor.inbox) for _ in range(world_size)]
        for future in self._futures:
            future.set_running_or_notify_cancel()
        threading.Thread(target=self._settle, name="daskpytorch-gang", daemon=True).start()

    @overload
    def __getitem__(self, index: int) -> Future[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Future[Any]]: ...

    def __getitem__(self, index: int | slice) -> Future[Any] | Sequence[Future[Any]]:
        return self._futures[index]

    def __len__(self) -> int:
        return len(self._futures)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Every rank's return value, in rank order; of as many ranks as there were in the end.

        Raises:
            TimeoutError: The gang has not ended within `timeout` seconds; it goes on.
            GangError: It failed; where the failing rank raised an exception, that exception, caused by such an error.
            concurrent.futures.CancelledError: It was cancelled.
        """
        self._futures[0].result(timeout)
        return [future.result() for future in self._futures[: self._num_ranks]]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that `result` would raise, or None."""
        self._futures[0].exception(timeout)
        futures = self._futures[: self._num_ranks]
        return next((error for future in futures if (error := future.exception()) is not None), None)

    def done(self) -> bool:
        """Whether the gang has ended."""
        return all(future.done() for future in self._futures)

    def cancel(self) -> bool:
        """End all the ranks; False where the gang had ended before."""
        if self.done():
            return False
        self._supervisor.cancel()
        return True

    def _settle(self) -> None:
        try:
            results = self._supervisor.run()
        except BaseException as error:
            self._supervisor.inbox.drop_returned()
            cause = CancelledError(str(error)) if isinstance(error, GangCancelledError) else error
            for future in self._futures:
                future.set_exception(cause)
            return
        self._num_ranks = min(len(results), len(self._futures))
        if self._num_ranks < len(self._futures):
            self._settle_missing()
        # The last first: `result` waits for future 0 alone.
        for rank, result in reversed(list(enumerate(results[: self._num_ranks]))):
            try:
                with self._supervisor.inbox.open_returned(rank, result) as file:
                    returned = pickle.load(file)  # noqa: S301 - from our own rank, by its agent's connection
            except Exception as error:
                self._futures[rank].set_exception(error)
            else:
                self._futures[rank].set_result(returned)
                del returned
        self._supervisor.inbox.drop_returned()

    def _settle_missing(self) -> None:
        how = f"the gang ended with {self._num_ranks} of {len(self._futures)} ranks, as its min_workers allows"
        for rank, future in enumerate(self._futures[self._num_ranks :], self._num_ranks):
            text = f"{how}; there was no rank {rank}, since too few workers came, or were left"
            future.is_missing = True
            future.set_exception(GangStartError(text, rank=rank))


class DaskAgents:
    """Starts a gang's agents on the workers of a Dask cluster, one each, pinned.

    On all of them or the first `num_workers`; to `stay` for many gangs, or each for one.
    """

    def __init__(self, client: Client, num_workers: int | None = None, *, stay: bool = False) -> None:
        if client.asynchronous:
            raise TypeError("dispatch needs a synchronous client: Client(..., asynchronous=False)")
        self._client = client
        self._futures: list[DaskFuture] = []
        self.scheduler: str = client.scheduler.address
        self._stay = stay
        self._addresses = _addresses(cluster.identity(client, FIRST_LOOK_TIMEOUT))
        self.workers: Sequence[str] = sorted(self._addresses, key=worker_order)[:num_workers]
        self.num_wanted: int = num_workers or len(self.workers)
        is_local = self.scheduler.startswith("inproc:")
        self.host: str = "127.0.0.1" if is_local else get_ip(get_address_host(self.scheduler))

    def launch(self, orders: Sequence[AgentOrder], on_failure: OnFailure) -> None:
        """Submit the agents."""
        for order in orders:
            address = self._addresses[order.worker]
            # Pinned, since Dask would give it to an idle worker; should the worker go, `lost_workers` says so, because
            # the task itself would wait for ever. Before all tasks that wait for a thread, since it needs none.
            future = self._client.submit(
                _serve,
                address,
                order,  # whole, since Dask logs the arguments of a task that fails, and it hides its token
                stay=self._stay,
                workers=[address],
                allow_other_workers=False,
                priority=AGENT_PRIORITY,
                pure=False,
                retries=0,
            )
            future.add_done_callback(lambda done, worker=order.worker: _report_failure(done, worker, on_failure))
            self._futures.append(future)

    def ranks_per_worker(self, gang: Gang) -> int:
        """Ranks on each worker: as the gang says, else one per GPU that they have, else one. Asks each worker once.

        Raises:
            ValueError: Some have more GPUs than others.
        """
        if gang.ranks_per_worker != "auto":
            return gang.ranks_per_worker
        known = _known_gpus.setdefault(self._client, {})
        addresses = {worker: self._addresses[worker] for worker in self.workers}
        if strangers := [address for address in addresses.values() if address not in known]:
            seconds = min(GPUS_TIMEOUT, gang.start_timeout)
            known |= self._client.sync(_ask_for_gpus, self._client, strangers, seconds)
        # Who does not answer may do so when its agent is started, or else is named then.
        return placement.one_per_gpu({w: known[address] for w, address in addresses.items() if address in known})

    @property
    def addresses(self) -> Mapping[str, str]:
        """What users call the workers -> their addresses, also of those that have gone."""
        return self._addresses

    def present(self) -> list[str]:
        """All the workers that the scheduler knows now.

        Raises:
            OSError: It does not answer, or the client has given it up.
        """
        try:
            found = self._client.sync(self._client.scheduler.identity, callback_timeout=LOOK_TIMEOUT)
        except (RuntimeError, AttributeError) as error:  # of a client that has closed itself, for want of a scheduler
            raise ConnectionError(f"the Dask client has closed itself: {error}") from error
        self._addresses |= (here := _addresses(found))
        return list(here)

    def is_connected(self) -> bool:
        """Whether the scheduler is there, as far as the client knows."""
        return bool(self._client.status == "running")

    def close(self) -> None:
        """Forget the agents' tasks."""
        if self._client.status == "running":
            self._client.cancel(self._futures, force=True)
        self._futures.clear()


_known_gpus: WeakKeyDictionary[Client, dict[str, HostAndGpus]] = WeakKeyDictionary()
"""By the workers' addresses: hosts' names and GPUs."""


async def _ask_for_gpus(client: Client, addresses: Sequence[str], seconds: float) -> dict[str, HostAndGpus]:
    """What the workers answer that answer in time; one that is suspended does not keep the others' answers."""

    async def ask(address: str) -> dict[str, HostAndGpus]:
        with contextlib.suppress(Exception):  # whatever there is in the worker's image
            async with asyncio.timeout(seconds):
                answers: dict[str, HostAndGpus] = await client.run(node.host_and_gpus, workers=[address])
                return answers
        return {}

    answers = await asyncio.gather(*(ask(address) for address in addresses))
    return {address: found for answer in answers for address, found in answer.items()}


def _addresses(scheduler: Mapping[str, Any]) -> dict[str, str]:
    """What users call the workers -> their addresses. In-process ones have addresses without an order."""
    return {
        f"local worker {info['name']}" if address.startswith("inproc:") else address: address
        for address, info in scheduler["workers"].items()
    }


def _serve(address: str, order: AgentOrder, *, stay: bool) -> None:
    """Be the agent on one worker: a Dask task."""
    here = get_worker()
    if here.address != address:
        raise RuntimeError(f"worker {address} was lost before it could start its ranks")
    if here.nanny is not None:
        forkserver.bequeath(here.nanny)
        _run_on(here, _end_as_the_nanny_says, here)
    secede()  # an agent only waits; it must not keep one of the worker's threads from other gangs and tasks
    with _farewell(here) as leaving, worker_data.served(here) as data:
        (resident.stay if stay else agent.run)(order, leaving, data)


@contextlib.contextmanager
def _farewell(worker: Worker) -> Iterator[int]:
    """Notice that the worker is told to close: gives a file descriptor that becomes readable then.

    The worker puts its end off until the end of this context, as far as its nanny lets it (`dask worker` gives it 8 s).
    """
    farewell, name = _Farewell(), f"daskpytorch-{threading.get_ident()}"
    try:
        _run_on(worker, worker.plugin_add, farewell, name)
        yield farewell.readable
    finally:
        farewell.close()
        with contextlib.suppress(RuntimeError):  # the worker's loop has ended
            _run_on(worker, _remove_plugin, worker, name)


async def _remove_plugin(worker: Worker, name: str) -> None:
    if name in worker.plugins:  # else the worker is closing, and has removed it
        await worker.plugin_remove(name)


async def _end_as_the_nanny_says(worker: Worker) -> None:
    """Have a worker below a nanny wait for the nanny's word on SIGTERM, and leave Ctrl-C to it.

    Where both have the signal at once the nanny closes the worker in good order, and the ranks can save; by the signal
    itself they would go before. A worker that has it alone, as when Dask finds that it takes too much memory, ends by
    it after all, and the nanny brings another.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        if worker.status not in (Status.closing, Status.closing_gracefully, Status.closed):
            loop.remove_signal_handler(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with contextlib.suppress(RuntimeError, ValueError):  # its loop is not the main thread's, which hears of signals
        loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(NANNYS_TIME, end))
        signal.signal(signal.SIGINT, lambda *_: None)  # ignored, it would be so by what is started here


class _Farewell(WorkerPlugin):  # type: ignore[misc]
    def __init__(self) -> None:
        self.readable, self._writable = os.pipe()
        self._lock = threading.Lock()  # nothing is written once the pipe is closed: its number may be another file's
        self._done = threading.Event()

    async def teardown(self, worker: Worker) -> None:
        """Called when the worker closes, and when the agent has ended."""
        with self._lock:
            if self._done.is_set():
                return
            os.write(self._writable, b".")
        await asyncio.to_thread(self._done.wait)

    def close(self) -> None:
        """Let the worker end."""
        with self._lock:
            self._done.set()
            os.close(self.readable)
            os.close(self._writable)


def _run_on(worker: Worker, coroutine: Callable[..., Any], *args: Any) -> None:
    """Have a coroutine run on the worker's event loop, in order, from a task's thread.

    Not waited for: a worker with other things to do would make a gang fail that needs nothing of it.
    """
    asyncio.run_coroutine_threadsafe(coroutine(*args), worker.loop.asyncio_loop)


def _report_failure(done: DaskFuture, worker: str, on_failure: OnFailure) -> None:
    if done.status == "error":
        error = done.exception()
        on_failure(worker, error if isinstance(error, Exception) else RuntimeError(str(error)))
    elif done.status in ("cancelled", "lost"):
        on_failure(worker, RuntimeError("the scheduler was lost"))


class Echo(Observer):
    """Writes what the ranks write to this process's standard error, with their ranks, and what happens to the gang."""

    def noted(self, text: str) -> None:
        """Say it."""
        Screen().write(f"{text}\n")

    def wrote(self, rank: int, lines: list[str]) -> None:
        """Pass it on."""
        Screen().write("".join(f"[rank {rank}] {line}\n" for line in lines))
