"""Measure the training time to the same loss on pet names with different numbers of ranks, as a Flyte workflow.

Steps: names -> scale (several models at once on a Dask cluster, each with its number of ranks)

Compare only models with the same global batch, the product of ranks and batch size per rank. The commands below run a
small comparison (about a minute on two cores), a tiny one, and a full one on a backend:

    pyflyte run workflows/pet_names_scaling.py pet_names_scaling
    pyflyte run workflows/pet_names_scaling.py pet_names_scaling --batch_sizes '[2048, 4096]' --hp '{"epochs": 1}'
    PET_NAMES_SCALING_WORKERS=16 pyflyte run --remote --image registry/daskpytorch:tag \
        workflows/pet_names_scaling.py pet_names_scaling --data s3://bucket/names.csv --ranks '[1, 4, 16]' \
        --batch_sizes '[1024, 4096, 16384]' --learning_rates '[0.001, 0.004, 0.016]' --hp '{"epochs": 40}'

`PET_NAMES_SCALING_WORKERS` sets the number of Dask workers when the workflow is registered or run here.
`DASKPYTORCH_PROFILE=gpu` gives each worker a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from flytekit import task, workflow

from flytekitplugins.daskpytorch import DaskCluster
from tasks import curves, sweeps
from tasks.char_lstm import Hyperparameters
from tasks.names import split_by_name
from tasks.sweeps import Experiment, ScalingRow, TimeToLoss
from workflows import pet_names, resources
from workflows.pet_names import NamesFile
from workflows.pet_names_sweep import HtmlFile, show, train_all

NUM_WORKERS = resources.number("PET_NAMES_SCALING_WORKERS", 2)
SETTINGS = resources.SETTINGS | {"PET_NAMES_SCALING_WORKERS": str(NUM_WORKERS)}
"""Environment variables of the tasks' pods, which import this file again."""
RANKS = [1, 2]
BATCH_SIZES = [128, 256]
"""Windows per step and rank. 1 x 256 and 2 x 128 have the same global batch."""
LEARNING_RATES = [0.006]


class PetNamesScaling(NamedTuple):
    """The outputs of the workflow."""

    rows: list[ScalingRow]
    """Rows for each epoch of each experiment that did not fail."""
    times: list[TimeToLoss]
    """Training times to the target loss, one for each experiment."""
    target_loss: float
    """Target loss in nats per character: the input, or the bigram model's loss if the input is None."""
    charts: HtmlFile
    """HTML page with charts of the time to the target loss against ranks, and of the loss against epochs and time."""


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare(
    data: str,
    hp: Hyperparameters,
    ranks: list[int],
    batch_sizes: list[int],
    learning_rates: list[float],
    target_loss: float | None,
) -> NamesFile:
    """Load and clean the names. Inputs that the workers cannot run, or that cannot be compared, fail here."""
    _grid(ranks, batch_sizes, learning_rates)
    sweeps.check_target(target_loss)
    return pet_names.load(data, hp, num_ranks=max(ranks), remedy="use fewer ranks")


@task(
    task_config=DaskCluster(scheduler=resources.SCHEDULER, workers=resources.workers(NUM_WORKERS)),
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
    """Train each model with its number of ranks, one worker per rank, and measure its time to the target loss."""
    training, held_out = split_by_name(pet_names.read(names), hp.held_out, hp.seed)
    outcomes, bigram_loss = train_all("scaling", training, held_out, hp, _grid(ranks, batch_sizes, learning_rates))
    target = bigram_loss if target_loss is None else target_loss
    times = sweeps.time_to_loss(outcomes, target)
    print(f"{sum(time.seconds is not None for time in times)} of {len(times)} came to {target:.4f} nats per character")
    shown = [
        curves.time_chart(times, target),
        curves.times_table(times),
        curves.loss_charts(outcomes, bigram_loss),
        curves.experiments_table(outcomes),
    ]
    return PetNamesScaling(
        rows=sweeps.scaling_rows(outcomes),
        times=times,
        target_loss=target,
        charts=show("Scaling", *shown),
    )


@workflow
def pet_names_scaling(
    data: str = "",
    ranks: list[int] = RANKS,
    batch_sizes: list[int] = BATCH_SIZES,
    learning_rates: list[float] = LEARNING_RATES,
    hp: Hyperparameters = Hyperparameters(epochs=3),
    target_loss: float | None = None,
) -> PetNamesScaling:
    """Measure the training time to the same held-out loss with different numbers of ranks.

    Models train side by side if there are enough workers. Give each worker its own cores.

    Args:
        data: Source of the names, as for pet_names.
        ranks: Numbers of ranks that train a model, each rank on its own worker, as a JSON list.
        batch_sizes: Windows per step and rank, as a JSON list. Compare equal products of ranks and batch size.
        learning_rates: Adam's learning rates, as a JSON list.
        hp: Common hyper-parameters of all models, as a JSON object of the fields of `Hyperparameters`. The grid
            replaces its batch_size and learning_rate. All epochs are trained, even after the target loss.
        target_loss: Target in nats per character. None: the held-out loss of a bigram model.
    """
    grid = {"ranks": ranks, "batch_sizes": batch_sizes, "learning_rates": learning_rates}
    names = prepare(data=data, hp=hp, target_loss=target_loss, **grid)
    scaled = scale(names=names, hp=hp, target_loss=target_loss, **grid)
    return PetNamesScaling(rows=scaled.rows, times=scaled.times, target_loss=scaled.target_loss, charts=scaled.charts)


def _grid(ranks: list[int], batch_sizes: list[int], learning_rates: list[float]) -> list[Experiment]:
    """Return the grid of experiments.

    Raises:
        ValueError: A number of ranks exceeds the number of workers, or a list is invalid.
    """
    if max(ranks, default=0) > NUM_WORKERS:
        raise ValueError(
            f"ranks={ranks}: {max(ranks)} ranks need as many workers, and there are {NUM_WORKERS}; set "
            f"PET_NAMES_SCALING_WORKERS={max(ranks)} or use fewer ranks"
        )
    return sweeps.grid(batch_sizes, learning_rates, ranks)
