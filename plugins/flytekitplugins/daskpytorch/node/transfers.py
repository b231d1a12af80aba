"""Transfers of checkpoints and of a call's large arguments between an agent and its driver, in threads of the agent."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path

from flytekitplugins.daskpytorch.protocol import messages
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointFile, digest_of, link_file, take_file
from flytekitplugins.daskpytorch.protocol.framing import Connection, introduce, watch_peer
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.protocol.payload import Address, SharedMemory
from flytekitplugins.daskpytorch.protocol.placement import title_of

NUM_FILES_KEPT = 3
"""Newest whole checkpoints that stay on a node, so that a restart needs no download."""
DIAL_TIMEOUT = 30.0
DIAL_WAITS = (0.1, 0.3, 1.0, 2.0, 4.0)
"""Seconds before each retry to connect."""


class Transfers:
    def __init__(self, order: AgentOrder, scratch: Path, say: Callable[[messages.FromAgent], None]) -> None:
        self._order = order
        self._scratch = scratch
        self._say = say
        self._used: dict[str, float] = {}
        """File name -> time at which ranks last asked for it. The driver may share the file, whose own times stay
        unchanged."""
        self._large: SharedMemory | None = None
        """Copy of the newest call's large arguments, for all attempts, except on the driver's machine."""
        self._large_name = ""
        self._large_lock = threading.Lock()
        self._outcomes, self._outcome_from_thread = Pipe(duplex=False)
        self._outcome_lock = threading.Lock()

    def close(self) -> None:
        """Ignore transfers in progress, and free the large arguments."""
        self._outcomes.close()
        self._outcome_from_thread.close()
        if self._large is not None:
            self._large.close()

    def fileno(self) -> int:
        """Readable when a download has succeeded or failed."""
        return self._outcomes.fileno()

    def next_outcome(self) -> messages.Bring:
        outcome: messages.Bring = self._outcomes.recv()
        return outcome

    def bring(self, order: messages.Bring) -> None:
        """Download in a thread. `next_outcome` returns the outcome."""
        self._in_background(self._bring, order)

    def send(self, file: CheckpointFile) -> None:
        self._in_background(self._send, file)

    def _find_large(self, original: Address) -> Address:
        """The first call downloads the arguments."""
        with self._large_lock:  # the previous attempt may still be downloading them
            if original.is_here:
                return original
            if self._large is None or self._large_name != original.name:
                with contextlib.closing(dial(self._order, ConnectionError)) as connection:
                    connection.send(messages.Download(None))
                    self._large, self._large_name = SharedMemory.received(connection, original), original.name
            return self._large.address

    def _bring(self, order: messages.Bring) -> None:
        answer = order.answer
        try:
            match answer.value:
                case CheckpointFile():
                    self._find(answer.value)
                case Address():
                    answer = replace(answer, value=self._find_large(answer.value))
        except BaseException as error:  # the ranks wait for an answer
            answer = replace(answer, value=None, failure=f"{type(error).__name__}: {error}")
        with self._outcome_lock, contextlib.suppress(OSError):  # the gang has ended
            self._outcome_from_thread.send(replace(order, answer=answer))

    def _find(self, file: CheckpointFile) -> None:
        path = self._scratch / file.name
        self._used[path.name] = time.time()  # keeps the file from deletion as one of the oldest
        if path.exists() and digest_of(path) == file.digest:
            return
        if self._order.folder is None or not link_file(self._order.folder / file.name, self._scratch):
            with contextlib.closing(dial(self._order, ConnectionError)) as connection:
                connection.send(messages.Download(file))
                take_file(connection, file, self._scratch)

    def _send(self, file: CheckpointFile) -> None:
        """Link a checkpoint into the driver's folder, else upload it. The driver requests one checkpoint at a time."""
        path = self._scratch / file.name
        with contextlib.suppress(OSError):  # the driver has ended
            if self._order.folder is not None and link_file(path, self._order.folder):
                self._say(messages.Sent(file))
            else:
                self._upload(file, path)
        self._drop_older_than(path)

    def _upload(self, file: CheckpointFile, path: Path) -> None:
        try:
            with contextlib.closing(dial(self._order, ConnectionError)) as connection:
                connection.send(messages.Upload(file))
                connection.send_file(path)
        except (OSError, EOFError) as error:
            self._say(messages.Sent(file, f"{type(error).__name__}: {error}"))

    def _drop_older_than(self, newest: Path) -> None:
        """Keep the last three checkpoints up to `newest`, and later ones, which the driver may request next."""
        with contextlib.suppress(FileNotFoundError):  # another thread has deleted one of the files
            kept = sorted(self._scratch.glob("step-*.pt"), key=self._last_used)
            for old in kept[: max(0, kept.index(newest) + 1 - NUM_FILES_KEPT)] if newest in kept else ():
                old.unlink(missing_ok=True)

    def _last_used(self, path: Path) -> float:
        return max(path.stat().st_mtime, self._used.get(path.name, 0.0))

    @staticmethod
    def _in_background(work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, name="daskpytorch-transfer", daemon=True).start()


def dial(order: AgentOrder, retried: type[ConnectionError] = ConnectionAbortedError) -> Connection:
    """Connect to the driver. By default, only a driver that has hung up is tried again.

    Raises ConnectionError if the driver cannot be reached, or is another gang's.
    """
    for wait_for in DIAL_WAITS:
        with contextlib.suppress(retried):
            return _dial_once(order)
        time.sleep(wait_for)
    return _dial_once(order)


def _this_worker(order: AgentOrder) -> str:
    return f"the worker {title_of(order.worker, socket.gethostname())}"


def _dial_once(order: AgentOrder) -> Connection:
    host, port = order.driver
    try:
        sock = socket.create_connection((host, port), timeout=DIAL_TIMEOUT)
    except OSError as error:
        raise ConnectionError(
            f"{_this_worker(order)} cannot reach the driver at {host}:{port} ({error}). Workers must be able to "
            "open connections to the machine that runs the task: check network policies and firewalls."
        ) from error
    sock.settimeout(None)
    watch_peer(sock)
    try:
        return introduce(sock, order.token)
    except ConnectionAbortedError as error:
        raise ConnectionAbortedError(
            f"{_this_worker(order)} called {host}:{port}, and the driver of its gang is not there, or has too many "
            f"other callers ({error}). The driver may have ended, another program may use its port, or a proxy between "
            "them may hang up. See the driver's log for other callers, and check that the worker reaches this address "
            "directly."
        ) from error
    except ConnectionRefusedError as error:
        raise ConnectionError(
            f"{_this_worker(order)} called {host}:{port}, and the driver of its gang is not there ({error}). "
            "The driver may have ended, and another program may use its port: check the driver, and start the run again"
        ) from error
