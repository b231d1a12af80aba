"""The driver keeps complete checkpoints only, refuses those of earlier attempts, and finds the newest undamaged."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins.daskpytorch import Keep
from flytekitplugins.daskpytorch.driver.manifest import find
from flytekitplugins.daskpytorch.driver.vault import Vault
from flytekitplugins.daskpytorch.protocol.checkpoints import CheckpointEntry, digest_of
from test_vault import flip_a_byte

SIZE = 5_000


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


def write(agent: Path, step: int, attempt: int = 0) -> CheckpointEntry:
    """A checkpoint as a rank leaves it with its agent."""
    data = hashlib.shake_128(str(step).encode()).digest(SIZE)
    file = CheckpointEntry(attempt=attempt, step=step, size=SIZE, digest=hashlib.sha256(data).hexdigest())
    (agent / file.name).write_bytes(data)
    return file


def upload(
    checkpoints: Vault, agent: Path, file: CheckpointEntry, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """A checkpoint comes over a connection, in two pieces, between which something may happen."""
    data = (agent / file.name).read_bytes()

    def pieces(size: int, what: str) -> Iterator[bytes]:
        yield data[:10]
        meanwhile()
        if len(data) < size:
            raise EOFError(what)
        yield data[10:]

    connection: Any = SimpleNamespace(pieces=pieces)
    if (refusal := checkpoints.receive(connection, file)) is not None:
        raise ValueError(refusal)
    checkpoints.add(file)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- The best --------------------------------------------------------------------------------------------------------

BEST = Keep(last=1, best=1, metric="loss")


def test_the_same_again_without_metrics_is_as_good_as_it_was(agent: Path, folder: Path) -> None:
    checkpoints = Vault(None, BEST, folder)
    best, newest = (replace(write(agent, step), metrics={"loss": step / 10}) for step in (1, 2))
    for file in (best, replace(best, metrics={}), newest):
        upload(checkpoints, agent, file)
    assert [(file.step, file.metrics) for file in checkpoints.entries()] == [(1, {"loss": 0.1}), (2, {"loss": 0.2})]
    assert find(checkpoints.intact(), BEST, None) == best


# ---- Damage on the disk ---------------------------------------------------------------------------------------------


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


def test_checkpoint_of_an_older_attempt_takes_no_space(checkpoints: Vault, agent: Path, folder: Path) -> None:
    checkpoints.fence(1)
    with pytest.raises(ValueError, match="of attempt 0 came when attempt 1 was running"):
        upload(checkpoints, agent, write(agent, 1))
    assert names(folder) == []


def test_attempt_that_ends_during_the_transfer_is_refused(checkpoints: Vault, agent: Path, folder: Path) -> None:
    kept, file = write(agent, 1, attempt=0), write(agent, 2, attempt=0)
    upload(checkpoints, agent, kept)
    with pytest.raises(ValueError, match="of attempt 0 came when attempt 1 was running"):
        upload(checkpoints, agent, file, lambda: checkpoints.fence(1))
    assert checkpoints.newest() == kept  # what was taken before stays good
    assert names(folder) == [kept.name]


# ---- On the driver's machine ----------------------------------------------------------------------------------------


def write_here(checkpoints: Vault, agent: Path, folder: Path, file: CheckpointEntry) -> None:
    """Rank 0 writes a file to the driver's folder, and reports it."""
    shutil.copyfile(agent / file.name, folder / file.name)
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
        write_here(checkpoints, agent, folder, file)
    assert (checkpoints.newest(), names(folder)) == (None, [])


def test_a_late_file_of_an_older_attempt_leaves_an_equal_checkpoint_of_this_attempt(
    checkpoints: Vault, agent: Path, folder: Path
) -> None:
    file = write(agent, 1, attempt=1)
    checkpoints.fence(1)
    write_here(checkpoints, agent, folder, file)
    with pytest.raises(ValueError, match="of attempt 0 came when attempt 1"):
        write_here(checkpoints, agent, folder, replace(file, attempt=0))
    assert (checkpoints.newest(), names(folder)) == (file, [file.name])


def test_a_lent_file_stays_whatever_the_policy_removes_until_the_next_attempt(
    checkpoints: Vault, agent: Path, folder: Path
) -> None:
    lent, *later = (write(agent, step) for step in range(4))
    write_here(checkpoints, agent, folder, lent)
    checkpoints.lend(lent)
    checkpoints.lend(lent)  # each rank may ask
    for file in later:
        write_here(checkpoints, agent, folder, file)
    assert not (folder / lent.name).exists()
    assert digest_of(checkpoints.lent / lent.name) == lent.digest
    checkpoints.take_back()
    assert names(folder) == sorted(file.name for file in checkpoints.entries())


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
