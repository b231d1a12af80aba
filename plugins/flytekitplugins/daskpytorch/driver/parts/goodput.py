"""Account of a gang's wall time, GPU hours, core hours and cost. Runs in the driver.

The driver names the gang's phase. Rank 0's ledger (`rank.usage`) divides the training phase. When an attempt ends, the
time after its newest checkpoint counts as lost.
"""

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flytekitplugins.daskpytorch.driver.agents import Peer
from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.driver.part import Part, Stage
from flytekitplugins.daskpytorch.driver.state import GangState
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.errors import StoppedEarlyError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.messages import Spent, Tell
from flytekitplugins.daskpytorch.protocol.placement import Node
from flytekitplugins.daskpytorch.records import BILL, Goodput, RankUsage

INTERVAL = 2.0
STORE_INTERVAL = 60.0
FILE = "hours.json"
PARTS = tuple(name for name in Goodput().as_dict() if name != "total")
VARIABLE = "DASKPYTORCH_PRICE"
CORE = "core"
HOUR = 3600.0


# ---- GPU hours, core hours, and their price


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


# ---- Seconds


@dataclass
class _Training:
    span: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    at_saves: dict[int, Mapping[str, float]] = field(default_factory=dict)
    safe: set[int] = field(default_factory=set)
    """Steps of kept checkpoints: the newest one in `at_saves`, and those whose report from rank 0 has yet to come."""

    def keep(self, step: int) -> None:
        self.safe.add(step)
        if step in self.at_saves:
            self.safe = {step}
            while (first := next(iter(self.at_saves))) != step:
                del self.at_saves[first]

    @property
    def kept(self) -> Mapping[str, float] | None:
        return next((spent for step, spent in reversed(self.at_saves.items()) if step in self.safe), None)

    def parts(self, *, is_lost: bool = False) -> dict[str, float]:
        has_begun = self.spent.get("stepping") or self.spent.get("data")
        parts, rest = dict(self.spent), "stepping" if has_begun else "preparing"
        if is_lost and has_begun:
            parts, rest = dict(self.kept or {"preparing": self.spent.get("preparing", 0.0)}), "lost"
        # The time since rank 0's last report, and the report's travel time.
        parts[rest] = parts.get(rest, 0.0) + max(0.0, self.span - math.fsum(parts.values()))
        return parts


class Accounting(Part):
    takes = (RankUsage, Spent)

    def __init__(self, state: GangState, clock: Callable[[], float], vault: Vault) -> None:
        self._state = state
        self._now = clock
        self._since = self._shown_at = state.asked_at
        self._phase: Literal["starting", "training", "waiting"] = "starting"
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._training = _Training()
        self._meter = Meter()
        self._worker = vault.worker
        storage = state.request.storage
        self._storage = storage if storage is not None and not storage.is_claimed and not storage.resume else None
        """None unless the host retries the task."""
        self._store_at = 0.0

    # ---- the account

    def goodput(self, *, is_lost: bool = False) -> Goodput:
        """`is_lost`: the account if the attempt failed now."""
        self._go_on()
        spent = self._training.parts(is_lost=is_lost)
        parts = {name: seconds + spent.get(name, 0.0) for name, seconds in self._parts.items()}
        return Goodput(total=math.fsum(parts.values()), **parts, **self._meter.amounts(spent.get("stepping", 0.0)))

    def final(self, error: Exception | None) -> Goodput:
        self._end_attempt(is_lost=error is not None and not isinstance(error, StoppedEarlyError))
        return self.goodput()

    def _end_attempt(self, *, is_lost: bool) -> None:
        self._go_on()
        spent = self._training.parts(is_lost=is_lost)
        for name, seconds in spent.items():
            self._parts[name] += seconds
        self._meter.train(spent.get("stepping", 0.0))
        self._training = _Training()

    def _go_on(self) -> None:
        now = self._now()
        self._meter.count(now - self._since)
        if self._phase == "training":
            self._training.span += now - self._since
        else:
            self._parts[self._phase] += now - self._since
        self._since = now

    # ---- what the core tells

    def begin(self, attempt: Attempt) -> None:
        nodes = {node.worker: node for _, node in attempt.places.values()}
        if names := ", ".join(self._meter.use(nodes.values())):
            self._state.observers.note(f"{VARIABLE} has no price for {names}, so the cost is unknown")
        self._has_told = False

    def enter(self, stage: Stage) -> None:
        self._go_on()
        if stage == "starting" or (stage == "gathering" and self._state.number == 0):
            self._phase = "starting"
        else:
            self._phase = "training" if stage == "training" else "waiting"

    def take(self, peer: Peer, attempt: Attempt, rank: int, report: object) -> None:
        if isinstance(report, RankUsage):
            self._state.observers.tell(journal.Used(usage=report))
        if rank != 0 or self._phase != "training" or not isinstance(report, (RankUsage, Spent)):
            return
        self._go_on()
        self._training.spent = report.seconds
        if isinstance(report, Spent) and report.step is not None:
            self._training.at_saves[report.step] = report.seconds
        if isinstance(report, Spent) and report.is_last:
            self._phase = "waiting"

    def note_kept(self, entry: CheckpointEntry) -> None:
        if self._state.attempt is not None and self._state.attempt.number == entry.attempt:
            self._training.keep(entry.step)

    def orders(self, now: float) -> None:
        attempt, is_due = self._state.training, self._now() >= self._shown_at + INTERVAL
        if is_due:
            self._shown_at = self._now()
            self._state.observers.tell(journal.Accounted(goodput=self.goodput()))
        if attempt is not None and attempt.has_observers and 0 in attempt.results and (is_due or not self._has_told):
            self._has_told = True
            attempt.tell(Tell(self.goodput()))
        if attempt is not None and now >= self._store_at:
            self._store_at = now + STORE_INTERVAL
            self._store()

    def settle(self, *, is_last: bool) -> None:
        self._store()

    def restart(self, number: int) -> None:
        self._end_attempt(is_lost=True)

    # ---- hours of the task's earlier attempts, and for its next

    def restore(self) -> None:
        if (storage := self._storage) is None:
            return
        for folder in (storage.own, storage.previous):
            with contextlib.suppress(Exception):  # storage clients raise errors of any class
                self._meter.add(json.loads(storage.files.read(f"{folder}/{FILE}")))
                return
        if storage.previous is not None:
            self._state.observers.note("the hours and the cost of earlier attempts are unknown and not counted")

    def _store(self) -> None:
        if self._storage is not None:
            left = self.goodput(is_lost=True)
            data = json.dumps({name: getattr(left, name) for name in BILL}).encode()
            write = functools.partial(self._storage.files.write, f"{self._storage.own}/{FILE}", data)
            self._worker.submit(write, lambda *_: True)
