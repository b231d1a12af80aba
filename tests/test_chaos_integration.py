"""Ten random schedules of faults; `benchmarks/chaos.py --schedules 200` runs more of the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str) -> None:
    """A benchmark ends what it starts; its exit code says whether all was as it must be."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_random_schedules_end_as_they_must() -> None:
    run("chaos.py", "--schedules", "10", "--seed", "17")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_piles_up_over_many_gangs() -> None:
    run("soak.py", "--quick")
