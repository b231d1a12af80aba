"""Ways to save a state, which `checkpoints.py` compares in drivers that run this file: checkpoint_ways.py CLUSTER.

A driver receives an order as JSON. The gang saves the state by each way twice, to separate folders. The first save
warms up. Then new ranks with other weights load the saved state, and compare a checksum of the weights with that of the
saved ones.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LAYERS = 8
SETTLE = 1.0
"""Pause in seconds before the next way, in which the driver commits the saved state."""
Wait = Callable[[], object]
Record = dict[str, Any]


# ---- States ---------------------------------------------------------------------------------------------------------


class Sharded:
    """Model of linear layers under FSDP2, with AdamW. Parameters and the two moments are a third of the state each."""

    def __init__(self, size: int, seed: int) -> None:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        width = math.isqrt(size // (12 * LAYERS))
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return the state dictionaries of model and optimizer."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def put_back(self, state: dict[str, Any]) -> None:
        """Load the state dictionary."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def checksum(self) -> float:
        """Return a checksum of the weights."""
        return float(self.model[LAYERS - 1].weight.detach().full_tensor().double().sum())


class Whole:
    """State of ten tensors, which each rank has in full, on its GPU if there is one."""

    def __init__(self, size: int, seed: int) -> None:
        import torch

        device, value = "cuda" if torch.cuda.is_available() else "cpu", float(1 - seed)
        self.tensors = {f"layer {index}": torch.full((size // 40,), value, device=device) for index in range(10)}

    def state(self) -> dict[str, Any]:
        """Return the tensors."""
        return self.tensors

    def put_back(self, state: dict[str, Any]) -> None:
        """Copy the state into the tensors."""
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])

    def checksum(self) -> float:
        """Return the sum of a tensor."""
        return float(self.tensors["layer 9"].double().sum())


# ---- Ways -----------------------------------------------------------------------------------------------------------


class Ours:
    """Way of this package: `save_sharded`, or `save` for a whole state."""

    def save(self, held: Sharded | Whole, uri: str, step: int) -> Wait:
        from flytekitplugins.daskpytorch import current_rank

        checkpoint = current_rank().checkpoint
        save = checkpoint.save if isinstance(held, Whole) else checkpoint.save_sharded
        save(held.state(), step)
        return checkpoint.flush

    def load(self, held: Sharded | Whole, uri: str) -> None:
        from flytekitplugins.daskpytorch import current_rank

        checkpoint, state = current_rank().checkpoint, held.state()
        if isinstance(held, Whole):
            state = checkpoint.load()
            found = state is not None
        else:
            found = checkpoint.load_sharded(state) is not None
        if not found:
            raise RuntimeError("there was nothing to load")
        held.put_back(state)


class Dcp:
    """Way of torch: `torch.distributed.checkpoint.async_save` in a thread, with its writer for files or for fsspec."""

    def save(self, held: Sharded | Whole, uri: str, step: int) -> Wait:
        from torch.distributed import checkpoint

        saving: Any = checkpoint.async_save(held.state(), storage_writer=self.writer(f"{uri}/{step}"))
        return saving.result  # type: ignore[no-any-return]

    def load(self, held: Sharded | Whole, uri: str) -> None:
        from torch.distributed import checkpoint

        state = held.state()
        checkpoint.load(state, storage_reader=self.reader(f"{uri}/1"))
        held.put_back(state)

    def writer(self, uri: str) -> Any:
        from torch.distributed import checkpoint

        return checkpoint.FsspecWriter(uri) if "://" in uri else checkpoint.FileSystemWriter(uri)  # torch 2.15 has both

    def reader(self, uri: str) -> Any:
        from torch.distributed import checkpoint

        return checkpoint.FsspecReader(uri) if "://" in uri else checkpoint.FileSystemReader(uri)


class Connector(Dcp):
    """Way of torch with the writer of Amazon's s3torchconnector."""

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
        """Return a file system for the endpoint, as the writer has no argument for an endpoint."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        config = S3ClientConfig(force_path_style=True)
        client = S3Client(os.environ["AWS_REGION"], endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        return S3FileSystem(os.environ["AWS_REGION"], s3_client=client)


WAYS: dict[str, Any] = {"ours": Ours(), "dcp": Dcp(), "connector": Connector()}
KEPT = ("ours",)
"""Ways whose saves the driver reports to `Observer.kept`."""


# ---- In ranks -------------------------------------------------------------------------------------------------------


def made(order: Record, seed: int) -> Sharded | Whole:
    """Return the state that the order describes."""
    return (Sharded if order["is_sharded"] else Whole)(order["size"], seed)


def save_all(order: Record) -> list[Record]:
    """Save by each way, and return a record for each."""
    from torch import distributed

    from flytekitplugins.daskpytorch import current_rank

    held, records = made(order, seed=0), []
    for number, way in enumerate(order["ways"]):
        for step in range(2):
            distributed.barrier()
            began, named = time.time(), 2 * number + step if way in KEPT else step
            finish = WAYS[way].save(held, f"{order['uri']}/{way}", named)
            returned = time.time()
            finish()
            ended = time.time()
            distributed.barrier()
            while way in KEPT and named not in {kept.step for kept in current_rank().checkpoint.list()}:
                time.sleep(0.05)  # the driver has not committed the checkpoint yet
            time.sleep(SETTLE)
        times = {"began": began, "stall": returned - began, "ended": ended}
        records.append({"way": way, "step": 2 * number + 1, "checksum": held.checksum(), **times})
    return records


def load_all(order: Record) -> list[Record]:
    """Load the state by each way, and return a record for each."""
    import torch.distributed.checkpoint.state_dict  # noqa: F401 - now, or the time of a way would have its import
    from torch import distributed

    if "://" in order["uri"]:
        import s3fs  # noqa: F401 - the same
    records = []
    for way in order["ways"]:
        held = made(order, seed=1)
        distributed.barrier()
        began = time.time()
        WAYS[way].load(held, f"{order['uri']}/{way}")
        distributed.barrier()
        seconds = time.time() - began
        if held.checksum() != order["checksum"]:
            raise RuntimeError(f"{way} has loaded other weights than were saved")
        records.append({"way": way, "restored": seconds})
    return records


# ---- The driver -----------------------------------------------------------------------------------------------------


def measured(client: Any, order: Record) -> dict[str, Record]:
    """Save and load by all ways of the order, and return the seconds by way."""
    from flytekitplugins.daskpytorch import Gang, Observer, dispatch

    kept: dict[int, float] = {}

    class Clock(Observer):
        def on_checkpoint(self, step: int) -> None:
            kept[step] = time.time()

    def run(function: Callable[[Record], list[Record]], told: Record) -> list[tuple[Record, ...]]:
        shape = {"ranks_per_worker": order["ranks"], "observers": (Clock,), "max_restarts": 0}
        gang = Gang(key="state", checkpoint_uri=f"{order['uri']}/gang", **shape)
        return list(zip(*dispatch.run(client, function, order | told, gang=gang).result(), strict=True))

    saved = run(save_all, {})
    loaded = run(load_all, {"checksum": saved[0][0]["checksum"]})
    found: dict[str, Record] = {}
    for save, load in zip(saved, loaded, strict=True):
        way, began = save[0]["way"], min(record["began"] for record in save)
        ended = kept[save[0]["step"]] if way in KEPT else max(record["ended"] for record in save)
        found[way] = {
            "stall": max(record["stall"] for record in save),
            "committed": ended - began,
            "restored": max(record["restored"] for record in load),
        }
    return found


def main() -> None:
    """Run the orders from standard input."""
    from distributed import Client

    with Client(scheduler_file=sys.argv[1]) as client:
        print("@ready", flush=True)
        for line in sys.stdin:
            print("@done", json.dumps(measured(client, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
