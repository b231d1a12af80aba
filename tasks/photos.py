"""Generated photographs of twenty breeds of dogs, for a run without a bucket. Runs in tasks and tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

COATS = ((0.16, 0.13, 0.12), (0.52, 0.30, 0.13), (0.85, 0.66, 0.36), (0.92, 0.89, 0.84), (0.45, 0.50, 0.58))
"""Colours of black, brown, golden, white and blue-grey fur, as red, green and blue from 0 to 1."""
BREEDS = (
    *("affenpinscher", "chesapeake", "labrador", "samoyed", "weimaraner"),
    *("schipperke", "boxer", "ridgeback", "maltese", "greyhound"),
    *("scottie", "dachshund", "dalmatian", "pointer", "blue-heeler"),
    *("newfoundland", "beagle", "collie", "papillon", "schnauzer"),
)
"""Breeds, one for each marking and coat: five plain, five striped, five spotted and five patched."""
SIDES = (64, 96)
"""Minimum and maximum width and height, in pixels."""
JPEG_QUALITY = 85


class _Plane(NamedTuple):
    """Coordinates of each pixel on the dog's own axes. The dog's length is from -1 to 1 in any pose."""

    x: Floats
    y: Floats


def write_photos(folder: str | os.PathLike[str], *, num_per_class: int = 30, seed: int = 0) -> Path:
    """Write JPEG files as `folder/breed/number.jpg`. The same arguments give the same files.

    Coat and markings depend on the breed. Pose, size, light, ground and noise do not. The sizes of the pictures differ.

    Args:
        folder: The folder, which is created if needed.
        num_per_class: Number of pictures of each of the `BREEDS`.
        seed: Seed of the pictures. Another seed gives other pictures of the same breeds.

    Returns:
        The folder.

    Raises:
        ValueError: `num_per_class` is below 1.
    """
    from PIL import Image

    if num_per_class < 1:
        raise ValueError(f"num_per_class={num_per_class!r}: must be a whole number from 1 up")
    for label, breed in enumerate(BREEDS):
        home = Path(folder, breed)
        home.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng((seed, label))
        for number in range(num_per_class):
            Image.fromarray(_photo(label, random)).save(home / f"{number:04}.jpg", quality=JPEG_QUALITY)
    return Path(folder)


def _photo(label: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Return a picture of a dog of the breed with this number, (height, width, 3)."""
    height, width = random.integers(*SIDES, size=2, endpoint=True)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    plane = _pose(rows, columns, random)
    fur = _coat(label % len(COATS), random) * _markings(label // len(COATS), plane, random)[..., None]
    picture = np.where(_outline(plane)[..., None], fur, _ground(rows / height, random))
    light = 1 + random.uniform(-0.25, 0.25) * (columns / width - 0.5) + random.uniform(-0.15, 0.15)
    picture = picture * light[..., None] + random.normal(0, 0.05, picture.shape)
    return (picture.clip(0, 1) * 255).astype(np.uint8)


def _pose(rows: Floats, columns: Floats, random: np.random.Generator) -> _Plane:
    """Return the pixels' coordinates for a dog that is turned, shifted, scaled and, in half of the cases, mirrored."""
    height, width = rows.shape
    size = min(height, width) * random.uniform(0.36, 0.5)
    x = (columns - width * random.uniform(0.42, 0.58)) / size * random.choice((-1, 1))
    y = (rows - height * random.uniform(0.45, 0.6)) / size
    angle = random.uniform(-0.35, 0.35)
    return _Plane(x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle))


def _outline(plane: _Plane) -> NDArray[np.bool_]:
    """Return True for pixels of the dog: body, head, ear, tail and legs."""
    x, y = plane
    body = (x / 0.75) ** 2 + (y / 0.38) ** 2 < 1
    head = ((x - 0.75) / 0.3) ** 2 + ((y + 0.35) / 0.27) ** 2 < 1
    ear = ((x - 0.6) / 0.12) ** 2 + ((y + 0.6) / 0.25) ** 2 < 1
    tail = ((x + 0.85) / 0.3) ** 2 + ((y + 0.25) / 0.07) ** 2 < 1
    legs = (abs(abs(x) - 0.45) < 0.1) & (y > 0) & (y < 0.85)
    return body | head | ear | tail | legs


def _coat(coat: int, random: np.random.Generator) -> Floats:
    """Return the fur's colour, which varies a little between dogs."""
    return np.asarray(COATS[coat], dtype=np.float32) * random.uniform(0.85, 1.1) + random.normal(0, 0.03, 3)


def _markings(kind: int, plane: _Plane, random: np.random.Generator) -> Floats:
    """Return factors for the fur's colour: none, stripes, spots or a few large patches, dark on fair coats."""
    x, y = plane
    phase, other_phase = random.uniform(0, 2 * np.pi, 2)
    strength = random.uniform(0.35, 0.6)
    match kind:
        case 0:
            marked = np.zeros_like(x, dtype=bool)
        case 1:
            marked = np.sin(random.uniform(16, 22) * x + phase) > 0.2
        case 2:
            frequency = random.uniform(15, 19)
            marked = np.sin(frequency * x + phase) + np.sin(frequency * y + other_phase) > 1.0
        case _:
            marked = np.sin(4.5 * x + phase) > 0.1
    return np.where(marked, strength, 1.0).astype(np.float32) + random.normal(0, 0.06, x.shape).astype(np.float32)


def _ground(depth: Floats, random: np.random.Generator) -> Floats:
    """Return sky above and ground below, in random colours and with grain, (height, width, 3)."""
    above, below = random.uniform(0.15, 0.95, (2, 3)).astype(np.float32)
    horizon = random.uniform(0.3, 0.7)
    share = (1 / (1 + np.exp(-12 * (depth - horizon))))[..., None]
    return above * (1 - share) + below * share + random.normal(0, 0.08, depth.shape)[..., None]
