"""The pet names' workflow, the main example, runs with Flyte 2. test_docs_integration.py runs it with flytekit."""

import json
import re
from pathlib import Path

import pytest
import torch

from pages import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.char_lstm import CharLSTM

WORKFLOW = REPOSITORY / "workflows" / "pet_names.py"


def test_new_names_are_sampled_from_a_trained_model(tmp_path: Path) -> None:
    """From `tasks/` comes all that is trained and shown; by its own script, as its docstring says."""
    pytest.importorskip("flyteplugins.dask")
    script = WORKFLOW.relative_to(REPOSITORY).with_name("flyte2") / "pet_names.py"
    hp = json.dumps({"epochs": 1, "batch_size": 4096})
    command = [SCRIPTS / "flyte", "run", "--local", script, "pet_names", "--hp", hp, "--num_names", "3"]
    with nothing_left_behind():
        done = run_program(command, cwd=REPOSITORY, env={"COLUMNS": "1000", "TMPDIR": str(tmp_path)})
    assert "Completed Local Run" in done.stdout, done.stdout + done.stderr
    assert "train: starting 2 ranks on 2 workers" in done.stderr
    [names] = re.findall(r"new names: (.*)", done.stdout)
    assert len(names.split(", ")) == 3
    [weights] = re.findall(r"o1=path='([^']*)'", done.stdout)
    CharLSTM.from_state_dict(torch.load(weights, weights_only=True))
