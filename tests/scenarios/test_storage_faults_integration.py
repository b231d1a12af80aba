"""Gangs survive failures of storage: a full disk, a damaged file, and S3 that answers badly."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client
from s3fs import S3FileSystem

import fault_training as ft
from fault_proxy import UNAVAILABLE, FaultProxy, denied, in_turns, late
from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.driver.manifest import MANIFEST
from processes import MAX_SECONDS, Cluster, nothing_left_behind, small_disk, until
from test_task_integration import RECOVERABLE, SAMPLE_PROJECT, SYSTEM, execute
from warm import Program

SAVED_NEXT = 2 * ft.SAVED_AT
"""The step of the checkpoint that goes wrong; the one before is safe."""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ft.Launch]:
    """Launches gangs of any of the functions below, and sees what happens to them."""
    with ft.watching(tmp_path / "traces") as launcher:

        def launch_function(client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> ft.Watched:
            monkeypatch.setattr(ft, "train", function)
            return launcher(client, *args, **kwargs)

        yield launch_function


# ---- What the ranks run: `fault_training.train`, with something wrong about one checkpoint


def train_with(folder: str, save: Callable[[Callable[..., None], Any, int], None]) -> float:
    """Have `save` called for rank 0's second checkpoint in the first attempt, once the first one is safe."""
    checkpoint = current_rank().checkpoint
    keep = checkpoint.save

    def patched(state: Any, step: int) -> None:
        if step == SAVED_NEXT and current_rank().is_main and not ft._has(folder, "broken"):
            ft._await(folder, f"kept-{ft.SAVED_AT}")
            save(keep, state, step)
        else:
            keep(state, step)

    checkpoint.save = patched  # type: ignore[method-assign]
    return ft.train(folder)


def break_down(folder: str) -> None:
    """End this rank, as if it were killed from outside."""
    ft._leave(folder, "broken", f"{os.getpid()} {time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)


def outgrow_the_driver(folder: str, num_bytes: int) -> float:
    """The second checkpoint is that large."""

    def save(keep: Callable[..., None], state: Any, step: int) -> None:
        keep(state | {"ballast": torch.zeros(num_bytes, dtype=torch.uint8)}, step)
        ft._await(folder, "go")
        break_down(folder)

    return train_with(folder, save)


# ---- Cases


def check_resumed(watched: ft.Watched, step: int) -> None:
    """The gang went on from this step, soon, to the result of an undisturbed run."""
    assert watched.futures.result() == [ft.expected()] * 2
    assert watched.starts(0) == watched.starts(1) == [0, step]
    assert any(f"going on from step {step}" in note for note in watched.notes), watched.notes
    assert watched.formed_at[-1] - watched.broke_at() < MAX_SECONDS


def test_the_drivers_disk_is_full(
    client: Client, launch: ft.Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small") as small:
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        watched = launch(client, outgrow_the_driver, 2 << 20)
        refusal = f"the checkpoint of step {SAVED_NEXT} was not kept (OSError: [Errno 28] No space left on device"
        until(lambda: any(refusal in note for note in watched.notes) or watched.futures.done(), "the refusal")
        (watched.folder / "go").touch()
        check_resumed(watched, ft.SAVED_AT)
        assert any(refusal in note for note in watched.notes), watched.notes
        until(lambda: not list(small.iterdir()), "the driver to clean up")


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
