"""Turns the bytes of a picture into what transforms take. Runs in threads of the processes that load data."""

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
"""In which torch's decoders give the same picture as PIL; all use libjpeg-turbo."""
MAX_PIXELS = 2**30 // 12
"""What PIL opens without a warning, 89 million: a quarter of a gigabyte, and decoding takes several times as much."""


class BrokenImageError(ValueError):
    """A picture that cannot be decoded, though it arrived as it lies in the bucket.

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
    """A picture of more pixels than are allowed; it was not decoded.

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
    """Import what `decode` needs: threads that import parts of torchvision at the same time find them half made."""
    import PIL.Image

    PIL.Image.init()
    if decoder != "pil":
        import torchvision.transforms.functional  # noqa: F401

        _jpeg_decoder()


@functools.cache
def _jpeg_decoder() -> Callable[[Tensor], Tensor]:
    """Return torchcodec's decoder, or torchvision's where torchcodec is not installed, or is for another torch."""
    try:
        from torchcodec.decoders import decode_jpeg
    except ModuleNotFoundError:
        return _torchvisions()
    except (ImportError, OSError, RuntimeError) as error:  # its libraries are loaded with it
        logging.getLogger(__name__).warning(
            "torchcodec does not decode pictures here, so torchvision does: %s. Torchcodec does from 0.16 on, which is "
            "for torch 2.11 and newer, and this is torch %s; its README has a table of what goes together",
            str(error).splitlines()[0],
            torch.__version__,
        )
        return _torchvisions()
    return functools.partial(decode_jpeg, mode="RGB")  # upright by itself


def _torchvisions() -> Callable[[Tensor], Tensor]:
    from torchvision.io import ImageReadMode, decode_jpeg

    return functools.partial(decode_jpeg, mode=ImageReadMode.RGB, apply_exif_orientation=True)


def decode(body: bytes, decoder: Decoder, max_pixels: int = MAX_PIXELS, min_side: int | None = None) -> Image | Tensor:
    """The picture in red, green and blue, as people see it: rotated as its EXIF data say.

    Args:
        body: A whole file.
        decoder: `pil` gives PIL's picture, `tensor` a tensor of (3, height, width), uint8. For a tensor JPEGs with
            three components or one are decoded by torchcodec or torchvision, all others by PIL.
        max_pixels: How large it may be.
        min_side: Decode a JPEG at the smallest of a half, a quarter and an eighth of its size at which neither side is
            shorter than this, if there is one; by PIL, since torch's decoders cannot.

    Raises:
        BrokenImageError: It is empty, cut short, or no picture.
        ImageTooLargeError: It is too large, as its header says.
    """
    from PIL import Image, ImageOps

    if not body:
        raise BrokenImageError("it is empty (0 bytes)")
    try:
        picture = Image.open(io.BytesIO(body))  # reads the header alone
        _check_size(picture, max_pixels)
        is_whole_size = min_side is None or not _shrink(picture, min_side)
        # Torchvision's decoder takes a JPEG that is cut short, and makes the rest grey; the others do not.
        if decoder != "pil" and is_whole_size and _is_for_torch(picture) and _is_whole(body):
            return _jpeg_decoder()(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        ImageOps.exif_transpose(picture, in_place=True)  # else it is copied
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
    """Have PIL decode fewer pixels than there are; whether it can."""
    whole = picture.size
    picture.draft(None, (min_side, min_side))
    return picture.size != whole


def _is_for_torch(picture: Image) -> bool:
    return picture.format == "JPEG" and picture.mode in JPEG_MODES


def _as_rgb(picture: Image) -> Image:
    if picture.mode.startswith("I;16"):  # PIL would cut all that is brighter than 1/256 off
        return picture.point(lambda brightness: brightness / 256).convert("L").convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError(f"it is in PIL's mode {picture.mode}, whose range of brightness is not fixed")
    if picture.format == "JPEG" and picture.mode == "RGB":
        return picture  # which convert() would copy; of other formats PIL may keep the file for further frames
    return picture.convert("RGB")


def _is_whole(body: bytes) -> bool:
    return body.rstrip(b"\0").endswith(END_OF_JPEG)


def _as_tensor(picture: Image) -> Tensor:
    from torchvision.transforms.functional import pil_to_tensor

    tensor: Tensor = pil_to_tensor(picture)
    return tensor
