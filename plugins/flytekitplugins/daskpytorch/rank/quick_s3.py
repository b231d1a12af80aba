"""Writes and reads shards in S3 with obstore, which takes less than half of s3fs's processor time. Runs in a rank.

Server, credentials and all other operations still come from `s3fs.S3FileSystem`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

BLOCK, NUM_BLOCKS = 8 << 20, 4
"""Bytes per upload request, and parallel requests per object. A file open for writing holds their product."""
KNOWN_OPTIONS = {"anon", "cache_regions", "client_kwargs.endpoint_url", "client_kwargs.region_name"} | {
    "endpoint_url",
    "key",
    "secret",
    "token",
}
"""With any other option of s3fs, such as encryption, obstore is not used."""
TIMEOUTS = {"connect_timeout": "10s", "timeout": "5min"}
REFRESH = timedelta(minutes=6)
"""Time after which obstore asks for temporary credentials again, as botocore renews them ten minutes ahead."""


class QuickFiles:
    def __init__(self, files: Any, store: Any) -> None:
        self._files = files
        self._store = store

    def open(self, path: str, mode: str) -> Any:
        """Open a new object for writing, which appears at the end of the context, never after an error.

        The memory that `write` receives must not change until it is sent.
        """
        import obstore

        assert mode == "wb"  # noqa: S101 - nobody asks for another
        return obstore.open_writer(self._store, self._key(path), buffer_size=BLOCK, max_concurrency=NUM_BLOCKS)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        import obstore

        return bytes(obstore.get_range(self._store, self._key(path), start=start, end=end))

    def _key(self, path: str) -> str:
        key: str = self._files.split_path(path)[1]
        return key


def quick_files(files: Any, path: str) -> QuickFiles | None:
    """Return fast access to a bucket, after whose errors the caller retries with s3fs (`files`).

    None if `files` is not s3fs or has options outside `KNOWN_OPTIONS`, or if obstore is not installed.
    """
    module = sys.modules.get("s3fs")
    if module is None or type(files) is not module.S3FileSystem or find_spec("obstore") is None:
        return None
    return _opened(files, files.split_path(path)[0]) if _names(files.storage_options) <= KNOWN_OPTIONS else None


@functools.cache
def _opened(files: Any, bucket: str) -> QuickFiles:
    from fsspec.asyn import sync

    files.connect()
    client = sync(files.loop, files.get_s3, bucket)  # finds the bucket's region
    credentials = None if files.anon else functools.partial(_credentials, files)
    return QuickFiles(files, open_store(bucket, client, credentials, TIMEOUTS, num_retries=2))


def open_store(
    bucket: str, client: Any, credentials: Callable[[], Any] | None, timeouts: Mapping[str, Any], num_retries: int
) -> Any:
    from obstore.store import S3Store

    global _first_used_in
    _first_used_in = _first_used_in or os.getpid()
    options: Any = {"allow_http": True, **timeouts}
    return S3Store(
        bucket,
        endpoint=client.meta.endpoint_url,
        region=client.meta.region_name,
        virtual_hosted_style_request=False,
        skip_signature=credentials is None,
        credential_provider=credentials,
        client_options=options,
        retry_config={"max_retries": num_retries},
    )


def was_used_before_fork() -> bool:
    """Return True if obstore would hang here: its threads do not survive a fork."""
    return _first_used_in not in (None, os.getpid())


_first_used_in: int | None = None
"""Process in which the first store was opened. Forked processes inherit the value."""


def _credentials(files: Any) -> Any:
    from fsspec.asyn import sync

    if files.key:
        return {"access_key_id": files.key, "secret_access_key": files.secret, "token": files.token, "expires_at": None}
    return for_obstore(sync(files.loop, _found_credentials, files.session))


def for_obstore(found: Any) -> dict[str, Any]:
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + REFRESH if found.token else None,
    }


async def _found_credentials(session: Any) -> Any:
    return await (await session.get_credentials()).get_frozen_credentials()


def _names(options: dict[str, Any]) -> set[str]:
    return {
        name
        for key, value in options.items()
        for name in ([f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key])
    }
