"""Train a model of pet names for each pair of batch size and learning rate, as a Flyte workflow.

Steps: names -> sweep (several models at once on a Dask cluster) -> evaluate and sample with the best -> report

The first command below trains four models on the embedded names (about a minute on two cores). The second is a tiny
trial. The third has batch sizes for the 56,000 names of Seattle's pet licences, and a worker for each model:

    pyflyte run workflows/pet_names_sweep.py pet_names_sweep
    pyflyte run workflows/pet_names_sweep.py pet_names_sweep --batch_sizes '[2048]' --learning_rates '[0.01]' \
        --hp '{"epochs": 1}'
    PET_NAMES_SWEEP_WORKERS=4 pyflyte run workflows/pet_names_sweep.py pet_names_sweep \
        --data s3://bucket/names.csv --batch_sizes '[4096, 16384]' --learning_rates '[0.001, 0.01]' \
        --hp '{"epochs": 40}'

`PET_NAMES_SWEEP_WORKERS` sets the number of Dask workers when the workflow is registered or run here.
`DASKPYTORCH_PROFILE=gpu` gives each worker a GPU. Models beyond the number of workers wait in a queue. A model whose
rank fails restarts from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flytekit import Deck, current_context, task, workflow
from flytekit.types.file import FlyteFile, PythonPickledFile

from flytekitplugins.daskpytorch import DaskCluster, Wandb, current_client, report
from tasks import char_lstm, curves, sweeps
from tasks.char_lstm import Hyperparameters
from tasks.names import split_by_name
from tasks.sweeps import Experiment, Outcome, SweepRow
from workflows import pet_names, resources
from workflows.pet_names import NamesFile

HtmlFile = FlyteFile["html"]
NUM_WORKERS = resources.number("PET_NAMES_SWEEP_WORKERS", 2)
SETTINGS = resources.SETTINGS | {"PET_NAMES_SWEEP_WORKERS": str(NUM_WORKERS)}
"""Environment variables of the tasks' pods, which import this file again."""
BATCH_SIZES = [256, 1024]
LEARNING_RATES = [0.003, 0.01]


class SweepOutputs(NamedTuple):
    """Outputs of a sweep: all losses, and the model with the lowest held-out loss after its last epoch."""

    rows: list[SweepRow]
    """Rows for each epoch of each experiment that did not fail."""
    hp: Hyperparameters
    """Hyper-parameters of the best model."""
    epoch_losses: list[float]
    """Held-out losses of the best model, as in `pet_names.TrainingOutputs`."""
    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    """Weights of the best model."""
    charts: HtmlFile
    """HTML page with charts of the loss against epochs and time, and a table of the models."""


class PetNamesSweep(NamedTuple):
    """The outputs of the workflow."""

    rows: list[SweepRow]
    hp: Hyperparameters
    model_state: PythonPickledFile
    charts: HtmlFile
    names: list[str]
    """Names that the best model invented."""


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare(
    data: str, hp: Hyperparameters, batch_sizes: list[int], learning_rates: list[float], num_names: int
) -> NamesFile:
    """Load and clean the names. Inputs that cannot be trained or swept over fail here, before any cluster starts."""
    pet_names.check_count(num_names)
    sweeps.grid(batch_sizes, learning_rates)
    return pet_names.load(data, hp, num_ranks=1)


@task(
    task_config=DaskCluster(scheduler=resources.SCHEDULER, workers=resources.workers(NUM_WORKERS)),
    requests=resources.GATHERING,
    environment=SETTINGS,
    retries=2,
    enable_deck=True,
)
def sweep(names: NamesFile, hp: Hyperparameters, batch_sizes: list[int], learning_rates: list[float]) -> SweepOutputs:
    """Train the models of the grid, one per worker at a time. The task returns the outputs of the best model."""
    training, held_out = split_by_name(pet_names.read(names), hp.held_out, hp.seed)
    outcomes, bigram_loss = train_all("sweep", training, held_out, hp, sweeps.grid(batch_sizes, learning_rates))
    best = sweeps.best(outcomes)
    print(f"best of {len(outcomes)}: {best.experiment.label}, {best.losses[-1]:.4f} nats per character")
    return SweepOutputs(
        rows=sweeps.sweep_rows(outcomes),
        hp=best.experiment.hyperparameters(hp),
        epoch_losses=best.losses,
        epoch_accuracies=[epoch.held_out_accuracy for epoch in best.epochs],
        model_state=pet_names.save(best.trained),
        charts=show("Sweep", curves.loss_charts(outcomes, bigram_loss), curves.experiments_table(outcomes)),
    )


@workflow
def pet_names_sweep(
    data: str = "",
    batch_sizes: list[int] = BATCH_SIZES,
    learning_rates: list[float] = LEARNING_RATES,
    hp: Hyperparameters = Hyperparameters(epochs=4),
    num_names: int = 20,
) -> PetNamesSweep:
    """Train a model for each batch size and learning rate, one per worker, and invent names with the best model.

    Args:
        data: Source of the names, as for pet_names.
        batch_sizes: Windows per step, as a JSON list of whole numbers.
        learning_rates: Adam's learning rates, as a JSON list.
        hp: Common hyper-parameters of all models, as a JSON object of the fields of `Hyperparameters`. The grid
            replaces its batch_size and learning_rate. Fields that the JSON leaves out have the defaults of
            `Hyperparameters`, such as 3 epochs.
        num_names: Number of names that the best model invents.
    """
    names = prepare(data=data, hp=hp, batch_sizes=batch_sizes, learning_rates=learning_rates, num_names=num_names)
    swept = sweep(names=names, hp=hp, batch_sizes=batch_sizes, learning_rates=learning_rates)
    quality = pet_names.evaluate(names=names, hp=swept.hp, model_state=swept.model_state)
    invented = pet_names.sample(names=names, hp=swept.hp, model_state=swept.model_state, num_names=num_names)
    pet_names.report(
        epoch_losses=swept.epoch_losses,
        epoch_accuracies=swept.epoch_accuracies,
        quality=quality,
        names=invented,
    )
    return PetNamesSweep(
        rows=swept.rows, hp=swept.hp, model_state=swept.model_state, charts=swept.charts, names=invented
    )


def train_all(
    name: str, training: list[str], held_out: list[str], hp: Hyperparameters, experiments: Sequence[Experiment]
) -> tuple[list[Outcome], float]:
    """Train a model for each experiment on the task's cluster, with one worker per rank.

    Returns:
        The outcome of each experiment, and the loss of a bigram model for comparison.
    """
    from flytekitplugins.daskpytorch import dispatch  # here because it imports Dask, which ranks do not need

    client = current_client()
    num_threads = min(client.nthreads().values())  # cores of a worker, as other models train on the same machine
    train_one = partial(sweeps.train, training=training, held_out=held_out, hp=hp, num_threads=num_threads)
    models = dispatch.map(
        client, train_one, experiments, workers=lambda experiment: experiment.ranks, wandb=_runs(name, hp)
    )
    bigram_loss = char_lstm.bigram_loss(char_lstm.windows(training), char_lstm.windows(held_out))
    return sweeps.collect(experiments, models), bigram_loss


def show(name: str, *pieces: str) -> HtmlFile:
    """Show pieces of HTML in a Deck of this name, and write them to a file."""
    Deck(name, report.page(report.status("done", name, tone="good"), *pieces))
    path = Path(current_context().working_directory, f"{name.lower()}.html")
    path.write_text(report.document(name, *pieces))
    return HtmlFile(path=str(path))


def _runs(name: str, hp: Hyperparameters) -> Wandb:
    """Return the settings of Weights & Biases: a run per model, with the common hyper-parameters as configuration."""
    shared = {key: value for key, value in asdict(hp).items() if key not in ("batch_size", "learning_rate")}
    return Wandb(project="pet-names", name=name, config=shared)
