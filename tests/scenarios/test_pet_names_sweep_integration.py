"""Sweeps and scaling of pet names run in the real `pyflyte`, and their Decks in a real browser."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pages import REPOSITORY, command
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.char_lstm import CharLSTM, Hyperparameters, evaluate, windows
from tasks.names import load_names, split_by_name
from tasks.sweeps import ScalingRow, SweepRow, TimeToLoss
from workflows import pet_names_sweep


@dataclass
class Run:
    """One run of a workflow, with what it left in its folder."""

    done: subprocess.CompletedProcess[str]
    folder: Path

    @property
    def outputs(self) -> dict[str, Any]:
        """What the script printed, as values; files are paths."""
        found = re.search(r"^PetNames\w+\((.*)\)$", self.done.stdout, re.MULTILINE)
        assert found, self.done.stdout + self.done.stderr
        quoted = re.sub(r"(?<![\w'])(/[^\s,\])]+)", r"'\1'", found[1])
        types = (SweepRow, ScalingRow, TimeToLoss, Hyperparameters)
        return eval(f"dict({quoted})", {kind.__name__: kind for kind in types})  # type: ignore[no-any-return]


def run(folder: Path, command: str) -> Run:
    """Run a command of the guides or the like, from the root of the repository."""
    program, *arguments = shlex.split(command)
    (folder / "tmp").mkdir()
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TMPDIR": str(folder / "tmp")}
    with nothing_left_behind():
        done = run_program([SCRIPTS / program, *arguments], cwd=REPOSITORY, env=environment)
    return Run(done=done, folder=folder)


def guides_command(workflow: str) -> str:
    return command(rf"pyflyte run workflows/{workflow}\.py {workflow} .*")


def held_out_windows() -> torch.Tensor:
    hp = Hyperparameters()
    return windows(split_by_name(load_names().names, hp.held_out, hp.seed)[1])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The guide's sweep: two batch sizes, two epochs."""
    return run(tmp_path_factory.mktemp("sweep"), guides_command("pet_names_sweep"))


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The guide's: one rank and two, two batch sizes, one epoch."""
    return run(tmp_path_factory.mktemp("scaling"), guides_command("pet_names_scaling"))


@pytest.mark.slow
def test_a_sweep_leaves_its_table_and_the_best_model(sweep: Run) -> None:
    outputs = sweep.outputs
    rows: list[SweepRow] = outputs["rows"]
    assert [(row.batch_size, row.lr, row.epoch) for row in rows] == [
        *((1024, 0.01, 1), (1024, 0.01, 2)),
        *((4096, 0.01, 1), (4096, 0.01, 2)),
    ]
    for first, second in (rows[:2], rows[2:]):
        assert second.loss < first.loss
        assert 0 < first.elapsed_time_sec < second.elapsed_time_sec

    best = min((row for row in rows if row.epoch == 2), key=lambda row: row.loss)
    assert outputs["hp"] == Hyperparameters(epochs=2, batch_size=best.batch_size, learning_rate=best.lr)
    state = torch.load(outputs["model_state"], weights_only=True)
    assert evaluate(CharLSTM.from_state_dict(state), held_out_windows()).loss == pytest.approx(best.loss, abs=1e-6)
    assert f"best of 2: batch size {best.batch_size:,}, learning rate 0.01, {best.loss:.4f} nats" in sweep.done.stdout


@pytest.mark.slow
def test_scaling_compares_equal_global_batches(scaling: Run) -> None:
    rows: list[ScalingRow] = scaling.outputs["rows"]
    assert [(row.ranks, row.batch_size, row.global_batch, row.epoch) for row in rows] == [
        *((1, 2048, 2048, 1), (1, 4096, 4096, 1)),
        *((2, 2048, 4096, 1), (2, 4096, 8192, 1)),
    ]
    # Only a gang of two takes the same steps as one rank with twice the batch, but for their dropout.
    assert rows[2].loss == pytest.approx(rows[1].loss, abs=0.05)
    assert abs(rows[2].loss - rows[0].loss) > abs(rows[2].loss - rows[1].loss)


# ---- What is refused, and what fails


SWEEP = {"data": "", "hp": Hyperparameters(), "batch_sizes": [8], "learning_rates": [0.1], "num_names": 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_sizes": []}, r"batch_sizes=\[\]: must be one or more different whole numbers"),
        ({"num_names": -1}, "num_names=-1: must be"),
        ({"data": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_a_bad_sweep_is_refused_before_a_cluster_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        pet_names_sweep.prepare(**SWEEP | given)


# ---- The defaults
