"""Predictions as a table of Weights & Biases, and as pieces of a Deck."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flytekitplugins.daskpytorch import report

if TYPE_CHECKING:
    import wandb


CELL = "padding:0.4em 0.6em;text-align:right;min-width:2.6em"
PIXELS = 84
"""Longer edge of a picture on the page, in pixels: three times that of a digit."""
JPEG_QUALITY = 90


class Picture(NamedTuple):
    """Picture with a caption."""

    image: Tensor
    """Pixels, (height, width) grey or (3, height, width) in red, green and blue, uint8, on the CPU."""
    caption: str
    is_wrong: bool
    """True for a wrong prediction, which gets a red frame."""


def predictions_table(
    images: Tensor, labels: Tensor, scores: Tensor, *, batch_size: int, num_batches: int, num_images: int
) -> wandb.Table:
    """Return a table of Weights & Biases with the first images of the first test batches, and their predictions.

    Args:
        images: Images of the whole test set in its order, (num_test, 28, 28), uint8.
        labels: Labels, (num_test,).
        scores: Ten probabilities of each image, (num_test, 10).
        batch_size: Images per test batch.
        num_batches: Number of batches in the table.
        num_images: Most images of each batch.
    """
    import wandb  # only rank 0 needs it

    columns = ["id", "image", "guess", "truth", *(f"score_{digit}" for digit in range(10))]
    guesses = scores.argmax(dim=1).tolist()
    shown = _shown(len(labels), batch_size, num_batches, num_images)
    return wandb.Table(
        columns=columns,
        data=[
            [
                f"{place}_{batch}",
                wandb.Image(images[index].cpu().numpy()),
                guesses[index],
                int(labels[index]),
                *scores[index].tolist(),
            ]
            for batch, place, index in shown
        ],
    )


def confusion_matrix(labels: Tensor, guesses: Tensor) -> str:
    """Return an HTML table that counts the guesses for each digit. Darker cells have larger shares of the digit."""
    counts = torch.bincount(labels * 10 + guesses, minlength=100).reshape(10, 10)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    head = "".join(f"<th style='{CELL}'>{digit}</th>" for digit in range(10))
    rows = "".join(_matrix_row(digit, counts[digit], shares[digit]) for digit in range(10))
    matrix = f"<thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody>"
    return report.text("Rows: the truth; columns: the guess.", quiet=True) + (
        f"<div style='overflow:auto'><table style='border-collapse:collapse'>{matrix}</table></div>"
    )


def picture_grid(pictures: Iterable[Picture], *, pixels: int = PIXELS) -> str:
    """Return the pictures side by side as HTML.

    Args:
        pictures: Pictures of any size.
        pixels: Longer edge of each picture on the page, in pixels.
    """
    return report.pictures(_piece(picture, pixels) for picture in pictures)


def _shown(num_test: int, batch_size: int, num_batches: int, num_images: int) -> Iterator[tuple[int, int, int]]:
    """Yield the batch, the place in the batch and the index in the test set of each image in the table."""
    for batch, start in enumerate(range(0, num_test, batch_size)[:num_batches]):
        for place, index in enumerate(range(start, min(start + batch_size, num_test))[:num_images]):
            yield batch, place, index


def _matrix_row(digit: int, counts: Tensor, shares: Tensor) -> str:
    cells = "".join(
        f"<td style='{CELL};{_shade(share, is_right=guess == digit)}'>{count or ''}</td>"
        for guess, (count, share) in enumerate(zip(counts.tolist(), shares.tolist(), strict=True))
    )
    return f"<tr><th style='{CELL}'>{digit}</th>{cells}</tr>"


def _shade(share: float, *, is_right: bool) -> str:
    """Return a cell's colour: blue on the diagonal, red elsewhere. A square root makes small errors visible."""
    red, green, blue, strength = (31, 119, 180, share) if is_right else (214, 39, 40, share**0.5)
    return f"background:rgba({red},{green},{blue},{strength:.2f})"


def _piece(picture: Picture, pixels: int) -> report.Picture:
    height, width = picture.image.shape[-2:]
    scale = pixels / max(height, width)
    return report.Picture(
        file=_encoded(picture.image),
        width=round(width * scale),
        height=round(height * scale),
        caption=picture.caption,
        tone="bad" if picture.is_wrong else None,
    )


def _encoded(image: Tensor) -> bytes:
    """Return the image as a file. Photographs are JPEG, which is a tenth of the size of PNG."""
    from PIL import Image

    file, is_grey = io.BytesIO(), image.dim() == 2
    pixels = image.numpy() if is_grey else image.permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels).save(file, format="png" if is_grey else "jpeg", quality=JPEG_QUALITY)
    return file.getvalue()
