"""Keeps what `torch.compile` has built in `Gang(compile_cache=...)`. Runs in ranks.

All ranks of a node compile into one folder of their agent: torch names its files by their content, and locks them
between processes. Ranks fetch the storage's files before the function. The node's first rank stores new ones meanwhile
and at its end.
"""

import hashlib
import importlib.metadata
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath

from flytekitplugins.daskpytorch.process.folders import locked, replacing
from flytekitplugins.daskpytorch.process.worker import in_thread
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import current_execution
from flytekitplugins.daskpytorch.protocol.job import RankOrder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
FETCH_LIMIT = 60.0
"""Seconds after which a rank goes on without the rest of the files."""
END_LIMIT = 20.0
"""Seconds after which a rank ends without the rest of its files in storage."""
FIRST_STORE, STORE_INTERVAL = 60.0, 600.0
QUIET = 10.0
"""Seconds after a file's last change in which a compiler may still write."""
MAX_SIZE = 100 << 20
NUM_REQUESTS = 16
THREAD = "daskpytorch-compiled"


class CompileCache:
    """Does nothing without `Gang(compile_cache=...)`."""

    def __init__(self, order: RankOrder, note: Callable[[str], object]) -> None:
        self._uri = order.job.settings.compile_cache
        self._note = note
        self._scratch = Path(order.scratch)
        self._folder = self._scratch / "compiled"
        self._stores = order.place.local_rank == 0
        self._kept: set[str] = set()
        self._damaged: set[str] = set()
        """Written again once they are built again."""
        self._ended = threading.Event()

    def open(self) -> None:
        if self._uri is None:
            return
        os.environ[VARIABLE] = str(self._folder)
        self._kind = _kind()  # the function may initialise CUDA later
        if not self._has_done(self._fetch, FETCH_LIMIT):
            self._note(
                f"compile_cache={self._uri!r} has not answered in {FETCH_LIMIT:g} s: the rank compiles by itself"
            )
        elif self._stores:
            in_thread(self._keep_storing, THREAD)

    def close(self) -> None:
        self._ended.set()
        if self._uri is not None and self._stores and not self._has_done(self._store, END_LIMIT):
            self._note(f"compile_cache={self._uri!r} has not taken all files in {END_LIMIT:g} s: the rank ends")

    def _has_done(self, do: Callable[[], None], limit: float) -> bool:
        return not wait([in_thread(lambda: self._try(do), THREAD)], limit).not_done

    def _try(self, do: Callable[..., None], *args: float) -> None:
        try:
            do(*args)
        except Exception as error:  # storage may raise any exception
            self._note(f"compile_cache={self._uri!r} is left out: {type(error).__name__}: {error}")

    def _place(self) -> tuple[Files, str]:
        files = Files(current_execution().filesystem(str(self._uri)))
        return files, f"{files.path(str(self._uri))}/{self._kind}"

    def _fetch(self) -> None:
        with locked(self._scratch / "compiled.lock") as lock:
            if os.fstat(lock).st_size:  # another rank of the node has fetched them
                return
            began, (files, place) = time.monotonic(), self._place()
            files.refuse_foreign(place)  # torch unpickles some of the files, and runs others
            self._kept = set(files.below(place))
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                self._damaged = {*filter(None, pool.map(lambda name: self._fetch_one(files, place, name), self._kept))}
            os.write(lock, b"1")
        self._kept -= self._damaged
        if self._damaged:
            self._note(
                f"{len(self._damaged)} compiled files are damaged, and left out: {place}/{min(self._damaged)}, ..."
            )
        taken = time.monotonic() - began
        if self._kept:
            self._note(f"fetched {len(self._kept)} compiled files from {place} in {taken:.1f} s")

    def _fetch_one(self, files: Files, place: str, name: str) -> str | None:
        digest, _, flat = name.partition("+")
        path = PurePosixPath(*flat.split("+"))
        data = files.read(f"{place}/{name}")
        if _digest(data) != digest or path.is_absolute() or ".." in path.parts:
            return name
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, target.with_name(f"{target.name}.{os.getpid()}.tmp")) as unfinished:
            unfinished.write_bytes(data)
            unfinished.chmod(0o700)  # a library must be executable on some systems
        return None

    def _keep_storing(self) -> None:
        wait = FIRST_STORE
        while not self._ended.wait(wait):
            self._try(self._store, time.time() - QUIET)
            wait = STORE_INTERVAL

    def _store(self, until: float = float("inf")) -> None:
        built = {_name_of(path, self._folder): path for path in _built(self._folder, until)}
        if not built.keys() - self._kept:
            return
        files, place = self._place()
        if files.is_local:
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
        files.refuse_foreign(place)
        new = built.keys() - self._kept - (set(files.below(place)) - self._damaged)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            list(pool.map(lambda name: files.write(f"{place}/{name}", built[name].read_bytes()), new))
        self._kept |= built.keys()


def _kind() -> str:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    cpu = _digest(flags.encode())[:8]  # its instruction set, as torch compiles for the machine at hand
    gpu = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    triton = next((each.version for each in importlib.metadata.distributions(name="triton")), "none")
    version = f"torch-{torch.__version__}-triton-{triton}-{sys.implementation.cache_tag}"
    return f"{version}-{platform.machine()}-{cpu}-{gpu}".replace("+", "-").replace("/", "-")


def _built(folder: Path, until: float) -> Iterable[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in (".lock", ".tmp") and "+" not in str(path.relative_to(folder)):
            found = path.stat()
            if found.st_mtime <= until and found.st_size <= MAX_SIZE:
                yield path


def _name_of(path: Path, folder: Path) -> str:
    return f"{_digest(path.read_bytes())}+{'+'.join(path.relative_to(folder).parts)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
