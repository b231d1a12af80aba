"""The pet names' workflow, the main example, runs in the real `pyflyte`."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from pages import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.char_lstm import CharLSTM

WORKFLOW = REPOSITORY / "workflows" / "pet_names.py"


def pet_names(
    *flags: str, cwd: Path, script: str = str(WORKFLOW), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the workflow."""
    command = [SCRIPTS / "pyflyte", "run", script, "pet_names", *flags]
    with nothing_left_behind():
        return run_program(command, cwd=cwd, env={"WANDB_DIR": str(cwd), **(env or {})})


def test_bad_input_is_refused_before_a_cluster_starts(tmp_path: Path) -> None:
    done = pet_names("--hp", '{"epoch": 3}', cwd=tmp_path)
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert "no 'epoch' (did you mean 'epochs'?)" in text, text
    assert "starting" not in text


def test_the_same_with_flyte_2(tmp_path: Path) -> None:
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
