"""Histograms and pictures that a rank logs, as any tracker takes them. Made in ranks, drawn in the driver or there."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from flytekitplugins.daskpytorch.documented import documented
from flytekitplugins.daskpytorch.extras import require_extra

__all__ = ["Histogram", "Picture"]

NUM_BINS = 64
"""As Weights & Biases has them."""


@documented
@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How values are spread, for `current_rank().log({"weights": Histogram.of(model.weight)})`.

    Examples:
        >>> from flytekitplugins.daskpytorch import Histogram
        >>> histogram = Histogram.of([0.5, 1.5, 1.5, float("nan")])
        >>> sum(histogram.counts), histogram.edges[0], histogram.edges[-1]
        (3.0, 0.5, 1.5)
    """

    counts: tuple[float, ...]
    """Of each bin."""
    edges: tuple[float, ...]
    """Of the bins, one more than there are."""

    @classmethod
    def of(cls, values: Any) -> Histogram:
        """Of a tensor, an array or a list of numbers, of any shape, in 64 bins; what is not finite does not count."""
        import torch

        flat = torch.as_tensor(values).detach().to_dense().float().flatten().cpu()
        counts, edges = flat[flat.isfinite()].histogram(NUM_BINS)
        return cls(counts=tuple(counts.tolist()), edges=tuple(edges.tolist()))


@documented
@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture, for `current_rank().log({"sample": Picture.of(image)})`.

    Examples:
        >>> import torch
        >>> from flytekitplugins.daskpytorch import Picture
        >>> picture = Picture.of(torch.rand(3, 32, 48), "noise")  # channels, height, width
        >>> picture.width, picture.height, picture.caption
        (48, 32, 'noise')
    """

    png: bytes = field(repr=False)
    """As a file of this kind has it."""
    width: int
    """In pixels."""
    height: int
    """In pixels."""
    caption: str = ""
    """Said below it where a tracker does."""

    @classmethod
    def of(cls, picture: Any, caption: str = "") -> Picture:
        """One of Pillow's, a figure of matplotlib's, or pixels.

        It is drawn and compressed before the call returns: some milliseconds for a small one.

        Args:
            picture: Pixels are a tensor or an array of the shape height x width, with three or four channels in front
                or behind if it is not grey: bytes, or floating-point numbers from 0 to 1.
            caption: What to say below it.

        Raises:
            ImportError: The extra `pictures` is not installed; those of the trackers bring it.
            ValueError: The pixels are of another shape.
        """
        require_extra("pictures", "Picture.of(...)")
        file = io.BytesIO()
        if hasattr(picture, "savefig"):
            picture.savefig(file, format="png")
        else:
            (picture if hasattr(picture, "save") else _image(picture)).save(file, format="PNG")
        from PIL import Image

        width, height = Image.open(file).size
        return cls(png=file.getvalue(), width=width, height=height, caption=caption)


def _image(pixels: Any) -> Any:
    import torch
    from PIL import Image

    values = torch.as_tensor(pixels).detach().cpu()
    if values.ndim == 3 and values.shape[0] in (1, 3, 4) and values.shape[-1] not in (3, 4):
        values = values.movedim(0, -1)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values.squeeze(-1)
    if values.ndim != 2 and not (values.ndim == 3 and values.shape[-1] in (3, 4)):
        raise ValueError(f"Picture.of(...): pixels of shape {tuple(values.shape)}, must be height x width (x channels)")
    if values.is_floating_point():
        values = values.float().nan_to_num().clamp(0, 1).mul(255).round()
    return Image.fromarray(values.to(torch.uint8).contiguous().numpy())
