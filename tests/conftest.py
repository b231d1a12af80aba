"""What several test files share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest
from s3fs import S3FileSystem

from flytekitplugins.daskpytorch.node import fork_client
from preload import TESTS_IMPORT
from warm import start_cold, start_in_forks_of, warm_python

if TYPE_CHECKING:
    from distributed import Client

    from fault_proxy import FaultProxy
    from fault_training import Launch
    from processes import Cluster
    from seaweed import Weed

os.environ["DASKPYTORCH_CHECKPOINTS"] = ""  # local runs keep none in the developer's own folder
for _name in TESTS_IMPORT:
    fork_client.import_ahead(_name)
start_in_forks_of(warm_python)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scenarios come first, so that two workers end together: the others are short."""
    items.sort(key=lambda item: item.path.parent.name != "scenarios")


def pytest_configure() -> None:
    """Test files are imported, which leaves little to collect, and took a third of its time to look for it."""
    gc.disable()
    from hypothesis import HealthCheck, settings

    # A busy machine makes single examples slow.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """What they have imported stays, but for what Flyte 2's SDK has done to fsspec; from now on there is garbage."""
    fsspec.register_implementation("s3", S3FileSystem, clobber=True)
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models that are too small for more: threads that wait for busy cores cost minutes."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def cold_fork_servers() -> Iterator[None]:
    """Those of this process start as users' do."""
    with pytest.MonkeyPatch.context() as patch:
        start_cold(patch)
        yield


@pytest.fixture(scope="module")
def one_fork_server() -> Iterator[None]:
    """For all gangs of a file in this process: none that another file has left. Nothing is left behind at last."""
    from processes import nothing_left_behind

    fork_client.shutdown()
    with nothing_left_behind():
        yield


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers on two hosts, for all test files whose tests leave them alive; others have one of their own."""
    from processes import shared_cluster

    with shared_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def breakable(cluster: Cluster) -> Iterator[Cluster]:
    """The test file's cluster, for a test that takes workers away: it has them again afterwards."""
    yield cluster
    cluster.make_whole()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    """A plain client of the test file's cluster."""
    from distributed import Client

    with Client(cluster.address) as connected:
        yield connected


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launches gangs whose every event is seen."""
    from fault_training import watching

    with watching(tmp_path / "traces") as launcher:
        yield launcher


@pytest.fixture(scope="session")
def weed() -> Iterator[Weed]:
    """A real S3 server, which knows users and their rights."""
    from seaweed import weed_server

    with weed_server() as server:
        server.make_bucket("tests")
        yield server


@pytest.fixture
def proxy(weed: Weed) -> Iterator[FaultProxy]:
    """A proxy of the server that does nothing wrong yet."""
    from fault_proxy import FaultProxy

    with FaultProxy(weed.endpoint) as running:
        yield running


@pytest.fixture
def s3(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of a bucket, whose server the environment names to both Flytes' clients and to S3's."""
    flyte = {"ENDPOINT": weed.endpoint, "ACCESS_KEY_ID": weed.keys.access, "SECRET_ACCESS_KEY": weed.keys.secret}
    for name, value in {**weed.env(), **{f"FLYTE_AWS_{name}": value for name, value in flyte.items()}}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # of other tests, which have other servers
    yield "s3://tests"
    S3FileSystem.clear_instance_cache()
