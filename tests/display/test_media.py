"""`Histogram` and `Picture`, as ranks log them."""

import io
import math
import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flytekitplugins.daskpytorch import Histogram, LogRecord, Picture
from flytekitplugins.daskpytorch.display.run_state import RunState
from told import To


class Figure:
    """Saves itself as matplotlib's does."""

    def savefig(self, file: Any, **how: Any) -> None:
        Image.new("L", (4, 3)).save(file, **how)


def pixels(picture: Picture) -> list[Any]:
    image = Image.open(io.BytesIO(picture.png))
    assert image.format == "PNG"
    assert image.size == (picture.width, picture.height)
    return np.asarray(image).tolist()


@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0, 1.0], np.array([0, 1, 1]), torch.tensor([0.0, 1.0, 1.0, math.nan, math.inf], requires_grad=True)],
)
def test_histogram_counts_what_is_finite(values: Any) -> None:
    histogram = Histogram.of(values)
    assert (histogram.counts[0], histogram.counts[-1], sum(histogram.counts)) == (1.0, 2.0, 3.0)
    assert (histogram.edges[0], histogram.edges[-1], len(histogram.edges)) == (0.0, 1.0, 65)


def test_pictures_of_other_libraries() -> None:
    image = Image.new("RGB", (4, 3), (1, 2, 3))
    assert pixels(Picture.of(image)) == [[[1, 2, 3]] * 4] * 3
    picture = Picture.of(Figure(), caption="a figure")
    assert (picture.width, picture.height, picture.caption) == (4, 3, "a figure")
    with pytest.raises(TypeError, match="must be a Pillow image or a matplotlib figure"):
        Picture.of(torch.zeros(2, 3))


def test_drawings_of_rank_0_travel_and_are_kept_by_nobody_else() -> None:
    metrics = {
        "loss": 1.0,
        "sample": Picture.of(Image.new("L", (1, 1))),
        "odd": object(),
        "weights": Histogram.of([1.0]),
    }
    records = [LogRecord(rank=rank, step=1, num_steps=None, time=time.time(), metrics=metrics) for rank in (0, 1)]
    sent = [pickle.loads(pickle.dumps(record.sent())) for record in records]
    assert [set(record.metrics) for record in sent] == [{"loss", "sample", "weights"}, {"loss"}]
    assert sent[0].drawings == {name: metrics[name] for name in ("sample", "weights")}
    log = RunState()
    To(log).logged(sent[0])
    assert log.values.metrics == log.records[0].metrics == {"loss": 1.0}
