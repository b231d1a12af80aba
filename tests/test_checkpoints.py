"""The driver keeps complete checkpoints only, refuses those of earlier attempts, and finds the newest undamaged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver import manifest
from flytekitplugins.daskpytorch.driver.manifest import find
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile, link_file
from flytekitplugins.daskpytorch.protocol.framing import MAX_PIECE, Connection
from flytekitplugins.daskpytorch.protocol.messages import Upload
from processes import ends

NUM_KEPT = Keep().last
SIZE = 3 * MAX_PIECE + 17


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """The folder of the agent, where ranks leave their checkpoints."""
    (tmp_path / "agent").mkdir()
    return tmp_path / "agent"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The driver's."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Vault:
    return Vault(None, Keep(), folder)


def write(agent: Path, step: int, attempt: int = 0, size: int = SIZE) -> CheckpointFile:
    """A checkpoint as a rank leaves it with its agent."""
    data = hashlib.shake_128(str(step).encode()).digest(size)
    file = CheckpointFile(attempt=attempt, step=step, size=size, digest=hashlib.sha256(data).hexdigest())
    (agent / file.name).write_bytes(data)
    return file


@contextlib.contextmanager
def sending(path: Path) -> Iterator[Connection]:
    """The receiving end of a connection over which a file comes."""
    ours, theirs = ends()

    def send() -> None:
        with contextlib.closing(theirs), contextlib.suppress(OSError):
            theirs.send_file(path)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with contextlib.closing(ours):
            yield ours
    finally:
        thread.join()
    assert not thread.is_alive()


def upload(checkpoints: Vault, agent: Path, file: CheckpointFile) -> None:
    with sending(agent / file.name) as connection:
        checkpoints.serve(connection, Upload(file))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


# ---- Keeping --------------------------------------------------------------------------------------------------------


def test_same_checkpoint_again_takes_no_place_of_another(checkpoints: Vault, agent: Path, folder: Path) -> None:
    first, second = write(agent, 1, size=100), write(agent, 2, size=100)
    for file in (first, second, *[first] * NUM_KEPT):
        upload(checkpoints, agent, file)
    assert checkpoints.newest() == first
    assert names(folder) == sorted([first.name, second.name])


# ---- The best --------------------------------------------------------------------------------------------------------

BEST = Keep(last=1, best=1, metric="loss")


def keep_all(checkpoints: Vault, agent: Path, **losses: float) -> list[CheckpointFile]:
    files = []
    for number, loss in losses.items():
        file = write(agent, int(number.removeprefix("step")), size=100)
        files.append(replace(file, metrics={"loss": loss}))
        upload(checkpoints, agent, files[-1])
    return files


def test_the_same_again_without_metrics_is_as_good_as_it_was(agent: Path, folder: Path) -> None:
    checkpoints = Vault(None, BEST, folder)
    [best] = keep_all(checkpoints, agent, step1=0.1)
    upload(checkpoints, agent, write(agent, 1, size=100))
    keep_all(checkpoints, agent, step2=0.2)
    assert [(file.step, file.metrics) for file in checkpoints.entries()] == [(1, {"loss": 0.1}), (2, {"loss": 0.2})]
    assert find(checkpoints.intact(), BEST, None) == best


# ---- Damage on the disk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["damaged", "truncated", "missing"])
def test_newest_that_is_not_whole_is_passed_over(
    checkpoints: Vault, agent: Path, folder: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(agent, step) for step in (2, 1)]  # the newest came last, whatever its step is
    for file in files:
        upload(checkpoints, agent, file)
    newest = folder / files[1].name
    if how == "damaged":
        flip_a_byte(newest)
    elif how == "truncated":
        os.truncate(newest, SIZE - 1)
    else:
        newest.unlink()
    assert checkpoints.newest() == files[0]
    assert "the checkpoint of step 1 is damaged" in capsys.readouterr().err


def test_a_file_is_not_read_again_while_nobody_writes_to_it(
    checkpoints: Vault, agent: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(agent, 1)
    upload(checkpoints, agent, file)
    read: list[Path] = []
    monkeypatch.setattr(manifest, "digest_of", lambda path: read.append(path) or file.digest)
    assert checkpoints.newest() == file
    assert not read
    os.utime(folder / file.name)  # as whoever writes would leave it
    assert checkpoints.newest() == file
    assert read == [folder / file.name]


def test_when_all_are_damaged_there_is_none_until_the_next_comes(checkpoints: Vault, agent: Path, folder: Path) -> None:
    for step in (1, 2):
        upload(checkpoints, agent, write(agent, step))
    for path in folder.iterdir():
        flip_a_byte(path)
    assert checkpoints.newest() is None
    file = write(agent, 2)  # the same bytes as the damaged one
    upload(checkpoints, agent, file)
    assert checkpoints.newest() == file


# ---- Older attempts ----------------------------------------------------------------------------------------------


def test_checkpoint_of_an_older_attempt_is_refused(checkpoints: Vault, agent: Path, folder: Path) -> None:
    kept = write(agent, 1, attempt=0)
    upload(checkpoints, agent, kept)
    checkpoints.fence(1)
    with pytest.raises(ValueError, match="of attempt 0 came when attempt 1 was running"):
        upload(checkpoints, agent, write(agent, 2, attempt=0))
    assert checkpoints.newest() == kept  # what was taken before stays good
    assert names(folder) == [kept.name]


def test_attempt_that_ends_during_the_transfer_is_refused(checkpoints: Vault, agent: Path) -> None:
    file = write(agent, 1, attempt=0)
    data = (agent / file.name).read_bytes()
    errors: list[Exception] = []
    ours, theirs = ends()

    def take() -> None:
        try:
            checkpoints.serve(theirs, Upload(file))
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    ours._sock.sendall(data[:100])
    checkpoints.fence(1)
    ours._sock.sendall(data[100:])
    thread.join()
    assert "of attempt 0 came when attempt 1 was running" in str(errors[0])
    assert checkpoints.newest() is None


# ---- On the agent's machine: the same file under a second name ------------------------------------------------------


def lend(checkpoints: Vault, agent: Path, folder: Path, file: CheckpointFile) -> None:
    """What the agent does, and then says."""
    assert link_file(agent / file.name, folder)
    checkpoints.add(file)


@pytest.mark.parametrize("what", ["of an older attempt", "torn"])
def test_a_file_that_is_there_and_does_not_count_is_removed(
    checkpoints: Vault, agent: Path, folder: Path, what: str
) -> None:
    file = write(agent, 1)
    if what == "torn":
        os.truncate(agent / file.name, SIZE - 1)
    else:
        checkpoints.fence(1)
    with pytest.raises(ValueError, match="bytes, not" if what == "torn" else "of attempt 0 came when attempt 1"):
        lend(checkpoints, agent, folder, file)
    assert (checkpoints.newest(), names(folder)) == (None, [])


def test_a_late_file_of_an_older_attempt_leaves_an_equal_checkpoint_of_this_attempt(
    checkpoints: Vault, agent: Path, folder: Path
) -> None:
    file = write(agent, 1, attempt=1)
    checkpoints.fence(1)
    lend(checkpoints, agent, folder, file)
    with pytest.raises(ValueError, match="of attempt 0 came when attempt 1"):
        lend(checkpoints, agent, folder, replace(file, attempt=0))
    assert (checkpoints.newest(), names(folder)) == (file, [file.name])


def test_a_second_name_replaces_another_file_and_is_not_to_be_had_where_there_is_no_such_folder(
    agent: Path, folder: Path
) -> None:
    file = write(agent, 1)
    (folder / file.name).write_text("damaged")
    assert link_file(agent / file.name, folder)
    assert link_file(agent / file.name, folder)  # it is there already
    assert (folder / file.name).samefile(agent / file.name)
    assert not link_file(agent / file.name, folder / "of another machine")
    assert not link_file(agent / "not there", folder)
    assert names(folder) == [file.name]


# ---- What does not arrive -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("how", ["torn", "damaged"])
def test_upload_that_is_not_whole_leaves_what_was_there(
    checkpoints: Vault, agent: Path, folder: Path, how: str, *, is_there: bool
) -> None:
    file = write(agent, 1)
    if is_there:
        upload(checkpoints, agent, file)
    if how == "damaged":
        flip_a_byte(agent / file.name)
    else:
        os.truncate(agent / file.name, SIZE // 100)
    reason = "the checkpoint of step 1 was damaged during its transfer" if how == "damaged" else None
    with pytest.raises((EOFError, ValueError), match=reason):
        upload(checkpoints, agent, file)
    assert checkpoints.newest() == (file if is_there else None)
    assert names(folder) == ([file.name] if is_there else [])
