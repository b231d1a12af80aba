"""Clusters as the driver sees them: one made here, and a scheduler that is none."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from urllib.error import HTTPError

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


def intervals() -> dict[str, float]:
    """What a worker of a cluster made here does over and over, and after how many milliseconds."""

    def of(dask_worker: Worker) -> dict[str, float]:
        return {name: callback.callback_time for name, callback in dask_worker.periodic_callbacks.items()}

    with cluster.opened(num_workers=1, start_timeout=300) as client:
        [found] = client.run(of).values()
    return found


def test_a_cluster_made_here_leaves_the_cores_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = intervals()
    assert found["tick"] == 1000
    assert "profile" not in found
    monkeypatch.setenv("DASKPYTORCH_DASHBOARD", "1")
    assert "profile" in intervals()
    assert dask.config.get("distributed.admin.tick.interval") == "20ms"  # for what else this process does with Dask


def test_what_the_user_told_dask_wins() -> None:
    with dask.config.set({"distributed.admin.tick.interval": "50ms"}):
        assert intervals()["tick"] == 50


@pytest.mark.parametrize("asked", ["", "1"])
def test_a_dashboard_is_where_it_is_asked_for_and_its_link_leads_to_it(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASKPYTORCH_DASHBOARD", asked)
    with cluster.opened(num_workers=2, start_timeout=300) as client:
        assert client.dashboard_link.startswith("http://127.0.0.1:")
        said = capsys.readouterr().err
        assert (f"Dask dashboard: {client.dashboard_link}" in said) == bool(asked)
        if asked:
            with urllib.request.urlopen(client.dashboard_link, timeout=60) as page:
                assert "Task Stream" in page.read().decode()
        else:
            with pytest.raises(HTTPError, match="404"):
                urllib.request.urlopen(client.dashboard_link, timeout=60)
