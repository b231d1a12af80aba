"""Prometheus: figures of running gangs, which a server scrapes or a Pushgateway receives. Runs in the driver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from flytekitplugins.daskpytorch import checks
from flytekitplugins.daskpytorch.display.figures import FIGURES, LABELS, PREFIX, GangFigures, newest
from flytekitplugins.daskpytorch.extras import require_extra
from flytekitplugins.daskpytorch.process.log import say
from flytekitplugins.daskpytorch.protocol.observer import Training

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PUSH_TIMEOUT = 5.0
"""Timeout, in seconds, for the gateway to take the figures."""
END_TIMEOUT = 3.0
"""Timeout, in seconds, for the gateway to take the last figures at the gang's end."""


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """Figures of the gang for Prometheus: `Gang(observers=(Prometheus(port=9400),))`.

    The driver serves the figures at `http://host:port/metrics` while gangs run. All gangs of the driver share the port.
    With `gateway`, the driver pushes the figures to a Pushgateway instead, for trainings that are shorter than the
    scrape interval. The gateway keeps the last figures after the end, until the training's next run.

    All figures have the labels `training`, the name of the task or function, and `model`, the index in a sweep. Of a
    driver's gangs with the same labels, the port serves the newest one. At a gateway, they overwrite each other.

    Raises:
        ImportError: The extra `prometheus` is not installed.
        ValueError: A field has an invalid value, or not exactly one of `port` and `gateway` is given.

    Examples:
        >>> from flytekitplugins.daskpytorch import DaskDDP, Gang, Prometheus
        >>> config = DaskDDP(gang=Gang(observers=(Prometheus(port=9400),)))
    """

    port: int | None = None
    """Port on the driver's machine."""
    host: str = "127.0.0.1"
    """Address that the port listens at. `0.0.0.0` lets other machines read the figures, without a password."""
    gateway: str | None = field(default=None, repr=False)
    """Address of a Pushgateway, such as `gateway.example.com:9091` or `https://user:password@gateway.example.com`."""
    interval: float = 15.0
    """Seconds between two pushes to the gateway."""

    def __post_init__(self) -> None:
        require_extra("prometheus", "Prometheus(...)")
        rules = {
            "port": checks.optional(checks.whole(1, 65535)),
            "host": checks.text("an address of this machine"),
            "interval": checks.SECONDS,
        }
        problems = checks.Problems("Prometheus", self, rules)
        problems.unless((self.port is None) != (self.gateway is None), "port", "given, or else gateway=, and not both")
        problems.raise_any()
        if self.gateway is not None and not _is_gateway(self.gateway):  # the value may have a password
            raise ValueError(
                "Prometheus(gateway=...): must be host:port or a URL. A password in the URL must be encoded, as by "
                "urllib.parse.quote(password, safe='')"
            )

    def __call__(self) -> GangFigures:
        """Return a new observer that exports the figures of one gang."""
        if self.port is not None:
            return _Scraped(self.host, self.port)
        return _Pushed(str(self.gateway), self.interval)


def _parts(gateway: str) -> SplitResult:
    return urlsplit(gateway if urlsplit(gateway).scheme in ("http", "https") else f"http://{gateway}")


def _is_gateway(value: Any) -> bool:
    try:
        if not checks.is_text(value):
            return False
        parts = _parts(value)
        is_cut = parts.query or parts.fragment or "@" in parts.path or "//" in parts.path  # as by a "/" in a password
        return bool(parts.hostname) and parts.port != 0 and not is_cut
    except ValueError:  # such as a port that is no number
        return False


class _Collector:
    """Collects the figures of gangs in Prometheus's form."""

    def __init__(self, gangs: Iterable[GangFigures]) -> None:
        self._gangs = gangs

    def collect(self) -> Iterator[Metric]:
        """Yield a family of samples for each figure."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, figure in FIGURES.items():
            kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
            family = kind(f"{PREFIX}_{name}", figure.help, labels=figure.labels, unit=figure.unit)
            for gang in newest(self._gangs):
                for values, value in gang.samples(name):
                    family.add_metric(values, value)
            if family.samples:
                yield family


def _registry_of(gangs: Iterable[GangFigures]) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector(gangs))
    return registry


# ---- Scraped by a server --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Port:
    """An open port, and the gangs whose figures it serves."""

    gangs: list[GangFigures]
    server: Any
    thread: threading.Thread


_ports: dict[tuple[str, int], _Port] = {}
"""Open ports of this process, by address."""
_lock = threading.Lock()
"""Lock of `_ports`."""
_reported: dict[str, object] = {}
"""Ports and gateways that fail, with a mark of the call that has written a line about it."""


def _report(address: str, text: str) -> None:
    """Write a line about a failure, unless the address has not worked since the last line."""
    mark = object()
    if _reported.setdefault(address, mark) is mark:  # models of a sweep fail at the same time
        say(f"Prometheus: {text}. The training goes on.")


class _Scraped(GangFigures):
    """Figures of a gang that a Prometheus server scrapes."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._host, self._port = self._address = host, port
        self._is_served = False

    def begins(self, training: Training) -> None:
        """Serve the figures, at a port that another gang may have opened."""
        super().begins(training)
        with _lock:
            try:
                port = _ports.get(self._address) or self._opened()
            except (OSError, UnicodeError) as error:  # UnicodeError: the host's name is invalid
                address = f"{self._host}:{self._port}"
                reason = f"{address} cannot be opened ({error}). Another program may have the port: give another one"
                _report(address, reason)
                return
            _ports[self._address] = port
            _reported.pop(f"{self._host}:{self._port}", None)
            port.gangs.append(self)
            self._is_served = True

    def _opened(self) -> _Port:
        from prometheus_client import start_http_server

        gangs: list[GangFigures] = []
        return _Port(gangs, *start_http_server(self._port, addr=self._host, registry=_registry_of(gangs)))

    def places(self) -> Mapping[str, str]:
        """Return the URL of the figures."""
        return {"Prometheus": f"http://{self._host}:{self._port}/metrics"} if self._is_served else {}

    def ended(self, error: Exception | None) -> None:
        """Serve the figures no longer. The last gang closes the port."""
        if not self._is_served:
            return
        with _lock:
            port = _ports[self._address]
            port.gangs.remove(self)
            if port.gangs:
                return
            del _ports[self._address]
            with suppress(OSError):  # on Linux this wakes the server, which looks for its end only every 0.5 s
                port.server.socket.shutdown(socket.SHUT_RDWR)
            port.server.shutdown()
            port.server.server_close()
        port.thread.join()


# ---- Pushed to a gateway --------------------------------------------------------------------------------------------


_silent: set[str] = set()
"""Gateways that have not answered at a gang's end. No gang waits for these at its end until a push succeeds."""


class _Pushed(GangFigures):
    """Figures of a gang that a Pushgateway receives, from a thread of their own."""

    def __init__(self, gateway: str, interval: float) -> None:
        super().__init__()
        self._gateway, self._handler = _without_password(gateway)
        self._interval = interval
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._push_until_end, name="daskpytorch-prometheus", daemon=True)

    def begins(self, training: Training) -> None:
        """Push the figures from now on."""
        super().begins(training)
        self._thread.start()

    def ended(self, error: Exception | None) -> None:
        """Push the last figures, for at most three seconds."""
        super().ended(error)
        self._has_ended.set()
        if self._gateway not in _silent:
            self._thread.join(END_TIMEOUT)
            if self._thread.is_alive():
                _silent.add(self._gateway)
                self._report(f"no answer for {END_TIMEOUT:g} s")

    def _push_until_end(self) -> None:
        registry = _registry_of([self])
        self._push(registry)  # before the first restart, whose count begins at 0
        while not self._has_ended.wait(self._interval):
            self._push(registry)
        self._push(registry)

    def _push(self, registry: CollectorRegistry) -> None:
        from prometheus_client import push_to_gateway

        key = {label: value for label, value in zip(LABELS, self.labels, strict=True) if value}
        try:
            push_to_gateway(self._gateway, PREFIX, registry, key, timeout=PUSH_TIMEOUT, handler=self._handler)
            _silent.discard(self._gateway)
            _reported.pop(self._gateway, None)
        except Exception as error:  # the training goes on, whatever the client raises
            self._report(str(error))

    def _report(self, reason: str) -> None:
        advice = "Later pushes are tried without further lines. Check the address, and that the gateway runs"
        _report(self._gateway, f"the gateway {self._gateway} does not take the figures ({reason}). {advice}")


def _without_password(gateway: str) -> tuple[str, Callable[..., Callable[[], None]]]:
    """Return a gateway's URL without user name and password, and a handler that sends these in a header."""
    from prometheus_client.exposition import basic_auth_handler

    parts = _parts(gateway)
    user = None if parts.username is None else unquote(parts.username)
    handler = partial(basic_auth_handler, username=user, password=unquote(parts.password or ""))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), handler
