"""How many JPEGs per second become tensors of 250 x 250, by who decodes them and at which size, without any bucket.

    python benchmarks/decoding.py                         # five rounds, about a minute
    python benchmarks/decoding.py --quick                 # one round of few pictures: does it still run?

Photo-like JPEGs of 256 to 400 pixels a side, and such of 3,000 x 2,000, lie in memory. Every way decodes them, makes
their shorter side 256 and crops 250, on one core: `PIL` as torchvision's `ImageFolder` decodes, the others as
`S3ImageFolder` does, with what is in quotes. Where there is a GPU, torchcodec decodes a batch there by nvJPEG, and the
pictures are resized there, too. Ways take turns. What their pixels differ by from those of `PIL` is printed, of 255.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Figure, Goal, reported
from launch import machine, version_of
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from flytekitplugins.daskpytorch.data.image_decoder import Decoder, decode, prepare

# The pictures are those of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from jpegs import encoded, photo

SIDE, CROP = 256, 250
LARGE = (3000, 2000)
PEER = "PIL"
NVJPEG = "torchcodec on the GPU (nvJPEG)"
GOALS = {'`decoder="pil", min_side=256`': 2.0, '`decoder="tensor", min_side=256`': 2.0}
"""How many times as fast as PIL, of large pictures."""
SHAPED = v2.Compose([v2.Resize(SIDE), v2.CenterCrop(CROP), v2.ToImage(), v2.ToPureTensor()])
Way = Callable[[Sequence[bytes]], list[Tensor]]


def by_pil(bodies: Sequence[bytes]) -> list[Tensor]:
    """As `ImageFolder`'s loader does it."""
    return [SHAPED(Image.open(io.BytesIO(body)).convert("RGB")) for body in bodies]


def by_us(bodies: Sequence[bytes], decoder: Decoder, min_side: int | None = None) -> list[Tensor]:
    """As `S3ImageFolder` does it."""
    return [SHAPED(decode(body, decoder, min_side=min_side)) for body in bodies]


def by_nvjpeg(bodies: Sequence[bytes]) -> list[Tensor]:
    """The whole batch on the GPU, where it stays."""
    from torchcodec.decoders import decode_jpeg

    pictures: Any = decode_jpeg(
        [torch.frombuffer(bytearray(body), dtype=torch.uint8) for body in bodies], device="cuda"
    )
    shaped = [SHAPED(picture) for picture in pictures]
    torch.cuda.synchronize()
    return shaped


def ways() -> dict[str, Way]:
    """All that can be measured here."""
    found: dict[str, Way] = {
        PEER: by_pil,
        '`decoder="pil"`': partial(by_us, decoder="pil"),
        '`decoder="tensor"`': partial(by_us, decoder="tensor"),
        '`decoder="pil", min_side=256`': partial(by_us, decoder="pil", min_side=SIDE),
        '`decoder="tensor", min_side=256`': partial(by_us, decoder="tensor", min_side=SIDE),
    }
    return found | ({NVJPEG: by_nvjpeg} if torch.cuda.is_available() else {})


def speeds(bodies: Sequence[bytes], rounds: int) -> dict[str, list[float]]:
    """Pictures per second by way, each in turn; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways()}
    for number in range(rounds + 1):
        for name, way in ways().items():
            began = time.perf_counter()
            way(bodies)
            if number:
                found[name].append(len(bodies) / (time.perf_counter() - began))
    return found


def differences(bodies: Sequence[bytes]) -> dict[str, float]:
    """By how much the pixels of each way differ from PIL's, on average."""
    wanted = torch.stack(by_pil(bodies)).float()
    return {name: float((torch.stack(way(bodies)).cpu().float() - wanted).abs().mean()) for name, way in ways().items()}


def table(kind: str, found: dict[str, list[float]], differ: dict[str, float]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {kind} | pictures per second | pixels differ from PIL's by |"
    yield "|---|---|---|"
    for name, all_rounds in found.items():
        spread = f"{statistics.median(all_rounds):.0f} ({min(all_rounds):.0f}–{max(all_rounds):.0f})"
        yield f"| {name} | {spread} | {differ[name]:.2f} |"


def figures(kind: str, found: dict[str, list[float]], goals: dict[str, float]) -> Iterator[Figure]:
    """Each way beside PIL."""
    for name, here in found.items():
        if name != PEER:
            wanted = [Goal(bound=goals[name])] if name in goals else []
            what = f"{kind} decoded, {SIDE}: {name}"
            yield Figure.beside(PEER, found[PEER], what=what, here=here, unit="1/s", goals=wanted)


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round, few pictures")
    asked = parser.parse_args()
    rounds, num_small, num_large = (1, 16, 2) if asked.quick else (asked.rounds, 256, 12)
    torch.set_num_threads(1)
    for decoder in ("pil", "tensor"):
        prepare(decoder)
    small = [encoded(photo(number)) for number in range(num_small)]
    large = [encoded(photo(number, LARGE)) for number in range(num_large)]
    print(machine(), *(f"{name} {version_of(name)}" for name in ("pillow", "torchcodec", "torchvision")), "", sep="\n")
    if not torch.cuda.is_available():
        print("There is no GPU here: nvJPEG is left out.\n")
    of_small, of_large = speeds(small, rounds), speeds(large, rounds)
    print(*table("256 to 400 pixels a side", of_small, differences(small)), "", sep="\n")
    print(*table("3,000 x 2,000 pixels", of_large, differences(large)), "", sep="\n")
    found = [*figures("small JPEGs", of_small, {}), *figures("large JPEGs", of_large, GOALS)]
    print(*reported(found), sep="\n")


if __name__ == "__main__":
    main()
