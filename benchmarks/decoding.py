"""Measure how many JPEGs per second become tensors of 250 x 250, by decoder and size, without a bucket.

    python benchmarks/decoding.py                         # five rounds, about a minute
    python benchmarks/decoding.py --quick                 # one round of few pictures, as a trial

Photo-like JPEGs of 3,000 x 2,000 pixels lie in memory. Each way decodes them, makes their shorter side 256 and crops
250, on one core. `PIL` decodes as torchvision's `ImageFolder` does. The second way decodes as `S3ImageFolder` does with
`decoder="pil", min_side=256`. On a GPU, torchcodec decodes a batch with nvJPEG, and the pictures are resized there,
too. The ways take turns.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Figure, at_least, report
from PIL import Image
from running import asked, take_turns
from torch import Tensor
from torchvision.transforms import v2

from flytekitplugins.daskpytorch.data.image_decoder import Decoder, decode, prepare

# The tests' module generates the pictures.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from jpegs import encoded, photo

SIDE, CROP = 256, 250
LARGE = (3000, 2000)
PEER = "PIL"
NVJPEG = "torchcodec on the GPU (nvJPEG)"
GOALS = {'`decoder="pil", min_side=256`': 2.0, NVJPEG: 1.0}
"""Ways with a row, and the least ratio of their speed to PIL's."""
SHAPED = v2.Compose([v2.Resize(SIDE), v2.CenterCrop(CROP), v2.ToImage(), v2.ToPureTensor()])
Way = Callable[[Sequence[bytes]], list[Tensor]]


def by_pil(bodies: Sequence[bytes]) -> list[Tensor]:
    """Decode the pictures as `ImageFolder`'s loader does."""
    return [SHAPED(Image.open(io.BytesIO(body)).convert("RGB")) for body in bodies]


def by_us(bodies: Sequence[bytes], decoder: Decoder, min_side: int | None = None) -> list[Tensor]:
    """Decode the pictures as `S3ImageFolder` does."""
    return [SHAPED(decode(body, decoder, min_side=min_side)) for body in bodies]


def by_nvjpeg(bodies: Sequence[bytes]) -> list[Tensor]:
    """Decode the whole batch on the GPU, and leave the tensors there."""
    from torchcodec.decoders import decode_jpeg

    pictures: Any = decode_jpeg(
        [torch.frombuffer(bytearray(body), dtype=torch.uint8) for body in bodies], device="cuda"
    )
    shaped = [SHAPED(picture) for picture in pictures]
    torch.cuda.synchronize()
    return shaped


def ways() -> dict[str, Way]:
    """Return the ways that this machine can measure."""
    found: dict[str, Way] = {
        PEER: by_pil,
        '`decoder="pil", min_side=256`': partial(by_us, decoder="pil", min_side=SIDE),
    }
    return found | ({NVJPEG: by_nvjpeg} if torch.cuda.is_available() else {})


def figures(bodies: Sequence[bytes], rounds: int) -> Iterator[Figure]:
    """Decode the pictures by all ways in turn, and yield the rows beside PIL."""

    def speed(way: Way) -> float:
        began = time.perf_counter()
        way(bodies)
        return len(bodies) / (time.perf_counter() - began)

    found = take_turns({name: partial(speed, way) for name, way in ways().items()}, rounds)
    for name, here in found.items():
        if name in GOALS:
            what = f"large JPEGs decoded, {SIDE}: {name}"
            row = {"what": what, "here": here, "unit": "1/s", "goals": at_least(GOALS[name])}
            yield Figure.beside(PEER, found[PEER], **row)


def main() -> None:
    """Measure, and print the table."""
    arguments = asked(__doc__, rounds=(5, 1, "rounds that count"), pictures=(12, 2, "pictures"))
    torch.set_num_threads(1)
    for decoder in ("pil", "tensor"):
        prepare(decoder)
    large = [encoded(photo(number, LARGE)) for number in range(arguments.pictures)]
    report(figures(large, arguments.rounds), arguments.on)


if __name__ == "__main__":
    main()
