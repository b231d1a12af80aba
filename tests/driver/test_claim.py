"""One gang at a time uses a checkpoint address. The next gang may use it once the one before has ended."""

import json
import multiprocessing
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from flytekitplugins.daskpytorch import GangStartError
from flytekitplugins.daskpytorch.driver.storage import claimed
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from flytekitplugins.daskpytorch.rank.checkpoint import write_checkpoint
from flytekitplugins.daskpytorch.settings import Gang
from flytekitplugins.daskpytorch.sweep.storage import SweepStorage
from seaweed import Weed

OTHERS = {"id": "theirs", "name": "flows.train", "host": "node-7", "pid": 4711}


@pytest.fixture(params=["folder", "s3"])
def paths(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoragePaths:
    """Where two gangs would keep their checkpoints."""
    uri, options = str(tmp_path / "kept"), {}
    if request.param == "s3":
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


def leave(paths: StoragePaths) -> None:
    """A claim of another gang's."""
    paths.files.write(f"{paths.own}/claim.json", json.dumps({**OTHERS, "since": time.time() - 90}).encode())


def test_a_second_gang_is_refused_and_one_after_the_end_goes_on_at_once(paths: StoragePaths) -> None:
    context = multiprocessing.get_context("fork")
    has_started = context.Event()
    child = context.Process(target=lambda: (has_started.set(), time.sleep(60)))
    with claimed(paths, "flows.first"):
        child.start()
        has_started.wait(60)
        pattern = r"in use by flows\.first on .* \(process \d+\), which began at .* UTC by its clock.*Gang\(key=...\)"
        with pytest.raises(GangStartError, match=pattern), claimed(paths, "flows.second"):
            pass
        assert written(paths)["name"] == "flows.first"
    with claimed(paths, "flows.second"):  # though a fork of the first outlives it
        assert written(paths)["name"] == "flows.second"
    assert not paths.files.fs.exists(f"{paths.own}/claim.json")
    child.kill()
    child.join()


def test_a_gang_of_another_machine_is_taken_over_at_once(
    paths: StoragePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(paths)
    with claimed(paths, "flows.second"):
        assert written(paths)["name"] == "flows.second"
    assert f"{paths.own}: taken over from flows.train on node-7 (process 4711), which began at 20" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [b"", b'{"id": "the', b"\xff\x00", b"[]"])
def test_a_damaged_claim_is_taken_over(paths: StoragePaths, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{paths.own}/claim.json"
    paths.files.write(path, content)
    with claimed(paths, "flows.second"):
        assert "taken over from a gang whose claim cannot be read" in capsys.readouterr().err
        assert written(paths)["name"] == "flows.second"
    assert not paths.files.fs.exists(path)


DIES = """
import os, sys
from flytekitplugins.daskpytorch.driver.storage import claimed
from flytekitplugins.daskpytorch.protocol.files import Files
from flytekitplugins.daskpytorch.protocol.host import StoragePaths
from fsspec.implementations.local import LocalFileSystem
files, own = Files(LocalFileSystem()), sys.argv[1]
with claimed(StoragePaths(files=files, previous=own, own=own, is_claimed=True), "first"):
    os.kill(os.getpid(), 9)
"""


def test_a_process_of_this_machine_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    own = str(tmp_path / "same")
    killed = subprocess.run([sys.executable, "-c", DIES, own], check=False)
    assert killed.returncode == -9
    assert (tmp_path / "same" / "claim.json").exists()
    again = StoragePaths(files=Files(fsspec.filesystem("file")), previous=own, own=own, is_claimed=True)
    with claimed(again, "second"):
        assert written(again)["name"] == "second"


def test_a_gang_that_a_newer_one_has_taken_over_ends_before_its_next_write(paths: StoragePaths, tmp_path: Path) -> None:
    def train() -> None:
        lost = threading.Event()
        with claimed(paths, "flows.first", lost.set) as own:
            vault = Vault(Gang(), own, tmp_path)
            vault.add(write_checkpoint(tmp_path, {}, CheckpointEntry(attempt=0, step=1)))
            assert vault.flush(60)
            before = paths.files.fs.find(paths.own)
            leave(paths)
            vault.add(write_checkpoint(tmp_path, {}, CheckpointEntry(attempt=0, step=2)))
            assert lost.wait(60)
            vault.flush(60)
            assert paths.files.fs.find(paths.own, refresh=True) == before
            raise RuntimeError("cancelled")

    with pytest.raises(GangStartError, match=r"was taken over by flows\.train on node-7 "):
        train()
    assert written(paths)["id"] == "theirs"


def test_storage_without_rights_costs_a_line(
    paths: StoragePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no rights")

    monkeypatch.setattr(Files, "write", refuse)
    with claimed(paths, "flows.first") as own:
        assert own is not None
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
