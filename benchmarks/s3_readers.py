"""Readers of an image folder that `s3.py` compares, written as their users would write them.

    python benchmarks/s3_readers.py WAY FOLDER SERVER FAR_SERVER PREFIX

Each way has its own process, which reads orders from standard input. An order has the near or far server,
the number of loader workers, and the number of pictures. The clients find the credentials in the environment.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torchvision.transforms import v2

BUCKET = "photos"
BATCH_SIZE = 32
NUM_CONNECTIONS = 32
"""Requests in flight per process, for readers with several requests."""

Item = tuple[Tensor, int]


def transform() -> Callable[[Any], Tensor]:
    """Return a transform from a PIL picture to bytes, which the device converts to floats."""
    return v2.Compose([v2.Resize(256), v2.CenterCrop(250), v2.ToImage(), v2.ToPureTensor()])


@dataclass
class Source:
    """Location of the images."""

    folder: Path
    """Folder with the same images on the local disk."""
    endpoint: str
    prefix: str

    def __post_init__(self) -> None:
        self.keys = sorted(f"{self.prefix}/{path.parent.name}/{path.name}" for path in self.folder.glob("*/*.jpg"))
        names = sorted({self.class_of(key) for key in self.keys})
        self.labels = {name: label for label, name in enumerate(names)}

    @staticmethod
    def class_of(key: str) -> str:
        """Return the name of an image's folder."""
        return key.split("/")[-2]


class Folder(Dataset[Item]):
    """Common part of the readers. The keys are known, and `read` fetches one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.transform = transform()

    def __len__(self) -> int:
        return len(self.source.keys)

    def __getitem__(self, index: int) -> Item:
        key = self.source.keys[index]
        return self.finished(key, self.read(key))

    def finished(self, key: str, body: bytes) -> Item:
        """Return an image, decoded by PIL, and its label."""
        return self.transform(Image.open(io.BytesIO(body)).convert("RGB")), self.source.labels[Source.class_of(key)]

    def read(self, key: str) -> bytes:
        """Return the bytes of one object."""
        raise NotImplementedError


class Forerunner(Folder):
    """Reader as in dask-pytorch-ddp: a new boto3 resource and a temporary file for each image."""

    def read(self, key: str) -> bytes:
        import boto3

        with tempfile.TemporaryFile() as file:
            boto3.resource("s3", endpoint_url=self.source.endpoint).Bucket(BUCKET).download_fileobj(key, file)
            file.seek(0)
            return file.read()


def connector(source: Source) -> Dataset[Item]:
    """Return the data set of Amazon's s3torchconnector, with its defaults."""
    from s3torchconnector import S3ClientConfig, S3MapDataset

    folder = Folder(source)
    dataset: Dataset[Item] = S3MapDataset.from_objects(
        [f"s3://{BUCKET}/{key}" for key in source.keys],
        region=os.environ["AWS_REGION"],
        endpoint=source.endpoint,
        transform=lambda reader: folder.finished(reader.key, reader.read()),
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return dataset


def local(source: Source) -> Dataset[Item]:
    """Return torchvision's `ImageFolder` on the local disk."""
    from torchvision.datasets import ImageFolder

    return ImageFolder(source.folder, transform())


def ours(source: Source, decoder: Literal["pil", "tensor"]) -> Dataset[Item]:
    """Return an `S3ImageFolder` with this decoder."""
    from flytekitplugins.daskpytorch import data

    return data.S3ImageFolder(
        BUCKET,
        source.prefix,
        transform(),
        decoder=decoder,
        storage_options={"endpoint_url": source.endpoint},
        num_connections=NUM_CONNECTIONS,
    )


WAYS: dict[str, Callable[[Source], Dataset[Item]]] = {
    "forerunner": Forerunner,
    "connector": connector,
    "local": local,
    "pil": lambda source: ours(source, "pil"),
    "ahead": lambda source: ours(source, "tensor"),
}


class Some(Sampler[int]):
    """Sampler of some of the images, which differ in each pass."""

    def __init__(self, num_all: int) -> None:
        self.num_all = self.count = num_all
        self._random = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num_all, generator=self._random)[: self.count].tolist())


def loader(dataset: Dataset[Item], sampler: Some, num_workers: int, *, reads_ahead: bool) -> DataLoader[Item]:
    """Return a loader with persistent workers."""
    batches: Any = BatchSampler(sampler, BATCH_SIZE, drop_last=False)
    if reads_ahead:
        from flytekitplugins.daskpytorch import data

        batches = data.ReadAhead(batches, num_workers)
    return DataLoader(dataset, batch_sampler=batches, num_workers=num_workers, persistent_workers=num_workers > 0)


def main() -> None:
    """Read pictures at each order, and print the seconds of each read."""
    way, folder, near, far, prefix = sys.argv[1:]
    loaders: dict[tuple[str, int], tuple[Some, DataLoader[Item]]] = {}
    print("@ready", flush=True)
    for line in sys.stdin:
        place, num_workers, count = json.loads(line)
        if (place, num_workers) not in loaders:
            source = Source(folder=Path(folder), endpoint=far if place == "far" else near, prefix=prefix)
            dataset, sampler = WAYS[way](source), Some(len(source.keys))
            batches = loader(dataset, sampler, num_workers, reads_ahead=way == "ahead")
            loaders[place, num_workers] = sampler, batches
        sampler, batches = loaders[place, num_workers]
        sampler.count = count
        began = time.perf_counter()
        shapes = [images.shape for images, _ in batches]
        seconds = time.perf_counter() - began
        if sum(shape[0] for shape in shapes) != count or any(shape[1:] != (3, 250, 250) for shape in shapes):
            raise ValueError(f"{way}: {count} images were asked for, {shapes} came")
        print("@done", seconds, flush=True)


if __name__ == "__main__":
    main()
