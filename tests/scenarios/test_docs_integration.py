"""The code blocks of the README and of the pages in docs/ run, and the file trees in them are up to date."""

import contextlib
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.image_spec.default_builder import create_docker_context
from flytekit.tools.translator import get_serializable
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flytekitplugins.daskpytorch import current_rank
from gangs import on_this_machine
from jpegs import photos
from otlp import receiver
from pages import PAGES, REPOSITORY, block, blocks, imported, run_as_script
from processes import SCRIPTS, Cluster, nothing_left_behind, run_program
from seaweed import Weed

Said = subprocess.CompletedProcess[str]

pytestmark = pytest.mark.usefixtures("weed", "one_fork_server")  # the server before what looks for processes


def run_warm(command: list[str], cwd: Path) -> Said:
    """Exit code and output of a command, whose program starts in a process that has the imports already."""
    program, *arguments = command
    with nothing_left_behind():
        return run_program(arguments if program == "python" else [SCRIPTS / program, *arguments], cwd=cwd)


def run_example(name: str, folder: Path) -> Said:
    """The block that begins with this file's name, by the command beside that; it goes well."""
    example = block(f"# {name}: ")
    (folder / name).write_text(example)
    command = example.splitlines()[0].removeprefix(f"# {name}: ")
    done = run_warm(shlex.split(command), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requires_grad" not in done.stderr  # as torch warns where a loss becomes a number with its graph
    return done


@pytest.fixture
def run_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Runs the block that has this mark, as a script, in this process."""

    def run(mark: str, *arguments: str) -> Said:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        run_as_script(imported("script_of_the_docs", block(mark), tmp_path, monkeypatch))
        return Said("script.py", 0, *capfd.readouterr())

    return run


def test_the_example_trains(tmp_path: Path) -> None:
    assert len(block("# train.py: ").splitlines()) <= 25
    done = run_example("train.py", tmp_path)
    assert "step 20/20" in done.stderr
    shown = re.search(r"the command prints `(.+)` in each run", PAGES["README.md"])
    assert shown
    assert done.stdout.splitlines()[-1] == shown[1]


SAY = {
    "# best.py: ": r"epoch=7\)",
    "# fits.py: ": r"0: micro batches of 32, 1 for a batch of 32",
    "# node.py: ": r"rank 0 of \d+",
    "# loader.py: python loader.py\n": r"^loss 0\.00\d\d after 8 epochs of 500 items$",
    "# resume.py: ": r"\b0\.\d+\D*\Z",
    "# stream.py: ": r"^\[40, 32\]$",
    "# sweep.py: ": r"\{'lr': 0\.3\}\s*\Z",
    "# variables.py: ": r"^\[\('/data', 'DETAIL'\), \('/data', 'DETAIL'\)\]$",
    "DaskPartitions": r"^\['\d+ names in partitions \[[\d, ]+\]', '\d+ names in partitions \[[\d, ]+\]'\]$",
    "compile_cache=": r"\A\Z",
    "optuna.create_study": r"^10 \{'rate': [\d.e-]+\} [\d.e-]+$",
    "trained {epochs} epochs": r"'rank 0 of ",
    "trained with {experiment}": r"(trained with \{'batch_size': [^}]*\}\W+){4}",
}
"""Marks of programs, and what each of them says."""


@pytest.mark.parametrize("mark", SAY)
def test_a_program_says_what_it_must(mark: str, run_script: Callable[..., Said], tmp_path: Path) -> None:
    command = re.match(r"# (\w+\.py): pyflyte", block(mark))
    done = run_example(command[1], tmp_path) if command else run_script(mark)
    assert re.search(SAY[mark], done.stdout + done.stderr if "fits" in mark else done.stdout, re.MULTILINE), done


def test_the_tutorial_runs_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    for example in blocks("python", "docs/tutorial.md"):
        (tmp_path / example.partition(":")[0].removeprefix("# ")).write_text(example)
    _, *commands = [line for each in blocks("bash", "docs/tutorial.md") for line in each.splitlines()]
    alone, gang, survives, resumed, nightly, registered = [run_line(line, tmp_path, monkeypatch) for line in commands]
    for done in (alone, gang, survives, resumed):
        assert float(done.stdout.split()[-1]) < 0.1, done.stdout + done.stderr
    assert "Deck: " in gang.stderr
    assert "step 201/240" in resumed.stderr
    assert nightly.stdout.endswith("good enough\n")
    assert "Launch Plan: every_night (Dry run Mode)" in registered.stdout, registered.stdout + registered.stderr


def run_line(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What becomes of a shell's line, which may begin with variables."""
    words = shlex.split(line)
    with monkeypatch.context() as patch:
        while "=" in words[0]:
            patch.setenv(*words.pop(0).split("=", 1))
        return run_warm(words, folder)


def test_the_example_can_be_unit_tested(tmp_path: Path) -> None:
    for name in ("alone.py", "gang.py"):
        (tmp_path / name).write_text(block(f"# {name}: "))
    (tmp_path / "test_train.py").write_text(block("one_rank"))
    done = run_warm(["pytest", "-q", "-p", "no:cacheprovider", "-p", "no:kmock"], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_example_of_a_gang_that_stays_trains_on_from_call_to_call(run_script: Callable[..., Said]) -> None:
    *trainings, evaluation = run_script("# phases.py: ").stdout.splitlines()
    losses = [float(line.split()[-1]) for line in trainings]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    first, second = literal_eval(evaluation)
    assert first == second


def test_the_tasks_of_a_script_train(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(block("# fit.py: "))
    done = run_example("fit_flow.py", tmp_path)
    assert float(re.findall(r"\d+\.\d+", done.stdout)[-1]) == pytest.approx(3.0, abs=0.5)


def test_the_example_of_a_sharded_state_trains_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    done = run_example("sharded.py", tmp_path)
    assert float(re.findall(r"\d+\.\d+", done.stdout)[-1]) < 1.0
    assert len(list(tmp_path.glob("kept/*/*/gang/step-30/*/.metadata"))) == 1


def test_the_training_with_validation_stops_early_or_at_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    done = run_example("loop.py", tmp_path)
    assert "reason='no better since epoch " in done.stdout, done.stdout + done.stderr
    late = run_warm(["pyflyte", "run", "loop.py", "train", "--epochs", "40", "--hours", "0"], tmp_path)
    assert "reason='no time left'" in late.stdout, late.stdout + late.stderr
    assert "step 2/40" not in late.stderr


def test_the_training_with_an_evaluation_beside_finds_the_last_epoch_best(tmp_path: Path) -> None:
    done = run_example("beside.py", tmp_path)
    printed = re.search(r"\(\d+, [\d.e-]+\)|o0=(\d+), o1=([\d.e-]+)", done.stdout)
    assert printed, done.stdout + done.stderr
    best, loss = (float(number) for number in re.findall(r"[\d.e-]+", printed[0].replace("o0=", "").replace("o1=", "")))
    assert best == 20
    assert loss < 0.5


def test_the_script_that_shows_what_stays_runs(run_script: Callable[..., Said], tmp_path: Path) -> None:
    done = run_script('futures.report("training.html")')
    first, second = done.stdout.splitlines()
    assert first.startswith("{'loss': 0.3333333333333333} 3 goodput "), done.stderr
    assert second.count("SavedCheckpoint(step=3") == 2
    assert (tmp_path / "training.html").read_text().startswith("<!doctype html>")


def test_the_cells_of_a_notebook_train(tmp_path: Path) -> None:
    in_a_shell = "from IPython.core.interactiveshell import InteractiveShell; import sys\n"
    in_a_shell += "InteractiveShell.instance().run_cell(sys.argv[1]).raise_error()"
    done = run_warm(["python", "-c", in_a_shell, block("# two cells of a notebook")], tmp_path)
    assert "['rank 0 of 2: 3 epochs', 'rank 1 of 2: 3 epochs']" in done.stdout, done.stdout + done.stderr


def test_the_example_of_a_model_per_key_prints_its_table(run_script: Callable[..., Said]) -> None:
    pytest.importorskip("dask.dataframe")
    printed = run_script("models_per_worker=2").stdout
    assert [line.split()[0] for line in printed.splitlines() if line[:1].isdigit()] == [*"0123"]
    assert "store" in printed
    assert "slope" in printed


def test_the_script_that_stops_models_early_runs(run_script: Callable[..., Said]) -> None:
    done = run_script("stop_early=")
    found = re.findall(r"^{'lr': ([\d.]+)} (\S+) after (\d) epochs$", done.stdout, re.MULTILINE)
    assert [rate for rate, _, _ in found] == ["0.3", "0.1", "0.03", "0.01", "0.003", "0.001"], done.stdout + done.stderr
    assert found[0][2] == "8"  # the best is trained to its end
    for rate, weight, epochs in found:  # how many others are stopped before they return depends on who is quicker
        assert (weight == "None") == (int(epochs) < 8), found
        assert weight == "None" or float(weight) == pytest.approx(3 - 3 * (1 - float(rate)) ** 8)
    assert done.stdout.splitlines()[-1] == "best: {'lr': 0.3}"


def test_the_script_of_a_sweep_that_goes_on_runs(run_script: Callable[..., Said], tmp_path: Path) -> None:
    first, second = (run_script('storage="sweeps"') for _ in range(2))
    assert first.stdout == second.stdout, first.stderr + second.stderr
    assert len(literal_eval(first.stdout)) == 4
    assert f"4 of 4 models have ended before, as {tmp_path / 'sweeps' / 'rates'} has it" in second.stderr


def test_the_script_with_figures_for_operators_exports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as (address, values):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", address)
        done = run_example("watched.py", tmp_path)
    assert "2 of 2 models have ended: 2 finished" in done.stderr
    assert "is not called any more" not in done.stderr
    for model, loss in (("0", (3 * 0.9**8) ** 2), ("1", (3 * 0.7**8) ** 2)):
        assert values["daskpytorch_metric", model, "loss"] == pytest.approx(loss)
        assert values["daskpytorch_step", model, ""] == values["daskpytorch_steps", model, ""] == 8
        assert values["daskpytorch_running", model, ""] == 0
        assert values["daskpytorch_restarts_total", model, "lost"] == 0


def test_the_task_with_a_deck_of_its_own_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decks: dict[str, str] = {}
    monkeypatch.setattr("flytekit.Deck", decks.__setitem__)
    example = imported("deck_of_its_own", block("# deck.py:"), tmp_path, monkeypatch)
    assert example.compare.task_function(4) == pytest.approx(1.7**-4)
    assert 'aria-label="held-out loss by epoch"' in decks["Comparison"]
    assert "best 0.4823 at 4" in decks["Comparison"]


def test_the_script_with_trackers_runs(run_script: Callable[..., Said], tmp_path: Path) -> None:
    done = run_script("# tracked.py")
    assert len(list(tmp_path.glob("runs/train-*/events.out.*"))) == 1, done.stderr
    assert len(list(tmp_path.glob("runs/train-*/[01]/events.out.*"))) == 2
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database:
        runs = database.execute("SELECT name, status FROM runs ORDER BY name").fetchall()
        [(num_points,)] = database.execute("SELECT count(*) FROM metrics WHERE key = 'loss'")
    assert runs == [("train", "FINISHED"), ("train", "FINISHED"), ("train-0", "FINISHED"), ("train-1", "FINISHED")]
    assert num_points == 3 * 8


def test_the_task_with_weights_and_biases_is_recorded_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    done = run_example("weights.py", tmp_path)
    assert "no API key found" in done.stdout + done.stderr
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


def test_the_script_that_sends_files_runs(run_script: Callable[..., Said], tmp_path: Path) -> None:
    done = run_script("process_results")
    assert json.loads((tmp_path / "results" / "rank-0" / "epoch-1.json").read_text()) == {"epoch": 1}, done.stderr


def test_the_script_that_reads_pictures_runs(
    run_script: Callable[..., Said], weed: Weed, monkeypatch: pytest.MonkeyPatch
) -> None:
    weed.put_all("readme", photos(20, 2, prefix="dogs"))
    for name, value in weed.env().items():
        monkeypatch.setenv(name, value)
    done = run_script("S3ImageFolder", "s3://readme/dogs")
    assert "16 pictures, 4 held out, 2 classes" in done.stdout, done.stdout + done.stderr


def test_the_task_that_sends_files_returns_them(tmp_path: Path) -> None:
    done = run_example("record.py", tmp_path)
    said = re.search(r"^  results: (\S+)$", done.stderr, re.MULTILINE)
    assert said, done.stdout + done.stderr
    assert said[1] in done.stdout  # as the task's output
    assert json.loads(Path(said[1], "rank-1", "epoch-1.json").read_text()) == {"epoch": 1}


def test_the_configuration_is_what_it_says_to_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = imported("on_gpus", block("min_workers=3"), tmp_path, monkeypatch)
    assert on_gpus.train._num_ranks_per_worker() == 4
    image = Image(name="default", fqn="registry.example/image", tag="v1")
    settings = SerializationSettings(image_config=ImageConfig(default_image=image))
    template = get_serializable(OrderedDict(), settings, on_gpus.train).template
    assert template.type == "dask"
    assert template.k8s_pod.pod_spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert template.metadata.interruptible
    assert [(secret.group, secret.key) for secret in template.security_context.secrets] == [("wandb", "api_key")]


def test_the_image_spec_makes_an_image_with_this_package(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("ImageSpec("), names)
    create_docker_context(names["image"], tmp_path)
    assert "daskpytorch[wandb] @ git+" in (tmp_path / "requirements_uv.txt").read_text()
    assert " git" in (tmp_path / "Dockerfile").read_text()


def test_the_network_policy_leaves_the_pods_to_each_other() -> None:
    policy = yaml.safe_load(block("kind: NetworkPolicy", "yaml"))["spec"]
    pods = [{"podSelector": policy["podSelector"]}]
    assert (policy["ingress"], policy["egress"][0]) == ([{"from": pods}], {"to": pods})


def test_the_commands_run() -> None:
    local = [
        line
        for each in blocks("bash")
        for line in each.splitlines()
        if line.startswith("pyflyte run workflows/pet_names.py pet_names ")
    ]
    assert local
    for line in local:
        done = run_warm(shlex.split(line), REPOSITORY)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "names=[" in done.stdout


def test_the_guides_script_runs_on_a_cluster_and_on_this_node(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; print(sys.argv[1:], os.environ['WORLD_SIZE'])")
    text = block("dispatch.run(client, run_script").replace("tcp://scheduler:8786", cluster.address)
    (tmp_path / "script.py").write_text(text)
    done = run_warm(["python", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "['--lr', '0.1'] 2" in done.stderr
    assert "['--lr', '0.1'] 1" in done.stderr


def test_the_two_commands_install_and_start_what_they_say() -> None:
    main, tests = (each.strip().split(" && ") for each in blocks("bash", "README.md")[:2])
    assert main[1] == ".venv/bin/pip install '.[workflows]'"
    assert main[2].startswith(".venv/bin/pyflyte run workflows/pet_names.py")
    assert tests[1:] == [".venv/bin/pip install -e '.[dev]'", ".venv/bin/pytest -n 2"]
    assert "pip install --quiet --editable '.[dev]'" in (REPOSITORY / ".ci" / "run").read_text()


def test_every_block_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    named = re.findall(r"""(?:block|run_example|run_script)\(f?["'](.*?)["'][,)]""", tests)
    marks = [*SAY, *(mark.partition("{library}")[0] for mark in named)]
    wholly = re.findall(r"""blocks\("python", "(.*?)"\)""", tests)
    run_elsewhere = blocks("python", *wholly)
    assert wholly
    assert [
        each
        for each in blocks("python")
        if each not in run_elsewhere and not any(mark.replace("\\n", "\n") in each for mark in marks)
    ] == []


def test_hyper_parameters_of_ones_own_are_strict() -> None:
    names: dict[str, Any] = {}
    exec(block("Gang(gpu_check=has_room)"), names)  # needs a GPU to run
    exec(block("(StrictInputs)"), names)
    assert names["Hyperparameters"].from_json('{"epochs": 4}').epochs == 4
    with pytest.raises(ValueError, match="epoch"):
        names["Hyperparameters"].from_json('{"epoch": 4}')


def write_weights(examples: list[str], folder: str) -> None:
    os.chdir(folder)
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (current_rank().world_size,)))
    names["written"](model)
    names["write_shards"](model, f"{folder}/shards")


def test_weights_of_a_sharded_model_are_written_for_other_tools(tmp_path: Path) -> None:
    examples = [block("import save_file\n"), block("HuggingFaceStorageWriter(")]
    on_this_machine(write_weights, examples, str(tmp_path)).result(timeout=200)
    one, joined = load_file(tmp_path / "model.safetensors"), {}
    for file in (tmp_path / "shards").glob("*.safetensors"):
        joined |= load_file(file)
    assert one.keys() == joined.keys()
    assert [tuple(one[name].shape) for name in ("0.weight", "1.weight")] == [(7, 3), (5, 7)]
    assert all(one[name].equal(joined[name]) for name in one)


def test_the_readme_is_short_and_leads_somewhere() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 250
    for page in ("README.md", "benchmarks/README.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]*)", (REPOSITORY / page).read_text())
        assert links
        assert [link for link in links if not (REPOSITORY / page).parent.joinpath(link).exists()] == []


def test_the_file_tree_is_complete() -> None:
    tree = block("plugins/flytekitplugins/daskpytorch/", "text")
    plugin = REPOSITORY / "plugins/flytekitplugins/daskpytorch"
    assert set(re.findall(r"(?<=[─,] )\w+\.py", tree)) == {path.name for path in plugin.glob("*.py")}
    assert {path.parent.name for path in plugin.glob("*/__init__.py")} <= set(re.findall(r"── (\w+)/", tree))
