"""Clusters as the driver sees them: one made here, and a scheduler that is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import dask
import pytest
from distributed import Worker

from flytekitplugins.daskpytorch.dask import cluster
from flytekitplugins.daskpytorch.errors import GangStartError


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that accepts connections and then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_a_scheduler_that_says_nothing_does_not_hold_up_the_driver(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", silent)
    with (
        pytest.raises(GangStartError, match=rf"answered at {silent} .* but says nothing for") as failure,
        cluster.opened(num_workers=1, start_timeout=1.5),
    ):
        raise AssertionError("there is no scheduler")
    assert "Look at the scheduler pod's log" in str(failure.value)


def test_it_is_greeted_from_under_an_event_loop_too(silent: str) -> None:
    async def greet() -> None:
        cluster.greet(silent, 0.3)

    with pytest.raises(TimeoutError, match=r"but says nothing for 0\.3 s"):
        asyncio.run(greet())


def test_nobody_at_the_address_is_told_from_a_scheduler_that_says_nothing() -> None:
    with pytest.raises(OSError, match="connect") as failure:
        cluster.greet("tcp://127.0.0.1:9", 0.3)
    assert "says nothing" not in str(failure.value)


def intervals(*, dashboard: bool) -> dict[str, float]:
    """What a worker of a cluster made here does over and over, and after how many milliseconds."""

    def of(dask_worker: Worker) -> dict[str, float]:
        return {name: callback.callback_time for name, callback in dask_worker.periodic_callbacks.items()}

    with cluster.opened(num_workers=1, start_timeout=300, dashboard=dashboard) as client:
        [found] = client.run(of).values()
    return found


def test_a_cluster_made_here_leaves_the_cores_to_the_ranks() -> None:
    found = intervals(dashboard=False)
    assert found["tick"] == 1000
    assert "profile" not in found
    assert "profile" in intervals(dashboard=True)
    assert dask.config.get("distributed.admin.tick.interval") == "20ms"  # for what else this process does with Dask


def test_what_the_user_told_dask_wins() -> None:
    with dask.config.set({"distributed.admin.tick.interval": "50ms"}):
        assert intervals(dashboard=False)["tick"] == 50
