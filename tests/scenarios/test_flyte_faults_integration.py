"""A task that is told to end keeps its last step, and the next attempt goes on from it, in the same runs of trackers.

`benchmarks/chaos.py` draws SIGTERM to pods of gangs that may shrink. test_spawn_integration.py signals all processes.
"""

import contextlib
import json
import shutil
import signal
import sqlite3
from pathlib import Path

from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from processes import MAX_SECONDS, TASKS_IMPORT, dask_cluster, is_alive, nothing_left_behind, until
from test_task_integration import RECOVERABLE, SAMPLE_PROJECT, SYSTEM, execute, expected, result
from tracked import Flow, scalars
from wandb_file import read_run
from warm import Program

RUN_ID = "f3a-n0"
"""Id of the Weights & Biases run: the execution and the node, whatever the attempt."""
NO_SERVER = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "15"}
"""Address of a Weights & Biases server, at which nothing listens."""


def test_after_sigterm_to_the_task_the_next_attempt_goes_on(tmp_path: Path) -> None:
    project = Path(shutil.copytree(SAMPLE_PROJECT, tmp_path / "project"))
    (traces := tmp_path / "traces").mkdir()
    tracked = tmp_path / "tracked"

    def lines(name: str) -> list[str]:
        return (traces / name).read_text().splitlines() if (traces / name).exists() else []

    def end_it(process: Program) -> None:
        """Not before MLflow has made its database, for which a busy machine takes longer than pods are given to end."""
        until(lambda: _has_points(tracked / "mlflow.db") or process.poll() is not None, "MLflow")
        until(lambda: len(lines("epochs-0-1")) >= 3 or process.poll() is not None, "the training")
        process.send_signal(signal.SIGTERM)

    environment = {"WANDB_DIR": str(tmp_path), **NO_SERVER}
    with (
        nothing_left_behind(),
        dask_cluster(
            tmp_path / "cluster",
            hosts=["127.0.0.2", "127.0.0.3"],
            imported_ahead=TASKS_IMPORT,
            worker_environments={0: environment, 1: environment},
        ) as cluster,
    ):
        where = {"cluster": cluster.address, "cwd": project}
        where["env"] = {"WANDB_MODE": "offline", "TRACKED": str(tracked)}
        endless = {"folder": str(traces), "epochs": 100_000, "saves_every": 100_000, "pace": 0.1}
        first = execute("resumable", endless, folder=tmp_path / "first", meddle=end_it, **where)
        assert (first.error.kind, first.error.origin) == (RECOVERABLE, SYSTEM)
        assert "PreemptedError" in first.output
        assert "the task was told to end (SIGTERM)" in first.error.message
        [stopped] = {tuple(lines(f"stopped-0-{rank}")) for rank in range(2)}
        step = int(stopped[0])
        assert f"the next attempt goes on from the checkpoint of step {step}" in first.error.message
        kept = Path(first.checkpoint, "daskpytorch/gang")
        assert [entry["step"] for entry in json.loads((kept / MANIFEST).read_text())["checkpoints"]] == [step]
        hours = json.loads((kept / "hours.json").read_text())
        (kept / "hours.json").write_text(json.dumps({**hours, "core_hours": 100 + hours["core_hours"]}))
        rest = {"folder": str(traces), "epochs": step + 2}
        second = execute("resumable", rest, folder=tmp_path / "second", number=1, previous=first.checkpoint, **where)
        until(lambda: not any(is_alive(int(pid)) for pid in lines("pids")), "the ranks to be gone")
    assert first.seconds < MAX_SECONDS
    assert [lines(f"start-1-{rank}") for rank in range(2)] == [[str(step)]] * 2
    assert result(second) == expected(step + 2)

    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime)
    runs = [read_run(path) for path in files]
    assert [(run["id"], run["exit_code"]) for run in runs] == [(RUN_ID, 1), (RUN_ID, 0)]
    assert hours["core_hours"] > 0
    assert runs[1]["summary"]["goodput"]["core_hours"] > 100
    steps = list(range(1, step + 3))
    assert [point for point, _ in scalars(tracked / f"resumable-{RUN_ID}", "value")] == steps
    flow = Flow(tracked, "tests")
    [run] = flow.runs
    assert (run.info.status, run.data.tags["daskpytorch.id"]) == ("FINISHED", f"resumable-{RUN_ID}")
    assert [point for point, _ in flow.points(run, "value")] == steps
    for attempt in (first, second):
        assert f"  MLflow: run {run.info.run_id} in sqlite:///" in attempt.output
        assert "  TensorBoard: " in attempt.output


def _has_points(database: Path) -> bool:
    with contextlib.suppress(sqlite3.OperationalError), sqlite3.connect(f"file:{database}?mode=ro", uri=True) as read:
        return bool(read.execute("select count(*) from metrics where key = 'value'").fetchone()[0])
    return False
