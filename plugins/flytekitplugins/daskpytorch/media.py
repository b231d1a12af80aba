"""Histograms and pictures for `log`. Ranks make them, and trackers in the driver or in rank 0 record them."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from flytekitplugins.daskpytorch.checks import require_extra

__all__ = ["Histogram", "Picture"]

NUM_BINS = 64
"""Number of bins of each `Histogram`. 64 is the default of Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Histogram of values as a metric, for `current_rank().log({"weights": Histogram.of(model.weight)})`.

    Examples:
        >>> from flytekitplugins.daskpytorch import Histogram
        >>> histogram = Histogram.of([0.5, 1.5, 1.5, float("nan")])
        >>> sum(histogram.counts), histogram.edges[0], histogram.edges[-1]
        (3.0, 0.5, 1.5)
    """

    counts: tuple[float, ...]
    """Number of values in each bin."""
    edges: tuple[float, ...]
    """Edges of the bins, from low to high: one edge more than bins."""

    @classmethod
    def of(cls, values: Any) -> Histogram:
        """Return the histogram of a tensor, array or list of any shape, in 64 bins. Ignores NaN and infinity."""
        import torch

        flat = torch.as_tensor(values).detach().to_dense().float().flatten().cpu()
        counts, edges = flat[flat.isfinite()].histogram(NUM_BINS)
        return cls(counts=tuple(counts.tolist()), edges=tuple(edges.tolist()))


@dataclass(frozen=True, kw_only=True)
class Picture:
    """PNG picture as a metric, for `current_rank().log({"sample": Picture.of(image)})`.

    Examples:
        >>> import torch
        >>> from flytekitplugins.daskpytorch import Picture
        >>> picture = Picture.of(torch.rand(3, 32, 48), "noise")  # channels, height, width
        >>> picture.width, picture.height, picture.caption
        (48, 32, 'noise')
    """

    png: bytes = field(repr=False)
    """The picture as the bytes of a PNG file."""
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
    caption: str = ""
    """Text below the picture, in trackers that show captions."""

    @classmethod
    def of(cls, picture: Any, caption: str = "") -> Picture:
        """Convert a Pillow image, a matplotlib figure or pixels to a `Picture`.

        The conversion to PNG takes some milliseconds for a small picture.

        Args:
            picture: A Pillow image, a matplotlib figure, or a tensor or array of pixels. Grey pixels have the shape
                height x width. Colours have 3 or 4 channels, as the first or the last dimension. Values are bytes, or
                floating-point numbers from 0 to 1.
            caption: Text below the picture.

        Raises:
            ImportError: The extra `pictures` is not installed. The trackers' extras include `pictures`.
            ValueError: The pixels have another shape.
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
        raise ValueError(
            f"Picture.of(...): pixels of shape {tuple(values.shape)}, must be height x width, or with 1, 3 or 4 "
            "channels as the first or last dimension"
        )
    if values.is_floating_point():
        values = values.float().nan_to_num().clamp(0, 1).mul(255).round()
    return Image.fromarray(values.to(torch.uint8).contiguous().numpy())
