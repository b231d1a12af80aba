"""Reads and writes objects of S3 with obstore, in less than half of s3fs's processor time. Runs in a rank.

Server, credentials and all other operations still come from `s3fs.S3FileSystem`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

BLOCK, NUM_BLOCKS = 8 << 20, 4
"""Bytes per upload request, and parallel requests per object. Memory holds the product of both."""
KNOWN_OPTIONS = {"anon", "cache_regions", "client_kwargs.endpoint_url", "client_kwargs.region_name"} | {
    "endpoint_url",
    "key",
    "secret",
    "token",
}
"""Options of s3fs with which obstore works. With any other option, for example encryption, s3fs does all operations."""
CLIENT: Any = {"allow_http": True, "connect_timeout": "10s", "timeout": "5min"}
REFRESH = timedelta(minutes=6)
"""Time for which obstore reuses temporary credentials. Botocore renews them ten minutes before they expire."""


class QuickS3:
    """Writes and reads objects like an `s3fs.S3FileSystem`. After an error, the caller retries with s3fs."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._store = functools.cache(self._opened)

    @classmethod
    @functools.cache
    def of(cls, files: Any) -> QuickS3 | None:
        """Return a `QuickS3` for an fsspec file system.

        Returns:
            None for other file systems than s3fs, for options outside `KNOWN_OPTIONS`, or without obstore.
        """
        module = sys.modules.get("s3fs")
        if module is None or type(files) is not module.S3FileSystem or find_spec("obstore") is None:
            return None
        return cls(files) if _names(files.storage_options) <= KNOWN_OPTIONS else None

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[QuickFile]:
        """Open a new object for writing. The object appears when closed, but never after an error."""
        import obstore

        bucket, key, _ = self._files.split_path(path)
        with obstore.open_writer(self._store(bucket), key, buffer_size=BLOCK, max_concurrency=NUM_BLOCKS) as file:
            yield QuickFile(file)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from `start` to `end`."""
        import obstore

        bucket, key, _ = self._files.split_path(path)
        return bytes(obstore.get_range(self._store(bucket), key, start=start, end=end))

    def _opened(self, bucket: str) -> Any:
        from fsspec.asyn import sync
        from obstore.store import S3Store

        self._files.connect()
        client = sync(self._files.loop, self._files.get_s3, bucket)
        return S3Store(
            bucket,
            endpoint=client.meta.endpoint_url,
            region=client.meta.region_name,
            virtual_hosted_style_request=False,
            skip_signature=self._files.anon,
            credential_provider=None if self._files.anon else functools.partial(_credentials, self._files.loop, client),
            client_options=CLIENT,
            retry_config={"max_retries": 2},
        )


class QuickFile:
    """New object, open for writing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        """Queue a copy of the data for upload. Obstore reads the copy later, when torch may have reused `data`."""
        self._file.write(bytes(data))


def _credentials(loop: Any, client: Any) -> Any:
    """Return s3fs's credentials in obstore's form."""
    from fsspec.asyn import sync

    found = sync(loop, client._request_signer._credentials.get_frozen_credentials)  # noqa: SLF001 - botocore has no other
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + REFRESH if found.token else None,
    }


def _names(options: dict[str, Any]) -> set[str]:
    return {
        name
        for key, value in options.items()
        for name in ([f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key])
    }
