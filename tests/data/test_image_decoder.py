"""Pictures of every format are decoded upright and in RGB, and no broken picture counts as complete."""

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from flytekitplugins.daskpytorch.data import image_folder
from flytekitplugins.daskpytorch.data.image_folder import BrokenImageError, Decoder, decode

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
    found = decode(FILES[kind], "pil")
    assert isinstance(found, Image.Image)
    assert (found.mode, found.size) == ("RGB", wanted.size)
    difference = np.abs(np.asarray(found, dtype=int) - np.asarray(wanted))
    assert difference.mean() < 20  # JPEG and palettes lose a little; a wrong rotation or inversion gives 40 and more
    tensor = decode(FILES[kind], "tensor")
    assert torch.equal(tensor, pil_to_tensor(found))


def test_pictures_without_a_fixed_range_are_errors() -> None:
    with pytest.raises(BrokenImageError, match="PIL's mode F"):
        decode(file(PICTURE.convert("F"), "tiff"), "pil")


def vast() -> bytes:
    """A small picture whose header says that it is large; what decodes it makes room for that first."""
    body = FILES["png"]
    header = b"IHDR" + struct.pack(">II", 20_000, 20_000) + body[24:29]
    return body[:12] + header + struct.pack(">I", zlib.crc32(header)) + body[33:]


@pytest.mark.parametrize("decoder", ["pil", "tensor"])
@pytest.mark.parametrize(
    "body, message",
    [
        (b"", r"it is empty \(0 bytes\)"),
        (b"<html>not found</html>", "cannot identify image file"),
        (FILES["jpeg"][:-200], "truncated"),
        (FILES["progressive"][: len(FILES["progressive"]) // 2], "truncated"),
        (FILES["jpeg"][:20], r"bytes\)"),
        (FILES["png"][:-300], "truncated"),
        (FILES["gif"][:-100], "truncated"),
        (vast(), r"DecompressionBombError: Image size \(400000000 pixels\) exceeds limit"),
    ],
    ids=["empty", "text", "cut", "cut progressive", "header alone", "cut png", "cut gif", "vast"],
)
def test_broken_pictures_are_errors(body: bytes, message: str, decoder: Decoder) -> None:
    with pytest.raises(BrokenImageError, match=message):
        decode(body, decoder)


def test_pil_decodes_where_torchcodec_is_missing_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = decode(FILES["jpeg"], "tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    image_folder._torchcodec.cache_clear()
    assert torch.equal(decode(FILES["jpeg"], "tensor"), wanted)
    assert not caplog.records
    monkeypatch.delitem(sys.modules, "torchcodec")
    (tmp_path / "torchcodec.py").write_text("raise OSError('libtorch.so: undefined symbol\\nof another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    image_folder._torchcodec.cache_clear()
    assert torch.equal(decode(FILES["jpeg"], "tensor"), wanted)
    assert caplog.messages == ["PIL decodes the pictures, since torchcodec cannot: libtorch.so: undefined symbol"]
    image_folder._torchcodec.cache_clear()
