"""Goodput: the driver assigns every second of a gang to one phase. Events and the clock are simulated."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from flytekitplugins.daskpytorch import Goodput
from flytekitplugins.daskpytorch.driver.parts.goodput import prices
from flytekitplugins.daskpytorch.errors import GangStartError, PreemptedError, StoppedEarlyError
from flytekitplugins.daskpytorch.protocol import journal
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.protocol.messages import Spent
from simulated_gang import Agent, OwnError, World, raised
from told import usage

W1, W2 = (f"tcp://10.0.0.{i}:1" for i in (1, 2))


class Trained(World):
    """A gang whose rank 0 says what it does, second by second."""

    def __init__(self, *how: Any, gpus: Mapping[str, tuple[str, ...]] | None = None, **settings: Any) -> None:
        super().__init__(*how, **settings)
        self.gpus |= gpus or {}
        self.spent: dict[str, float] = {}
        self.asked_at = self.clock()

    @property
    def main(self) -> Agent:
        """The agent of rank 0."""
        return next(agent for agent in self.connected() if 0 in agent.ranks)

    def go(self, seconds: float = 10.0) -> None:
        """Everybody comes, and all ranks meet, which takes so long."""
        self.join_all()
        self.obey_all()
        self.clock.now += seconds
        self.spent = {"preparing": 0.0}
        for agent in self.connected():
            self.ready(agent)

    def go_again(self, seconds: float = 10.0) -> None:
        """All obey, the gang settles, and its ranks meet again."""
        self.obey_all()
        self.wait(1.0)
        self.go(seconds)

    def spend(self, **seconds: float) -> None:
        """Rank 0 works."""
        for part, value in seconds.items():
            self.clock.now += value
            self.spent[part] = self.spent.get(part, 0.0) + value
        self.say_spent()

    def say_spent(self, step: int | None = None, *, is_last: bool = False) -> None:
        self.report(self.main, 0, Spent(dict(self.spent), step, is_last))

    def keep(self, step: int, seconds: float = 1.0) -> None:
        """Rank 0 saves a checkpoint, which arrives."""
        self.spend(saving=seconds)
        self.say_spent(step)
        self.save(self.main, step)
        self.obey_all()
        self.upload_all(self.main)

    def end(self) -> Goodput:
        """The account that is given when it is over, checked against the clock."""
        assert self.is_over
        goodput = self.accounting.final(self.error if isinstance(self.error, Exception) else None)
        check(goodput)
        assert math.isclose(goodput.total, self.clock() - self.asked_at)
        return goodput

    def deliver_all(self) -> None:
        self.say_spent(is_last=True)
        for agent in self.connected():
            self.deliver(agent)
        self.obey_all()


def check(goodput: Goodput) -> None:
    total, *parts = goodput.as_dict().values()
    assert math.fsum(parts) == total
    assert all(part >= 0 for part in parts), goodput


def parts(goodput: Goodput) -> dict[str, float]:
    """Those that are not nothing, in whole milliseconds."""
    return {
        name: round(seconds, 3) for name, seconds in goodput.as_dict().items() if name != "total" and seconds > 1e-9
    }


MakeTrained = Callable[..., Trained]


@pytest.fixture
def world_of(tmp_path: Path) -> MakeTrained:
    """Makes a gang whose ranks have met after so many seconds."""

    def make(seconds: float = 10.0, **settings: Any) -> Trained:
        world = Trained(tmp_path, **settings)
        world.go(seconds)
        return world

    return make


def test_undisturbed(world_of: MakeTrained) -> None:
    world = world_of(10.0)
    world.spend(preparing=3.0, data=1.0, stepping=20.0, evaluation=4.0)
    world.keep(5, seconds=2.0)
    world.clock.now += 0.5  # the last step, of which the driver has not heard
    world.spent["stepping"] += 0.5
    world.say_spent(is_last=True)
    world.clock.now += 6.0  # for the other rank, say
    world.deliver_all()
    assert world.results == [0, 1]
    assert parts(world.end()) == {
        "starting": 10.0,
        "preparing": 3.0,
        "data": 1.0,
        "stepping": 20.5,
        "evaluation": 4.0,
        "saving": 2.0,
        "waiting": 6.0,
    }


def test_work_after_the_newest_checkpoint_is_lost_and_done_again_is_kept(world_of: MakeTrained) -> None:
    world = world_of(10.0)
    world.spend(preparing=3.0, stepping=20.0)
    world.keep(5)
    world.spend(stepping=4.0, data=2.0, evaluation=1.0)
    world.clock.now += 0.5  # of which nothing was heard
    world.fail(world.agent(W2), 1, OwnError("once"))
    world.obey_all()
    world.go(7.0)
    world.spend(preparing=1.0, stepping=4.0)
    world.deliver_all()
    assert parts(world.end()) == {"starting": 17.0, "preparing": 4.0, "stepping": 24.0, "saving": 1.0, "lost": 7.5}


def test_a_checkpoint_that_was_written_but_did_not_arrive_keeps_nothing(world_of: MakeTrained) -> None:
    world = world_of()
    world.spend(stepping=20.0)
    world.keep(5)
    world.spend(stepping=5.0)
    world.say_spent(9)  # and rank 0 is gone before it is written
    world.fail(world.main, 0, OwnError("once"))
    world.go_again()
    world.deliver_all()
    assert parts(world.end())["lost"] == 5.0


def test_a_checkpoint_that_arrives_after_the_failure_keeps_what_it_holds(world_of: MakeTrained) -> None:
    world = world_of()
    world.spend(stepping=20.0)
    world.say_spent(5)
    world.save(world.main, 5)
    world.spend(stepping=3.0)
    world.fail(world.agent(W2), 1, OwnError("once"))
    world.upload(world.main)  # rank 0 was told to end, and first writes what it has saved
    world.obey_all()
    world.wait(1.0)
    world.go()
    world.deliver_all()
    goodput = parts(world.end())
    assert goodput["stepping"] == 20.0
    assert goodput["lost"] == 3.0


@pytest.mark.parametrize("saves", [True, False])
def test_of_a_gang_that_is_preempted_what_it_saves_is_kept(world_of: MakeTrained, saves: bool) -> None:
    world = world_of(5.0, max_restarts=0)
    world.spend(stepping=8.0)
    world.feed(world.state.request_stop, "the node is taken away")
    if saves:
        world.keep(5)
    world.obey_all()
    world.wait(60.0)
    world.obey_all()
    assert isinstance(raised(world), PreemptedError)
    goodput = world.end()
    assert goodput.stepping == (8.0 if saves else 0.0)
    assert goodput.lost >= (0.0 if saves else 8.0)


def test_a_model_that_was_stopped_early_has_lost_nothing(world_of: MakeTrained) -> None:
    world = world_of(5.0)
    world.spend(stepping=8.0)
    world.watcher.wish = StoppedEarlyError("others are better", epoch=1, metric="loss", value=1.0)
    world.step(world.main, saves=False)
    world.obey_all()
    assert isinstance(raised(world), StoppedEarlyError)
    assert parts(world.end()) == {"starting": 5.0, "stepping": 8.0}


def test_a_gang_that_never_forms_has_only_started(tmp_path: Path) -> None:
    world = Trained(tmp_path, start_timeout=60.0)
    world.wait(100.0)
    assert isinstance(raised(world), GangStartError)
    goodput = world.end()
    assert goodput.starting == goodput.total > 0
    assert goodput.share == 0.0


def test_usage_of_any_rank_reaches_observers_and_that_of_rank_0_is_its_account(world_of: MakeTrained) -> None:
    world = world_of(1.0)
    world.clock.now += 4.0
    for rank, agent in enumerate([world.agent(W1), world.agent(W2)]):
        world.report(agent, rank, usage(rank, seconds={"preparing": 1.0, "data": 3.0 - rank}))
    assert [event.usage.rank for event in world.watcher.events if isinstance(event, journal.Used)] == [0, 1]
    assert parts(world.accounting.final(None)) == {"starting": 1.0, "preparing": 1.0, "data": 3.0}


# ---- Hours and their price


def test_hours_of_all_workers_are_counted_and_priced_over_restarts(
    world_of: MakeTrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_PRICE", "H1=99, h100 = 3.5,core=0.5")  # 4.0 an hour for each worker
    world = world_of(0.0, gpus={W1: ("GPU-a",), W2: ("GPU-b",)}, min_workers=1)
    world.spend(stepping=1800.0)
    world.keep(5, seconds=0.0)
    world.spend(stepping=900.0)
    world.lose(world.agent(W2))
    world.go_again(0.0)
    world.spend(stepping=3600.0)
    world.deliver_all()
    goodput = world.end()
    assert goodput.gpu_hours == goodput.core_hours == pytest.approx(2 * 0.75 + 1.0, abs=0.001)
    assert goodput.trained_hours == 2 * 0.5 + 1.0
    assert goodput.cost == pytest.approx(4.0 * goodput.gpu_hours)
    assert goodput.bill == {
        "gpu_hours": goodput.gpu_hours,
        "trained_share": 2.0 / goodput.gpu_hours,
        "cost": goodput.cost,
    }


def test_the_next_attempt_of_the_task_counts_the_hours_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_PRICE", "core=0.5")
    bills = []
    for number, ends in enumerate((True, False, True)):
        previous = str(tmp_path / str(number - 1)) if number else None
        paths = StoragePaths(files=Files(LocalFileSystem()), previous=previous, own=str(tmp_path / str(number)))
        world = Trained(tmp_path, storage=paths)
        world.accounting.restore()
        world.go(0.0)
        world.spend(stepping=3600.0)
        if ends:
            world.clock.now += 36.0  # since the newest write
            world.fail(world.agent(W2), 1, OwnError("once"))
            world.obey_all()
        else:  # the driver is killed, a minute after its newest write
            world.wait(61.0)
        world.work()
        stored = json.loads((tmp_path / str(number) / "hours.json").read_text())
        assert stored["core_hours"] == pytest.approx(world.accounting.goodput().core_hours, abs=1e-3 if ends else 0.04)
        bills.append(world.accounting.goodput(is_lost=True).bill)
        assert not [text for text in world.watcher.notes if "earlier attempts" in text]
    assert [bill["core_hours"] for bill in bills] == [pytest.approx(hours, abs=0.12) for hours in (2, 4, 6)]
    assert [bill["cost"] for bill in bills] == [pytest.approx(bill["core_hours"] / 2) for bill in bills]
    assert [bill["trained_share"] for bill in bills] == [0.0] * 3  # nothing was saved


def test_unknown_hours_of_earlier_attempts_and_unpriced_gpus_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_PRICE", "A100=2,core=0.5")
    paths = StoragePaths(files=Files(LocalFileSystem()), previous=str(tmp_path / "gone"), own=str(tmp_path / "own"))
    world = Trained(tmp_path, storage=paths, gpus={W1: ("GPU-a",)})
    world.accounting.restore()
    world.go(0.0)
    world.spend(stepping=3600.0)
    assert list(world.accounting.goodput().bill) == ["gpu_hours", "trained_share"]
    assert world.watcher.notes == [
        "train: the hours and the cost of earlier attempts are unknown and not counted",
        "train: DASKPYTORCH_PRICE has no price for H100, so the cost is unknown",
    ]


@pytest.mark.parametrize("value", ["H100", "H100=", "=3", "core=x", "core=-1", "core=nan", "A=1,,B=2", "core=1,Core=2"])
def test_a_malformed_price_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASKPYTORCH_PRICE", value)
    with pytest.raises(ValueError, match=r"^DASKPYTORCH_PRICE='.*': '.*' is no price per hour. .*H100=3.2,core=0.05$"):
        prices()


# ---- The record


def test_a_line_names_the_share_of_the_steps_and_all_that_took_time() -> None:
    goodput = Goodput(total=144.31, starting=1.2, preparing=5.0, stepping=120.1, data=18.0, lost=0.01)
    assert str(goodput) == ("goodput 83 %: 120.1 s of 144.3 s stepping; starting 1.2 s, preparing 5.0 s, data 18.0 s")
    assert str(Goodput(total=2.0, stepping=2.0)) == "goodput 100 %: 2.0 s of 2.0 s stepping"
    assert str(Goodput(total=2.0, stepping=2.0, cost=39.361)).endswith("of 2.0 s stepping; cost 39.36")
    assert Goodput().share == 0.0
    names = ["total", "starting", "preparing", "stepping", "data", "compiling"]
    names += ["evaluation", "saving", "waiting", "lost"]
    assert list(Goodput().as_dict()) == names
