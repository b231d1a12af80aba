"""Obstore's file system for shards in S3, which takes less than half of s3fs's processor time. Runs in a rank.

Server, credentials and all other operations still come from `s3fs.S3FileSystem`.
"""

from __future__ import annotations

import functools
import sys
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

KNOWN_OPTIONS = {"anon", "cache_regions", "client_kwargs.endpoint_url", "client_kwargs.region_name"} | {
    "endpoint_url",
    "key",
    "secret",
    "token",
}
"""Options of `S3FileSystem` of s3fs with which obstore is used. With any other, such as encryption, s3fs is used."""
CLIENT: Any = {"allow_http": True, "connect_timeout": "10s", "timeout": "5min"}
REFRESH = timedelta(minutes=6)
"""Time for which obstore reuses temporary credentials. Botocore renews credentials ten minutes before their expiry."""


def quick_files(files: Any, path: str) -> Any | None:
    """Return obstore's fast file system for an S3 bucket. After its errors, the caller retries with s3fs (`files`).

    A file that is open for writing keeps the objects that `write` receives, so their memory must not change.

    Args:
        files: An fsspec file system.
        path: Path or URL of an object in the bucket.

    Returns:
        None if `files` is not s3fs or has options outside `KNOWN_OPTIONS`, or if obstore is not installed.
    """
    module = sys.modules.get("s3fs")
    if module is None or type(files) is not module.S3FileSystem or find_spec("obstore") is None:
        return None
    return _opened(files, files.split_path(path)[0]) if _names(files.storage_options) <= KNOWN_OPTIONS else None


@functools.cache
def _opened(files: Any, bucket: str) -> Any:
    from fsspec.asyn import sync
    from obstore.fsspec import FsspecStore

    files.connect()
    client = sync(files.loop, files.get_s3, bucket)
    return FsspecStore(
        "s3",
        endpoint=client.meta.endpoint_url,
        region=client.meta.region_name,
        virtual_hosted_style_request=False,
        skip_signature=files.anon,
        credential_provider=None if files.anon else functools.partial(_credentials, files.loop, client),
        client_options=CLIENT,
        retry_config={"max_retries": 2},
    )


def _credentials(loop: Any, client: Any) -> Any:
    """Return the credentials of s3fs's S3 client, in the form that obstore expects."""
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
