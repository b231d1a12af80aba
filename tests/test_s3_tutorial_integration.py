"""The transfer learning tutorial of dask-pytorch-ddp runs with only its import changed, on a real S3 server."""

from __future__ import annotations

import json
from pathlib import Path

from jpegs import photos
from processes import nothing_left_behind, run_program
from seaweed import Weed

TUTORIAL = '''
import json
import math
import pickle
import uuid

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from flytekitplugins.daskpytorch import data, dispatch, results
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchvision import models, transforms

rh = results.DaskResultsHandler(uuid.uuid4().hex)


def halves(dataset, train_pct, batch_size, num_workers):
    """Loaders of the pictures to train on and of those to evaluate on, from one shuffled list of indices."""
    indices = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1)).tolist()
    cut = math.floor(train_pct * len(dataset))
    return {
        phase: DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=SubsetRandomSampler(chosen),
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )
        for phase, chosen in {"train": indices[:cut], "val": indices[cut:]}.items()
    }


def run_transfer_learning(bucket, prefix, train_pct, batch_size, n_epochs, base_lr, num_workers):
    rank = dist.get_rank()
    pictures = data.S3ImageFolder(
        bucket,
        prefix,
        transform=transforms.Compose([transforms.Resize(64), transforms.CenterCrop(56), transforms.ToTensor()]),
    )
    torch.manual_seed(0)
    model = models.squeezenet1_1(num_classes=len(pictures.classes))
    model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=base_lr * dist.get_world_size(), momentum=0.9)
    loaders = halves(pictures, train_pct, batch_size, num_workers)
    count = 0
    for epoch in range(n_epochs):
        for phase, loader in loaders.items():
            model.train(phase == "train")
            for inputs, labels in loader:
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                count += 1
                record = {
                    "loss": loss.item(),
                    "epoch": epoch,
                    "count": count,
                    "worker": rank,
                    "sample": len(labels),
                    "correct": int((outputs.argmax(1) == labels).sum()),
                    "phase": phase,
                }
                rh.submit_result(f"worker/{rank}/data-{phase}-{count}.json", json.dumps(record))
    if rank == 0:
        rh.submit_result("model.pkl", pickle.dumps(model.module.state_dict()))


if __name__ == "__main__":
    startparams = {"train_pct": 0.8, "batch_size": 8, "n_epochs": 2, "base_lr": 0.01, "num_workers": 2}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        futures = dispatch.run(client, run_transfer_learning, bucket="tutorial", prefix="dogs", **startparams)
        rh.process_results("results", futures, raise_errors=False)
        print([future.exception() for future in futures])
'''


def test_the_tutorial_runs_after_a_change_of_its_import_line(weed: Weed, tmp_path: Path) -> None:
    weed.put_all("tutorial", photos(40, 4, prefix="dogs"))
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    with nothing_left_behind():
        done = run_program(["tutorial.py"], cwd=tmp_path, env=weed.env())
    assert "[None, None]" in done.stdout, done.stdout + done.stderr
    written = [json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")]
    for rank in range(2):
        for epoch in range(2):
            of_rank = [record for record in written if (record["worker"], record["epoch"]) == (rank, epoch)]
            assert sum(record["sample"] for record in of_rank if record["phase"] == "train") == 32
            assert sum(record["sample"] for record in of_rank if record["phase"] == "val") == 8
    assert (tmp_path / "results" / "model.pkl").stat().st_size > 1_000_000
