"""One gang at a time uses a checkpoint address. The next gang may use it once the one before has ended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from flytekitplugins.daskpytorch import GangStartError
from flytekitplugins.daskpytorch.driver import claim as module
from flytekitplugins.daskpytorch.driver.claim import Claim, claimed
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.sweep.storage import SweepStorage
from processes import until
from seaweed import Weed

OTHERS = {
    "id": "theirs",
    "name": "flows.train",
    "host": "node-7",
    "pid": 4711,
    "started": "1",
    "machine": "another",
    "job": None,
    "number": 0,
}


@pytest.fixture(params=["folder", "memory", "s3"])
def paths(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoragePaths:
    """Where two gangs would keep their checkpoints."""
    uri = {"folder": str(tmp_path / "kept"), "memory": f"memory://{uuid.uuid4().hex}"}.get(request.param)
    options: dict[str, Any] = {}
    if uri is None:
        weed: Weed = request.getfixturevalue("weed")
        bucket = f"claims-{uuid.uuid4().hex}"
        weed.client.create_bucket(Bucket=bucket)
        uri = f"s3://{bucket}/kept"
        options = {"key": weed.keys.access, "secret": weed.keys.secret, "endpoint_url": weed.endpoint}
    files = Files(fsspec.core.url_to_fs(uri, **options)[0])
    own = f"{files.path(uri)}/same"
    return StoragePaths(files=files, previous=own, own=own, is_claimed=True)


def written(paths: StoragePaths) -> dict[str, Any]:
    paths.files.fs.invalidate_cache()
    return dict(json.loads(paths.files.read(f"{paths.own}/claim.json")))


def leave(paths: StoragePaths, **about: Any) -> None:
    """A claim of another gang's."""
    now = time.time()
    content = {**OTHERS, "since": now - 90, "renewed": now, **about}
    paths.files.write(f"{paths.own}/claim.json", json.dumps(content).encode())


def test_a_second_gang_is_refused_and_one_after_the_end_goes_on_at_once(paths: StoragePaths) -> None:
    with claimed(paths, "flows.first"):
        pattern = r"in use by flows\.first on .* \(process \d+\), which began at .* UTC by its clock.*Gang\(key=...\)"
        with pytest.raises(GangStartError, match=pattern), claimed(paths, "flows.second"):
            pass
        assert written(paths)["name"] == "flows.first"
    with claimed(paths, "flows.second"):
        assert written(paths)["name"] == "flows.second"
    assert not paths.files.fs.exists(f"{paths.own}/claim.json")


def test_of_many_that_come_at_once_one_has_it(paths: StoragePaths) -> None:
    barrier, done, taken = threading.Barrier(8), threading.Event(), []

    def come() -> None:
        barrier.wait()
        with contextlib.suppress(GangStartError), claimed(paths, "flows.train"):
            taken.append(1)
            done.wait(60)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: sum(thread.is_alive() for thread in threads) <= 1, "seven to be refused")
    done.set()
    for thread in threads:
        thread.join()
    assert taken == [1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims that are stale in a moment."""
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.05)
    monkeypatch.setattr(module, "STALE_AFTER", 1.0)


@pytest.mark.usefixtures("quick")
def test_an_owner_on_another_machine_that_does_not_renew_its_claim_is_taken_over(
    paths: StoragePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(paths)
    begun_at = time.monotonic()
    with claimed(paths, "flows.second"):
        assert time.monotonic() - begun_at >= 1.0
        assert written(paths)["name"] == "flows.second"
    told = capsys.readouterr().err
    assert f"{paths.own} is claimed by flows.train on node-7 (process 4711), which began at 20" in told
    assert " UTC by its clock; waiting up to 1 s for a sign of life" in told
    assert "taken over from flows.train on node-7" in told


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("clock", [0, -86_400, 86_400], ids=["right", "a day slow", "a day fast"])
def test_an_owner_on_another_machine_that_renews_its_claim_is_not_whatever_its_clock_says(
    paths: StoragePaths, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    monkeypatch.setattr(module, "STALE_AFTER", 60.0)
    now = time.time() + clock
    leave(paths, since=now, renewed=now)
    with (
        pytest.raises(GangStartError, match=r"in use by flows\.train on node-7 .* began at "),
        claimed(paths, "flows.second", lambda: leave(paths, since=now, renewed=now, number=1)),
    ):
        pass
    assert written(paths)["id"] == "theirs"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", [b"", b'{"id": "the', b"\xff\x00", b"[]"])
def test_a_damaged_claim_is_taken_over_and_mended(
    paths: StoragePaths, monkeypatch: pytest.MonkeyPatch, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "RENEW_EVERY", 0.1)
    path = f"{paths.own}/claim.json"
    paths.files.write(path, content)
    with claimed(paths, "flows.second") as claim:
        assert "taken over from a gang whose claim cannot be read" in capsys.readouterr().err
        assert written(paths)["name"] == "flows.second"
        paths.files.write(path, content)
        until(lambda: paths.files.read(path) != content, "the owner to renew its claim")
        assert written(paths)["name"] == "flows.second"
        assert claim.loss is None
    assert not paths.files.fs.exists(path)


def test_who_waits_for_a_sign_of_life_can_be_ended(paths: StoragePaths) -> None:
    leave(paths)
    with pytest.raises(GangStartError, match="in use"), claimed(paths, "flows.second", lambda: True):
        pass


def test_the_attempt_before_of_the_same_task_is_taken_over_at_once(
    paths: StoragePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_INTERVAL", 1e9)  # nobody waits
    names = ("FLYTE_INTERNAL_EXECUTION_ID", "FLYTE_INTERNAL_TASK_NAME", "FLYTE_ATTEMPT_NUMBER")
    for name, value in zip(names, ("execution", "train", "1"), strict=True):
        monkeypatch.setenv(name, value)
    leave(paths, job=["execution", "train", "0"])
    with claimed(paths, "flows.second"):
        assert written(paths)["name"] == "flows.second"


DIES = """
import os, sys
from flytekitplugins.daskpytorch.driver.claim import claimed
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from fsspec.implementations.local import LocalFileSystem
files, own = Files(LocalFileSystem()), sys.argv[1]
with claimed(StoragePaths(files=files, previous=own, own=own, is_claimed=True), "first"):
    os.kill(os.getpid(), 9)
"""


def test_a_process_of_this_machine_that_was_killed_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path / "same")
    killed = subprocess.run([sys.executable, "-c", DIES, own], check=False)
    assert killed.returncode == -9
    assert (tmp_path / "same" / "claim.json").exists()
    monkeypatch.setattr(module, "POLL_INTERVAL", 1e9)  # nobody waits
    again = StoragePaths(files=Files(fsspec.filesystem("file")), previous=own, own=own, is_claimed=True)
    with claimed(again, "second"):
        assert written(again)["name"] == "second"


def test_who_was_suspended_too_long_learns_that_another_has_taken_over(
    paths: StoragePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_EVERY", 0.1)
    monkeypatch.setattr(module, "FIRST_LOOK", 0.1)
    lost = threading.Event()

    def train() -> None:
        with claimed(paths, "flows.first") as claim:
            claim.on_loss = lost.set
            until(lambda: written(paths)["number"] > 1, "a renewal")
            until(lambda: leave(paths) or lost.wait(0.5), "the loss to be noticed")  # a renewal may come after `leave`
            raise RuntimeError("cancelled")

    with pytest.raises(GangStartError, match=r"was taken over by flows\.train on node-7 .* suspended"):
        train()
    assert lost.is_set()
    assert written(paths)["id"] == "theirs"


def test_storage_without_rights_costs_a_line(
    paths: StoragePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError("no rights")

    monkeypatch.setattr(Files, "create", refuse)
    with claimed(paths, "flows.first") as claim:
        assert isinstance(claim, Claim)
    assert f"{paths.own} could not be claimed (PermissionError: no rights)" in capsys.readouterr().err


def test_a_model_of_a_sweep_is_trained_once_at_a_time(tmp_path: Path) -> None:
    storage = SweepStorage(str(tmp_path), "sweep")
    models = [storage.model(index, dict).paths for index in (0, 1)]
    with (
        claimed(models[0], "flows.sweep"),
        claimed(models[1], "flows.sweep"),
        pytest.raises(GangStartError, match=f"{tmp_path}/sweep/0 is in use by flows.sweep"),
        claimed(models[0], "flows.sweep again"),
    ):
        pass


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Each claim's thread ends with it."""
    yield
    until(lambda: "daskpytorch-claim" not in {thread.name for thread in threading.enumerate()}, "the threads to end")
