"""Invent pet names with an LSTM that two ranks train together, as a Flyte workflow.

names -> train (by DDP on a Dask cluster) -> evaluate and sample -> report

On this machine, on the embedded list of names (under a minute on two cores):

    pyflyte run workflows/pet_names.py pet_names

Tiny, to see that everything works; and on a list of your own (a JSON list, or a CSV file with a column of names):

    pyflyte run workflows/pet_names.py pet_names --hp '{"epochs": 1, "batch_size": 2048}' --num_names 5
    pyflyte run workflows/pet_names.py pet_names --data s3://bucket/names.csv --hp '{"epochs": 3, "batch_size": 512}'

On a Flyte backend with the Dask operator (build the image from the Dockerfile first):

    pyflyte run --remote --image registry/daskpytorch:tag workflows/pet_names.py pet_names

Which batch size and learning rate? `pet_names_sweep` trains a model for each pair, several at once, and goes on with
the best one. Four models on the embedded names (about a minute on two cores); tiny; and batches for the 56,000 names of
Seattle's pet licences, each model on a worker of its own:

    pyflyte run workflows/pet_names.py pet_names_sweep
    pyflyte run workflows/pet_names.py pet_names_sweep --batch_sizes '[2048]' --learning_rates '[0.01]' \
        --hp '{"epochs": 1}'
    PET_NAMES_SWEEP_WORKERS=4 pyflyte run workflows/pet_names.py pet_names_sweep --data s3://bucket/names.csv \
        --batch_sizes '[4096, 16384]' --learning_rates '[0.001, 0.01]' --hp '{"epochs": 40}'

Are more ranks worth it? `pet_names_scaling` measures the time to the same loss with more or fewer ranks, which compares
like with like where the global batch (ranks x batch size per rank) is the same. Small (about a minute on two cores);
tiny; and in full on a backend:

    pyflyte run workflows/pet_names.py pet_names_scaling
    pyflyte run workflows/pet_names.py pet_names_scaling --batch_sizes '[2048, 4096]' --hp '{"epochs": 1}'
    PET_NAMES_SCALING_WORKERS=16 pyflyte run --remote --image registry/daskpytorch:tag workflows/pet_names.py \
        pet_names_scaling --data s3://bucket/names.csv --ranks '[1, 4, 16]' --batch_sizes '[1024, 4096, 16384]' \
        --learning_rates '[0.001, 0.004, 0.016]' --hp '{"epochs": 40}'

Training saves a checkpoint after each epoch. When a worker is lost or a rank fails, the gang starts again from the
newest one, up to three times; on a Flyte backend the task's next attempt resumes from it, too.

`PET_NAMES_WORKERS`, `PET_NAMES_SWEEP_WORKERS` and `PET_NAMES_SCALING_WORKERS` set the numbers of Dask workers when the
workflows are registered or run here, and `DASKPYTORCH_PROFILE=gpu` gives each a GPU. A sweep may have more models than
workers: they queue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from flytekit import Deck, current_context, task, workflow
from flytekit.types.file import FlyteFile, PythonPickledFile

from flytekitplugins.daskpytorch import (
    DaskCluster,
    DaskDDP,
    Gang,
    Wandb,
    current_client,
)
from flytekitplugins.daskpytorch.report import line_chart, table
from tasks import char_lstm, curves, sweeps
from tasks.char_lstm import CharLSTM, Hyperparameters, TrainingResult
from tasks.curves import Chart
from tasks.names import load_names, split_by_name
from tasks.sweeps import Experiment, Outcome, ScalingRow, SweepRow, TimeToLoss
from workflows import resources

NamesFile = FlyteFile["json"]
PngFile = FlyteFile["png"]
NUM_WORKERS = resources.number("PET_NAMES_WORKERS", 2)
NUM_SWEEP_WORKERS = resources.number("PET_NAMES_SWEEP_WORKERS", 2)
NUM_SCALING_WORKERS = resources.number("PET_NAMES_SCALING_WORKERS", 2)
SETTINGS = resources.SETTINGS | {
    "PET_NAMES_WORKERS": str(NUM_WORKERS),
    "PET_NAMES_SWEEP_WORKERS": str(NUM_SWEEP_WORKERS),
    "PET_NAMES_SCALING_WORKERS": str(NUM_SCALING_WORKERS),
}
"""For the tasks' pods, which import this file again."""
SWEEP_BATCH_SIZES = [256, 1024]
SWEEP_LEARNING_RATES = [0.003, 0.01]
SCALING_RANKS = [1, 2]
SCALING_BATCH_SIZES = [128, 256]
"""Per rank: 1 x 256 and 2 x 128 have the same global batch."""
SCALING_LEARNING_RATES = [0.006]


class TrainingOutputs(NamedTuple):
    """What training leaves."""

    epoch_losses: list[float]
    """Cross-entropy of the next character on held-out names, in nats, after each epoch."""
    epoch_accuracies: list[float]
    """The share of their characters that the model ranks first, after each epoch."""
    model_state: PythonPickledFile
    """The weights of a `CharLSTM`: `torch.load(..., weights_only=True)`."""


class PetNames(NamedTuple):
    """The outputs of the workflow."""

    epoch_losses: list[float]
    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    names: list[str]
    """Invented names in title case, none of them in the training list."""


class SweepOutputs(NamedTuple):
    """What a sweep leaves: all losses, and the model whose held-out loss is the lowest at the end."""

    rows: list[SweepRow]
    """One for each epoch of each experiment that has not failed."""
    hp: Hyperparameters
    """How the best model was trained."""
    epoch_losses: list[float]
    """The best model's, as those of `TrainingOutputs`."""
    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    """The best model's weights, as those of `TrainingOutputs`."""
    pictures: list[PngFile]
    """Loss against epoch and against elapsed time."""


class PetNamesSweep(NamedTuple):
    """The outputs of the workflow that sweeps."""

    rows: list[SweepRow]
    hp: Hyperparameters
    model_state: PythonPickledFile
    pictures: list[PngFile]
    names: list[str]
    """Invented by the best model."""


class PetNamesScaling(NamedTuple):
    """The outputs of the workflow that measures scaling."""

    rows: list[ScalingRow]
    """One for each epoch of each experiment that has not failed."""
    times: list[TimeToLoss]
    """One for each experiment."""
    target_loss: float
    """Nats per character: what was asked for, or the bigram model's."""
    pictures: list[PngFile]
    """Time to the loss against ranks; loss against epoch and against elapsed time."""


@dataclass
class Quality:
    """The trained model on the held-out names."""

    loss: float
    """Cross-entropy of the next character, in nats."""
    accuracy: float
    bigram_loss: float
    """The same loss of a model that knows only the character before."""


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare(data: str, hp: Hyperparameters, num_names: int) -> NamesFile:
    """Load and clean the names, and refuse what cannot be trained on before any cluster starts."""
    _check_count(num_names)
    return _load_names(data, hp, num_ranks=NUM_WORKERS, remedy="set PET_NAMES_WORKERS lower")


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare_sweep(
    data: str, hp: Hyperparameters, batch_sizes: list[int], learning_rates: list[float], num_names: int
) -> NamesFile:
    """As `prepare`; refuses a grid that makes no sense, too."""
    _check_count(num_names)
    sweeps.grid(batch_sizes, learning_rates)
    return _load_names(data, hp, num_ranks=1)


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare_scaling(
    data: str,
    hp: Hyperparameters,
    ranks: list[int],
    batch_sizes: list[int],
    learning_rates: list[float],
    target_loss: float | None,
) -> NamesFile:
    """As `prepare`; refuses a grid that makes no sense or that the workers cannot carry, too."""
    _scaling_grid(ranks, batch_sizes, learning_rates)
    sweeps.check_target(target_loss)
    return _load_names(data, hp, num_ranks=max(ranks), remedy="use fewer ranks")


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
    """Train in every rank; the first rank's outputs are the task's."""
    training, held_out = split_by_name(_read(names), hp.held_out, hp.seed)
    result = char_lstm.train(char_lstm.windows(training), char_lstm.windows(held_out), hp)
    return TrainingOutputs(
        epoch_losses=[epoch.held_out_loss for epoch in result.epochs],
        epoch_accuracies=[epoch.held_out_accuracy for epoch in result.epochs],
        model_state=_save(result),
    )


@task(
    task_config=DaskCluster(
        scheduler=resources.SCHEDULER,
        workers=resources.workers(NUM_SWEEP_WORKERS),
    ),
    requests=resources.GATHERING,
    environment=SETTINGS,
    retries=2,
    enable_deck=True,
)
def sweep(names: NamesFile, hp: Hyperparameters, batch_sizes: list[int], learning_rates: list[float]) -> SweepOutputs:
    """Train one model per worker until the grid is done; the best one's outputs are the task's."""
    training, held_out = split_by_name(_read(names), hp.held_out, hp.seed)
    outcomes = _train_all("sweep", training, held_out, hp, sweeps.grid(batch_sizes, learning_rates))
    best, bigram_loss = sweeps.best(outcomes), _bigram_loss(training, held_out)
    print(f"best of {len(outcomes)}: {best.experiment.label}, {best.losses[-1]:.4f} nats per character")
    charts = [curves.loss_by_epoch(outcomes, bigram_loss), curves.loss_by_time(outcomes, bigram_loss)]
    return SweepOutputs(
        rows=sweeps.sweep_rows(outcomes),
        hp=best.experiment.hyperparameters(hp),
        epoch_losses=best.losses,
        epoch_accuracies=[epoch.held_out_accuracy for epoch in best.epochs],
        model_state=_save(best.trained),
        pictures=_show("Sweep", charts, curves.experiments_table(outcomes)),
    )


@task(
    task_config=DaskCluster(
        scheduler=resources.SCHEDULER,
        workers=resources.workers(NUM_SCALING_WORKERS),
    ),
    requests=resources.GATHERING,
    environment=SETTINGS,
    retries=2,
    enable_deck=True,
)
def scale(
    names: NamesFile,
    hp: Hyperparameters,
    ranks: list[int],
    batch_sizes: list[int],
    learning_rates: list[float],
    target_loss: float | None,
) -> PetNamesScaling:
    """Train each model with its number of ranks, a worker for each, and see when it comes to the target."""
    training, held_out = split_by_name(_read(names), hp.held_out, hp.seed)
    outcomes = _train_all("scaling", training, held_out, hp, _scaling_grid(ranks, batch_sizes, learning_rates))
    bigram_loss = _bigram_loss(training, held_out)
    target = bigram_loss if target_loss is None else target_loss
    times = sweeps.time_to_loss(outcomes, target)
    print(f"{sum(time.seconds is not None for time in times)} of {len(times)} came to {target:.4f} nats per character")
    charts = [
        curves.time_chart(times, target),
        curves.loss_by_epoch(outcomes, bigram_loss),
        curves.loss_by_time(outcomes, bigram_loss),
    ]
    return PetNamesScaling(
        rows=sweeps.scaling_rows(outcomes),
        times=times,
        target_loss=target,
        pictures=_show("Scaling", charts, curves.times_table(times) + curves.experiments_table(outcomes)),
    )


@task(requests=resources.SMALL)
def evaluate(names: NamesFile, hp: Hyperparameters, model_state: PythonPickledFile) -> Quality:
    """Judge the weights that arrived, beside a bigram model fitted on the same training names."""
    training, held_out = (char_lstm.windows(part) for part in split_by_name(_read(names), hp.held_out, hp.seed))
    found = char_lstm.evaluate(_load(model_state), held_out)
    return Quality(loss=found.loss, accuracy=found.accuracy, bigram_loss=char_lstm.bigram_loss(training, held_out))


@task(requests=resources.SMALL)
def sample(names: NamesFile, hp: Hyperparameters, model_state: PythonPickledFile, num_names: int) -> list[str]:
    """Invent names that are in no list."""
    return char_lstm.sample_names(_load(model_state), num_names, exclude=_read(names), seed=hp.seed)


@task(requests=resources.SMALL, enable_deck=True)
def report(epoch_losses: list[float], epoch_accuracies: list[float], quality: Quality, names: list[str]) -> str:
    """Say in a line, and show in a Deck, how the training went and what came of it."""
    text = (
        f"held-out loss {quality.loss:.4f} nats per character, {_compare(quality)} a bigram model's "
        f"{quality.bigram_loss:.4f}; {quality.accuracy:.1%} of the characters right"
    )
    Deck(
        "Pet names",
        f"<p>{text}</p>"
        + line_chart("held-out loss", {"LSTM": list(enumerate(epoch_losses, 1))}, "epoch")
        + line_chart("held-out accuracy", {"LSTM": list(enumerate(epoch_accuracies, 1))}, "epoch")
        + table(("new names",), [(name,) for name in names]),
    )
    print(text)
    print(f"new names: {', '.join(names)}")
    return text


@workflow
def pet_names(data: str = "", hp: Hyperparameters = Hyperparameters(), num_names: int = 20) -> PetNames:
    """Train on a list of names and invent new ones.

    Args:
        data: A JSON list of names or a CSV file with a column of names (a path, https:// or s3://); empty for the
            embedded list.
        hp: How to train, as a JSON object of Hyperparameters' fields.
        num_names: How many names to invent.
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


@workflow
def pet_names_sweep(
    data: str = "",
    batch_sizes: list[int] = SWEEP_BATCH_SIZES,
    learning_rates: list[float] = SWEEP_LEARNING_RATES,
    hp: Hyperparameters = Hyperparameters(epochs=4),
    num_names: int = 20,
) -> PetNamesSweep:
    """Train a model for each batch size and learning rate, one per worker, and go on with the best.

    Args:
        data: As for pet_names.
        batch_sizes: Windows per step, as a JSON list of whole numbers.
        learning_rates: Adam's step sizes, as a JSON list.
        hp: What all models share, as a JSON object of Hyperparameters' fields; its batch_size and learning_rate are
            replaced by those of the grid. A field that is left out of the JSON has its usual default, such as 6 epochs.
        num_names: How many names the best model is to invent.
    """
    names = prepare_sweep(data=data, hp=hp, batch_sizes=batch_sizes, learning_rates=learning_rates, num_names=num_names)
    swept = sweep(names=names, hp=hp, batch_sizes=batch_sizes, learning_rates=learning_rates)
    quality = evaluate(names=names, hp=swept.hp, model_state=swept.model_state)
    invented = sample(names=names, hp=swept.hp, model_state=swept.model_state, num_names=num_names)
    report(
        epoch_losses=swept.epoch_losses,
        epoch_accuracies=swept.epoch_accuracies,
        quality=quality,
        names=invented,
    )
    return PetNamesSweep(
        rows=swept.rows, hp=swept.hp, model_state=swept.model_state, pictures=swept.pictures, names=invented
    )


@workflow
def pet_names_scaling(
    data: str = "",
    ranks: list[int] = SCALING_RANKS,
    batch_sizes: list[int] = SCALING_BATCH_SIZES,
    learning_rates: list[float] = SCALING_LEARNING_RATES,
    hp: Hyperparameters = Hyperparameters(epochs=3),
    target_loss: float | None = None,
) -> PetNamesScaling:
    """Measure the time to the same held-out loss with more or fewer ranks.

    Models are trained side by side where there are workers for it; give each worker cores of its own.

    Args:
        data: As for pet_names.
        ranks: How many processes train a model together, each on a worker of its own; a JSON list.
        batch_sizes: Windows per step and rank; a JSON list. Compare equal products of ranks and batch size.
        learning_rates: Adam's step sizes, as a JSON list.
        hp: What all models share, as a JSON object of Hyperparameters' fields; its batch_size and learning_rate are
            replaced by those of the grid. All its epochs are trained, also after the target.
        target_loss: Nats per character; without it, the held-out loss of a bigram model.
    """
    names = prepare_scaling(
        data=data,
        hp=hp,
        ranks=ranks,
        batch_sizes=batch_sizes,
        learning_rates=learning_rates,
        target_loss=target_loss,
    )
    scaled = scale(
        names=names,
        hp=hp,
        ranks=ranks,
        batch_sizes=batch_sizes,
        learning_rates=learning_rates,
        target_loss=target_loss,
    )
    return PetNamesScaling(
        rows=scaled.rows, times=scaled.times, target_loss=scaled.target_loss, pictures=scaled.pictures
    )


def _check_count(num_names: int) -> None:
    if num_names < 0:
        raise ValueError(f"num_names={num_names}: must be a whole number from 0 up")


def _scaling_grid(ranks: list[int], batch_sizes: list[int], learning_rates: list[float]) -> list[Experiment]:
    """The grid, if the workers can carry it.

    Raises:
        ValueError: They cannot, or a list makes no sense.
    """
    if max(ranks, default=0) > NUM_SCALING_WORKERS:
        raise ValueError(
            f"ranks={ranks}: {max(ranks)} ranks need as many workers, and there are {NUM_SCALING_WORKERS}; set "
            f"PET_NAMES_SCALING_WORKERS={max(ranks)} or use fewer ranks"
        )
    return sweeps.grid(batch_sizes, learning_rates, ranks)


def _load_names(data: str, hp: Hyperparameters, *, num_ranks: int, remedy: str = "hold out fewer") -> NamesFile:
    """Load and clean the names, say what was dropped, and see that every rank can have one."""
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


def _train_all(
    name: str, training: list[str], held_out: list[str], hp: Hyperparameters, experiments: Sequence[Experiment]
) -> list[Outcome]:
    """Train a model for each experiment on the task's cluster, with one worker per rank."""
    from flytekitplugins.daskpytorch import dispatch  # late: it imports Dask, which no rank needs

    client = current_client()
    num_threads = min(client.nthreads().values())  # a worker's share of its machine, where other models train, too
    train_one = partial(sweeps.train, training=training, held_out=held_out, hp=hp, num_threads=num_threads)
    models = dispatch.map(
        client, train_one, experiments, workers=lambda experiment: experiment.ranks, wandb=_runs(name, hp)
    )
    return sweeps.collect(experiments, models)


def _runs(name: str, hp: Hyperparameters) -> Wandb:
    """A Weights & Biases run for each model, with what all share in its configuration, too."""
    shared = {key: value for key, value in asdict(hp).items() if key not in ("batch_size", "learning_rate")}
    return Wandb(project="pet-names", name=name, config=shared)


def _bigram_loss(training: list[str], held_out: list[str]) -> float:
    return char_lstm.bigram_loss(char_lstm.windows(training), char_lstm.windows(held_out))


def _show(name: str, charts: Sequence[Chart], tables: str) -> list[PngFile]:
    """Put charts and tables into a Deck of that name; returns the charts as files."""
    Deck(name, "".join(chart.html for chart in charts) + tables)
    folder = current_context().working_directory
    return [PngFile(path=str(chart.save(folder))) for chart in charts]


def _compare(quality: Quality) -> str:
    """How much better or worse than a bigram model the trained one is."""
    gain = quality.bigram_loss - quality.loss
    return f"{abs(gain):.4f} {'better' if gain >= 0 else 'worse'} than"


def _read(names: NamesFile) -> list[str]:
    return list(json.loads(Path(names.download()).read_text()))


def _save(result: TrainingResult) -> PythonPickledFile:
    path = Path(current_context().working_directory, "model_state.pt")
    torch.save(result.state_dict, path)
    return PythonPickledFile(path=str(path))


def _load(model_state: PythonPickledFile) -> CharLSTM:
    return CharLSTM.from_state_dict(torch.load(model_state.download(), map_location="cpu", weights_only=True))
