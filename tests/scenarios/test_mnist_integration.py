"""The digits' workflow runs in the real `pyflyte`."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.types.directory import FlyteDirectory

from tasks.cnn import CNN, Hyperparameters, evaluate
from tasks.digits import small_digits
from wandb_file import read_run
from workflow_runs import Run
from workflows.mnist import prepare

HP = {"epochs": 3, "batch_size": 16}
UNPLUGGED = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1") | {"no_proxy": "", "NO_PROXY": ""}
"""Environment of a machine whose every way to the network is refused."""


class Mnist(Run):
    """One run of the workflow, with what it left in its folder."""

    @property
    def outputs(self) -> tuple[list[float], Path]:
        """Accuracies and weights, as the script printed them."""
        found = re.search(r"Mnist\(epoch_accuracies=(\[.*?\]), model_state=(\S+), summary='", self.done.stdout)
        assert found, self.done.stdout + self.done.stderr
        return json.loads(found[1]), Path(found[2])

    @property
    def wandb(self) -> Path:
        """The file of the only run that Weights & Biases recorded."""
        (file,) = (self.folder / "wandb").glob("offline-run-*/*.wandb")
        return file


mnist = partial(Mnist.of, "mnist")


def test_two_ranks_without_network_learn_the_digits_that_there_are(tmp_path: Path) -> None:
    flags = ("--hp", json.dumps(HP), "--num_logged_images", "8", "--watch")
    run = mnist(tmp_path, "first", *flags, env=UNPLUGGED)
    accuracies, weights = run.outputs
    assert run.has_trained
    assert "train: starting 2 ranks" in run.done.stderr
    [said] = [line for line in run.done.stdout.splitlines() if "scikit-learn" in line]
    assert said.startswith("1,438 training and 359 test digits from scikit-learn")
    assert "MNIST could not be downloaded: " in said
    assert "give data_dir" in said

    assert len(accuracies) == HP["epochs"]
    assert accuracies[-1] >= 0.9
    assert f"test accuracy {accuracies[-1]:.2%} after epoch 3; of the 40 test digits" in run.done.stdout
    state = torch.load(weights, weights_only=True)
    assert not any(key.startswith("module.") for key in state)
    found = evaluate(CNN.from_state_dict(state), small_digits(seed=0).test, batch_size=1000)
    assert found.accuracy == pytest.approx(accuracies[-1], abs=0.001)
    history = read_run(run.wandb)["history"]
    assert sum("gradients/layers.0.weight._type" in record for record in history) == HP["epochs"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_dir": True}, "does not hold MNIST in torchvision's layout: MNIST/raw/train-images"),
        ({"hp": Hyperparameters(backend="nccl")}, r"hp\.backend='nccl': needs GPUs; set MNIST_GPUS"),
        ({"num_logged_batches": -1}, "num_logged_batches=-1: must be a whole number from 0 up"),
        (
            {"hp": Hyperparameters(backend="nccl"), "num_logged_images": -2},
            "num_logged_images=-2: .*; hp.backend='nccl': ",
        ),
    ],
)
def test_bad_input_is_refused_before_ranks_start(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    inputs = {"data_dir": None, "hp": Hyperparameters(), "num_logged_batches": 1, "num_logged_images": 1} | given
    if inputs["data_dir"]:
        inputs["data_dir"] = FlyteDirectory(str(tmp_path))
    with pytest.raises((ValueError, FlyteUserRuntimeException), match=said):
        prepare(**inputs)
