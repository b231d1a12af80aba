"""A user's script with a gang: the ranks find in `__main__` what the script defines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from processes import nothing_left_behind, run_program

SCRIPT = """
import io
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from torch.utils.data import DataLoader, Dataset

from flytekitplugins.daskpytorch import current_rank, dispatch

WIDTH = 3


@dataclass
class Settings:
    width: int


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, WIDTH)


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return Settings(index * index)


def as_list(items):
    return items


def train(settings):
    rank = current_rank()
    found = [None] * rank.world_size
    dist.all_gather_object(found, Settings(rank.rank))
    rank.checkpoint.save(settings, step=1)
    torch.save(Net(), file := io.BytesIO())
    file.seek(0)
    loaded = []
    if rank.is_main:
        loader = DataLoader(
            Squares(), batch_size=2, num_workers=1, multiprocessing_context="forkserver", collate_fn=as_list
        )
        loaded = [item.width for items in loader for item in items]
    dist.barrier()
    logging.getLogger("mine").info("rank %d has trained", rank.rank)
    return {
        "gathered": [each.width for each in found],
        "net": torch.load(file, weights_only=False).layer.out_features,
        "loaded": loaded,
        "arguments": sys.argv[1:],
        "beside": Path(__file__).with_name("conf.yaml").read_text(),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        main, _ = dispatch.run(client, train, Settings(1)).result()
    print(json.dumps(main))
"""


def test_what_a_script_defines_can_be_gathered_saved_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "conf.yaml").write_text("width: 7")
    with nothing_left_behind():
        done = run_program(["train.py", "--lr", "3"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "gathered": [0, 1],
        "net": 3,
        "loaded": [0, 1, 4, 9],
        "arguments": ["--lr", "3"],
        "beside": "width: 7",
    }
    assert "[rank 1] INFO: rank 1 has trained" in done.stderr


UNGUARDED = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from flytekitplugins.daskpytorch.node import fork_client


def train(index):
    return index


if __name__ != "__main__":  # as where a script without the line below trains
    fork_client.connect()
with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
    pool.submit(train, 1).result()
"""


def test_a_script_without_a_guard_does_not_train_in_the_processes_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    with nothing_left_behind():
        done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "RuntimeError: the script starts a gang while another process of the same script imports it" in done.stderr


CALLABLES = """
import copyreg
import functools
import sys

import hydra
from distributed import Client, LocalCluster
from omegaconf import DictConfig

from flytekitplugins.daskpytorch import current_rank, dispatch


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> str:
    print(f"rank {current_rank().rank} has lr={config.lr}")


@functools.lru_cache(maxsize=3)
def cached(number):
    return number + current_rank().rank


class Trainer:
    def __init__(self, name):
        self.__qualname__ = self.name = name

    def __call__(self, number):
        return number * len(self.name)

    def __reduce__(self):
        return self.name


trainer = Trainer("trainer")

if __name__ == "__main__":
    with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        print(dispatch.run(client, cached, 5).result(), dispatch.run(client, trainer, 5).result())
        dispatch.run(client, main).result()
"""


def test_hydras_main_a_cached_function_and_an_object_that_goes_by_its_name_are_called_in_the_ranks(
    tmp_path: Path,
) -> None:
    (tmp_path / "callables.py").write_text(CALLABLES)
    with nothing_left_behind():
        done = run_program([tmp_path / "callables.py", "+lr=0.5"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[5, 6] [35, 35]" in done.stdout
    assert "[rank 0] rank 0 has lr=0.5" in done.stderr
    assert "[rank 1] rank 1 has lr=0.5" in done.stderr
