"""A gang that needs more open files than the driver may have is refused before its first agent."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest

from flytekitplugins.daskpytorch import Gang, GangStartError
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.process import system
from flytekitplugins.daskpytorch.process.system import OTHERS, allow_connections
from simulated_gang import Cluster


@pytest.fixture(autouse=True)
def limit() -> Iterator[int]:
    """The hard limit, below which the tests begin."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def may_have(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the system allow so many."""

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
