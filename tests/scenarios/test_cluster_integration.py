"""Gangs run on clusters with TLS."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import Client
from distributed.security import Security

from flytekitplugins.daskpytorch import current_rank, dispatch
from processes import SCRIPTS, Cluster, dask_cluster, nothing_left_behind, run_program

TASK = """
import torch
import torch.distributed as dist
from flytekit import task
from flytekitplugins.daskpytorch import DaskDDP, current_rank


@task(task_config=DaskDDP())
def add() -> int:
    mine = torch.tensor(current_rank().rank + 1)
    dist.all_reduce(mine)
    return int(mine)
"""


def add(offset: int) -> int:
    mine = torch.tensor(current_rank().rank + offset)
    dist.all_reduce(mine)
    return int(mine)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a cluster with certificates of its own, as a task's `environment` has them."""
    folder, made = tmp_path_factory.mktemp("tls"), Security.temporary()
    parts = {"ca": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for name, text in parts.items():
        (folder / f"{name}.pem").write_text(text)
    comm = "DASK_DISTRIBUTED__COMM"
    settings = {
        f"{comm}__TLS__{role}__{part}": str(folder / f"{part.lower()}.pem")
        for role in ("SCHEDULER", "WORKER", "CLIENT")
        for part in ("CERT", "KEY")
    }
    settings |= {f"{comm}__TLS__CA_FILE": str(folder / "ca.pem"), f"{comm}__DEFAULT_SCHEME": "tls"}
    return settings | {f"{comm}__REQUIRE_ENCRYPTION": "True"}


@pytest.fixture(scope="module")
def encrypted(tls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose processes took these settings from their environment."""
    with nothing_left_behind(), contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in tls.items():
                patch.setenv(name, value)
            cluster = stack.enter_context(dask_cluster(tmp_path_factory.mktemp("encrypted"), wait=False))
        yield cluster


def test_a_task_takes_its_tls_settings_from_its_environment(
    encrypted: Cluster, tls: dict[str, str], tmp_path: Path
) -> None:
    assert encrypted.address.startswith("tls://")
    (tmp_path / "adding.py").write_text(TASK)
    env = {**tls, "DASK_SCHEDULER_ADDRESS": encrypted.address}
    done = run_program([SCRIPTS / "pyflyte", "run", "adding.py", "add"], cwd=tmp_path, env=env)
    assert done.stdout.strip().endswith("3"), done.stdout + done.stderr


def test_a_gang_runs_for_a_client_with_a_security_of_its_own(encrypted: Cluster, tls: dict[str, str]) -> None:
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    security = Security(
        tls_ca_file=tls[f"{prefix}CA_FILE"],
        tls_client_cert=tls[f"{prefix}CLIENT__CERT"],
        tls_client_key=tls[f"{prefix}CLIENT__KEY"],
        require_encryption=True,
    )
    with Client(encrypted.address, security=security) as client:
        client.wait_for_workers(2)
        assert dispatch.run(client, add, offset=1).result() == [3, 3]
