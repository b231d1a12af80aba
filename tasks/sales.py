"""Daily sales of shops, generated or read, and a small forecasting model for one shop. Runs in tasks and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import dask.dataframe
import numpy as np
import pandas as pd
import torch
from torch import nn

from flytekitplugins.daskpytorch import url_to_fs

COLUMNS = {"store": "i", "day": "i", "sales": "if"}
"""Name of each column, and the kinds of dtype (NumPy's letters) that it may have."""
WEEK = 7
FIRST_WEEKDAYS = (0.9, 0.85, 0.9, 1.0, 1.25, 1.6, 0.5)
"""Sales of a generated shop on Monday to Sunday, relative to its mean."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyper-parameters of the shops' models, all of them whole numbers above zero but the learning rate."""

    steps: int = 150
    """Steps of Adam, each on all days of the training."""
    learning_rate: float = 0.02
    hidden: int = 8
    """Width of the hidden layer."""
    held_out: int = 28
    """Last days of each shop, which are forecast and not trained on."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("steps", "learning_rate", "hidden", "held_out"):
            if not getattr(self, name) > 0:
                raise ValueError(f"hp.{name}={getattr(self, name)!r}: must be above zero")


# ---- Data


def frame_of(data: str, num_stores: int, num_days: int, num_parts: int) -> dask.dataframe.DataFrame:
    """Return a Dask frame of sales, whose partitions the workers read or generate.

    Args:
        data: Parquet files with the columns `store`, `day` (whole numbers) and `sales`: a path, a pattern or a URL.
            Empty: generated sales.
        num_stores: Number of generated shops.
        num_days: Number of generated days.
        num_parts: Number of partitions of generated sales.

    Raises:
        ValueError: The data cannot be read, or lack a column.
    """
    if not data:
        chunks = [chunk.tolist() for chunk in np.array_split(np.arange(num_stores), num_parts) if len(chunk)]
        return dask.dataframe.from_map(partial(generate, num_days=num_days), chunks, meta=generate([0], num_days=1))
    try:
        fs, path = url_to_fs(data)
        frame = dask.dataframe.read_parquet(path, filesystem=fs)
    except Exception as error:  # of storage, of pyarrow, or of Dask
        raise ValueError(f"data={data!r} cannot be read as Parquet ({type(error).__name__}: {error})") from error
    for name, kinds in COLUMNS.items():
        found = frame.dtypes.get(name)
        if found is None or found.kind not in kinds:
            what = "is missing" if found is None else f"is of type {found}"
            raise ValueError(f"data={data!r}: the column {name} {what}; columns: {', '.join(map(str, frame.columns))}")
    return frame[list(COLUMNS)]


def generate(stores: Sequence[int], *, num_days: int) -> pd.DataFrame:
    """Return generated sales of some shops: a level, a trend, a week of its own, and noise, by the shop's number."""
    days = np.arange(num_days)
    tables = []
    for store in stores:
        random = np.random.default_rng(store)
        week = np.array(FIRST_WEEKDAYS) * random.lognormal(sigma=0.2, size=WEEK)
        level = random.uniform(50, 500) * (1 + random.normal(scale=0.3) * days / 365)
        sales = level * week[days % WEEK] * random.lognormal(sigma=0.1, size=num_days)
        tables.append(pd.DataFrame({"store": store, "day": days, "sales": sales.round(2)}))
    return pd.concat(tables, ignore_index=True)


# ---- The model of a shop


class Forecast(nn.Module):
    """Forecasts a day's sales, divided by the shop's mean, from the week before and the day of the week."""

    def __init__(self, hidden: int) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * WEEK, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, weeks: torch.Tensor, weekdays: torch.Tensor) -> torch.Tensor:
        """Return the forecasts.

        Args:
            weeks: Sales of the seven days before, of shape (days, 7).
            weekdays: Days of the week, 0 to 6, of shape (days,).

        Returns:
            Sales of shape (days,), as float32.
        """
        known = torch.cat([weeks, nn.functional.one_hot(weekdays, WEEK)], dim=1)
        forecast: torch.Tensor = weeks[:, 0] + self.layers(known).squeeze(1)
        return forecast


def train(store: int, rows: pd.DataFrame, hp: Hyperparameters) -> dict[str, Any]:
    """Train the model of a shop, and forecast its last days.

    Returns:
        The fields of the shop's row: mean absolute errors on the held-out days, as shares of their sales, of the model
        (`error_share`) and of last week's sales (`naive_share`), the next day's forecast, the mean, and the weights.

    Raises:
        ValueError: The shop has too few days, or a day twice or not at all.
    """
    rows = rows.sort_values("day")
    if len(rows) < hp.held_out + 2 * WEEK:
        raise ValueError(f"shop {store} has {len(rows)} days: must have {hp.held_out + 2 * WEEK} or more")
    if (rows["day"].diff().iloc[1:] != 1).any():
        raise ValueError(f"shop {store}: each day from {rows['day'].min()} to {rows['day'].max()} must have one row")
    torch.manual_seed(store)
    sales = torch.tensor(rows["sales"].to_numpy(), dtype=torch.float32)
    mean = sales[: -hp.held_out].mean().clamp(min=1e-6)
    weeks = (sales / mean).unfold(0, WEEK, 1)  # one row more than known days: the last week forecasts tomorrow
    weekdays = torch.tensor(rows["day"].to_numpy()[0] + WEEK) + torch.arange(len(weeks))
    inputs, targets = (weeks, weekdays % WEEK), (sales / mean)[WEEK:]
    model = Forecast(hp.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=hp.learning_rate)
    num_trained = len(targets) - hp.held_out
    for _ in range(hp.steps):
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(*(each[:num_trained] for each in inputs)), targets[:num_trained])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        forecasts = model(*inputs)
    held_out = targets[num_trained:]
    of_model, of_last_week = (
        float((forecast - held_out).abs().sum() / held_out.sum())
        for forecast in (forecasts[num_trained:-1], weeks[num_trained:-1, 0])
    )
    return {
        "error_share": of_model,
        "naive_share": of_last_week,
        "tomorrow": float(forecasts[-1] * mean),
        "mean": float(mean),
        "weights": nn.utils.parameters_to_vector(model.parameters()).tolist(),
    }
