"""On systems that cannot run gangs, or only smaller ones, the error says so, and what to do."""

import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flytekit import task

from flytekitplugins.daskpytorch import Gang, GangStartError, SpawnDDP, current_rank
from flytekitplugins.daskpytorch.doctor import examine
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process import system
from flytekitplugins.daskpytorch.process.system import OTHERS, allow_connections
from simulated_gang import Cluster


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@task(task_config=SpawnDDP(nproc=2))
def gang() -> int:
    return current_rank().world_size


@task(task_config=SpawnDDP(gang=Gang(debug=True)))
def alone() -> int:
    return current_rank().world_size


@pytest.mark.usefixtures("on_a_mac")
def test_a_gang_is_refused_before_anything_starts() -> None:
    with pytest.raises(GangStartError, match=r"gangs run on Linux.*DASKPYTORCH_DEBUG=1 or Gang\(debug=True\)"):
        gang()


@pytest.mark.usefixtures("on_a_mac")
@pytest.mark.parametrize("start", [fork_client.connect, lambda: Supervisor(None, None)])  # type: ignore[arg-type]
def test_by_whatever_way_it_comes(start: Any) -> None:
    with pytest.raises(GangStartError, match="gangs run on Linux"):
        start()


@pytest.mark.usefixtures("on_a_mac")
def test_one_rank_in_this_process_trains() -> None:
    assert alone() == 1


@pytest.mark.usefixtures("on_a_mac")
def test_the_doctor_says_so() -> None:
    finding = next(iter(examine(None, 60.0)))
    assert (finding.what, finding.verdict) == ("versions", "problem")
    assert "DASKPYTORCH_DEBUG=1" in finding.value


# ---- A gang that needs more open files than the driver may have is refused before its first agent


@pytest.fixture
def limit() -> Iterator[int]:
    """The hard limit, below which the tests begin."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def may_have(limit: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the system allow so many."""
    del limit  # what the test raises is put back

    def allow(hard: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (512, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)

    return allow


def test_more_agents_can_come_than_files_could_be_open_before(limit: int) -> None:
    allow_connections(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(system.MAX_FILES, limit), limit)


def test_as_many_agents_as_the_limit_allows_may_come(may_have: Callable[[int], None]) -> None:
    may_have(4096)
    allow_connections(4096 - OTHERS)
    with pytest.raises(GangStartError, match=r"may have 4,096 files open .* 3,841 workers needs 4,097"):
        allow_connections(4097 - OTHERS)


def test_a_gang_with_more_workers_than_connections_is_refused_before_any_agent_starts(
    may_have: Callable[[int], None],
) -> None:
    may_have(1024)
    cluster = Cluster([f"tcp://10.0.0.{number}:1" for number in range(1000)])
    with pytest.raises(GangStartError, match="1,000 workers"):
        Supervisor(request_for(print, [], {}, Gang()), cluster).run()
    assert cluster.asked == {}
