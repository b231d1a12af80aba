"""The objects of an S3 bucket by obstore, at less than half of s3fs's processor time. Runs in a rank.

A file system of s3fs's says which server that is, and with which credentials. It remains the way to all else.
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
"""Bytes that are sent at a time, and how many times that of one object at once: both are memory."""
KNOWN_OPTIONS = {"anon", "cache_regions", "client_kwargs.endpoint_url", "client_kwargs.region_name"} | {
    "endpoint_url",
    "key",
    "secret",
    "token",
}
"""What obstore needs no telling of; with others, such as an encryption, s3fs does all."""
CLIENT: Any = {"allow_http": True, "connect_timeout": "10s", "timeout": "5min"}
REFRESH = timedelta(minutes=6)
"""How long temporary credentials are used without asking; botocore renews them ten minutes before their end."""


class QuickS3:
    """Writes and reads what an `s3fs.S3FileSystem` would, except that it is s3fs that is to be asked again."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._store = functools.cache(self._opened)

    @classmethod
    @functools.cache
    def of(cls, files: Any) -> QuickS3 | None:
        """For this fsspec file system; None: it is of another kind, is told what obstore is not, or that is missing."""
        module = sys.modules.get("s3fs")
        if module is None or type(files) is not module.S3FileSystem or find_spec("obstore") is None:
            return None
        return cls(files) if _names(files.storage_options) <= KNOWN_OPTIONS else None

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[QuickFile]:
        """A new object, which is there once it is closed, and is not where anything went wrong."""
        import obstore

        bucket, key, _ = self._files.split_path(path)
        with obstore.open_writer(self._store(bucket), key, buffer_size=BLOCK, max_concurrency=NUM_BLOCKS) as file:
            yield QuickFile(file)

    def read(self, path: str, start: int, end: int) -> bytes:
        """Some of an object's bytes."""
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
    """What is being written."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        """Send a copy: obstore keeps what it is given until it is sent, and torch has its own plans with its memory."""
        self._file.write(bytes(data))


def _credentials(loop: Any, client: Any) -> Any:
    """What obstore signs requests with: as s3fs has found them."""
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
