"""Photo-like pictures, and the odd ones among them, made from a seed, for the tests of image reading."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image

SIDES = (256, 400)
"""The shortest and the longest side of a photo."""
QUALITY = 85
ROTATED_BY_90 = 6
"""EXIF's orientation of a picture that is to be turned right by 90 degrees."""


def photo(seed: int, size: tuple[int, int] | None = None) -> Image.Image:
    """A picture with what photos have: large soft forms, edges, fine grain. As a JPEG it takes about 30 KB."""
    random = np.random.default_rng(seed)
    width, height = size or random.integers(SIDES[0], SIDES[1] + 1, 2).tolist()
    pixels = sum(_clouds(random, width, height, cells) * weight for cells, weight in ((3, 110), (9, 60), (40, 34)))
    pixels = pixels + _disc(random, width, height) + 6.5 * random.standard_normal((height, width, 1), np.float32)
    return Image.fromarray((pixels + 60).clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    """A picture as a file of that kind."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"quality": QUALITY} if kind == "JPEG" else {}) | options)
    return buffer.getvalue()


def photos(num_photos: int, num_classes: int, prefix: str = "photos") -> dict[str, bytes]:
    """JPEGs by key, `prefix/class/image`, as many of each class."""
    return {
        f"{prefix}/class-{index % num_classes:02d}/{index:05d}.jpg": encoded(photo(index))
        for index in range(num_photos)
    }


@dataclass(frozen=True, kw_only=True)
class Odd:
    """A file that readers of images stumble over."""

    key: str
    """The end of its key."""
    body: bytes
    looks_like: Image.Image | None
    """What it shows; None where it is no picture."""


def _odd() -> list[Odd]:
    upright = photo(1, (96, 64))
    grey, palette, alpha = upright.convert("L"), upright.convert("P", palette=Image.Palette.ADAPTIVE), upright.copy()
    alpha.putalpha(200)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = ROTATED_BY_90
    deep = Image.fromarray((np.asarray(grey, np.uint16) << 8) | np.asarray(grey, np.uint16))
    jpeg = encoded(upright)
    cmyk = encoded(upright.convert("CMYK"))
    return [
        Odd(key="grey.jpg", body=encoded(grey), looks_like=grey),
        Odd(key="palette.png", body=encoded(palette, "PNG"), looks_like=palette),
        Odd(key="palette.gif", body=encoded(palette, "GIF"), looks_like=palette),
        Odd(key="alpha.png", body=encoded(alpha, "PNG"), looks_like=upright),
        Odd(key="cmyk.jpg", body=cmyk, looks_like=Image.open(io.BytesIO(cmyk))),
        Odd(
            key="turned.jpg", body=encoded(upright, exif=exif), looks_like=upright.transpose(Image.Transpose.ROTATE_270)
        ),
        Odd(key="deep.png", body=encoded(deep, "PNG"), looks_like=grey),
        Odd(key="UPPER.JPG", body=jpeg, looks_like=upright),
        Odd(key="with space and +%.jpeg", body=jpeg, looks_like=upright),
        Odd(key="größe-犬.jpg", body=jpeg, looks_like=upright),
        Odd(key="truncated.jpg", body=jpeg[: len(jpeg) // 2], looks_like=None),
        Odd(key="empty.jpg", body=b"", looks_like=None),
        Odd(key="text.jpg", body=b"<html>not a picture</html>\n" * 50, looks_like=None),
    ]


def _clouds(random: np.random.Generator, width: int, height: int, cells: int) -> np.ndarray:
    """Soft coloured noise of so many cells a side."""
    coarse = random.integers(0, 256, (cells, cells, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(smooth, np.float32) / 255


def _disc(random: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A disc with a sharp edge."""
    y, x = np.ogrid[:height, :width]
    inside = (x - random.uniform(0, width)) ** 2 + (y - random.uniform(0, height)) ** 2 < (width / 4) ** 2
    return inside[..., None] * random.uniform(-60, 60, 3).astype(np.float32)


ODD = {odd.key: odd for odd in _odd() if odd.looks_like is not None}
"""Pictures that are to be read."""
UNDECODABLE = {odd.key: odd for odd in _odd() if odd.looks_like is None}
"""Files named like pictures that arrive whole, and are none."""
