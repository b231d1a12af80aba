"""Training data: folders of pictures in S3, their splits and the ranks' batches. Runs in drivers and in ranks.

For example `DataLoader(S3ImageFolder("s3://bucket/dogs", transform=...), batch_size=64, num_workers=2)`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils.data import Dataset, get_worker_info

from flytekitplugins.daskpytorch.checks import Problems, is_whole
from flytekitplugins.daskpytorch.data import image_decoder
from flytekitplugins.daskpytorch.data.bucket import Access, Bucket, DamagedTransferError
from flytekitplugins.daskpytorch.data.image_cache import ImageCache
from flytekitplugins.daskpytorch.data.image_decoder import BrokenImageError, ImageTooLargeError
from flytekitplugins.daskpytorch.data.image_index import ImageIndex
from flytekitplugins.daskpytorch.data.read_ahead import ahead_of
from flytekitplugins.daskpytorch.extras import require_extra

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    Picture = Image | Tensor


logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"] | Callable[[str, Exception], Any]
OF_ONE_PICTURE = (BrokenImageError, DamagedTransferError, FileNotFoundError)
"""What `on_error` decides about; that the server is down or refuses us is another matter."""
MAX_LOADER_WORKERS = 1024
MAX_WHOLE = 2**62
NUM_DECODERS = 2
"""Threads per process; with two rather than as many as read, a batch takes a tenth less time on two cores."""
STORAGE_OPTIONS = ("key", "secret", "token", "profile", "anon", "endpoint_url", "region_name", "client_kwargs")
"""As s3fs calls them."""
CLIENT_OPTIONS = ("endpoint_url", "region_name")


class S3ImageFolder(Dataset[tuple[Any, Any]]):
    """Pictures in S3 at `prefix/class/picture`, as a map-style data set of (picture, label).

    It is listed when it is made. A batch is read by many requests at once, by a client of each process's own, and with
    `RankLoader` or `ReadAhead` the next one is read while this one is decoded and trained on. The data set may be
    used before and after a `DataLoader` starts its workers by fork, forkserver or spawn, and travels to ranks pickled.
    Whatever arrives is compared with the listing. What is no picture by its name, and folders' markers, are left out.

    Attributes:
        all_files: The pictures' keys, in their order.
        classes: The names of the folders below the prefix that have pictures, in their order.
        class_to_idx: Their labels, 0 and up.
        targets: The label of each picture, before `target_transform`.

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
    """For `RankLoader`."""

    def __init__(
        self,
        s3_bucket: str,
        s3_prefix: str = "",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        anon: bool = False,
        *,
        storage_options: Mapping[str, Any] | None = None,
        endpoint_url: str | None = None,
        decoder: image_decoder.Decoder = "pil",
        nested: bool = False,
        on_error: OnError = "raise",
        max_pixels: int = image_decoder.MAX_PIXELS,
        min_side: int | None = None,
        index: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 10 * 2**30,
        num_connections: int = 32,
        timeout: float = 30.0,
        num_retries: int = 5,
    ) -> None:
        """List the folder, or read its listing from a file.

        Args:
            s3_bucket: The bucket's name, or an URI of the whole folder, `s3://bucket/prefix`.
            s3_prefix: The folder in it.
            transform: What makes of a picture what the data set gives. Called in order, by one thread.
            target_transform: The same for labels.
            anon: Whether the bucket is read without credentials. Else with those that AWS's chain of providers finds:
                environment, profile, role of the pod or machine.
            storage_options: The same as s3fs calls it: `key`, `secret`, `token`, `profile`, `anon`, `endpoint_url`,
                `region_name`.
            endpoint_url: Address of another server than AWS's, whose buckets stand in the URL's path; None: as the
                environment or the profile says.
            decoder: What transforms are given: `pil`, a `PIL.Image.Image` in RGB; `tensor`, one of (3, height, width),
                uint8, which is faster to decode and to transform. Both are upright, as the EXIF data say, and have the
                same pixels. A tensor is decoded by torchcodec where that is installed, else by torchvision.
            nested: Whether pictures may lie deeper than `prefix/class/picture`; else those are an error, since folders
                such as `train` and `val` would be taken for classes.
            on_error: What becomes of a picture that cannot be decoded, has vanished, or arrives damaged time after
                time: `raise`; `skip`, which leaves it out of its batch; or a function of its key and the error that
                gives another picture, or None to skip it. What was skipped or replaced is logged, and counted in
                `num_broken`.
            max_pixels: How many a picture may have: a file of kilobytes may take gigabytes to decode. A larger one is
                never decoded, and what becomes of it is for `on_error` to say.
            min_side: Where transforms make pictures smaller anyway, as `Resize(256)` does: 256 decodes each JPEG at a
                half, a quarter or an eighth of its size, the smallest at which neither side is shorter than that. It
                takes a fraction of the time for large ones. Their pixels are means of those of the whole picture, so
                that what a transform makes of them differs a little; a crop before the transform takes a larger part
                of the picture. None: every picture has its own size.
            index: A file that keeps the listing, to list once for many ranks or runs; written if it is not there.
            cache_dir: A local folder in which pictures are kept, for several processes at once.
            cache_bytes: How large it may become.
            num_connections: The most requests in flight per process.
            timeout: Seconds without an answer after which a request has failed.
            num_retries: Further tries after failures that may pass: resets, time-outs, 5xx, damage.

        Raises:
            ValueError: An argument is out of range, or pictures lie too deep.
            FileNotFoundError: There is no such bucket, or no picture in the folder.
            PermissionError: It may not be listed.
            OSError: The server cannot be reached.
            ImportError: The extra `s3` is not installed.
        """
        require_extra("s3", "S3ImageFolder")
        bucket, prefix = _split_uri(s3_bucket, s3_prefix)
        problems, whole = Problems("S3ImageFolder", SimpleNamespace(**locals())), "a whole number from 1 up"
        problems.unless(decoder in get_args(image_decoder.Decoder), "decoder", "'pil' or 'tensor'")
        is_known = on_error in ("raise", "skip") or callable(on_error)
        problems.unless(is_known, "on_error", "'raise', 'skip' or a function")
        problems.unless(is_whole(max_pixels, 1, MAX_WHOLE), "max_pixels", whole)
        problems.unless(min_side is None or is_whole(min_side, 1, MAX_WHOLE), "min_side", f"{whole}, or None")
        problems.unless(cache_bytes > 0, "cache_bytes", "a number of bytes above 0")
        problems.unless(is_whole(num_connections, 1, MAX_WHOLE), "num_connections", whole)
        problems.unless(timeout > 0, "timeout", "a number of seconds above 0")
        problems.unless(is_whole(num_retries, 0, MAX_WHOLE), "num_retries", "a whole number from 0 up")
        problems.raise_any()
        access = Access(
            num_connections=num_connections,
            timeout=timeout,
            num_retries=num_retries,
            **_access_options(storage_options or {}, anon=anon, endpoint_url=endpoint_url),
        )
        self.transform = transform
        self.target_transform = target_transform
        self._decoder: image_decoder.Decoder = decoder
        self._on_error = on_error
        self._max_pixels = max_pixels
        self._min_side = min_side
        self._cache = ImageCache(cache_dir, cache_bytes) if cache_dir is not None else None
        self._source = _Source(bucket, access)
        self._index = self._listed(prefix, index, nested=nested)
        self.all_files = [listed.key for listed in self._index.files]
        self.classes = self._index.classes
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        self.targets = self._index.targets
        self._num_broken = _counters()

    @property
    def etags(self) -> list[str]:
        """What equal pictures have in common, for `split_by_class`."""
        return [f"{listed.etag} {listed.size}" for listed in self._index.files]

    @property
    def num_broken(self) -> int:
        """How many pictures were skipped or replaced so far, by this process and its loader workers."""
        return int(self._num_broken.sum())

    def __len__(self) -> int:
        return len(self.all_files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """One picture and its label.

        Raises:
            OSError: It could not be read; which kind tells why, see `__init__`. FileNotFoundError: it has vanished.
            BrokenImageError: It cannot be decoded, also where it would be left out of a batch; an ImageTooLargeError
                where it has more than `max_pixels`.
        """
        index = range(len(self))[index]
        outcome = self._decode(index, self._source.here.readers.submit(self._fetch, index))
        picture = self._judged(index, outcome)
        if picture is None and isinstance(outcome, Exception):
            raise outcome
        return self._item(index, picture)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """A batch, in order, without the pictures to skip; what `DataLoader` calls.

        The files of the batch that `ReadAhead` says comes next are under way when this returns.

        Raises:
            BrokenImageError: Nothing is left of it; or what `__getitem__` does.
        """
        image_decoder.prepare(self._decoder)
        bodies = self._source.bodies(self._fetch, indices, ahead_of(indices))
        outcomes = self._source.here.decoders.map(self._decode, indices, bodies)
        try:
            pictures = [(index, self._judged(index, outcome)) for index, outcome in zip(indices, outcomes, strict=True)]
        finally:
            for body in bodies:
                body.cancel()  # where one has failed
        items = [self._item(index, picture) for index, picture in pictures if picture is not None]
        if not items and indices:
            keys = ", ".join(self._uri(index) for index in indices[:3])
            raise BrokenImageError(
                f"all {len(indices)} pictures of a batch were skipped ({keys}{', ...' if len(indices) > 3 else ''}); "
                "see the log for the reasons"
            )
        return items

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._num_broken.is_shared():  # type: ignore[no-untyped-call]
            # It came to another process than a worker of its own loader.
            self._num_broken = _counters()

    def _listed(self, prefix: str, path: str | os.PathLike[str] | None, *, nested: bool) -> ImageIndex:
        bucket = self._source.here.bucket
        if path is not None and Path(path).exists():
            found = ImageIndex.load(path)
            wanted = (bucket.name, f"{prefix}/" if prefix else "", nested)
            if (found.bucket, found.prefix, found.nested) != wanted:
                raise ValueError(
                    f"index={os.fspath(path)!r} is of s3://{found.bucket}/{found.prefix} (nested={found.nested}), not "
                    f"of s3://{bucket.name}/{prefix} (nested={nested}): name another file"
                )
            return found
        index = ImageIndex.of(bucket.listing(f"{prefix}/" if prefix else ""), bucket.name, prefix, nested=nested)
        if path is not None:
            index.save(path)
        return index

    def _fetch(self, index: int) -> bytes:
        listed = self._index.files[index]
        bucket = self._source.here.bucket
        body = self._cache.get(bucket.name, listed) if self._cache else None
        if body is None:
            body = bucket.read(listed)
            if self._cache:
                self._cache.put(bucket.name, listed, body)
        return body

    def _decode(self, index: int, body: Future[bytes]) -> Picture | Exception:
        """The picture of a file that may be under way; the errors that `on_error` decides about are returned."""
        try:
            return image_decoder.decode(body.result(), self._decoder, self._max_pixels, self._min_side)
        except ImageTooLargeError as error:
            return ImageTooLargeError(f"{self._uri(index)} is not decoded: {error}, or see on_error")
        except BrokenImageError as error:
            return BrokenImageError(f"{self._uri(index)} cannot be decoded: {error}. Mend it, or see on_error")
        except OF_ONE_PICTURE as error:
            return error

    def _judged(self, index: int, outcome: Picture | Exception) -> Picture | None:
        """The picture; in place of a broken one, what `on_error` says."""
        if not isinstance(outcome, Exception):
            return outcome
        if self._on_error == "raise":
            raise outcome
        worker = get_worker_info()
        self._num_broken[0 if worker is None else 1 + worker.id % MAX_LOADER_WORKERS] += 1
        replacement: Picture | None = None
        if callable(self._on_error):
            replacement = self._on_error(self.all_files[index], outcome)
        logger.warning("%s: %s", "skipped" if replacement is None else "replaced", outcome)
        return replacement

    def _item(self, index: int, picture: Picture | None) -> tuple[Any, Any]:
        target = self.targets[index]
        return (
            picture if self.transform is None else self.transform(picture),
            target if self.target_transform is None else self.target_transform(target),
        )

    def _uri(self, index: int) -> str:
        return f"s3://{self._index.bucket}/{self.all_files[index]}"


@dataclass
class _Threads:
    bucket: Bucket
    readers: ThreadPoolExecutor
    decoders: ThreadPoolExecutor
    """Few: more would only take the processor from each other, and from the readers."""
    ahead: dict[int, Future[bytes]] = field(default_factory=dict)
    """Files of the next batch, by their numbers."""


class _Source:
    """A bucket, and threads that read it and that decode, anew in each process."""

    def __init__(self, name: str, access: Access) -> None:
        self._name, self._access = name, access
        self._by_process: dict[int, _Threads] = {}
        """What was inherited by a fork stays: to close it would wait for threads that are not there."""

    @property
    def here(self) -> _Threads:
        """Those of this process."""
        if (pid := os.getpid()) not in self._by_process:
            self._by_process[pid] = _Threads(
                Bucket(self._name, self._access),
                ThreadPoolExecutor(self._access.num_connections, thread_name_prefix="s3-reader"),
                ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="s3-decoder"),
            )
        return self._by_process[pid]

    def bodies(
        self, fetch: Callable[[int], bytes], indices: Sequence[int], ahead: Iterable[int]
    ) -> list[Future[bytes]]:
        """The files of a batch, which may be under way, and behind them those of the next.

        What was read ahead and is not asked for now, as when an epoch was broken off, is forgotten.
        """
        here = self.here
        known, here.ahead = here.ahead, {}  # which no other thread uses from now on
        bodies = [known.pop(index) if index in known else here.readers.submit(fetch, index) for index in indices]
        for body in known.values():
            body.cancel()
        here.ahead = {index: here.readers.submit(fetch, index) for index in ahead}
        return bodies

    def __reduce__(self) -> tuple[type[_Source], tuple[str, Access]]:
        return _Source, (self._name, self._access)


def _counters() -> Tensor:
    """One for this process, one for each loader worker: they add to their own alone."""
    counters = torch.zeros(1 + MAX_LOADER_WORKERS, dtype=torch.int64)
    counters.share_memory_()  # type: ignore[no-untyped-call]
    return counters


def _split_uri(s3_bucket: str, s3_prefix: str) -> tuple[str, str]:
    bucket, prefix = s3_bucket, s3_prefix
    if "://" in s3_bucket:
        scheme, _, rest = s3_bucket.partition("://")
        bucket, _, inner = rest.partition("/")
        if scheme not in ("s3", "s3a"):
            raise ValueError(f"s3_bucket={s3_bucket!r}: must be a bucket's name or s3://bucket/prefix")
        if inner.strip("/") and s3_prefix.strip("/"):
            raise ValueError(f"s3_bucket={s3_bucket!r} and s3_prefix={s3_prefix!r}: name the prefix once")
        prefix = inner or s3_prefix
    if not bucket or "/" in bucket:
        raise ValueError(f"s3_bucket={s3_bucket!r}: must be a bucket's name or s3://bucket/prefix")
    return bucket, prefix.strip("/")


def _access_options(options: Mapping[str, Any], *, anon: bool, endpoint_url: str | None) -> dict[str, Any]:
    """The arguments of `Access` among those of s3fs; what is named outside of them comes first."""
    client = options.get("client_kwargs") or {}
    unknown = [*(options.keys() - set(STORAGE_OPTIONS)), *(client.keys() - set(CLIENT_OPTIONS))]
    if unknown:
        raise ValueError(f"storage_options has {', '.join(sorted(unknown))}: known are {', '.join(STORAGE_OPTIONS)}")
    if (options.get("key") is None) != (options.get("secret") is None):
        raise ValueError("storage_options has one of key and secret: name both, or neither")
    return {
        "anon": anon or bool(options.get("anon", False)),
        "key": options.get("key"),
        "secret": options.get("secret"),
        "token": options.get("token"),
        "profile": options.get("profile"),
        "endpoint_url": endpoint_url or options.get("endpoint_url") or client.get("endpoint_url"),
        "region": options.get("region_name") or client.get("region_name"),
    }
