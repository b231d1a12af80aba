"""Data set of the pictures in a folder of an S3 bucket, their index and decoder. Runs in drivers and in ranks."""

from __future__ import annotations

import functools
import io
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.checks import Problems, require_extra
from flytekitplugins.daskpytorch.data.bucket import (
    Access,
    Bucket,
    DamagedTransferError,
    Listed,
    access_options,
    split_uri,
)
from flytekitplugins.daskpytorch.data.rank_loader import ahead_of

if TYPE_CHECKING:
    from PIL.Image import Image


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


def decode(body: bytes, decoder: Decoder) -> Image | Tensor:
    """Return the picture of a file in RGB, rotated as its EXIF data say. Raises `BrokenImageError`."""
    from PIL import Image, ImageOps

    if not body:
        raise BrokenImageError("it is empty (0 bytes)")
    try:
        picture = Image.open(io.BytesIO(body))  # reads the header only
        if decoder == "tensor" and picture.format == "JPEG" and picture.mode != "CMYK" and (quick := _torchcodec()):
            tensor: Tensor = quick(torch.frombuffer(bytearray(body), dtype=torch.uint8))
            return tensor
        ImageOps.exif_transpose(picture, in_place=True)  # without `in_place` PIL copies the picture
        upright = _as_rgb(picture)
        return upright if decoder == "pil" else torch.from_numpy(np.array(upright)).permute(2, 0, 1)
    except (OSError, SyntaxError, ValueError, RuntimeError, EOFError, Image.DecompressionBombError) as error:
        raise BrokenImageError(f"{type(error).__name__}: {error} ({len(body)} bytes)") from error


@functools.cache
def _torchcodec() -> Callable[[Tensor], Any] | None:
    try:
        from torchcodec.decoders import decode_jpeg  # type: ignore[attr-defined, unused-ignore]
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as error:  # its libraries are built for another torch
        logger.warning("PIL decodes the pictures, since torchcodec cannot: %s", str(error).splitlines()[0])
        return None
    return functools.partial(decode_jpeg, mode="RGB")


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


logger = logging.getLogger(__name__)

Decoder = Literal["pil", "tensor"]
OnError = Literal["raise", "skip"]
OF_ONE_PICTURE = (BrokenImageError, DamagedTransferError, FileNotFoundError)
RULES = {
    "decoder": checks.must_be("'pil' or 'tensor'", lambda value: value in ("pil", "tensor")),
    "on_error": checks.must_be("'raise' or 'skip'", lambda value: value in ("raise", "skip")),
    "num_connections": checks.COUNT,
    "timeout": checks.SECONDS,
    "num_retries": checks.whole(0),
}
NUM_DECODERS = 2
"""More threads would compete for cores with the reading threads."""


class S3ImageFolder(Dataset[tuple[Any, Any]]):
    """Map-style data set of (picture, label), from pictures in S3 at `prefix/class/picture`.

    The folder is listed when the data set is made, without objects that are no pictures by their extension. Length and
    ETag of each picture that arrives are compared with the listing.

    Many requests of one client per process read a batch at once. With `RankLoader` or `ReadAhead`, the next batch is
    read while the current one is decoded and trained on.

    The data set works before and after a `DataLoader` starts its workers by fork, forkserver or spawn, and can be
    pickled.

    Attributes:
        all_files: Keys of the pictures, in the order of the listing, which is sorted by key.
        classes: Names of the folders below the prefix that have pictures, in alphabetical order.
        class_to_idx: Label of each class, from 0 up, by the class's name.
        targets: Label of each picture, before `target_transform`.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from torchvision.transforms import v2
        >>> from flytekitplugins.daskpytorch import data
        >>> dogs = data.S3ImageFolder("s3://pictures/dogs", transform=v2.Resize((32, 32)), decoder="tensor")
        >>> len(dogs), dogs.classes
        (8, ['beagle', 'collie'])
        >>> images, labels = next(iter(DataLoader(dogs, batch_size=4)))
        >>> images.shape, images.dtype, labels.tolist()
        (torch.Size([4, 3, 32, 32]), torch.uint8, [0, 0, 0, 0])
    """

    reads_ahead = True
    """Always True: tells `ReadAhead` and `RankLoader` that this data set downloads the next batch ahead."""

    def __init__(
        self,
        s3_bucket: str,
        s3_prefix: str = "",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        anon: bool = False,
        *,
        storage_options: Mapping[str, Any] | None = None,
        nested: bool = False,
        decoder: Decoder = "pil",
        on_error: OnError = "raise",
        num_connections: int = 32,
        timeout: float = 30.0,
        num_retries: int = 5,
    ) -> None:
        """List the pictures in a folder of a bucket.

        Args:
            s3_bucket: Name of the bucket, or URI of the whole folder, `s3://bucket/prefix`.
            s3_prefix: Folder in the bucket.
            transform: Function of an upright picture in RGB that returns the data set's picture. One thread calls it,
                in order.
            target_transform: Function of a label that returns the data set's label.
            anon: True: read the bucket without credentials. False: use those of AWS's provider chain.
            storage_options: Options as in s3fs: `key`, `secret`, `token`, `profile`, `anon`, `endpoint_url`,
                `region_name`. `endpoint_url` is the address of a server other than AWS, with the bucket in the URL's
                path. Default: from the environment or the profile, else AWS.
            nested: True: also take pictures that are deeper than `prefix/class/picture`. False: deeper pictures are an
                error, because folders such as `train` and `val` would become classes.
            decoder: Type of the decoded picture. `pil`: `PIL.Image.Image`. `tensor`: uint8 tensor of (3, height, width)
                with the same pixels. Torchcodec from 0.16 on decodes JPEGs sooner, where it is installed.
            on_error: Handling of a picture that cannot be decoded, has vanished, or arrives damaged after all retries.
                `raise`: raise the error. `skip`: leave the picture out of its batch, and log its key and the error.
            num_connections: Maximum number of requests in flight per process.
            timeout: Timeout, in seconds, for the server's answer to a request.
            num_retries: Maximum number of retries of a request after resets, timeouts, HTTP 5xx or short bodies.

        Raises:
            ValueError: An argument is out of range, or the folder has pictures at deeper levels.
            FileNotFoundError: The bucket does not exist, or the folder has no picture.
            PermissionError: The credentials do not allow the listing.
            OSError: The server cannot be reached.
            ImportError: The extra `s3` is not installed.
        """
        require_extra("s3", "S3ImageFolder")
        bucket, prefix = split_uri(s3_bucket, s3_prefix)
        Problems("S3ImageFolder", SimpleNamespace(**locals()), RULES).raise_any()
        access = Access(
            num_connections=num_connections,
            timeout=timeout,
            num_retries=num_retries,
            **access_options(storage_options or {}, anon=anon),
        )
        self.transform = transform
        self.target_transform = target_transform
        self._decoder, self._on_error = decoder, on_error
        self._bucket, self._access = bucket, access
        self._readers: dict[int, _Reader] = {}
        """By process id. Entries of parents stay after a fork: their threads do not exist here."""
        folder = f"{prefix}/" if prefix else ""
        listing = self._reader.bucket.listing(folder)
        self._files = pictures_in(listing, f"s3://{bucket}/{folder}", folder, nested=nested)
        self.all_files = [listed.key for listed in self._files]
        names = [key.removeprefix(folder).partition("/")[0] for key in self.all_files]
        self.classes = sorted(set(names))
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.targets = [self.class_to_idx[name] for name in names]

    @property
    def _reader(self) -> _Reader:
        if (pid := os.getpid()) not in self._readers:
            self._readers[pid] = _Reader(self._bucket, self._access)
        return self._readers[pid]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": {}}

    @property
    def etags(self) -> list[str]:
        """Text with ETag and size of each picture, in the order of `all_files`.

        Equal pictures have equal texts, except after uploads in parts or with KMS keys.
        """
        return [f"{listed.etag} {listed.size}" for listed in self._files]

    def __len__(self) -> int:
        return len(self.all_files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return one picture and its label.

        Raises:
            OSError: The picture could not be read. The subclass says why, such as `FileNotFoundError` for a vanished
                picture.
            BrokenImageError: The picture cannot be decoded, even if `on_error` would skip it in a batch.
        """
        self._import_decoder()
        index = range(len(self))[index]
        return self._item(index, self._decode(index, self._reader.fetch(self._files[index])))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the pictures with these indices and their labels, without skipped ones. Called by `DataLoader`.

        Downloads of the next batch, which `ReadAhead` names, are then in progress.

        Raises:
            BrokenImageError: All pictures of the batch were skipped, or one is broken and `on_error` is `raise`.
            OSError: A picture could not be read. The subclass says why.
        """
        self._import_decoder()
        bodies = self._reader.bodies(self._files, indices, ahead_of(indices))
        try:
            decoded = self._reader.decoders.map(self._decode_or_skip, indices, bodies)
            pictures = list(zip(indices, decoded, strict=True))
        finally:
            for body in bodies:
                body.cancel()  # after an exception
        items = [self._item(index, picture) for index, picture in pictures if picture is not None]
        if not items and indices:
            keys = ", ".join(self._uri(index) for index in indices[:3])
            raise BrokenImageError(
                f"all {len(indices)} pictures of a batch were skipped ({keys}{', ...' if len(indices) > 3 else ''}); "
                "the log has the reason for each. Mend these pictures, or leave them out of the data set"
            )
        return items

    def _import_decoder(self) -> None:
        from PIL import Image

        Image.init()  # before threads decode: imports in several threads may fail
        if self._decoder == "tensor":
            _torchcodec()

    def _decode(self, index: int, body: Future[bytes]) -> Image | Tensor:
        try:
            return decode(body.result(), self._decoder)
        except BrokenImageError as error:
            what = f"{self._uri(index)} cannot be decoded: {error}. on_error='skip' leaves it out"
            raise BrokenImageError(what) from error.__cause__

    def _decode_or_skip(self, index: int, body: Future[bytes]) -> Image | Tensor | None:
        try:
            return self._decode(index, body)
        except OF_ONE_PICTURE as error:
            if self._on_error == "raise":
                raise
            logger.warning("skipped: %s", error)
            return None

    def _item(self, index: int, picture: Image | Tensor) -> tuple[Any, Any]:
        target = self.targets[index]
        return (
            picture if self.transform is None else self.transform(picture),
            target if self.target_transform is None else self.target_transform(target),
        )

    def _uri(self, index: int) -> str:
        return f"s3://{self._bucket}/{self.all_files[index]}"


class _Reader:
    """Client and threads of one process."""

    def __init__(self, bucket: str, access: Access) -> None:
        self.bucket = Bucket(bucket, access)
        self.threads = ThreadPoolExecutor(access.num_connections, thread_name_prefix="s3-reader")
        self.decoders = ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="s3-decoder")
        self._ahead: dict[int, Future[bytes]] = {}

    def fetch(self, listed: Listed) -> Future[bytes]:
        return self.threads.submit(self.bucket.read, listed)

    def bodies(self, files: Sequence[Listed], indices: Sequence[int], ahead: Iterable[int]) -> list[Future[bytes]]:
        """Start downloads of a batch and then of the next batch. Return the first batch's downloads.

        Downloads that an earlier call has started are used for the first batch, or else cancelled.
        """
        known, self._ahead = self._ahead, {}  # only this thread uses `known` from now on
        bodies = [known.pop(index) if index in known else self.fetch(files[index]) for index in indices]
        for body in known.values():
            body.cancel()
        self._ahead = {index: self.fetch(files[index]) for index in ahead}
        return bodies


# ---- The pictures of a folder, from one listing

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


def pictures_in(listing: Iterable[Listed], uri: str, folder: str, *, nested: bool) -> list[Listed]:
    """Return the pictures among the objects of a folder, and log what is left out.

    Raises `ValueError` for pictures at deeper levels unless `nested`, and `FileNotFoundError` without pictures.
    """
    found: defaultdict[str, list[Listed]] = defaultdict(list)
    for listed in listing:
        found[_kind(listed.key, folder)].append(listed)
    pictures, deeper = found.pop("picture", []), found.pop("deeper picture", [])
    if deeper and not nested:
        first = deeper[0].key.removeprefix(folder).partition("/")[0]
        raise ValueError(
            f"{uri} has {len(deeper)} pictures that lie deeper than class/picture, such as {deeper[0].key}. If "
            f"{first!r} is a part of the data rather than a class, name it: {uri}{first}. If {first!r} is a class, "
            "pass nested=True"
        )
    pictures = sorted(pictures + deeper)
    left_out = {kind: f"{len(others)} x {kind}, such as {others[0].key}" for kind, others in found.items()}
    if not pictures:
        raise FileNotFoundError(
            f"{uri} has no pictures. Looked for {uri}CLASS/PICTURE with the extensions {' '.join(IMAGE_EXTENSIONS)}; "
            f"found {'; '.join(left_out.values()) or 'no such object'}. Check bucket, prefix and endpoint"
        )
    for kind in left_out.keys() - {"folder marker"}:
        logger.warning("%s: left out %s", uri, left_out[kind])
    return pictures


def _kind(key: str, folder: str) -> str:
    parts = key.removeprefix(folder).split("/")
    if not parts[-1]:
        return "folder marker"
    if not parts[-1].lower().endswith(IMAGE_EXTENSIONS) or parts[-1].startswith("."):
        return "file that is no picture by its name"
    if len(parts) == 1:
        return "picture in no class's folder"
    return "picture" if len(parts) == 2 else "deeper picture"
