"""Proxy that simulates a distant server. Each answer of a near server is delayed by a round trip.

    python benchmarks/delay.py PORT SECONDS             # prints the port that it listens at

A new connection takes an additional round trip, as with TCP's handshake.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import cast


class _Far(asyncio.Protocol):
    """Connection to the near server. The server's data reaches the client after the delay."""

    def __init__(self, client: asyncio.Transport, delay: float) -> None:
        self._client, self._delay = client, delay
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[bytes] = deque()

    def data_received(self, data: bytes) -> None:
        self._under_way.append(data)
        self._loop.call_later(self._delay, self._arrive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._loop.call_later(self._delay, self._client.close)

    def _arrive(self) -> None:
        self._client.write(self._under_way.popleft())


class _Near(asyncio.Protocol):
    """Connection of a client. The client's data reaches the server at once, except during the first round trip."""

    def __init__(self, port: int, delay: float) -> None:
        self._port, self._delay = port, delay
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] = []
        self._server: asyncio.Transport | None = None
        self._is_gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connecting = self._loop.create_task(self._connect(cast("asyncio.Transport", transport)))

    def data_received(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            self._server.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_gone = True
        if self._server is not None:
            self._server.close()

    async def _connect(self, client: asyncio.Transport) -> None:
        await asyncio.sleep(self._delay)
        server, _ = await self._loop.create_connection(lambda: _Far(client, self._delay), "127.0.0.1", self._port)
        server.writelines(self._early)
        self._server = server
        if self._is_gone:
            server.close()


async def serve(port: int, delay: float) -> None:
    """Run the proxy to that port, without end."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Near(port, delay), "127.0.0.1", 0, backlog=1024)
    print("@ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
