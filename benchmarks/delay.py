"""Proxy that simulates a distant server. Each answer of a near server is delayed by a round trip of 20 ms.

    python benchmarks/delay.py PORT SECONDS             # prints the port that it listens at

A new connection takes an additional round trip, as with TCP's handshake.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from running import Program

DELAY = 0.02
"""Round trip to the distant server, in seconds."""
CHUNK = 1 << 18
"""Number of bytes of a read, at most."""


def distant(endpoint: str, folder: Path) -> str:
    """Start a proxy to a server in its own process, and return the proxy's URL."""
    proxy = Program([sys.executable, __file__, str(urlsplit(endpoint).port), str(DELAY)], folder / "proxy")
    return f"http://127.0.0.1:{proxy.hear('ready')}"


async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float) -> None:
    """Pass on the bytes of a connection, each read after the delay, then the connection's end."""
    loop, under_way = asyncio.get_running_loop(), deque[bytes]()
    with suppress(ConnectionError):  # one side has reset the connection, which closes the other
        while data := await source.read(CHUNK):
            under_way.append(data)
            loop.call_later(delay, lambda: target.write(under_way.popleft()))
    loop.call_later(delay, target.close)


async def serve(port: int, delay: float) -> None:
    """Run the proxy to that port, without end."""

    async def connect(client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay)
        server, orders = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(client, orders, 0.0), pass_on(server, answers, delay))

    server = await asyncio.start_server(connect, "127.0.0.1", 0, backlog=1024)
    print("@ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
