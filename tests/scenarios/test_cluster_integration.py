"""A gang runs on a cluster with TLS."""

from pathlib import Path

import pytest
from distributed.security import Security

from processes import SCRIPTS, dask_cluster, nothing_left_behind, run_program

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


def test_a_task_takes_its_tls_settings_from_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, comm = Security.temporary(), "DASK_DISTRIBUTED__COMM"
    parts = {"CA": made.tls_ca_file, "CERT": made.tls_client_cert, "KEY": made.tls_client_key}
    for name, text in parts.items():
        (tmp_path / f"{name}.pem").write_text(text)
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        for part in ("CERT", "KEY"):
            monkeypatch.setenv(f"{comm}__TLS__{role}__{part}", str(tmp_path / f"{part}.pem"))
    monkeypatch.setenv(f"{comm}__TLS__CA_FILE", str(tmp_path / "CA.pem"))
    monkeypatch.setenv(f"{comm}__DEFAULT_SCHEME", "tls")
    monkeypatch.setenv(f"{comm}__REQUIRE_ENCRYPTION", "True")
    (tmp_path / "adding.py").write_text(TASK)
    # This process, which has read its settings before, cannot wait for the workers.
    with nothing_left_behind(), dask_cluster(tmp_path / "cluster", wait=False) as cluster:
        assert cluster.address.startswith("tls://")
        env = {"DASK_SCHEDULER_ADDRESS": cluster.address}
        done = run_program([SCRIPTS / "pyflyte", "run", "adding.py", "add"], cwd=tmp_path, env=env)
    assert done.stdout.strip().endswith("3"), done.stdout + done.stderr
