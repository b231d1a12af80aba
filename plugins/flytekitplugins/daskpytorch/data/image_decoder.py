"""Decoder that turns the bytes of a picture into a PIL image or a tensor. Runs in threads of loading processes."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile


Decoder = Literal["pil", "tensor"]
END_OF_JPEG = b"\xff\xd9"
JPEG_MODES = ("RGB", "L")
"""PIL's modes of JPEGs that torchcodec and torchvision decode to the same pixels as PIL."""
MAX_PIXELS = 2**30 // 12
"""Default of the maximum number of pixels of a picture: 89 million, which PIL opens without a warning.

A decoded picture of that size takes a quarter of a gigabyte of memory, and its decoding several times as much.
"""


class BrokenImageError(ValueError):
    """A picture cannot be decoded, although it arrived undamaged from the bucket.

    Examples:
        >>> from flytekitplugins.daskpytorch import data
        >>> dogs = data.S3ImageFolder("s3://pictures/with-a-broken-one")
        >>> try:
        ...     dogs.__getitems__(range(len(dogs)))
        ... except data.BrokenImageError as error:
        ...     print(error)
        s3://pictures/with-a-broken-one/beagle/broken.jpg cannot be decoded...
    """


class ImageTooLargeError(BrokenImageError):
    """A picture has more pixels than `max_pixels` allows, and was not decoded.

    Examples:
        >>> from flytekitplugins.daskpytorch import data
        >>> dogs = data.S3ImageFolder("s3://pictures/dogs", max_pixels=100)
        >>> try:
        ...     dogs[0]
        ... except data.ImageTooLargeError as error:
        ...     print(error)
        s3://pictures/dogs/beagle/0.jpg ... max_pixels...
    """


def prepare(decoder: Decoder) -> None:
    """Import the modules that a decoder needs, before threads decode. Imports in several threads may fail."""
    import PIL.Image

    PIL.Image.init()
    if decoder != "pil":
        import torchvision.transforms.functional  # noqa: F401

        _jpeg_decoder()


@functools.cache
def _jpeg_decoder() -> Callable[[Tensor], Tensor]:
    """Return torchcodec's function that decodes a JPEG, or torchvision's if torchcodec cannot be imported."""
    try:
        from torchcodec.decoders import decode_jpeg
    except ModuleNotFoundError:
        return _torchvisions()
    except (ImportError, OSError, RuntimeError) as error:  # raised by torchcodec's shared libraries
        logging.getLogger(__name__).warning(
            "torchvision decodes the pictures, since torchcodec cannot: %s. torchcodec decodes pictures from 0.16 on, "
            "which needs torch 2.11 or newer; this is torch %s. torchcodec's README lists the matching versions",
            str(error).splitlines()[0],
            torch.__version__,
        )
        return _torchvisions()
    return functools.partial(decode_jpeg, mode="RGB")  # torchcodec rotates by the EXIF data itself


def _torchvisions() -> Callable[[Tensor], Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    return functools.partial(decode_jpeg, mode=ImageReadMode.RGB, apply_exif_orientation=True)


def decode(body: bytes, decoder: Decoder, max_pixels: int = MAX_PIXELS, min_side: int | None = None) -> Image | Tensor:
    """Decode a picture's file, and return the picture in RGB, rotated as its EXIF data say.

    Args:
        body: Bytes of the picture's file.
        decoder: Type of the returned picture. `pil`: a PIL image. `tensor`: a uint8 tensor of (3, height, width). For a
            tensor, torchcodec or torchvision decodes JPEGs with one or three components, and PIL decodes all other
            pictures.
        max_pixels: Maximum number of pixels of the picture.
        min_side: Minimum length, in pixels, of the returned picture's shorter side, if the picture is that large. JPEGs
            are decoded at a half, a quarter or an eighth of their size: the smallest size that is large enough. Only
            PIL can shrink, so PIL decodes these JPEGs. None: decode at full size.

    Raises:
        BrokenImageError: The file is empty, cut short, or no picture.
        ImageTooLargeError: The file's header has more pixels than `max_pixels`.
    """
    from PIL import Image, ImageOps

    if not body:
        raise BrokenImageError("it is empty (0 bytes)")
    try:
        picture = Image.open(io.BytesIO(body))  # reads the header only
        _check_size(picture, max_pixels)
        is_whole_size = min_side is None or not _shrink(picture, min_side)
        # Torchvision decodes a JPEG that is cut short, with a grey rest. The other decoders raise an error.
        if decoder != "pil" and is_whole_size and _is_for_torch(picture) and _is_whole(body):
            return _jpeg_decoder()(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        ImageOps.exif_transpose(picture, in_place=True)  # without `in_place` PIL copies the picture
        upright = _as_rgb(picture)
    except ImageTooLargeError:
        raise
    except Image.DecompressionBombError as error:  # PIL's own limit, twice PIL.Image.MAX_IMAGE_PIXELS
        raise ImageTooLargeError(
            f"{error} Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS as well as max_pixels={max_pixels:,}"
        ) from error
    except (OSError, SyntaxError, ValueError, RuntimeError, EOFError) as error:
        raise BrokenImageError(f"{type(error).__name__}: {error} ({len(body)} bytes)") from error
    return upright if decoder == "pil" else _as_tensor(upright)


def _check_size(picture: Image, max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise ImageTooLargeError(
            f"it has {width:,} x {height:,} = {width * height:,} pixels, max_pixels={max_pixels:,} are allowed. Make "
            "it smaller, or raise max_pixels where there is memory for it"
        )


def _shrink(picture: ImageFile, min_side: int) -> bool:
    """Let PIL decode a JPEG at a smaller size with no side below `min_side`. Return False if PIL cannot."""
    whole = picture.size
    picture.draft(None, (min_side, min_side))
    return picture.size != whole


def _is_for_torch(picture: Image) -> bool:
    return picture.format == "JPEG" and picture.mode in JPEG_MODES


def _as_rgb(picture: Image) -> Image:
    if picture.mode.startswith("I;16"):  # PIL would clip all values above 255 of 65535
        return picture.point(lambda brightness: brightness / 256).convert("L").convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError(
            f"PIL's mode {picture.mode} has no fixed range of brightness: save the picture as 8-bit grey or RGB"
        )
    if picture.format == "JPEG" and picture.mode == "RGB":
        return picture  # convert() would copy it, as it must for other formats, whose file PIL may keep open
    return picture.convert("RGB")


def _is_whole(body: bytes) -> bool:
    return body.rstrip(b"\0").endswith(END_OF_JPEG)


def _as_tensor(picture: Image) -> Tensor:
    from torchvision.transforms.functional import pil_to_tensor

    tensor: Tensor = pil_to_tensor(picture)
    return tensor
