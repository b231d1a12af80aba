"""Photo-like pictures, made from a seed, for the tests of image reading."""

import io

import numpy as np
from PIL import Image

SIDES = (256, 400)
"""The shortest and the longest side of a photo."""
QUALITY = 85


def photo(seed: int, size: tuple[int, int] | None = None) -> Image.Image:
    """A picture with what photos have: large soft forms, edges, fine grain. As a JPEG it takes about 30 KB."""
    random = np.random.default_rng(seed)
    width, height = size or random.integers(SIDES[0], SIDES[1] + 1, 2).tolist()
    pixels = sum(_clouds(random, width, height, cells) * weight for cells, weight in ((3, 110), (9, 60), (40, 34)))
    pixels = pixels + _disc(random, width, height) + 6.5 * random.standard_normal((height, width, 1), np.float32)
    return Image.fromarray((pixels + 60).clip(0, 255).astype(np.uint8))


def encoded(picture: Image.Image) -> bytes:
    """A picture as a JPEG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def photos(num_photos: int, num_classes: int, prefix: str = "photos") -> dict[str, bytes]:
    """JPEGs by key, `prefix/class/image`, as many of each class."""
    return {
        f"{prefix}/class-{index % num_classes:02d}/{index:05d}.jpg": encoded(photo(index))
        for index in range(num_photos)
    }


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
