"""Lists and reads the objects of one S3 bucket. Runs in every process that loads data, each with a client of its own.

Objects are listed by botocore and read by obstore, whose Rust client costs a third of botocore's time per object. Its
threads do not survive a fork, and a forked process that calls it would hang; such a process reads by botocore instead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

FIRST_BACKOFF = 0.1
"""Seconds before the first retry, at most; twice as long before each further one."""
LONGEST_BACKOFF = 5.0
NOTICE_INTERVAL = 10.0
"""Seconds between two reports on a long listing."""
AWS_HOST = re.compile(r"\.amazonaws\.com(\.cn)?$")
MD5 = re.compile(r"[0-9a-f]{32}")
"""The ETag of an object that was put in one piece, unless it is encrypted by a key of KMS."""
CREDENTIALS = "Check the credentials: environment variables, profile, or the pod's role; anon=True asks without any"
REGION = "Name it: storage_options={'region_name': ...}"
ADVICE: Mapping[str, tuple[type[OSError], str]] = {
    "NoSuchKey": (FileNotFoundError, "does not exist: it was deleted after it had been listed"),
    "NoSuchBucket": (FileNotFoundError, "does not exist: there is no such bucket. Check its name and the endpoint"),
    "AccessDenied": (PermissionError, f"may not be read with these credentials. {CREDENTIALS}"),
    "ExpiredToken": (PermissionError, f"may not be read: the credentials have expired. {CREDENTIALS}"),
    "InvalidToken": (PermissionError, f"may not be read: the session token is not valid. {CREDENTIALS}"),
    "InvalidAccessKeyId": (PermissionError, f"may not be read: the access key is not known there. {CREDENTIALS}"),
    "SignatureDoesNotMatch": (PermissionError, f"may not be read: the secret key is wrong. {CREDENTIALS}"),
    "RequestTimeTooSkewed": (PermissionError, "may not be read: this machine's clock is wrong"),
    "PermanentRedirect": (PermissionError, f"is in another region. {REGION}"),
    "AuthorizationHeaderMalformed": (PermissionError, f"is in another region. {REGION}"),
}
"""S3's error code -> what it is, and what the user can do. All others are worth another try."""
HTTP_CODES = {"403": "AccessDenied", "404": "NoSuchKey", "301": "PermanentRedirect"}
"""For answers without a body."""


class DamagedTransferError(OSError):
    """An object arrived with another length or checksum than it was listed with, again and again.

    Examples:
        Such a picture, like one that cannot be decoded, may be left out:

        >>> from flytekitplugins.daskpytorch import data
        >>> def instead(key: str, error: Exception) -> None:
        ...     print(f"{key}: {'damaged' if isinstance(error, data.DamagedTransferError) else 'broken'}")
        >>> dogs = data.S3ImageFolder("s3://pictures/with-a-broken-one", on_error=instead)
        >>> pictures = dogs.__getitems__(range(len(dogs)))
        with-a-broken-one/beagle/broken.jpg: broken
        >>> len(dogs), len(pictures), dogs.num_broken
        (9, 8, 1)
    """


class ChangedError(DamagedTransferError):
    """An object has been overwritten since it was listed.

    Examples:
        A new listing has it as it is now:

        >>> from flytekitplugins.daskpytorch import data
        >>> def read(uri: str, index: int) -> tuple[object, int]:
        ...     try:
        ...         return data.S3ImageFolder(uri, index="listing.txt")[index]
        ...     except data.ChangedError:
        ...         return data.S3ImageFolder(uri)[index]
        >>> picture, label = read("s3://pictures/dogs", 3)
        >>> label
        0
    """


FINAL = (FileNotFoundError, PermissionError, ChangedError)
"""Errors that another try would not mend."""


class Listed(NamedTuple):
    """An object as its bucket lists it."""

    key: str
    size: int
    """Bytes."""
    etag: str
    """Without quotation marks."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach a bucket. Travels to other processes, unlike the clients that are made from it."""

    anon: bool = False
    key: str | None = field(default=None, repr=False)
    """The access key; None: what AWS's chain of providers finds (environment, profile, role of the pod or machine)."""
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    """Of ~/.aws/config."""
    endpoint_url: str | None = None
    """None: as the environment or the profile says, else AWS."""
    region: str | None = None
    """None: as the environment or the profile says, else us-east-1."""
    num_connections: int = 32
    timeout: float = 30.0
    """Seconds without an answer after which a request has failed."""
    num_retries: int = 5

    def session(self) -> Any:
        """A botocore session with these credentials.

        Raises:
            ValueError: There is no such profile.
        """
        import botocore.session
        from botocore.exceptions import ProfileNotFound

        session = botocore.session.Session(profile=self.profile)
        try:
            session.get_scoped_config()
        except ProfileNotFound as error:
            raise ValueError(f"{error}: add it to ~/.aws/config, or name another (profile, AWS_PROFILE)") from None
        if self.key is not None:
            session.set_credentials(self.key, self.secret, self.token)
        if not self.anon:
            session.get_credentials()
        return session

    def client(self, session: Any) -> Any:
        """A botocore client of this process."""
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(
            connect_timeout=self.timeout,
            read_timeout=self.timeout,
            max_pool_connections=self.num_connections,
            retries={"total_max_attempts": 1 + self.num_retries, "mode": "standard"},
            signature_version=UNSIGNED if self.anon else None,
        )
        with _quick_parsing(session):
            client = self._client(session, config)
            if not is_aws(client.meta.endpoint_url):  # other servers have no host name for each bucket
                client = self._client(session, config.merge(Config(s3={"addressing_style": "path"})))
        return client

    def _client(self, session: Any, config: Any) -> Any:
        region = self.region or session.get_config_variable("region") or "us-east-1"
        return session.create_client("s3", endpoint_url=self.endpoint_url, region_name=region, config=config)


@contextmanager
def _quick_parsing(session: Any) -> Iterator[None]:
    """Make clients that leave times of day as they are: to parse them takes two thirds of a long listing's time."""
    from botocore.parsers import ResponseParserFactory

    name = "response_parser_factory"
    usual, quick = session.get_component(name), ResponseParserFactory()
    quick.set_parser_defaults(timestamp_parser=str)
    session.register_component(name, quick)
    try:
        yield
    finally:  # other clients of this session learn by it when credentials expire
        session.register_component(name, usual)


def is_aws(endpoint_url: str) -> bool:
    """Whether a server is one of AWS's own."""
    return AWS_HOST.search(urlsplit(endpoint_url).hostname or "") is not None


class Bucket:
    """A bucket to list and to read from, by threads of one process."""

    def __init__(self, name: str, access: Access) -> None:
        self.name = name
        self.access = access
        self._plain: _Botocore | None = None
        self._quick: _Obstore | _Botocore | None = None
        self._lock = threading.Lock()
        self._etags_are_checksums: bool | None = None

    def listing(self, prefix: str) -> Iterator[Listed]:
        """All objects whose keys begin with a prefix, in the order of their keys.

        Raises:
            FileNotFoundError: There is no such bucket.
            PermissionError: It may not be listed.
            OSError: The server cannot be reached, or does not answer rightly.
        """
        uri = f"s3://{self.name}/{prefix}"
        started = noticed = time.monotonic()
        num_listed = 0
        pages = self._plainly().client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        try:
            for page in pages:
                for item in page.get("Contents", ()):
                    yield Listed(item["Key"], item["Size"], item.get("ETag", "").strip('"'))
                num_listed += len(page.get("Contents", ()))
                if time.monotonic() > noticed + NOTICE_INTERVAL:
                    noticed = time.monotonic()
                    logger.warning("listing %s: %d objects in %.0f s", uri, num_listed, noticed - started)
        except Exception as error:
            raise _from_botocore(error, uri) from error

    def read(self, listed: Listed) -> bytes:
        """An object, as it was listed.

        Raises:
            FileNotFoundError: It does not exist any more.
            PermissionError: It may not be read, or not any more.
            ChangedError: It has been overwritten.
            DamagedTransferError: What arrives is something else.
            TimeoutError: The server does not answer.
            OSError: It cannot be reached, or answers with errors.
        """
        uri = f"s3://{self.name}/{listed.key}"
        seen: set[bytes] = set()
        for retry in range(self.access.num_retries + 1):
            if retry:
                time.sleep(random.uniform(0.5, 1) * min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (retry - 1)))
            try:
                body, etag = self._reader_of(listed.key).get(listed.key)
                self._verify(uri, listed, body, etag, seen)
            except FINAL:
                raise
            except OSError as error:
                failure = error
            else:
                return body
        num_tries = self.access.num_retries + 1
        raise type(failure)(f"{failure}. Tried {num_tries} times; timeout={self.access.timeout:g} s") from failure

    def _reader_of(self, key: str) -> _Obstore | _Botocore:
        plain = self._plainly()
        if not _is_path(key):
            return plain
        with self._lock:
            self._quick = self._quick or _quick_reader(self.name, self.access, plain)
        return self._quick

    def _plainly(self) -> _Botocore:
        with self._lock:
            self._plain = self._plain or _Botocore(self.name, self.access)
        return self._plain

    def _verify(self, uri: str, listed: Listed, body: bytes, etag: str, seen: set[bytes]) -> None:
        """Compare with the listing what arrived; `seen` are the checksums of the tries before."""
        if etag != listed.etag and etag and listed.etag:
            raise ChangedError(
                f"{uri} has been overwritten since it was listed: it had {listed.size} bytes and the ETag "
                f"{listed.etag}, now {etag}. List it again"
            )
        if len(body) != listed.size:
            raise DamagedTransferError(f"{uri} arrived with {len(body)} bytes, but has {listed.size}")
        if self._etags_are_checksums is False or not MD5.fullmatch(listed.etag):
            return
        checksum = hashlib.md5(body, usedforsecurity=False)
        if checksum.hexdigest() == listed.etag:
            self._etags_are_checksums = True
            return
        if checksum.digest() not in seen or self._is_checksum(listed):
            seen.add(checksum.digest())
            raise DamagedTransferError(
                f"{uri} arrived with the checksum {checksum.hexdigest()}, but was listed with {listed.etag}"
            )
        if self._etags_are_checksums is None:
            self._etags_are_checksums = False
            logger.warning("ETags of s3://%s are no checksums (%s): lengths alone are compared", self.name, uri)

    def _is_checksum(self, listed: Listed) -> bool:
        """Whether an ETag that did not fit the same bytes twice is a checksum: not if a key of KMS encrypts them."""
        try:
            answer = self._plainly().client.head_object(Bucket=self.name, Key=listed.key)
        except Exception as error:
            raise _from_botocore(error, f"s3://{self.name}/{listed.key}") from error
        encryption = answer.get("ServerSideEncryption", "")
        return encryption == "AES256" or (self._etags_are_checksums is True and not encryption.startswith("aws:kms"))


class _Obstore:
    def __init__(self, bucket: str, access: Access, plain: _Botocore) -> None:
        from obstore.store import S3Store

        self._bucket = bucket
        endpoint: str = plain.client.meta.endpoint_url
        in_path = not is_aws(endpoint) or "." in bucket
        silence = timedelta(seconds=access.timeout)
        self._store = S3Store(
            bucket,
            endpoint=endpoint if in_path else None,
            region=plain.client.meta.region_name,
            virtual_hosted_style_request=not in_path,
            skip_signature=access.anon,
            credential_provider=None if access.anon else _credentials(plain.session),
            client_options={
                "allow_http": True,
                "connect_timeout": silence,
                "read_timeout": silence,
                "timeout": 10 * silence,  # of a whole picture
            },
            retry_config={"max_retries": 0},  # `Bucket.read` tries again
        )

    def get(self, key: str) -> tuple[bytes, str]:
        """An object and its ETag; one try. Raises what `Bucket.read` does."""
        import obstore

        try:
            answer = obstore.get(self._store, key)
            return bytes(answer.bytes()), (answer.meta["e_tag"] or "").strip('"')
        except Exception as error:
            raise _from_obstore(error, f"s3://{self._bucket}/{key}") from None  # its text has what is of use


class _Botocore:
    def __init__(self, bucket: str, access: Access) -> None:
        self._bucket = bucket
        self.session = access.session()
        self.client = access.client(self.session)

    def get(self, key: str) -> tuple[bytes, str]:
        try:
            answer = self.client.get_object(Bucket=self._bucket, Key=key)
            return answer["Body"].read(), answer.get("ETag", "").strip('"')
        except Exception as error:
            raise _from_botocore(error, f"s3://{self._bucket}/{key}") from error


def _quick_reader(bucket: str, access: Access, plain: _Botocore) -> _Obstore | _Botocore:
    if _inherited_threads:
        logger.warning(
            "this process was forked from one that had read by obstore already, which cannot be used after that: it "
            "reads by botocore, at about half the speed. Give the DataLoader multiprocessing_context='forkserver', or "
            "read nothing before it starts its workers"
        )
        return plain
    return _Obstore(bucket, access, plain)


def _is_path(key: str) -> bool:
    """Whether obstore can name an object, since it takes keys for paths."""
    return not any(part in ("", ".", "..") for part in key.split("/"))


def _credentials(session: Any) -> Any:
    """What obstore asks for credentials: botocore knows all of AWS's ways to them, and renews them in time."""
    found = session.get_credentials()
    if found is None:
        raise PermissionError(f"there are no AWS credentials to sign requests with. {CREDENTIALS}")

    def current() -> dict[str, Any]:
        from datetime import UTC, datetime

        frozen = found.get_frozen_credentials()
        # Temporary ones are asked for again and again; botocore renews them ten minutes before their end.
        expires_at = datetime.now(UTC) + timedelta(minutes=6) if frozen.token else None
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires_at,
        }

    return current


def _from_obstore(error: Exception, uri: str) -> OSError:
    text = str(error)
    if code := re.search(r"<Code>(\w+)</Code>", text):
        message = re.search(r"<Message>(.*?)</Message>", text)
        return _explained(uri, code.group(1), f"{code.group(1)}: {message.group(1) if message else ''}")
    status = re.search(r"status code: (\d{3})", text)
    if status is None and ("kind: Timeout" in text or "TimedOut" in text):
        return TimeoutError(f"{uri} was not answered in time")
    return _explained(uri, status.group(1) if status else "", text.partition("\n")[0])


def _from_botocore(error: Exception, uri: str) -> OSError:
    from botocore.exceptions import (
        ClientError,
        ConnectTimeoutError,
        NoCredentialsError,
        PartialCredentialsError,
        ReadTimeoutError,
    )

    if isinstance(error, ClientError):
        return _explained(uri, str(error.response.get("Error", {}).get("Code", "")), str(error))
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return PermissionError(f"{uri} may not be read: {error}. {CREDENTIALS}")
    if isinstance(error, (ConnectTimeoutError, ReadTimeoutError)):
        return TimeoutError(f"{uri} was not answered in time: {error}")
    return ConnectionError(f"{uri} could not be read: {type(error).__name__}: {error}")


def _explained(uri: str, code: str, text: str) -> OSError:
    kind, advice = ADVICE.get(HTTP_CODES.get(code, code), (None, ""))
    if kind is None:
        return ConnectionError(f"{uri} could not be read: {text}")
    return kind(f"{uri} {advice} ({text})")


_inherited_threads = False
"""Whether this process, or one that it was forked from, was forked from a process with threads of obstore."""
_had_threads = False


def _look_for_threads() -> None:
    """Before a fork. Obstore may have been used by others than us: its threads tell, which bear this name on Linux."""
    global _had_threads
    _had_threads = False
    if "obstore" in sys.modules:
        for name in Path("/proc/self/task").glob("*/comm"):
            with suppress(OSError):
                _had_threads = _had_threads or name.read_text().startswith("tokio")


def _note_inheritance() -> None:
    global _inherited_threads
    _inherited_threads = _inherited_threads or _had_threads


os.register_at_fork(before=_look_for_threads, after_in_child=_note_inheritance)
