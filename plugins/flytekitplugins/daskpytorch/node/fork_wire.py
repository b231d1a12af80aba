"""What a fork server and those who ask it for ranks share."""

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence

__all__ = ["BOOTSTRAP", "END", "MAX_PACKET", "SPAWN"]


MAX_PACKET = 4096
END = b"end"
SPAWN = b"spawn"
# Other plugins' .pth files make the namespace package `flytekitplugins` at the interpreter's start, out of the folders
# known by then; without the pop, an editable installation of this one may not be among them.
BOOTSTRAP = (
    # Without garbage collections the imports take a sixth less time; what is called turns them on again.
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv.pop()); "
    # flytekitplugins-dask fixes where this namespace is looked for before sys.path is set.
    "sys.modules.pop('flytekitplugins', None); from flytekitplugins.daskpytorch.node.fork_server import {0}; {0}()"
)


def _is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is; an abstract name has no permissions, as a file would."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.getuid())


def _python(main: str, arguments: Sequence[int | str], path: list[str]) -> list[str]:
    """The command of a fresh interpreter that calls one of the main functions of `fork_server`."""
    return [sys.executable, "-P", "-c", BOOTSTRAP.format(main), *map(str, arguments), json.dumps(path)]
