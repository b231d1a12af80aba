"""Are more ranks worth it? Take the time to the same loss on pet names with more or fewer, as a Flyte workflow.

names -> scale (several models at once, each by its number of ranks, on a Dask cluster)

That compares like with like where the global batch (ranks x batch size per rank) is the same. Small (about a minute on
two cores); tiny; and in full on a backend:

    pyflyte run workflows/pet_names_scaling.py pet_names_scaling
    pyflyte run workflows/pet_names_scaling.py pet_names_scaling --batch_sizes '[2048, 4096]' --hp '{"epochs": 1}'
    PET_NAMES_SCALING_WORKERS=16 pyflyte run --remote --image registry/daskpytorch:tag \
        workflows/pet_names_scaling.py pet_names_scaling --data s3://bucket/names.csv --ranks '[1, 4, 16]' \
        --batch_sizes '[1024, 4096, 16384]' --learning_rates '[0.001, 0.004, 0.016]' --hp '{"epochs": 40}'

`PET_NAMES_SCALING_WORKERS` sets the number of Dask workers when the workflow is registered or run here, and
`DASKPYTORCH_PROFILE=gpu` gives each a GPU.
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
"""For the tasks' pods, which import this file again."""
RANKS = [1, 2]
BATCH_SIZES = [128, 256]
"""Per rank: 1 x 256 and 2 x 128 have the same global batch."""
LEARNING_RATES = [0.006]


class PetNamesScaling(NamedTuple):
    """The outputs of the workflow."""

    rows: list[ScalingRow]
    """One for each epoch of each experiment that has not failed."""
    times: list[TimeToLoss]
    """One for each experiment."""
    target_loss: float
    """Nats per character: what was asked for, or the bigram model's."""
    charts: HtmlFile
    """Time to the loss against ranks; loss against epoch and against elapsed time: a page for a browser."""


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare(
    data: str,
    hp: Hyperparameters,
    ranks: list[int],
    batch_sizes: list[int],
    learning_rates: list[float],
    target_loss: float | None,
) -> NamesFile:
    """Load and clean the names, and refuse what the workers cannot carry or cannot be compared."""
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
    """Train each model with its number of ranks, a worker for each, and see when it comes to the target."""
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
    grid = {"ranks": ranks, "batch_sizes": batch_sizes, "learning_rates": learning_rates}
    names = prepare(data=data, hp=hp, target_loss=target_loss, **grid)
    scaled = scale(names=names, hp=hp, target_loss=target_loss, **grid)
    return PetNamesScaling(rows=scaled.rows, times=scaled.times, target_loss=scaled.target_loss, charts=scaled.charts)


def _grid(ranks: list[int], batch_sizes: list[int], learning_rates: list[float]) -> list[Experiment]:
    """The grid, if the workers can carry it.

    Raises:
        ValueError: They cannot, or a list makes no sense.
    """
    if max(ranks, default=0) > NUM_WORKERS:
        raise ValueError(
            f"ranks={ranks}: {max(ranks)} ranks need as many workers, and there are {NUM_WORKERS}; set "
            f"PET_NAMES_SCALING_WORKERS={max(ranks)} or use fewer ranks"
        )
    return sweeps.grid(batch_sizes, learning_rates, ranks)
