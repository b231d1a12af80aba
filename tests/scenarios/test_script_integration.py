"""A user's script with a gang: what is in `__main__`, and Ctrl-C."""

import os
import re
import signal
from pathlib import Path

import pytest

from pages import REPOSITORY
from processes import nothing_left_behind, run_program, running, until

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
        done = run_program(["train.py"], cwd=tmp_path)
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


# ---- Ctrl-C


SCRIPT = REPOSITORY / "tests/support/driving.py"


def interrupted_twice(how: str, folder: Path) -> tuple[int, str]:
    """Press Ctrl-C twice while the script trains, and return its exit code and its output."""
    trains, said = [folder / f"trains-{rank}" for rank in range(2)], folder / "said"
    with nothing_left_behind(), running([SCRIPT, how, folder], cwd=folder, log=said) as process:
        until(lambda: all(path.exists() for path in trains) or process.poll() is not None, "the training")
        for _ in range(2):  # as a terminal does
            os.killpg(process.pid, signal.SIGINT)
        process.wait()
    return process.returncode, said.read_text()


OURS = re.compile(r'/(daskpytorch/.*|driving)\.py", line ')
SCRIPTS_OWN = re.compile(r'/driving\.py", line \d+, in main\n')


def tracebacks(said: str) -> list[str]:
    """The frames of each, those among them that Dask logs of its own at a second Ctrl-C."""
    parts = said.split("Traceback (most recent call last):\n")[1:]
    return ["".join(re.findall(r'^  File ".*\n', part, re.MULTILINE)) for part in parts]


@pytest.mark.parametrize("how", [pytest.param("threads", marks=pytest.mark.slow), "processes", "task"])
def test_at_ctrl_c_nobody_but_the_script_has_a_traceback(how: str, tmp_path: Path) -> None:
    code, said = interrupted_twice(how, tmp_path)
    # Flytekit has a handler of its own; of two that come at once a process may see one.
    assert code in ((1, 130) if how == "task" else (-signal.SIGINT,)), said
    assert not [frames for frames in tracebacks(said) if OURS.search(frames) and not SCRIPTS_OWN.search(frames)], said
    assert "Exception in thread" not in said
    assert "Exception ignored" not in said
