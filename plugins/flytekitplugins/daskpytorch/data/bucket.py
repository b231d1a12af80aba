"""Access to an S3 bucket, and a client that lists and reads its objects. Each process makes its own client.

botocore lists objects. obstore reads them: its Rust client takes a third of botocore's time per object. Threads of
obstore do not survive a fork, so a forked process would hang in obstore, and reads by botocore instead.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from flytekitplugins.daskpytorch.checks import CONTROL_CHARACTERS
from flytekitplugins.daskpytorch.process.worker import with_retries

logger = logging.getLogger(__name__)

STORAGE_OPTIONS = ("key", "secret", "token", "profile", "anon", "endpoint_url", "region_name")
"""As in s3fs."""
CREDENTIALS = (
    "Check the credentials: environment variables, profile, or the pod's role. anon=True reads a public bucket"
)
REFRESH = timedelta(minutes=6)
"""Time after which obstore asks for temporary credentials again, as botocore renews them ten minutes ahead."""
FIRST_BACKOFF = 0.1
LONGEST_BACKOFF = 5.0
SERVER = "Check the address, the network and the server"
REGION = "Name the region: storage_options={'region_name': ...}"
ADVICE: Mapping[str, tuple[type[OSError], str]] = {
    "NoSuchKey": (FileNotFoundError, "does not exist: the object was deleted after the listing. List the bucket again"),
    "NoSuchBucket": (FileNotFoundError, "does not exist: there is no such bucket. Check its name and the endpoint"),
    **dict.fromkeys(
        ("AccessDenied", "ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
        (PermissionError, f"may not be read. {CREDENTIALS}"),
    ),
    "RequestTimeTooSkewed": (PermissionError, "may not be read: this machine's clock is wrong. Set the clock"),
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed"), (PermissionError, f"is in another region. {REGION}")
    ),
}
"""By S3's error code, which the message has, too. Reads that fail with other codes are retried."""
INHERITED = (
    "this process reads with botocore, at about half the speed: it was forked from a process that had used obstore, "
    "which does not work after a fork. Give the DataLoader multiprocessing_context='forkserver', or read nothing "
    "before the DataLoader starts its workers"
)
HTTP_CODES = {"403": "AccessDenied", "404": "NoSuchKey", "301": "PermanentRedirect"}


class DamagedTransferError(OSError):
    """An object's length differs from the bucket's listing, even after all retries.

    Examples:
        Leave out damaged pictures, and pictures that cannot be decoded:

        >>> from flytekitplugins.daskpytorch import data
        >>> dogs = data.S3ImageFolder("s3://pictures/with-a-broken-one", on_error="skip")
        >>> len(dogs), len(dogs.__getitems__(range(len(dogs))))
        (9, 8)
    """


class ChangedError(DamagedTransferError):
    """An object has been overwritten in the bucket since it was listed.

    Examples:
        List the folder again to get the new object:

        >>> from flytekitplugins.daskpytorch import data
        >>> def read(dogs: data.S3ImageFolder, index: int) -> tuple[object, int]:
        ...     try:
        ...         return dogs[index]
        ...     except data.ChangedError:
        ...         return data.S3ImageFolder("s3://pictures/dogs")[index]
        >>> picture, label = read(data.S3ImageFolder("s3://pictures/dogs"), 3)
        >>> label
        0
    """


FINAL = (FileNotFoundError, PermissionError, ChangedError)
"""A retry cannot succeed after these."""


class Listed(NamedTuple):
    key: str
    size: int
    etag: str


class Bucket:
    """Client that lists and reads one S3 bucket. Threads of one process may share the client."""

    def __init__(self, name: str, access: Access) -> None:
        self.name = name
        self.access = access
        self._session = access.session()
        self._client = access.client(self._session)
        self._lock = threading.Lock()

    def listing(self, prefix: str) -> Iterator[Listed]:
        """Yield all objects whose keys begin with a prefix, in the order of their keys.

        Raises `FileNotFoundError` without such a bucket, `PermissionError`, and other `OSError`s of the server.
        """
        uri = f"s3://{self.name}/{prefix}"
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        try:
            for page in pages:
                for item in page.get("Contents", ()):
                    yield Listed(item["Key"], item["Size"], item.get("ETag", "").strip('"'))
        except Exception as error:
            raise _from_botocore(error, uri) from error

    def read(self, listed: Listed) -> bytes:
        """Read an object with retries, and return its bytes, whose length and ETag match the listing.

        Raises `FileNotFoundError`, `PermissionError`, `ChangedError` if the object was overwritten since the listing,
        `DamagedTransferError`, `TimeoutError`, and other `OSError`s.
        """
        longest = [min(LONGEST_BACKOFF, FIRST_BACKOFF * 2**retry) for retry in range(self.access.num_retries)]
        waits = [random.uniform(0.5, 1) * seconds for seconds in longest]
        try:
            return with_retries(lambda: self._get(listed), waits, final=FINAL)
        except FINAL:
            raise
        except OSError as error:
            tried = f"Tried {len(waits) + 1} times with timeout={self.access.timeout:g} s"
            raise type(error)(f"{error}. {tried}") from error

    def _get(self, listed: Listed) -> bytes:
        import obstore

        uri, key = f"s3://{self.name}/{listed.key}", listed.key
        store = self._store_for(key)
        try:
            if store is None:
                answer = self._client.get_object(Bucket=self.name, Key=key)
                body, etag = bytes(answer["Body"].read()), answer.get("ETag", "")
            else:
                found = obstore.get(store, key)
                body, etag = bytes(found.bytes()), found.meta["e_tag"] or ""
        except Exception as error:
            if store is None:
                raise _from_botocore(error, uri) from error
            raise _from_obstore(error, uri) from None  # the cause adds nothing
        _verify(uri, listed, body, etag.strip('"'))
        return body

    def _store_for(self, key: str) -> Any:
        is_path = not any(part in ("", ".", "..") for part in key.split("/"))
        if not is_path or CONTROL_CHARACTERS.search(key) is not None:  # obstore changes or refuses the key
            return None
        with self._lock:
            return self._store

    @functools.cached_property
    def _store(self) -> Any:
        """Obstore's store. None where obstore would hang."""
        from obstore.store import S3Store

        global _first_used_in
        if _first_used_in not in (None, os.getpid()):
            logger.warning(INHERITED)
            return None
        _first_used_in = os.getpid()
        silence = timedelta(seconds=self.access.timeout)
        options: Any = {"allow_http": True, "connect_timeout": silence, "read_timeout": silence}
        return S3Store(
            self.name,
            endpoint=self._client.meta.endpoint_url,
            region=self._client.meta.region_name,
            virtual_hosted_style_request=False,
            skip_signature=self.access.anon,
            credential_provider=None if self.access.anon else credentials(self._session),
            client_options=options | {"timeout": 10 * silence},  # for a whole picture
            retry_config={"max_retries": 0},  # `read` retries
        )


def _verify(uri: str, listed: Listed, body: bytes, etag: str) -> None:
    if etag != listed.etag and etag and listed.etag:
        raise ChangedError(
            f"{uri} has been overwritten since it was listed: it had {listed.size} bytes and the ETag "
            f"{listed.etag}, now {etag}. List the bucket again"
        )
    if len(body) != listed.size:
        raise DamagedTransferError(f"{uri} arrived with {len(body)} bytes instead of {listed.size}. {SERVER}")


def _from_obstore(error: Exception, uri: str) -> OSError:
    text = str(error)
    if code := re.search(r"<Code>(\w+)</Code>", text):
        message = re.search(r"<Message>(.*?)</Message>", text)
        return _explained(uri, code.group(1), f"{code.group(1)}: {message.group(1) if message else ''}")
    status = re.search(r"status code: (\d{3})", text)
    if status is None and ("kind: Timeout" in text or "TimedOut" in text):
        return TimeoutError(f"{uri} was not answered in time. {SERVER}")
    return _explained(uri, status.group(1) if status else "", text.partition("\n")[0])


def _from_botocore(error: Exception, uri: str) -> OSError:
    from botocore import exceptions as of_botocore

    if isinstance(error, of_botocore.ClientError):
        return _explained(uri, str(error.response.get("Error", {}).get("Code", "")), str(error))
    if isinstance(error, (of_botocore.NoCredentialsError, of_botocore.PartialCredentialsError)):
        return PermissionError(f"{uri} may not be read: {error}. {CREDENTIALS}")
    if isinstance(error, (of_botocore.ConnectTimeoutError, of_botocore.ReadTimeoutError)):
        return TimeoutError(f"{uri} was not answered in time: {error}. {SERVER}")
    return ConnectionError(f"{uri} could not be read: {type(error).__name__}: {error}. {SERVER}")


def _explained(uri: str, code: str, text: str) -> OSError:
    kind, advice = ADVICE.get(HTTP_CODES.get(code, code), (None, ""))
    if kind is None:
        return ConnectionError(f"{uri} could not be read: {text}. {SERVER}")
    return kind(f"{uri} {advice} ({text})")


# ---- The user's options


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials, server address and timeouts for a bucket. Can be pickled, unlike clients of the bucket."""

    anon: bool = False
    key: str | None = field(default=None, repr=False)
    """None: AWS's provider chain finds the key, such as in the environment or a profile."""
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    """Name in `~/.aws/config`. None: the profile that `AWS_PROFILE` names, else the default one."""
    endpoint_url: str | None = None
    """None: from the environment or the profile, else AWS."""
    region_name: str | None = None
    """None: from the environment or the profile, else us-east-1."""
    num_connections: int = 32
    timeout: float = 30.0
    num_retries: int = 5

    def session(self) -> Any:
        import botocore.session

        session = botocore.session.Session(profile=self.profile)
        # The parsing of timestamps takes two thirds of a long listing's time. Botocore's credentials take texts, too.
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
        if self.key is not None:
            session.set_credentials(self.key, self.secret, self.token)
        if not self.anon:
            session.get_credentials()
        return session

    def client(self, session: Any) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(
            connect_timeout=self.timeout,
            read_timeout=self.timeout,
            max_pool_connections=self.num_connections,
            retries={"total_max_attempts": 1 + self.num_retries, "mode": "standard"},
            signature_version=UNSIGNED if self.anon else None,
        )
        region = self.region_name or session.get_config_variable("region") or "us-east-1"
        return session.create_client("s3", endpoint_url=self.endpoint_url, region_name=region, config=config)


_first_used_in: int | None = None
"""Process in which the first store was opened. Forked processes inherit the value."""


def credentials(session: Any) -> Callable[[], Any]:
    source = session.get_credentials()
    if source is None:
        raise PermissionError(f"there are no AWS credentials to sign requests with. {CREDENTIALS}")

    def current() -> Any:
        found = source.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + REFRESH if found.token else None,
        }

    return current


def split_uri(s3_bucket: str, s3_prefix: str) -> tuple[str, str]:
    """Return bucket and prefix. Raises `ValueError` if the bucket's name is malformed, or the prefix is given twice."""
    scheme, _, rest = s3_bucket.rpartition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in ("", "s3", "s3a") or not bucket or (not scheme and "/" in rest):
        raise ValueError(f"s3_bucket={s3_bucket!r}: must be a bucket's name or s3://bucket/prefix")
    if prefix.strip("/") and s3_prefix.strip("/"):
        raise ValueError(f"s3_bucket={s3_bucket!r} and s3_prefix={s3_prefix!r}: name the prefix once")
    return bucket, (prefix or s3_prefix).strip("/")


def access_options(options: Mapping[str, Any], *, anon: bool) -> dict[str, Any]:
    if unknown := options.keys() - set(STORAGE_OPTIONS):
        names = ", ".join(sorted(unknown))
        raise ValueError(f"storage_options has {names}, which is unknown. Known are {', '.join(STORAGE_OPTIONS)}")
    if (options.get("key") is None) != (options.get("secret") is None):
        has, lacks = ("secret", "key") if options.get("key") is None else ("key", "secret")
        raise ValueError(
            f"storage_options has {has}, but no {lacks}: give both, or neither to use the environment's credentials"
        )
    return {**options, "anon": anon or bool(options.get("anon"))}
