"""Gangs survive random faults. `benchmarks/chaos.py --schedules 200` runs more of the same schedules.

One schedule and a few gangs in every run, so that neither benchmark can be broken for days.
"""

import subprocess
import sys

import pytest

from pages import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"


def run(script: str, *arguments: str) -> None:
    """A benchmark ends what it starts; its exit code says whether all was as it must be."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chosen",
    [
        "--seed 17 --only 2",
        pytest.param("--seed 17 --schedules 10", marks=pytest.mark.slow),
        pytest.param("--seed 17 --schedules 10 --storage 1", marks=pytest.mark.slow),
        pytest.param("--seed 17 --staying 16", marks=pytest.mark.slow),
    ],
)
def test_random_schedules_end_as_they_must(chosen: str) -> None:
    run("chaos.py", *chosen.split())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_gangs", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_nothing_piles_up_over_many_gangs(num_gangs: int) -> None:
    run("soak.py", "--gangs", str(num_gangs))
