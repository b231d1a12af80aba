"""The ways to keep a sharded state that `sharded.py` compares; its programs run this file.

    python benchmarks/sharded_ways.py gang|cached|ray ORDER   # ORDER is JSON; says "@record" and JSON for all it finds

The state is that of a model of linear layers, sharded by FSDP2, and of its AdamW: a third each are parameters and the
two moments. Each way saves it twice, to a folder of its own in the bucket: the first warms up. Then new ranks with
other weights load it, as many and half as many, and compare a sum of a layer's weights with that of those saved.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = 8
SETTLE = 1.0
"""Seconds for the driver to commit what the ranks have written, before the next way begins."""
Wait = Callable[[], object]


# ---- The state ------------------------------------------------------------------------------------------------------


def made(size: int, seed: int) -> tuple[Any, Any]:
    """A sharded model and its optimizer, with moments, of `size` bytes altogether."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    width = math.isqrt(size // (12 * LAYERS))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any, *, full: bool = False) -> dict[str, Any]:
    """As `torch.distributed.checkpoint.state_dict` gives it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=full, cpu_offload=full)
    )
    return {"model": weights, "optimizer": moments}


def put_back(model: Any, optimizer: Any, state: dict[str, Any], *, full: bool = False) -> None:
    """Into the model and its optimizer."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=full),
    )


def checksum(model: Any) -> float:
    """What tells its weights from others."""
    return float(model[LAYERS - 1].weight.detach().full_tensor().double().sum())


# ---- The ways -------------------------------------------------------------------------------------------------------


class Ours:
    """`save_sharded`."""

    def save(self, model: Any, optimizer: Any, uri: str, step: int) -> Wait:
        from flytekitplugins.daskpytorch import current_rank

        checkpoint = current_rank().checkpoint
        checkpoint.save_sharded(state_of(model, optimizer), step)
        return checkpoint.flush

    def load(self, model: Any, optimizer: Any, uri: str) -> None:
        from flytekitplugins.daskpytorch import current_rank

        state = state_of(model, optimizer)
        if current_rank().checkpoint.load_sharded(state) is None:
            raise RuntimeError("there was nothing to load")
        put_back(model, optimizer, state)


class Gathered:
    """Our `save`, of the whole state on rank 0."""

    def save(self, model: Any, optimizer: Any, uri: str, step: int) -> Wait:
        from flytekitplugins.daskpytorch import current_rank

        checkpoint = current_rank().checkpoint
        checkpoint.save(state_of(model, optimizer, full=True), step)
        return checkpoint.flush

    def load(self, model: Any, optimizer: Any, uri: str) -> None:
        from flytekitplugins.daskpytorch import current_rank

        state = current_rank().checkpoint.load()
        if state is None:
            raise RuntimeError("there was nothing to load")
        put_back(model, optimizer, state, full=True)


class Dcp:
    """`async_save` of torch, with a writer."""

    def __init__(self, *, in_process: bool = False) -> None:
        self._in_process = in_process

    def save(self, model: Any, optimizer: Any, uri: str, step: int) -> Wait:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self._in_process else AsyncCheckpointerType.THREAD
        writer = self.writer(f"{uri}/{step}")
        saving: Any = checkpoint.async_save(
            state_of(model, optimizer), storage_writer=writer, async_checkpointer_type=kind
        )
        return saving.result  # type: ignore[no-any-return]

    def load(self, model: Any, optimizer: Any, uri: str) -> None:
        from torch.distributed import checkpoint

        state = state_of(model, optimizer)
        checkpoint.load(state, storage_reader=self.reader(f"{uri}/1"))
        put_back(model, optimizer, state)

    def writer(self, uri: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(uri)

    def reader(self, uri: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(uri)


class Connector(Dcp):
    """The same with Amazon's writer."""

    def writer(self, uri: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(region=os.environ["AWS_REGION"], path=uri)
        writer.fs = self._files()
        return writer

    def reader(self, uri: str) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(region=os.environ["AWS_REGION"], path=uri)
        reader.fs = self._files()
        return reader

    def _files(self) -> Any:
        """Where the endpoint may be named, which the writer leaves to AWS."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        config = S3ClientConfig(force_path_style=True)
        client = S3Client(os.environ["AWS_REGION"], endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        return S3FileSystem(os.environ["AWS_REGION"], s3_client=client)


WAYS: dict[str, Any] = {
    "ours": Ours(),
    "cached": Ours(),
    "gathered": Gathered(),
    "dcp": Dcp(),
    "dcp process": Dcp(in_process=True),
    "connector": Connector(),
}
KEPT = ("ours", "cached", "gathered")
"""Those of which the driver says when they are kept."""


# ---- In ranks -------------------------------------------------------------------------------------------------------


class Peak:
    """How much more memory this process comes to hold."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        self._before = self._read("VmRSS")

    def grown(self) -> int:
        """Bytes."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
        return 1024 * int(line.split()[1])


def save_all(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Save by each way; one record for each."""
    from torch import distributed

    from flytekitplugins.daskpytorch import current_rank

    model, optimizer = made(order["size"], seed=0)
    total, records = checksum(model), []
    for number, way in enumerate(order["ways"]):
        for step in range(2):
            distributed.barrier()
            current_rank().log({"way": way}, step=2 * number + step)
            time.sleep(SETTLE / 4)  # until the driver knows
            distributed.barrier()
            peak, began = Peak(), time.time()
            named = 2 * number + step if way in KEPT else step
            finish = WAYS[way].save(model, optimizer, f"{order['uri']}/{way.replace(' ', '-')}", named)
            returned = time.time()
            finish()
            ended = time.time()
            distributed.barrier()
            while way in KEPT and named not in {kept.step for kept in current_rank().checkpoint.list()}:
                time.sleep(0.05)  # the driver has not got all of it
            time.sleep(SETTLE)
        records.append(
            {
                "way": way,
                "step": 2 * number + 1,
                "began": began,
                "stall": returned - began,
                "ended": ended,
                "memory": peak.grown(),
                "checksum": total,
            }
        )
    return records


def load_all(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Load what each way has saved; one record for each."""
    import s3fs  # noqa: F401 - now, or the first way would pay for the second
    from torch import distributed

    records = []
    for way in order["ways"]:
        model, optimizer = made(order["size"], seed=1)
        distributed.barrier()
        began = time.time()
        WAYS[way].load(model, optimizer, f"{order['uri']}/{way.replace(' ', '-')}")
        distributed.barrier()
        seconds = time.time() - began
        if checksum(model) != order["checksum"]:
            raise RuntimeError(f"{way} has loaded other weights than were saved")
        records.append({"way": way, "load": seconds})
    return records


def save_and_start_again(order: dict[str, Any]) -> tuple[dict[str, Any]]:
    """Save, and be killed; in the next attempt of the gang, in new ranks, load what was saved."""
    from torch import distributed

    rank, folder = distributed.get_rank(), Path(order["folder"])
    saved = [folder / f"{number}.json" for number in range(distributed.get_world_size())]
    if not saved[rank].exists():
        [record] = save_all(order)
        saved[rank].write_text(json.dumps(record))
        distributed.barrier()  # all have written theirs
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()  # which fails, as a training's next collective would
    record = json.loads(saved[rank].read_text())
    [loaded] = load_all(order | {"checksum": record["checksum"]})
    return (record | loaded,)


# ---- Drivers --------------------------------------------------------------------------------------------------------


def say(record: dict[str, Any]) -> None:
    """Tell `sharded.py`."""
    print("@record", json.dumps(record), flush=True)


class Counted:
    """What comes over the driver's connections, and how much its memory grows, since a way has begun."""

    def __init__(self) -> None:
        from flytekitplugins.daskpytorch.protocol.framing import Connection

        self.num_bytes = 0
        self.peak = Peak()
        self._lock = threading.Lock()
        usual = Connection.read

        def read(connection: Connection, size: int) -> bytes:
            data = usual(connection, size)
            with self._lock:
                self.num_bytes += len(data)
            return data

        Connection.read = read  # type: ignore[method-assign]

    def begin(self) -> None:
        """A way has begun."""
        self.num_bytes, self.peak = 0, Peak()


class Launch:
    """Runs functions as gangs that have one state, and sees when their saves are kept."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._counted = Counted()
        self._kept: dict[int, tuple[float, int, int]] = {}

    def run(
        self, function: Any, num_ranks: int, told: dict[str, Any], **settings: Any
    ) -> list[tuple[dict[str, Any], ...]]:
        """What its ranks return, way by way."""
        from flytekitplugins.daskpytorch.driver.futures import GangFutures
        from flytekitplugins.daskpytorch.driver.request import named, request_for
        from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
        from flytekitplugins.daskpytorch.node.own_node import OwnNode
        from flytekitplugins.daskpytorch.settings import Gang

        uri = f"{self._order['uri']}/gang"
        options = {"max_restarts": 0} | settings
        request = request_for(
            function, (self._order | told,), {}, Gang(ranks_per_worker=num_ranks, checkpoint_uri=uri, **options)
        )
        supervisor = Supervisor(named(request, "state"), OwnNode(), [self._clock()])
        return list(zip(*GangFutures(supervisor, num_ranks).result(), strict=True))

    def _clock(self) -> Any:
        from flytekitplugins.daskpytorch.protocol.observer import Observer

        counted, kept = self._counted, self._kept

        class Clock(Observer):
            def logged(self, record: Any) -> None:
                if record.rank == 0:
                    counted.begin()

            def kept(self, step: int) -> None:
                kept[step] = (time.time(), counted.num_bytes, counted.peak.grown())

        return Clock()

    def said(self, together: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        """What saving by one way took, of what all ranks have found."""
        way, step = together[0]["way"], together[0]["step"]
        by_driver = self._kept[step] if way in KEPT else (max(record["ended"] for record in together), 0, 0)
        return {
            "way": way,
            "stall": max(record["stall"] for record in together),
            "committed": by_driver[0] - min(record["began"] for record in together),
            "through the driver": by_driver[1],
            "driver's memory": by_driver[2],
            "rank 0's memory": together[0]["memory"],
        }


def gang(order: dict[str, Any]) -> None:
    """Save in one gang, load in two others."""
    launch = Launch(order)
    saved = launch.run(save_all, order["ranks"], {})
    for together in saved:
        say(launch.said(together))
    total = saved[0][0]["checksum"]
    for what, num_ranks in (("same size", order["ranks"]), ("half size", order["ranks"] // 2)):
        for together in launch.run(load_all, num_ranks, {"checksum": total}):
            say({"way": together[0]["way"], what: max(record["load"] for record in together)})


def cached(order: dict[str, Any]) -> None:
    """Save, and load in the next attempt of the same gang, whose nodes have copies of what they wrote."""
    launch = Launch(order)
    folder = tempfile.mkdtemp(dir=os.environ["TMPDIR"])
    told = {"ways": ["cached"], "folder": folder}
    settings = {"shard_cache": f"{folder}/shards", "max_restarts": 1}
    [together] = launch.run(save_and_start_again, order["ranks"], told, **settings)
    say(launch.said(together) | {"same size": max(record["load"] for record in together)})


def ray(order: dict[str, Any]) -> None:
    """The same by Ray Train: each rank saves its shards to its disk, and reports the folder."""
    import ray as engine
    from pyarrow.fs import S3FileSystem
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    files = S3FileSystem(
        endpoint_override=os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"),
        scheme="http",
        region=os.environ["AWS_REGION"],
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
    )
    folder = tempfile.mkdtemp(dir=os.environ["TMPDIR"])

    def run(function: Any, num_ranks: int, name: str, **more: Any) -> list[dict[str, Any]]:
        trainer = TorchTrainer(
            function,
            train_loop_config=order | {"folder": folder, "files": files, "name": name} | more,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=num_ranks, use_gpu=False),
            run_config=RunConfig(
                name=name, storage_path=f"{order['uri'].removeprefix('s3://')}/ray", storage_filesystem=files
            ),
        )
        trainer.fit()
        return [json.loads(Path(folder, f"{name}-{rank}").read_text()) for rank in range(num_ranks)]

    temporary = str(Path(os.environ["TMPDIR"], "ray"))
    engine.init("local", num_cpus=order["ranks"] + 1, include_dashboard=False, _temp_dir=temporary)
    saved = run(ray_save, order["ranks"], "save")
    say(
        {
            "way": "ray",
            "stall": max(record["stall"] for record in saved),
            "committed": max(record["ended"] for record in saved) - min(record["began"] for record in saved),
            "through the driver": 0,
            "driver's memory": 0,
            "rank 0's memory": saved[0]["memory"],
        }
    )
    for what, num_ranks in (("same size", order["ranks"]), ("half size", order["ranks"] // 2)):
        name = what.replace(" ", "-")
        loaded = run(ray_load, num_ranks, name, path=saved[0]["path"], checksum=saved[0]["checksum"])
        say({"way": "ray", what: max(record["load"] for record in loaded)})
    engine.shutdown()


def ray_save(config: dict[str, Any]) -> None:
    """In a rank."""
    from ray import train
    from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode
    from torch import distributed
    from torch.distributed import checkpoint

    model, optimizer = made(config["size"], seed=0)
    total = checksum(model)
    for step in range(2):
        folder = tempfile.mkdtemp()
        distributed.barrier()
        peak, began = Peak(), time.time()
        checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
        train.report(
            {"step": step}, Checkpoint.from_directory(folder), checkpoint_upload_mode=CheckpointUploadMode.ASYNC
        )
        returned = time.time()
        reported = train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        ended = time.time()
        distributed.barrier()
    record = {
        "began": began,
        "stall": returned - began,
        "ended": ended,
        "memory": peak.grown(),
        "checksum": total,
        "path": reported[-1].checkpoint.path,
    }
    Path(config["folder"], f"save-{distributed.get_rank()}").write_text(json.dumps(record))


def ray_load(config: dict[str, Any]) -> None:
    """In a rank."""
    from ray.train import Checkpoint
    from torch import distributed
    from torch.distributed import checkpoint

    model, optimizer = made(config["size"], seed=1)
    distributed.barrier()
    began = time.time()
    with Checkpoint(config["path"], config["files"]).as_directory() as folder:
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=folder)
        put_back(model, optimizer, state)
        distributed.barrier()
    seconds = time.time() - began
    if checksum(model) != config["checksum"]:
        raise RuntimeError("Ray has loaded other weights than were saved")
    Path(config["folder"], f"{config['name']}-{distributed.get_rank()}").write_text(json.dumps({"load": seconds}))


if __name__ == "__main__":
    {"gang": gang, "cached": cached, "ray": ray}[sys.argv[1]](json.loads(sys.argv[2]))
    say({})
