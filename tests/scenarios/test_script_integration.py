"""A user's script with a gang: the ranks find in `__main__` what the script defines."""

import subprocess
import sys
from pathlib import Path

from processes import nothing_left_behind, run_program

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
