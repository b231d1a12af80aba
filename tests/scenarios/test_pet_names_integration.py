"""Pet names, the main example: with Flyte 2, a sweep, and scaling. test_docs_integration.py runs it with flytekit."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from pages import REPOSITORY, command
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.char_lstm import CharLSTM, Hyperparameters, evaluate, windows
from tasks.names import load_names, split_by_name
from tasks.sweeps import ScalingRow, SweepRow, TimeToLoss
from workflow_runs import Run
from workflows import pet_names_sweep


def test_new_names_are_sampled_from_a_trained_model(tmp_path: Path) -> None:
    """From `tasks/` comes all that is trained and shown; by its own script, as its docstring says."""
    pytest.importorskip("flyteplugins.dask")
    hp = json.dumps({"epochs": 1, "batch_size": 4096})
    script = "workflows/flyte2/pet_names.py"
    command = [SCRIPTS / "flyte", "run", "--local", script, "pet_names", "--hp", hp, "--num_names", "3"]
    with nothing_left_behind():
        done = run_program(command, cwd=REPOSITORY, env={"COLUMNS": "1000", "TMPDIR": str(tmp_path)})
    assert "Completed Local Run" in done.stdout, done.stdout + done.stderr
    assert "train: starting 2 ranks on 2 workers" in done.stderr
    [names] = re.findall(r"new names: (.*)", done.stdout)
    assert len(names.split(", ")) == 3
    [weights] = re.findall(r"o1=path='([^']*)'", done.stdout)
    CharLSTM.from_state_dict(torch.load(weights, weights_only=True))


# ---- Sweeps and scaling


class Swept(Run):
    """A workflow's run by the guides' command."""

    @property
    def outputs(self) -> dict[str, Any]:
        """Values that the script printed; files are paths."""
        found = re.search(r"^PetNames\w+\((.*)\)$", self.done.stdout, re.MULTILINE)
        assert found, self.done.stdout + self.done.stderr
        quoted = re.sub(r"(?<![\w'])(/[^\s,\])]+)", r"'\1'", found[1])
        types = (SweepRow, ScalingRow, TimeToLoss, Hyperparameters)
        return eval(f"dict({quoted})", {kind.__name__: kind for kind in types})  # type: ignore[no-any-return]


def run(workflow: str, folder: Path) -> Swept:
    _, _, _, _, *flags = shlex.split(command(rf"pyflyte run workflows/{workflow}\.py {workflow} .*"))
    return Swept.of(workflow, folder, "first", *flags)


def held_out_windows() -> torch.Tensor:
    hp = Hyperparameters()
    return windows(split_by_name(load_names().names, hp.held_out, hp.seed)[1])


@pytest.mark.slow
def test_a_sweep_leaves_its_table_and_the_best_model(tmp_path: Path) -> None:
    """Two batch sizes, two epochs."""
    sweep = run("pet_names_sweep", tmp_path)
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
def test_scaling_compares_equal_global_batches(tmp_path: Path) -> None:
    """One rank and two, two batch sizes, one epoch."""
    rows: list[ScalingRow] = run("pet_names_scaling", tmp_path).outputs["rows"]
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
