"""Meter of a gang's GPU hours and core hours, and their price. Runs in the driver."""

import math
import os
from collections.abc import Collection, Mapping
from typing import Any

from flytekitplugins.daskpytorch.protocol.placement import Node

VARIABLE = "DASKPYTORCH_PRICE"
CORE = "core"
HOUR = 3600.0


def prices() -> dict[str, float]:
    """By name in small letters. `ValueError`: malformed."""
    asked, found = os.environ.get(VARIABLE, ""), dict[str, float]()
    for entry in asked.split(",") if asked.strip() else ():
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not name or not 0 <= price < math.inf or name.casefold() in found:
            raise ValueError(
                f"{VARIABLE}={asked!r}: {entry.strip()!r} is no price per hour. Give each GPU's name and '{CORE}' a "
                "number, once: H100=3.2,core=0.05"
            )
        found[name.casefold()] = price
    return found


class Meter:
    def __init__(self) -> None:
        self._prices = prices()
        self._num_gpus = self._num_cores = 0
        self._price = 0.0
        self.hours = {"gpu_hours": 0.0, "core_hours": 0.0, "trained_hours": 0.0}
        self._cost = 0.0 if self._prices else math.nan  # NaN: unknown

    def use(self, nodes: Collection[Node]) -> list[str]:
        """Count these workers from now on. Return the GPUs without a price, if there are prices."""
        cores = {node.host: node.num_cores for node in nodes}  # shared by its workers
        gpus = {node.key_of(gpu): name for node in nodes for gpu, name in zip(node.gpus, node.gpu_names, strict=True)}
        self._num_gpus, self._num_cores = len(gpus), sum(cores.values())
        each = [self._price_of(name) for name in gpus.values()]
        self._price = math.fsum(each) + self._prices.get(CORE, 0.0) * self._num_cores
        unpriced = {name for name, price in zip(gpus.values(), each, strict=True) if math.isnan(price)}
        return sorted(unpriced) if self._prices else []

    def _price_of(self, gpu: str) -> float:
        named = [name for name in self._prices if name != CORE and name in gpu.casefold()]
        return self._prices[max(named, key=len)] if named else math.nan

    def count(self, seconds: float) -> None:
        self.hours["gpu_hours"] += self._num_gpus * seconds / HOUR
        self.hours["core_hours"] += self._num_cores * seconds / HOUR
        self._cost += self._price * seconds / HOUR

    def train(self, stepping: float) -> None:
        self.hours["trained_hours"] += self._trained(stepping)

    def add(self, earlier: Mapping[str, float | None]) -> None:
        cost = math.nan if earlier["cost"] is None else earlier["cost"]
        self.hours = {name: hours + float(earlier[name] or 0.0) for name, hours in self.hours.items()}
        self._cost += cost

    def amounts(self, stepping: float = 0.0) -> dict[str, Any]:
        """`stepping`: seconds that `train` will count."""
        trained = self.hours["trained_hours"] + self._trained(stepping)
        return {**self.hours, "trained_hours": trained, "cost": None if math.isnan(self._cost) else self._cost}

    def _trained(self, stepping: float) -> float:
        return (self._num_gpus or self._num_cores) * stepping / HOUR
