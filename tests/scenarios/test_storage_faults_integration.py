"""Gangs survive S3 that answers badly."""

import json
import shutil
import signal
from pathlib import Path

from s3fs import S3FileSystem

from fault_proxy import UNAVAILABLE, FaultProxy, denied, in_turns, late
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from processes import MAX_SECONDS, Cluster, nothing_left_behind, until
from test_task_integration import RECOVERABLE, SAMPLE_PROJECT, SYSTEM, execute
from warm import Program


def test_s3_takes_checkpoints_badly(cluster: Cluster, proxy: FaultProxy, s3: str, tmp_path: Path) -> None:
    """Training goes on meanwhile, and the newest checkpoint arrives when it can: before the task ends."""
    busy_or_not_for_us = late(0.5, in_turns(UNAVAILABLE, denied("ExpiredToken")))
    (traces := tmp_path / "traces").mkdir()

    def num_epochs() -> int:
        return sum(path.read_text().count("\n") for path in traces.glob("epochs-0-0"))

    def end_it(process: Program) -> None:
        until(lambda: proxy.num_requests("") or process.poll() is not None, "a checkpoint on its way")
        before = num_epochs()  # who waited for S3 would make one or two more
        until(lambda: num_epochs() >= before + 5 or process.poll() is not None, "the training to go on")
        proxy.heal()
        process.send_signal(signal.SIGTERM)

    with nothing_left_behind():
        proxy.fail(busy_or_not_for_us, methods=("PUT",), passes_on=False)
        behind_it = dict.fromkeys(("AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT"), proxy.endpoint)
        attempt = execute(
            "resumable",
            {"folder": str(traces), "epochs": 100_000, "pace": 0.1},
            cluster=cluster.address,
            cwd=Path(shutil.copytree(SAMPLE_PROJECT, tmp_path / "project")),
            folder=tmp_path / "run",
            checkpoint=f"{s3}/{tmp_path.name}/attempt",
            meddle=end_it,
            env={**behind_it, "WANDB_MODE": "disabled", "TMPDIR": str(tmp_path)},
        )
    assert attempt.seconds < MAX_SECONDS
    assert (attempt.error.kind, attempt.error.origin) == (RECOVERABLE, SYSTEM)
    stopped = int((traces / "stopped-0-0").read_text())
    assert f"the next attempt goes on from the checkpoint of step {stopped}" in attempt.error.message
    manifest = json.loads(S3FileSystem().cat(f"{attempt.checkpoint}/daskpytorch/gang/{MANIFEST}"))
    assert manifest["checkpoints"][0]["step"] == stopped
