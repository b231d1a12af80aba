"""The shops' workflow runs in the real `pyflyte`, on a file in which two shops cannot be trained."""

import re
from pathlib import Path

import pandas as pd
import pytest

from tasks import sales
from workflow_runs import Run

HP = sales.Hyperparameters()


def test_the_workflow_forecasts_each_shop_and_names_those_that_it_cannot(tmp_path: Path) -> None:
    frame = sales.generate(range(6), num_days=120)
    frame = frame[~((frame["store"] == 2) & (frame["day"] == 50)) & ~((frame["store"] == 3) & (frame["day"] > 20))]
    for number, part in frame.groupby(frame["day"] // 40):  # a shop's rows lie in three files
        part.to_parquet(tmp_path / f"{number}.parquet")
    run = Run.of("stores", tmp_path, "first", "--data", f"{tmp_path}/*.parquet")
    assert run.has_trained
    assert "shop 2: ValueError: shop 2: each day from 0 to 119 must have one row" in run.done.stdout
    assert "shop 3: ValueError: shop 3 has 21 days: must have 42 or more" in run.done.stdout
    found = re.search(r"num_failed=2, error_share=(\S+), naive_share=(\S+)\)", run.done.stdout)
    assert found, run.done.stdout
    rows = {store: sales.train(store, frame[frame["store"] == store], HP) for store in (0, 1, 4, 5)}
    expected = pd.DataFrame(rows.values())[["error_share", "naive_share"]].median()
    assert (float(found[1]), float(found[2])) == pytest.approx(tuple(expected), abs=0.01)


def test_a_model_forecasts_better_than_last_week() -> None:
    rows = [sales.train(store, sales.generate([store], num_days=365), HP) for store in range(4)]
    assert sum(row["error_share"] for row in rows) < 0.95 * sum(row["naive_share"] for row in rows)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"store": [1], "day": [1]}, "the column sales is missing; columns: store, day"),
        ({"store": ["a"], "day": [1], "sales": [2.0]}, "the column store is of type"),
        (None, "cannot be read as Parquet"),
    ],
)
def test_data_that_cannot_be_forecast_are_refused_with_the_values(
    columns: dict[str, list[object]] | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "sales.parquet"
    if columns is not None:
        pd.DataFrame(columns).to_parquet(path)
    with pytest.raises(ValueError, match=said):
        sales.frame_of(str(path), 1, 1, 1)
