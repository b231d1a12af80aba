"""What runs in a rank: environment, process group, the user's function, its result. A child of the fork server."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import cloudpickle

from flytekitplugins.daskpytorch import context, flyte, ship, tracking
from flytekitplugins.daskpytorch.blame import Failure
from flytekitplugins.daskpytorch.context import LogRecord, RankContext
from flytekitplugins.daskpytorch.flyte import FlyteSettings, TaskOutput
from flytekitplugins.daskpytorch.placement import Place

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.tracking import RunSettings

__all__ = ["STOPPED", "Job", "RankOrder", "environment", "main"]

STOPPED = 143
"""The exit code of a rank that ended because it was told to (128 + SIGTERM, as shells have it)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for all the ranks of a gang. Holds the user's objects only as bytes."""

    gang: str
    """The gang's name."""
    generation: int
    """Which incarnation of the gang; each has rendezvous keys of its own."""
    call: bytes
    """From `ship.pack_call`."""
    pass_local_rank: bool
    """Call the function with `local_rank=`."""
    backend: str
    store: tuple[str, int]
    """Host and port of the rendezvous store."""
    timeout: float
    """Seconds for all ranks to meet."""
    flyte: FlyteSettings | None
    """None outside a Flyte task: results then travel pickled, from every rank."""
    tracking: RunSettings | None


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """All that one rank is told; the first message on its channel."""

    place: Place
    job: Job
    code: str
    """Where the project's sources lie, unpacked."""
    directory: str
    """The working directory."""
    environment: dict[str, str]
    """The whole of the rank's environment."""


def environment(base: Mapping[str, str], place: Place, job: Job, interface: str | None) -> dict[str, str]:
    """A rank's environment: the worker's own, the execution's names, and the variables that PyTorch code expects."""
    host, port = job.store
    env = dict(base)
    if job.flyte is not None:
        env |= job.flyte.environment
    env |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # env:// must join the driver's store, not open one in rank 0
        "OMP_NUM_THREADS": str(place.num_threads),
        "CUDA_VISIBLE_DEVICES": place.gpu or "",
    }
    if interface is not None:
        # gloo listens where the host's name resolves to, which on many machines is a loopback address.
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    return env


def main(channel: Connection) -> int:
    """Run one rank from its first message to its exit code."""
    order: RankOrder = channel.recv()
    link = _Link(channel)
    tracker: tracking.Tracker | None = None
    try:
        _settle_in(order)
        if order.job.tracking is not None and order.place.rank == 0:
            tracker = tracking.Tracker(order.job.tracking)
        link.obey(tracker)
        with flyte.entered(order.job.flyte) as ctx:
            call = ship.unpack_call(order.job.call)
            _join_gang(order)
            context.enter(_context(order, link, tracker))
            link.send("ready")
            returned = call.function(*call.args, **_keywords(order, call, ctx))
            link.send("result", _payload(order, returned, ctx))
    except BaseException as error:
        link.send("failure", Failure.of(error, time.time(), order.code))
        _wind_up(tracker, 1)
        return 1
    # Nobody leaves before all have finished: the others may still be talking to this rank.
    link.ended.wait()
    _wind_up(tracker, 0)
    return 0


class _Link:
    """The rank's end of its channel: reports go out, orders come in."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.ended = threading.Event()
        """Set when every rank of the gang has finished."""

    def send(self, kind: str, value: object = None) -> None:
        """Report to the driver. Where nobody listens any more, the rank is about to be ended."""
        data = cloudpickle.dumps((kind, value))
        with self._lock, contextlib.suppress(OSError):
            self._channel.send_bytes(data)

    def obey(self, tracker: tracking.Tracker | None) -> None:
        """Follow orders from now on, in a thread, since the main thread may be inside a collective."""
        threading.Thread(target=self._obey, args=(tracker,), name="daskpytorch-orders", daemon=True).start()

    def _obey(self, tracker: tracking.Tracker | None) -> None:
        try:
            while self._channel.recv() != "stop":
                self.ended.set()
        except (EOFError, OSError):  # the agent died
            os._exit(STOPPED)
        if tracker is not None:
            tracker.finish(1)
        os._exit(STOPPED)


def _settle_in(order: RankOrder) -> None:
    import torch

    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    sys.path.insert(0, order.code)
    sys.argv[1:] = []
    faulthandler.enable()  # a rank that crashes in C code says where, in its log
    torch.set_num_threads(order.place.num_threads)


def _join_gang(order: RankOrder) -> None:
    import torch
    from torch import distributed
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = order.job.store
    timeout = timedelta(seconds=order.job.timeout)
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    device = torch.device("cuda", 0) if order.job.backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        order.job.backend,
        store=PrefixStore(f"{order.job.gang}/{order.job.generation}", store),
        rank=order.place.rank,
        world_size=order.place.world_size,
        device_id=device,
    )


def _context(order: RankOrder, link: _Link, tracker: tracking.Tracker | None) -> RankContext:
    def sink(record: LogRecord) -> None:
        if tracker is not None:
            tracker.log(record)
        plain = {name: value for name, value in record.metrics.items() if isinstance(value, (int, float, str))}
        link.send("log", LogRecord(**{**vars(record), "metrics": plain}))

    place = order.place
    return RankContext(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        sink=sink,
    )


def _keywords(order: RankOrder, call: ship.Call, ctx: Any) -> dict[str, Any]:
    keywords = dict(call.kwargs)
    if order.job.flyte is not None:
        keywords |= flyte.arguments(order.job.flyte, ctx)
    if order.job.pass_local_rank:
        keywords["local_rank"] = order.place.local_rank
    return keywords


def _payload(order: RankOrder, returned: Any, ctx: Any) -> object:
    """What the driver needs of the return value: in a Flyte task rank 0's literals, else every rank's value."""
    if order.job.flyte is None:
        return _dumps(returned)
    if order.place.rank != 0:
        return None
    literal_map = flyte.literals(order.job.flyte, returned, ctx)
    return TaskOutput(literal_map=literal_map.to_flyte_idl().SerializeToString(), decks=flyte.decks(ctx))


def _dumps(value: Any) -> bytes:
    """Pickle a result; CUDA tensors go as CPU tensors, since the driver may have no GPU."""
    import torch

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.is_cuda:
                return obj.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer, protocol=5).dump(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled: {error}. "
            "Return plain data or tensors, such as a state_dict instead of a model."
        ) from error
    return buffer.getvalue()


def _wind_up(tracker: tracking.Tracker | None, exit_code: int) -> None:
    if tracker is not None:
        tracker.finish(exit_code)
    atexit._run_exitfuncs()  # noqa: SLF001 - the fork server ends this process by os._exit, which runs none
    sys.stdout.flush()
    sys.stderr.flush()
