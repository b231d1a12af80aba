"""On systems that cannot run gangs, the error says so, and what to do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from flytekit import task

from flytekitplugins.daskpytorch import Gang, GangStartError, SpawnDDP, current_rank
from flytekitplugins.daskpytorch.doctor import examine
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node import fork_client


@pytest.fixture(autouse=True)
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@task(task_config=SpawnDDP(nproc=2))
def gang() -> int:
    return current_rank().world_size


@task(task_config=SpawnDDP(gang=Gang(debug=True)))
def alone() -> int:
    return current_rank().world_size


def test_a_gang_is_refused_before_anything_starts() -> None:
    with pytest.raises(GangStartError, match=r"gangs run on Linux.*DASKPYTORCH_DEBUG=1 or Gang\(debug=True\)"):
        gang()


@pytest.mark.parametrize("start", [fork_client.connect, lambda: Supervisor(None, None)])  # type: ignore[arg-type]
def test_by_whatever_way_it_comes(start: Any) -> None:
    with pytest.raises(GangStartError, match="gangs run on Linux"):
        start()


def test_one_rank_in_this_process_trains() -> None:
    assert alone() == 1


def test_the_doctor_says_so() -> None:
    finding = next(iter(examine(None, with_gangs=False)))
    assert (finding.what, finding.verdict) == ("system", "problem")
    assert "DASKPYTORCH_DEBUG=1" in finding.advice
