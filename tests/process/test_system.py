"""On systems that cannot run gangs, the error says so, and what to do."""

import resource
import sys
from typing import Any

import pytest
from flytekit import task

from flytekitplugins.daskpytorch import Gang, GangStartError, SpawnDDP, current_rank, doctor
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.process.system import allow_files


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
@pytest.mark.parametrize("start", [fork_client.connect, doctor.versions, lambda: Supervisor(None, None)])  # type: ignore[arg-type]
def test_by_whatever_way_it_comes(start: Any) -> None:
    with pytest.raises(GangStartError, match="gangs run on Linux"):
        start()


@pytest.mark.usefixtures("on_a_mac")
def test_one_rank_in_this_process_trains() -> None:
    assert alone() == 1


def test_more_files_can_be_open_than_before() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert allow_files(4096) == min(4096, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(4096, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
