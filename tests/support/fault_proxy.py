"""An HTTP proxy before an S3 server that answers some requests wrongly. It runs in a thread of the tests' process."""

import asyncio
import itertools
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
CHUNKED = re.compile(rb"(?i)transfer-encoding: *chunked")
EXPECT = re.compile(rb"(?im)^expect: *100-continue\r\n")
MAX_HEAD = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client is sent."""

    head: bytes = b""
    body: bytes = b""
    delay: float = 0.0
    """Seconds before the first byte."""
    pause: float = 0.0
    """Seconds in the middle of the body."""
    end: str = "keep"
    """What becomes of the connection: keep, close or reset."""


Fault = Callable[[Answer], Answer]
"""Makes another answer of the server's."""


def _error(status: str, code: str, message: str) -> Fault:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'

    def answer(_: Answer) -> Answer:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        return Answer(head=head.encode(), body=body.encode())

    return answer


def denied(code: str) -> Fault:
    """Refuse as S3 does, with a code such as ExpiredToken or AccessDenied."""
    return _error("403 Forbidden", code, f"{code}, says the proxy.")


def late(seconds: float, then: Fault = lambda right: right) -> Fault:
    """Say nothing for so long, then answer; rightly, unless that is a fault, too."""
    return lambda right: replace(then(right), delay=seconds)


def in_turns(*faults: Fault) -> Fault:
    """Each time the next one."""
    turns = itertools.cycle(faults)

    def answer(right: Answer) -> Answer:
        return next(turns)(right)

    return answer


def stalled_body(seconds: float) -> Fault:
    """Pause for so long in the middle of the body."""
    return lambda right: Answer(head=right.head, body=right.body, pause=seconds)


def _half(right: Answer) -> bytes:
    return right.body[: len(right.body) // 2]


def _with_length(head: bytes, length: int) -> bytes:
    return LENGTH.sub(b"Content-Length: %d" % length, head)


UNAVAILABLE = _error("503 Service Unavailable", "SlowDown", "Please reduce your request rate.")
RESET: Fault = lambda _: Answer(end="reset")  # noqa: E731
"""Reset the connection instead of an answer."""
RESET_IN_BODY: Fault = lambda right: Answer(head=right.head, body=_half(right), end="reset")  # noqa: E731
SHORTENED: Fault = lambda right: Answer(  # noqa: E731
    head=_with_length(right.head, len(right.body) // 2), body=_half(right)
)
"""Announce and send half of the object, as if that were all."""
GARBAGE: Fault = lambda _: Answer(head=b"\x00\xffno HTTP\r\n\r\n", end="close")  # noqa: E731


@dataclass
class _Rule:
    key: str
    fault: Fault
    left: float
    methods: tuple[str, ...]
    passes_on: bool


class FaultProxy:
    """A proxy for as long as the `with` block runs."""

    def __init__(self, endpoint: str) -> None:
        upstream = urlsplit(endpoint)
        self._upstream = (upstream.hostname or "", upstream.port or 80)
        self._rules: list[_Rule] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self.requests: Counter[str] = Counter()
        """How often each path (`/bucket/key`) has been asked for."""
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._in_loop(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MAX_HEAD))
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fail(
        self,
        fault: Fault,
        key: str = "",
        times: float = float("inf"),
        methods: tuple[str, ...] = (),
        *,
        passes_on: bool = True,
    ) -> None:
        """Answer the next so many requests for keys that contain `key` wrongly; the first rule that fits counts.

        Args:
            fault: How.
            key: Part of the keys.
            times: How many.
            methods: Only requests by these; empty: by any.
            passes_on: The server gets the request all the same.
        """
        self._rules.append(_Rule(key=key, fault=fault, left=times, methods=methods, passes_on=passes_on))

    def heal(self) -> None:
        """From now on answer rightly, and count anew."""
        self._rules.clear()
        self.requests.clear()

    def num_requests(self, key: str) -> int:
        """How often keys that contain this have been asked for."""
        return sum(count for path, count in self.requests.items() if key in path)

    # ---- In the loop's thread

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._upstream, limit=MAX_HEAD)
            try:
                while await self._answer(reader, writer, server_reader, server_writer):
                    pass
            finally:
                server_writer.close()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # either side has gone, or the proxy is being stopped
        finally:
            writer.close()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> bool:
        """Pass one request on, its `Host` too, since that is signed; whether there may be another one."""
        head, asks_first = EXPECT.subn(b"", await reader.readuntil(b"\r\n\r\n"))
        if asks_first:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(head, reader)
        method, target, _ = head.split(b" ", 2)
        path = unquote(target.partition(b"?")[0].decode())
        self.requests[path] += 1
        rule = self._rule_for(method.decode(), path)
        right = Answer()
        if rule is None or rule.passes_on:
            server_writer.write(head + body)
            await server_writer.drain()
            right = await _response(server_reader, has_body=method != b"HEAD")
        answer = right if rule is None else rule.fault(right)
        return await _send(writer, replace(answer, body=b"") if method == b"HEAD" else answer)

    def _rule_for(self, method: str, path: str) -> _Rule | None:
        """Which counts, once less from now on."""
        for rule in self._rules:
            if rule.key in path and rule.left > 0 and (not rule.methods or method in rule.methods):
                rule.left -= 1
                return rule
        return None

    def _in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _response(reader: asyncio.StreamReader, *, has_body: bool) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    return Answer(head=head, body=await _body(head, reader) if has_body else b"")


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    """As it came; chunks with their sizes."""
    if CHUNKED.search(head):
        chunks = [b""]
        while chunks[-1] != b"0\r\n\r\n":
            size = await reader.readuntil(b"\r\n")
            chunks.append(size + await reader.readexactly(int(size.split(b";")[0], 16) + 2))
        return b"".join(chunks)
    length = LENGTH.search(head)
    return await reader.readexactly(int(length[1])) if length else b""


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """Whether the connection is still there."""
    await asyncio.sleep(answer.delay)
    middle = len(answer.body) // 2 if answer.pause else len(answer.body)
    writer.write(answer.head + answer.body[:middle])
    await writer.drain()
    if answer.pause:
        await asyncio.sleep(answer.pause)
        writer.write(answer.body[middle:])
        await writer.drain()
    if answer.end == "reset":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    return answer.end == "keep"
