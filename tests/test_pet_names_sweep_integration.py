"""Sweeps and scaling of pet names run in the real `pyflyte`, and their Decks in a real browser."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import REPOSITORY
from pages import command
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks import sweeps
from tasks.char_lstm import CharLSTM, Hyperparameters, evaluate, windows
from tasks.names import load_names, split_by_name
from tasks.sweeps import ScalingRow, SweepRow, TimeToLoss
from test_report import chart_data
from workflows import pet_names_scaling, pet_names_sweep


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


def test_a_sweep_leaves_its_charts_as_a_page(sweep: Run) -> None:
    page = Path(sweep.outputs["charts"])
    assert page.name == "sweep.html"
    [by_epoch, _] = chart_data(page.read_text())
    losses = sorted([row.loss for row in sweep.outputs["rows"] if row.epoch == 2])
    assert [line["y"][-1] for line in by_epoch["lines"][:2]] == pytest.approx(losses, rel=1e-5)


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
SCALING = {k: v for k, v in SWEEP.items() if k != "num_names"} | {"ranks": [1], "target_loss": None}


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"ranks": [1, pet_names_scaling.NUM_WORKERS + 1]},
            r"ranks=\[1, \d+\]: \d+ ranks need as many workers, and there are \d+; set PET_NAMES_SCALING_WORKERS=",
        ),
        ({"target_loss": 0.0}, r"target_loss=0\.0: must be a finite number of nats"),
        ({"data": "two.json", "ranks": [2]}, "training samples .* are fewer than the 2 ranks"),
    ],
)
def test_a_bad_scaling_is_refused_before_a_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweeps.char_lstm, "windows", lambda names: torch.zeros(len(names), 9))
    Path("two.json").write_text('["a", "b"]')
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        pet_names_scaling.prepare(**SCALING | given)


TRAININGS = {"pet_names": "train", "pet_names_sweep": "sweep", "pet_names_scaling": "scale"}


@pytest.mark.parametrize("workflow", TRAININGS)
def test_the_environment_says_how_many_workers_there_are(monkeypatch: pytest.MonkeyPatch, workflow: str) -> None:
    monkeypatch.setenv(variable := f"{workflow.upper()}_WORKERS", "16")
    found = runpy.run_path(str(REPOSITORY / "workflows" / f"{workflow}.py"), run_name=f"{workflow}_on_many_workers")
    assert found[TRAININGS[workflow]].task_config.num_workers == 16
    for task in (found[TRAININGS[workflow]], found["prepare"]):
        assert task.environment[variable] == "16"  # the pods read it again


# ---- The defaults
