"""The pictures that show predictions are drawn correctly."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import torch
from PIL import Image

from tasks.pictures import Picture, confusion_matrix, picture_grid

NUM_TEST = 25
IMAGES = torch.randint(256, (NUM_TEST, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_confusion_matrix() -> None:
    html = confusion_matrix(torch.tensor([0, 0, 0, 1, 9]), torch.tensor([0, 0, 7, 1, 4]))
    rows = [re.findall(r"<td[^>]*>(\d*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)][1:]
    counts = [[int(cell or 0) for cell in row] for row in rows]
    assert len(counts) == 10
    assert {(t, g): n for t, row in enumerate(counts) for g, n in enumerate(row) if n} == {
        (0, 0): 2,
        (0, 7): 1,
        (1, 1): 1,
        (9, 4): 1,
    }
    assert "nan" not in html


def test_picture_grid() -> None:
    html = picture_grid(
        [
            Picture(image=IMAGES[0], caption="guess 3, truth 3", is_wrong=False),
            Picture(image=IMAGES[1], caption="<b>", is_wrong=True),
        ]
    )
    pngs = [base64.b64decode(data) for data in re.findall(r'base64,([^"]*)"', html)]
    for png, image in zip(pngs, IMAGES[:2], strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), image.numpy())
    assert re.findall(r"<figcaption>(.*?)</figcaption>", html) == ["guess 3, truth 3", "&lt;b&gt;"]
    assert re.findall(r'<figure(?: class="(.*?)")?>', html) == ["", "dpt-bad"]
    assert re.findall(r'alt="(.*?)"', html) == ["guess 3, truth 3", "&lt;b&gt;"]
