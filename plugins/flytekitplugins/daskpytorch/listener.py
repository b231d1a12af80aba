"""The driver's ear: accepts agents and turns what they say into events."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from flytekitplugins.daskpytorch.handshake import admit
from flytekitplugins.daskpytorch.messages import Download, Reported, Upload, watch_peer
from flytekitplugins.daskpytorch.submission import is_piece

__all__ = ["Event", "Listener"]

Event = tuple[str, Any, Any]
"""What happened, to whom (a connection or a worker), and the message or error."""


FileServer = Callable[[Connection, Upload | Download], None]
"""Sends or receives a checkpoint over a connection."""


class Listener:
    """Accepts agents and turns what they say into events; a gang's files go to the vault, its results to the inbox."""

    def __init__(
        self,
        host: str,
        token: bytes,
        events: queue.SimpleQueue[Event],
        serve_file: FileServer | None = None,
        keep_piece: Callable[[Reported], object] | None = None,
    ) -> None:
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._token = token
        self._events = events
        self._serve_file = serve_file
        self._keep_piece = keep_piece
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        """Host and port to dial."""
        threading.Thread(target=self._accept, name="daskpytorch-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more; connections stay."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # close alone does not wake the thread in accept
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(sock,), name="daskpytorch-peer", daemon=True).start()

    def _listen(self, sock: socket.socket) -> None:
        watch_peer(sock)
        try:
            connection = admit(sock, self._token)
        except ConnectionRefusedError:
            return
        try:
            while True:
                message = connection.recv()
                if isinstance(message, (Upload, Download)) and self._serve_file is not None:
                    self._transfer(connection, message, self._serve_file)
                    return
                if isinstance(message, Reported) and is_piece(message.report) and self._keep_piece is not None:
                    message = self._keep_piece(message)
                self._events.put(("message", connection, message))
        except (EOFError, OSError):
            self._events.put(("gone", connection, None))

    def _transfer(self, connection: Connection, request: Upload | Download, serve: FileServer) -> None:
        error: Exception | None = None
        with contextlib.closing(connection):
            try:
                serve(connection, request)
            except Exception as caught:  # whatever it is, the checkpoint is not here
                error = caught
        if isinstance(request, Upload):
            self._events.put(("kept", request.file, error))
