"""Invent pet names with an LSTM that two ranks train together, as a Flyte workflow.

Steps: names -> train (with DDP on a Dask cluster) -> evaluate and sample -> report

Run the workflow on this machine, with the embedded list of names (under a minute on two cores):

    pyflyte run workflows/pet_names.py pet_names

Try a tiny training first, or train on your own list (a JSON list, or a CSV file with a column of names):

    pyflyte run workflows/pet_names.py pet_names --hp '{"epochs": 1, "batch_size": 2048}' --num_names 5
    pyflyte run workflows/pet_names.py pet_names --data s3://bucket/names.csv --hp '{"epochs": 3, "batch_size": 512}'

Run the workflow on a Flyte backend with the Dask operator, after building the image from the Dockerfile:

    pyflyte run --remote --image registry/daskpytorch:tag workflows/pet_names.py pet_names

Training saves a checkpoint after each epoch. If a worker is lost or a rank fails, the gang restarts from the newest
checkpoint, up to three times. On a Flyte backend, the task's next attempt also resumes from the newest checkpoint.

`PET_NAMES_WORKERS` sets the number of Dask workers when the workflow is registered or run here.
`DASKPYTORCH_PROFILE=gpu` gives each worker a GPU. The workflow pet_names_sweep.py compares batch sizes and learning
rates. The workflow pet_names_scaling.py compares numbers of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from flytekit import Deck, current_context, task, workflow
from flytekit.types.file import FlyteFile, PythonPickledFile

from flytekitplugins.daskpytorch import DaskDDP, Gang, Wandb
from tasks import char_lstm
from tasks.char_lstm import CharLSTM, Hyperparameters, TrainingResult
from tasks.names import load_names, split_by_name
from tasks.quality import Quality, page
from workflows import resources

NamesFile = FlyteFile["json"]
NUM_WORKERS = resources.number("PET_NAMES_WORKERS", 2)
SETTINGS = resources.SETTINGS | {"PET_NAMES_WORKERS": str(NUM_WORKERS)}
"""Environment variables of the tasks' pods, which import this file again."""


class TrainingOutputs(NamedTuple):
    """Outputs of the training."""

    epoch_losses: list[float]
    """Cross-entropy of the next character on held-out names after each epoch, in nats."""
    epoch_accuracies: list[float]
    """Share of held-out characters that the model ranks first, after each epoch, from 0 to 1."""
    model_state: PythonPickledFile
    """Weights of a `CharLSTM`. Load them with `torch.load(..., weights_only=True)`."""


class PetNames(NamedTuple):
    """The outputs of the workflow."""

    epoch_losses: list[float]
    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    names: list[str]
    """Invented names in title case, without names of the training list."""


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare(data: str, hp: Hyperparameters, num_names: int) -> NamesFile:
    """Load and clean the names. Inputs that cannot be trained on fail here, before any cluster starts."""
    check_count(num_names)
    return load(data, hp, num_ranks=NUM_WORKERS, remedy="set PET_NAMES_WORKERS lower")


@task(
    task_config=DaskDDP(
        scheduler=resources.SCHEDULER,
        workers=resources.workers(NUM_WORKERS),
        gang=Gang(start_timeout=600, max_restarts=3),
        wandb=Wandb(project="pet-names"),
    ),
    requests=resources.SMALL,
    environment=SETTINGS,
    retries=2,
    enable_deck=True,
)
def train(names: NamesFile, hp: Hyperparameters) -> TrainingOutputs:
    """Train in all ranks. The task returns the outputs of rank 0."""
    training, held_out = split_by_name(read(names), hp.held_out, hp.seed)
    result = char_lstm.train(char_lstm.windows(training), char_lstm.windows(held_out), hp)
    return TrainingOutputs(
        epoch_losses=[epoch.held_out_loss for epoch in result.epochs],
        epoch_accuracies=[epoch.held_out_accuracy for epoch in result.epochs],
        model_state=save(result),
    )


@task(requests=resources.SMALL)
def evaluate(names: NamesFile, hp: Hyperparameters, model_state: PythonPickledFile) -> Quality:
    """Evaluate the received weights, beside a bigram model fitted on the same training names."""
    training, held_out = (char_lstm.windows(part) for part in split_by_name(read(names), hp.held_out, hp.seed))
    found = char_lstm.evaluate(_load(model_state), held_out)
    return Quality(loss=found.loss, accuracy=found.accuracy, bigram_loss=char_lstm.bigram_loss(training, held_out))


@task(requests=resources.SMALL)
def sample(names: NamesFile, hp: Hyperparameters, model_state: PythonPickledFile, num_names: int) -> list[str]:
    """Return invented names, none of which is in the list of names."""
    return char_lstm.sample_names(_load(model_state), num_names, exclude=read(names), seed=hp.seed)


@task(requests=resources.SMALL, enable_deck=True)
def report(epoch_losses: list[float], epoch_accuracies: list[float], quality: Quality, names: list[str]) -> str:
    """Print a summary of the training and its result in a line, and show both in a Deck."""
    text = quality.verdict()
    Deck("Pet names", page(epoch_losses, epoch_accuracies, quality, names))
    print(text)
    print(f"new names: {', '.join(names)}")
    return text


@workflow
def pet_names(data: str = "", hp: Hyperparameters = Hyperparameters(), num_names: int = 20) -> PetNames:
    """Train on a list of names and invent new names.

    Args:
        data: A JSON list of names or a CSV file with a column of names (a path, https:// or s3://). Empty: the embedded
            list.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
        num_names: Number of names to invent.
    """
    names = prepare(data=data, hp=hp, num_names=num_names)
    trained = train(names=names, hp=hp)
    quality = evaluate(names=names, hp=hp, model_state=trained.model_state)
    invented = sample(names=names, hp=hp, model_state=trained.model_state, num_names=num_names)
    report(
        epoch_losses=trained.epoch_losses,
        epoch_accuracies=trained.epoch_accuracies,
        quality=quality,
        names=invented,
    )
    return PetNames(
        epoch_losses=trained.epoch_losses,
        epoch_accuracies=trained.epoch_accuracies,
        model_state=trained.model_state,
        names=invented,
    )


def check_count(num_names: int) -> None:
    """Raise a `ValueError` if the number of names to invent is negative."""
    if num_names < 0:
        raise ValueError(f"num_names={num_names}: must be a whole number from 0 up")


def load(data: str, hp: Hyperparameters, *, num_ranks: int, remedy: str = "hold out fewer") -> NamesFile:
    """Load and clean the names, print which were dropped, and check that every rank gets a sample."""
    loaded = load_names(data)
    print(loaded.report)
    training, _ = split_by_name(loaded.names, hp.held_out, hp.seed)
    if (num_samples := len(char_lstm.windows(training))) < num_ranks:
        raise ValueError(
            f"{num_samples} training samples ({len(training)} names) are fewer than the {num_ranks} ranks; give more "
            f"names, or {remedy}"
        )
    path = Path(current_context().working_directory, "names.json")
    path.write_text(json.dumps(loaded.names))
    return NamesFile(path=str(path))


def read(names: NamesFile) -> list[str]:
    """Return the names in a file that `load` wrote."""
    return list(json.loads(Path(names.download()).read_text()))


def save(result: TrainingResult) -> PythonPickledFile:
    """Write the trained weights to a file, and return the file."""
    path = Path(current_context().working_directory, "model_state.pt")
    torch.save(result.state_dict, path)
    return PythonPickledFile(path=str(path))


def _load(model_state: PythonPickledFile) -> CharLSTM:
    return CharLSTM.from_state_dict(torch.load(model_state.download(), map_location="cpu", weights_only=True))
