"""Train a forecasting model for each shop of a data frame, as a Flyte workflow.

Steps: check -> forecast (a model per shop, several at once on each Dask worker) -> summarize

Run the workflow on this machine, with generated sales of 60 shops, without a download (half a minute on two cores):

    pip install '.[workflows]'
    pyflyte run workflows/stores.py stores

Forecast the shops of Parquet files with the columns `store`, `day` and `sales`, on four workers:

    STORES_WORKERS=4 pyflyte run workflows/stores.py stores --data 's3://bucket/sales/*.parquet'

`STORES_WORKERS` sets the number of Dask workers, 2 by default, and `STORES_MODELS_PER_WORKER` the number of models that
each worker trains at once, 2 by default. `DASKPYTORCH_PROFILE=gpu` gives each worker a GPU, which its models share.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pandas as pd
from flytekit import task, workflow

from flytekitplugins.daskpytorch import DaskCluster, current_client
from tasks import sales
from tasks.sales import Hyperparameters
from workflows import resources

NUM_WORKERS = resources.number("STORES_WORKERS", 2)
MODELS_PER_WORKER = resources.number("STORES_MODELS_PER_WORKER", 2)
SETTINGS = resources.SETTINGS | {
    "STORES_WORKERS": str(NUM_WORKERS),
    "STORES_MODELS_PER_WORKER": str(MODELS_PER_WORKER),
}
"""Environment variables of the tasks' pods, which import this file again."""


class Summary(NamedTuple):
    """Outputs of the summary."""

    num_failed: int
    """Shops whose training failed. Their rows of the table have the errors."""
    error_share: float
    """Median over the shops of the mean absolute error on held-out days, as a share of their sales."""
    naive_share: float
    """The same of last week's sales as the forecast."""


class Stores(NamedTuple):
    """The outputs of the workflow."""

    forecasts: pd.DataFrame
    """A row for each shop: the fields that `sales.train` returns, and the error of a shop whose training failed."""
    num_failed: int
    error_share: float
    naive_share: float


@task(requests=resources.SMALL, environment=SETTINGS)
def check(data: str, num_stores: int, num_days: int, hp: Hyperparameters) -> str:
    """Open the data. Wrong inputs fail here, before any cluster starts."""
    least = hp.held_out + 2 * sales.WEEK
    for name, value, minimum in (("num_stores", num_stores, 1), ("num_days", num_days, least)):
        if not data and value < minimum:
            raise ValueError(f"{name}={value}: must be a whole number from {minimum} up")
    sales.frame_of(data, num_stores, num_days, num_parts=1)
    return data


@task(
    task_config=DaskCluster(scheduler=resources.SCHEDULER, workers=resources.workers(NUM_WORKERS)),
    requests=resources.GATHERING,
    environment=SETTINGS,
    retries=2,
)
def forecast(data: str, num_stores: int, num_days: int, hp: Hyperparameters) -> pd.DataFrame:
    """Train a model for each shop. The rows stay on the workers."""
    from flytekitplugins.daskpytorch import dispatch  # here because it imports Dask, which other tasks do not need

    frame = sales.frame_of(data, num_stores, num_days, num_parts=2 * NUM_WORKERS)
    models = dispatch.map(
        current_client(), partial(sales.train, hp=hp), frame.groupby("store"), models_per_worker=MODELS_PER_WORKER
    )
    return models.to_frame()


@task(requests=resources.SMALL, environment=SETTINGS)
def summarize(forecasts: pd.DataFrame) -> Summary:
    """Print the shops that failed, and compare the forecasts of the others with last week's sales."""
    failed = forecasts[forecasts["error"].notna()]
    causes = [f"shop {store}: {error}" for store, error in zip(failed["store"], failed["error"], strict=True)]
    print(*causes[:5], sep="\n")
    if len(failed) == len(forecasts):
        raise ValueError(f"none of {len(forecasts)} shops could be forecast. {causes[0]}")
    medians = forecasts[["error_share", "naive_share"]].median()
    print(
        f"{len(forecasts) - len(failed)} of {len(forecasts)} shops: median error {medians['error_share']:.1%} of the "
        f"sales, {medians['naive_share']:.1%} by last week's sales"
    )
    return Summary(len(failed), float(medians["error_share"]), float(medians["naive_share"]))


@workflow
def stores(
    data: str = "", num_stores: int = 60, num_days: int = 365, hp: Hyperparameters = Hyperparameters()
) -> Stores:
    """Train a forecasting model for each shop.

    Args:
        data: Parquet files with the columns `store`, `day` (whole numbers) and `sales`: a path, a pattern or a URL.
            Empty: generated sales.
        num_stores: Number of generated shops.
        num_days: Number of generated days.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
    """
    checked = check(data=data, num_stores=num_stores, num_days=num_days, hp=hp)
    forecasts = forecast(data=checked, num_stores=num_stores, num_days=num_days, hp=hp)
    summary = summarize(forecasts=forecasts)
    return Stores(
        forecasts=forecasts,
        num_failed=summary.num_failed,
        error_share=summary.error_share,
        naive_share=summary.naive_share,
    )
