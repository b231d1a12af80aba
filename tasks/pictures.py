"""How predictions are shown: as a table of Weights & Biases, and as HTML for a Deck."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    import wandb

__all__ = ["Picture", "confusion_matrix", "picture_grid", "predictions_table"]

CELL = "padding:0.4em 0.7em;text-align:right"
PIXELS = 84
"""The longer edge of a picture on the page, in pixels: of a digit, three times its own."""
JPEG_QUALITY = 90


class Picture(NamedTuple):
    """A picture with what is written below it."""

    image: Tensor
    """(height, width) grey or (3, height, width) in red, green and blue; uint8, on the CPU."""
    caption: str
    is_wrong: bool
    """Wrong ones get a red frame."""


def predictions_table(
    images: Tensor, labels: Tensor, scores: Tensor, *, batch_size: int, num_batches: int, num_images: int
) -> wandb.Table:
    """The first images of the first test batches with their guesses, as a table of Weights & Biases.

    Args:
        images: Of the whole test set in its order, (num_test, 28, 28), uint8.
        labels: (num_test,).
        scores: The ten probabilities of each image, (num_test, 10).
        batch_size: Images per test batch.
        num_batches: How many batches are shown …
        num_images: … with at most so many images of each.
    """
    import wandb  # only rank 0 comes here

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
    """An HTML table that counts the guesses for each digit, the darker the greater their share of the digit."""
    counts = torch.bincount(labels * 10 + guesses, minlength=100).reshape(10, 10)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    head = "".join(f"<th style='{CELL}'>{digit}</th>" for digit in range(10))
    rows = "".join(_matrix_row(digit, counts[digit], shares[digit]) for digit in range(10))
    return (
        "<table style='border-collapse:collapse'><caption>rows: the truth; columns: the guess</caption>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def picture_grid(pictures: Iterable[Picture], *, pixels: int = PIXELS) -> str:
    """The pictures side by side, as HTML that needs no other file.

    Args:
        pictures: Of any size.
        pixels: The longer edge of each on the page.
    """
    figures = "".join(_figure(picture, pixels) for picture in pictures)
    return f"<div style='display:flex;flex-wrap:wrap;gap:0.5em'>{figures}</div>"


def _shown(num_test: int, batch_size: int, num_batches: int, num_images: int) -> Iterator[tuple[int, int, int]]:
    """The batch, the place in it and the index in the test set of each image that the table shows."""
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
    """Blue on the diagonal, red beside it, where a few per cent shall be seen already."""
    red, green, blue, strength = (31, 119, 180, share) if is_right else (214, 39, 40, share**0.5)
    return f"background:rgba({red},{green},{blue},{strength:.2f})"


def _figure(picture: Picture, pixels: int) -> str:
    kind, data = _encoded(picture.image)
    height, width = picture.image.shape[-2:]
    scale = pixels / max(height, width)
    frame = "#d62728" if picture.is_wrong else "transparent"
    return (
        f"<figure style='margin:0;text-align:center;max-width:{pixels + 40}px;border:3px solid {frame}'>"
        f"<img src='data:image/{kind};base64,{data}' width='{width * scale:.0f}' height='{height * scale:.0f}' alt=''>"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _encoded(image: Tensor) -> tuple[str, str]:
    """The format and the file in base64: photographs as JPEG, which is a tenth of their PNG."""
    from PIL import Image  # comes with matplotlib

    file, is_grey = io.BytesIO(), image.dim() == 2
    pixels = image.numpy() if is_grey else image.permute(1, 2, 0).contiguous().numpy()
    kind = "png" if is_grey else "jpeg"
    Image.fromarray(pixels).save(file, format=kind, quality=JPEG_QUALITY)
    return kind, base64.b64encode(file.getvalue()).decode()
