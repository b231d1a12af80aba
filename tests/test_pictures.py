"""The pictures that show predictions are drawn correctly."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.pictures import Picture, confusion_matrix, picture_grid, predictions_table

NUM_TEST = 25
IMAGES = torch.randint(256, (NUM_TEST, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(NUM_TEST) % 10
SCORES = torch.rand(NUM_TEST, 10, generator=torch.Generator().manual_seed(1)).softmax(dim=1)


@pytest.mark.parametrize(
    ("num_batches", "num_images", "shown"),
    [
        (2, 3, [0, 1, 2, 10, 11, 12]),
        (9, 4, [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]),
        (9, 99, list(range(25))),
        (0, 3, []),
    ],
)
def test_table(num_batches: int, num_images: int, shown: list[int]) -> None:
    table = predictions_table(IMAGES, LABELS, SCORES, batch_size=10, num_batches=num_batches, num_images=num_images)
    assert table.columns == ["id", "image", "guess", "truth", *(f"score_{digit}" for digit in range(10))]
    assert [row[0] for row in table.data] == [f"{index % 10}_{index // 10}" for index in shown]
    assert [row[2] for row in table.data] == SCORES[shown].argmax(dim=1).tolist()
    assert [row[3] for row in table.data] == LABELS[shown].tolist()
    assert [row[4:] for row in table.data] == SCORES[shown].tolist()
    for row, index in zip(table.data, shown, strict=True):
        assert np.array_equal(np.asarray(row[1].image), IMAGES[index].numpy())


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


@pytest.mark.parametrize(("size", "shown"), [((60, 60), (120, 120)), ((30, 90), (40, 120)), ((250, 125), (120, 60))])
def test_photographs_of_any_size(size: tuple[int, int], shown: tuple[int, int]) -> None:
    smooth = torch.linspace(0, 255, size[1]).to(torch.uint8).expand(3, *size)
    html = picture_grid([Picture(image=smooth, caption="beagle 90%", is_wrong=False)], pixels=120)
    found = re.search(r'<img src="data:image/jpeg;base64,([^"]*)" width="(\d+)" height="(\d+)"', html)
    assert found
    assert (int(found[3]), int(found[2])) == shown
    jpeg = np.asarray(Image.open(io.BytesIO(base64.b64decode(found[1]))))
    assert jpeg.shape == (*size, 3)
    assert np.abs(jpeg.astype(int) - smooth.permute(1, 2, 0).numpy()).max() < 8
