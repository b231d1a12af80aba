"""Pictures of every format are decoded upright and in RGB, and no broken picture counts as complete."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flytekitplugins.daskpytorch.data.image_folder import BrokenImageError, decode

WIDTH, HEIGHT = 70, 50
rng = np.random.default_rng(0)
small = Image.fromarray(rng.integers(0, 255, (5, 7, 3), dtype=np.uint8))
PICTURE = small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def file(picture: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    return file(PICTURE, exif=exif)


FILES = {
    "jpeg": file(PICTURE),
    "best jpeg": file(PICTURE, quality=100, subsampling=0),
    "progressive": file(PICTURE, progressive=True),
    "grayscale": file(PICTURE.convert("L")),
    "cmyk": file(PICTURE.convert("CMYK")),
    "rotated": rotated(),
    "png": file(PICTURE, "png"),
    "transparent": file(PICTURE.convert("RGBA"), "png"),
    "palette": file(PICTURE.convert("P"), "png"),
    "gif": file(PICTURE.convert("P"), "gif"),
    "webp": file(PICTURE, "webp", lossless=True),
    "16 bits": file(Image.fromarray(np.asarray(PICTURE.convert("L"), dtype=np.uint16) * 257), "png"),
    "trailing zeros": file(PICTURE) + b"\0" * 100,
    "trailing text": file(PICTURE) + b"appended by a camera",
}


@pytest.mark.parametrize("kind", FILES)
def test_pictures_are_what_they_show(kind: str) -> None:
    wanted = PICTURE.rotate(-90, expand=True) if kind == "rotated" else PICTURE
    wanted = wanted.convert("L").convert("RGB") if kind in ("grayscale", "16 bits") else wanted
    found = decode(FILES[kind])
    assert (found.mode, found.size) == ("RGB", wanted.size)
    difference = np.abs(np.asarray(found, dtype=int) - np.asarray(wanted))
    assert difference.mean() < 20  # JPEG and palettes lose a little; a wrong rotation or inversion gives 40 and more


def test_pictures_without_a_fixed_range_are_errors() -> None:
    with pytest.raises(BrokenImageError, match="PIL's mode F"):
        decode(file(PICTURE.convert("F"), "tiff"))


def vast() -> bytes:
    """A small picture whose header says that it is large; what decodes it makes room for that first."""
    body = FILES["png"]
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + body[24:29]
    return body[:12] + header + struct.pack(">I", zlib.crc32(header)) + body[33:]


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", r"it is empty \(0 bytes\)"),
        (b"<html>not found</html>", "cannot identify image file"),
        (FILES["jpeg"][:-200], "image file is truncated"),
        (FILES["progressive"][: len(FILES["progressive"]) // 2], "truncated"),
        (FILES["jpeg"][:20], r"bytes\)"),
        (FILES["png"][:-300], "truncated"),
        (FILES["gif"][:-100], "truncated"),
        (vast(), r"DecompressionBombError: Image size \(400000000 pixels\) exceeds limit"),
    ],
    ids=["empty", "text", "cut", "cut progressive", "header alone", "cut png", "cut gif", "vast"],
)
def test_broken_pictures_are_errors(body: bytes, message: str) -> None:
    with pytest.raises(BrokenImageError, match=message):
        decode(body)
