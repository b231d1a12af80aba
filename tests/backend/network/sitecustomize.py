"""The network of a pod, for a Python: an address of its own on the loopback interface, and the cluster's names.

It stands in for a network namespace and for the cluster's DNS.
"""

import contextlib
import os
import socket
from pathlib import Path

ADDRESS = os.environ["POD_IP"]
NAMES = Path(os.environ["POD_NAMES"])
PODS = "127.1."
ANY = {"", "0.0.0.0"}
_bind, _connect, _resolve = socket.socket.bind, socket.socket.connect, socket.getaddrinfo
socket.has_ipv6 = False


def bind(self, address):
    """All addresses of a pod are its one."""
    if self.family == socket.AF_INET and address[0] in ANY:
        address = (ADDRESS, *address[1:])
    return _bind(self, address)


def connect(self, address):
    """What a pod connects comes from its address; by a datagram's socket Dask asks for that, and sends nothing."""
    if self.family == socket.AF_INET and address[0] != "127.0.0.1":
        if self.type & socket.SOCK_DGRAM == socket.SOCK_DGRAM:
            return _bind(self, (ADDRESS, 0))
        if address[0].startswith(PODS):
            with contextlib.suppress(OSError):  # it has an address already
                _bind(self, (ADDRESS, 0))
    return _connect(self, address)


def getaddrinfo(host, *args, **kwargs):
    """The names of services, as far as there is a pod behind them."""
    if isinstance(host, str) and host.endswith(".svc.cluster.local"):
        try:
            host = (NAMES / host).read_text()
        except OSError:
            raise socket.gaierror(socket.EAI_NONAME, f"{host}: no such service") from None
    return _resolve(host, *args, **kwargs)


socket.socket.bind, socket.socket.connect, socket.getaddrinfo = bind, connect, getaddrinfo
