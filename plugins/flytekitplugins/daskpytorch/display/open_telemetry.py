"""OpenTelemetry: figures of running gangs as instruments of the process's meter provider. Runs in the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flytekitplugins.daskpytorch.display.figures import FIGURES, PREFIX, GangFigures, newest
from flytekitplugins.daskpytorch.extras import require_extra
from flytekitplugins.daskpytorch.protocol.observer import Training

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation

UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "": ""}
"""Unit's name -> its code for OpenTelemetry (UCUM). Exporters to Prometheus name every gauge of unit "1" a ratio."""


@dataclass(frozen=True, kw_only=True)
class OpenTelemetry:
    """Figures of the gang for OpenTelemetry: `Gang(observers=(OpenTelemetry(),))`.

    The figures are those of `Prometheus`, with names such as `daskpytorch.rank_memory`. The meter provider of the
    driver's process gets the figures. The program sets the provider by `opentelemetry.metrics.set_meter_provider`, or
    starts under `opentelemetry-instrument`. Without a provider, nothing is exported.

    Raises:
        ImportError: The extra `opentelemetry` is not installed.

    Examples:
        >>> from flytekitplugins.daskpytorch import DaskDDP, Gang, OpenTelemetry
        >>> config = DaskDDP(gang=Gang(observers=(OpenTelemetry(),)))
    """

    def __post_init__(self) -> None:
        require_extra("opentelemetry", "OpenTelemetry()")

    def __call__(self) -> GangFigures:
        """Return a new observer that exports the figures of one gang."""
        return _Observed()


_gangs: list[GangFigures] = []
"""Gangs of this process whose figures are exported."""
_lock = threading.Lock()
"""Lock of `_providers`."""
_providers: list[Any] = []
"""Meter providers that have the instruments. Instruments cannot be removed, so gangs share them."""


class _Observed(GangFigures):
    """Figures of a gang that instruments read."""

    def begins(self, training: Training) -> None:
        """Export the figures, by instruments that another gang may have made."""
        from opentelemetry.metrics import get_meter_provider

        super().begins(training)
        with _lock:
            if (provider := get_meter_provider()) not in _providers:
                _providers.append(provider)
                _make_instruments(provider)
        _gangs.append(self)

    def ended(self, error: Exception | None) -> None:
        """Export the figures no longer."""
        _gangs.remove(self)


def _make_instruments(provider: Any) -> None:
    meter = provider.get_meter("flytekitplugins.daskpytorch")
    for name, figure in FIGURES.items():
        make: Callable[..., Any] = (
            meter.create_observable_counter if figure.is_counter else meter.create_observable_gauge
        )
        make(f"{PREFIX}.{name}", [partial(_observe, name)], UNITS[figure.unit], figure.help)


def _observe(name: str, _: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for gang in newest(_gangs):
        for values, value in gang.samples(name):
            yield Observation(value, dict(zip(FIGURES[name].labels, values, strict=True)))
