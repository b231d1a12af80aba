"""The main job through the real `pyflyte` script."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.char_lstm import CharLSTM, Hyperparameters, bigram_loss, evaluate, windows
from tasks.names import load_names, split_by_name

WORKFLOW = REPOSITORY / "workflows" / "pet_names.py"
TINY = {"epochs": 2, "batch_size": 1024}


def pet_names(
    *flags: str, cwd: Path, script: str = str(WORKFLOW), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the workflow."""
    command = [SCRIPTS / "pyflyte", "run", script, "pet_names", *flags]
    with nothing_left_behind():
        return run_program(command, cwd=cwd, env={"WANDB_DIR": str(cwd), **(env or {})})


def outputs(done: subprocess.CompletedProcess[str]) -> tuple[list[float], Path, list[str]]:
    """Losses, weights and names, as the script printed them."""
    found = re.search(
        r"PetNames\(epoch_losses=(\[.*?\]), .*model_state=(\S+), names=(\[.*?\])\)", done.stdout, re.DOTALL
    )
    assert found, done.stdout + done.stderr
    names = re.findall(r"'([^']*)'", found[3])
    return json.loads(found[1]), Path(found[2]), names


@pytest.mark.slow
def test_the_workflow_is_the_same_wherever_it_is_run_from(tmp_path: Path) -> None:
    flags = ("--hp", json.dumps(TINY), "--num_names", "6")
    here = outputs(pet_names(*flags, cwd=REPOSITORY, script="workflows/pet_names.py", env={"WANDB_MODE": "disabled"}))
    elsewhere = outputs(pet_names(*flags, cwd=tmp_path))
    losses, weights, names = here
    assert losses == pytest.approx(elsewhere[0], rel=1e-6)
    assert names == elsewhere[2]
    assert len(names) == len(set(names)) == 6
    assert all(name == name.title() for name in names)
    assert not {name.lower() for name in names} & set(load_names().names)

    state = torch.load(weights, weights_only=True)
    assert not any(key.startswith("module.") for key in state)
    _, held_out = split_by_name(load_names().names, Hyperparameters().held_out, Hyperparameters().seed)
    assert evaluate(CharLSTM.from_state_dict(state), windows(held_out)).loss == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.slow
def test_data_from_s3(tmp_path: Path, s3: Mapping[str, str]) -> None:
    import boto3

    names = load_names().names
    text = "Licence,Animal's Name\n" + "".join(f"{number},{name.title()}\n" for number, name in enumerate(names))
    client = boto3.client(
        "s3", endpoint_url=s3["AWS_ENDPOINT_URL"], aws_access_key_id="test", aws_secret_access_key="test"
    )
    client.put_object(Bucket=s3["bucket"], Key="names.csv", Body=text.encode())
    env = {name: value for name, value in s3.items() if name.startswith("AWS_")}
    flags = (
        "--data",
        f"s3://{s3['bucket']}/names.csv",
        "--hp",
        '{"epochs": 1, "batch_size": 4096}',
        "--num_names",
        "1",
    )
    done = pet_names(*flags, cwd=tmp_path, env=env)
    assert f"{len(names):,} names" in done.stdout, done.stdout + done.stderr
    assert len(outputs(done)[0]) == 1


@pytest.mark.slow
def test_more_ranks_than_two(tmp_path: Path) -> None:
    done = pet_names("--hp", '{"epochs": 1, "batch_size": 9000}', cwd=tmp_path, env={"PET_NAMES_WORKERS": "3"})
    assert "starting 3 ranks on 3 workers" in done.stderr
    assert "every epoch is one step" in done.stderr
    assert len(outputs(done)[0]) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--hp", '{"epochs": 0}'), r"epochs=0\): must be a whole number from 1 up"),
        (("--hp", '{"epoch": 3}'), r"no 'epoch' \(did you mean 'epochs'\?\)"),
        (("--hp", '{"epochs": "many"}'), "epochs='many'"),
        (("--num_names", "-1"), "num_names=-1"),
        (("--data", "nowhere.json"), "nowhere.json"),
        (("--data", "empty.json"), "empty"),
        (("--data", "foreign.json"), "alphabet"),
        (("--data", "two.json"), "2 training samples .* are fewer than the 3 ranks"),
    ],
)
def test_bad_input_is_refused_before_a_cluster_starts(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "foreign.json").write_text(json.dumps(["Ωmega", "Ñu", "René"]))
    (tmp_path / "two.json").write_text(json.dumps(["a", "b"]))
    done = pet_names(*flags, cwd=tmp_path, env={"PET_NAMES_WORKERS": "3"})
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert re.search(said, text), text
    assert "starting" not in text


@pytest.mark.slow
def test_the_seattle_names_beat_a_bigram_model(tmp_path: Path, data_folder: Path) -> None:
    path = data_folder / "seattle_pet_licenses.csv"
    done = pet_names("--data", str(path), "--hp", '{"epochs": 1, "batch_size": 1024}', cwd=tmp_path)
    losses, _, _ = outputs(done)
    hp = Hyperparameters()
    training, held_out = (windows(part) for part in split_by_name(load_names(str(path)).names, hp.held_out, hp.seed))
    assert losses[-1] < bigram_loss(training, held_out) - 0.1


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
