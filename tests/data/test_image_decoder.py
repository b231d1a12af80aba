"""Every decoder returns the same pixels, and no broken picture counts as complete."""

import importlib.abc
import io
import struct
import sys
import types
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from PIL import Image

import jpegs
from flytekitplugins.daskpytorch.data import image_folder
from flytekitplugins.daskpytorch.data.image_folder import (
    MAX_PIXELS,
    BrokenImageError,
    Decoder,
    ImageTooLargeError,
    decode,
)

has_torchcodec = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"),
    reason=f"torchcodec decodes pictures from 0.16 on, which is for torch 2.11 and newer; this is {torch.__version__}",
)
BY_TORCH = [pytest.param("torchcodec", marks=has_torchcodec), "torchvision"]
WIDTH, HEIGHT = 70, 50
rng = np.random.default_rng(0)
small = Image.fromarray(rng.integers(0, 255, (5, 7, 3), dtype=np.uint8))
PICTURE = small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def file(picture: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """PIL's pictures, or tensors by one of torch's two decoders."""
    if request.param == "torchvision":
        monkeypatch.setattr(image_folder, "_jpeg_decoder", image_folder._torchvisions)
    return "pil" if request.param == "pil" else "tensor"


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
@pytest.mark.parametrize("decoder", BY_TORCH, indirect=True)
def test_all_decoders_give_the_same_picture(kind: str, decoder: Decoder) -> None:
    by_pil = decode(FILES[kind], "pil")
    tensor = decode(FILES[kind], decoder)
    assert isinstance(by_pil, Image.Image)
    assert by_pil.mode == "RGB"
    assert by_pil.size == ((HEIGHT, WIDTH) if kind == "rotated" else (WIDTH, HEIGHT))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.uint8
    assert torch.equal(tensor, torch.from_numpy(np.array(by_pil)).permute(2, 0, 1))


@pytest.mark.parametrize("kind", FILES)
def test_pictures_are_what_they_show(kind: str) -> None:
    wanted = PICTURE.rotate(-90, expand=True) if kind == "rotated" else PICTURE
    wanted = wanted.convert("L").convert("RGB") if kind in ("grayscale", "16 bits") else wanted
    difference = np.abs(np.asarray(decode(FILES[kind], "pil"), dtype=int) - np.asarray(wanted))
    assert difference.mean() < 20  # JPEG and palettes lose a little; a wrong rotation or inversion gives 40 and more


def test_pictures_without_a_fixed_range_are_errors() -> None:
    with pytest.raises(BrokenImageError, match="PIL's mode F"):
        decode(file(PICTURE.convert("F"), "tiff"), "pil")


@pytest.mark.parametrize("decoder", ["pil", *BY_TORCH], indirect=True)
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
    ],
    ids=["empty", "text", "cut", "cut progressive", "header alone", "cut png", "cut gif"],
)
def test_broken_pictures_are_errors(body: bytes, message: str, decoder: Decoder) -> None:
    with pytest.raises(BrokenImageError, match=message):
        decode(body, decoder)


# ---- Pictures that are too large ------------------------------------------------------------------------------------


def enlarged(kind: str, width: int, height: int) -> bytes:
    """A small picture whose header says that it is large; what decodes it makes room for that first."""
    body = FILES[kind]
    if kind == "png":
        header = b"IHDR" + struct.pack(">II", width, height) + body[24:29]
        return body[:12] + header + struct.pack(">I", zlib.crc32(header)) + body[33:]
    start = body.index(b"\xff\xc0") + 5
    return body[:start] + struct.pack(">HH", height, width) + body[start + 4 :]


def blank(width: int, height: int) -> bytes:
    """A whole PNG of two colours, of a few kilobytes."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1 + (width + 7) // 8) * height)
    chunks = [(b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


LARGE = {
    "png": blank(13_000, 13_000),
    "cut png": enlarged("png", 13_000, 13_000),
    "jpeg": enlarged("jpeg", 13_000, 13_000),
}


@pytest.mark.parametrize("decoder", ["pil", *BY_TORCH], indirect=True)
@pytest.mark.parametrize("kind", LARGE)
def test_too_large_pictures_are_errors_of_their_own(kind: str, decoder: Decoder) -> None:
    said = r"it has 13,000 x 13,000 = 169,000,000 pixels, max_pixels=89,478,485 are allowed\. .*raise max_pixels"
    with pytest.raises(ImageTooLargeError, match=said):
        decode(LARGE[kind], decoder)


@pytest.mark.parametrize("decoder", ["pil", *BY_TORCH], indirect=True)
def test_the_limit_can_be_set(decoder: Decoder) -> None:
    assert decode(FILES["jpeg"], decoder, WIDTH * HEIGHT) is not None
    with pytest.raises(ImageTooLargeError, match=r"70 x 50 = 3,500 pixels, max_pixels=3,499 are allowed"):
        decode(FILES["jpeg"], decoder, WIDTH * HEIGHT - 1)


@pytest.mark.parametrize("max_pixels", [MAX_PIXELS, 10**12])
def test_what_pil_itself_does_not_open_is_too_large(max_pixels: int) -> None:
    with pytest.raises(ImageTooLargeError, match=r"400000000 pixels.* raise PIL\.Image\.MAX_IMAGE_PIXELS as well as"):
        decode(enlarged("png", 20_000, 20_000), "pil", max_pixels)


# ---- Fewer pixels than there are -----------------------------------------------------------------------------------

LARGE_PHOTO = jpegs.photo(3, (660, 502))
SHOT = jpegs.encoded(LARGE_PHOTO)


@pytest.mark.parametrize("decoder", ["pil", "tensor"])
@pytest.mark.parametrize(
    "min_side, size",
    [(503, (660, 502)), (252, (660, 502)), (251, (330, 251)), (126, (330, 251)), (125, (165, 126)), (5, (83, 63))],
)
def test_a_jpeg_is_decoded_at_the_smallest_size_that_suffices(
    decoder: Decoder, min_side: int, size: tuple[int, int]
) -> None:
    picture = decode(SHOT, decoder, min_side=min_side)
    assert (picture.size if isinstance(picture, Image.Image) else tuple(picture.shape[:0:-1])) == size


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("min_side", [WIDTH, 20])
def test_decoders_agree_on_smaller_pictures(kind: str, min_side: int) -> None:
    by_pil = decode(FILES[kind], "pil", min_side=min_side)
    assert isinstance(by_pil, Image.Image)
    is_smaller = "png" not in kind and min_side == 20 and Image.open(io.BytesIO(FILES[kind])).format == "JPEG"
    width, height = (WIDTH // 2, HEIGHT // 2) if is_smaller else (WIDTH, HEIGHT)
    assert by_pil.size == ((height, width) if kind == "rotated" else (width, height))
    by_torch = decode(FILES[kind], "tensor", min_side=min_side)
    assert torch.equal(by_torch, torch.from_numpy(np.array(by_pil)).permute(2, 0, 1))  # type: ignore[arg-type]


# ---- Who decodes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_resolved() -> Iterator[None]:
    image_folder._jpeg_decoder.cache_clear()
    yield
    image_folder._jpeg_decoder.cache_clear()


class _Broken(importlib.abc.MetaPathFinder):
    """An installation of torchcodec whose libraries are for another torch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name == "torchcodec":
            raise self._error


def without_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchcodec"]:
        monkeypatch.delitem(sys.modules, name)


SAID = "torchvision decodes the pictures, since torchcodec cannot: "


@pytest.mark.parametrize("error", [ModuleNotFoundError("no torchcodec"), RuntimeError("undefined symbol: _ZN2at4")])
def test_torchvision_decodes_where_torchcodec_cannot(error, nothing_resolved, monkeypatch, caplog) -> None:
    without_torchcodec(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [_Broken(error), *sys.meta_path])
    assert decode(FILES["jpeg"], "tensor").shape == (3, HEIGHT, WIDTH)
    said = f"{SAID}undefined symbol"
    assert [said in record.getMessage() for record in caplog.records] == [True] * isinstance(error, RuntimeError)


def test_torchvision_decodes_where_torchcodec_is_for_videos_alone(nothing_resolved, monkeypatch, caplog) -> None:
    """As those before 0.16 are, which fit older torch."""
    without_torchcodec(monkeypatch)
    for name in ("torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert decode(FILES["jpeg"], "tensor").shape == (3, HEIGHT, WIDTH)
    assert [f"{SAID}cannot import name 'decode_jpeg'" in record.getMessage() for record in caplog.records] == [True]


@has_torchcodec
def test_a_tensor_is_torchcodecs_and_nothing_warns(nothing_resolved) -> None:
    assert image_folder._jpeg_decoder().func.__module__.startswith("torchcodec")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(FILES["jpeg"], "tensor").shape == (3, HEIGHT, WIDTH)
