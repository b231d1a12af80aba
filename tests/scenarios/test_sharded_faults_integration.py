"""Sharded checkpoints of gangs survive ranks that die at set moments, and failing or full storage."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from s3fs import S3FileSystem

from fault_proxy import RESET, UNAVAILABLE, Fault, FaultProxy, denied, late
from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from gangs import Notes, on_this_machine
from processes import small_disk, until
from seaweed import Weed

pytestmark = pytest.mark.usefixtures("one_fork_server")

DOOMED_STEP = 3
DOOMED = {"in mid upload": 1, "at .metadata": 0, "at the report": 0, "after the commit": 1}
"""Moment of a save -> the rank that is killed then."""


def train(steps: int, size: int = 4, moment: str = "", gates: str | None = None) -> list[int]:
    """Sum the steps up, in a tensor of this size: from which one it went on, and the sum.

    Args:
        steps: How many there are.
        size: Of the tensor.
        moment: When a rank kills itself in the save of one step, in its first life.
        gates: A folder; before each step there must be a file of its number.
    """
    from flytekitplugins.daskpytorch.rank import shards

    shards.RETRY_AFTER = (0.1, 0.2, 0.4)
    rank, state = current_rank(), {"sum": torch.zeros(size)}
    first = rank.checkpoint.load_sharded(state) or 0
    for step in range(first + 1, steps + 1):
        while gates is not None and not Path(gates, str(step)).exists():
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
        state["sum"] += step
        is_doomed = step == DOOMED_STEP and moment and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_doomed and rank.rank == DOOMED[moment]:
            doom(moment)
        rank.checkpoint.save_sharded({"sum": state["sum"], "own": state["sum"] + rank.rank} if moment else state, step)
        rank.checkpoint.flush()
        while is_doomed:  # nobody is further when the rank dies
            time.sleep(0.01)
            if moment == "after the commit" and rank.rank == 1 and step in [one.step for one in rank.checkpoint.list()]:
                os.kill(os.getpid(), signal.SIGKILL)
    return [first, int(state["sum"][0])]


def doom(moment: str) -> None:
    """Have this process killed at a moment of its next save."""
    from flytekitplugins.daskpytorch.rank import sharded, shards

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    match moment:
        case "in mid upload":
            real = shards.HashedStream.write
            shards.HashedStream.write = lambda self, data: (real(self, data), die())
        case "at the report":
            sharded.Written = die
        case "at .metadata":
            shards.ShardWriter.finish = die


def run(uri: str, *args: Any, **how: Any) -> tuple[GangFutures, Notes]:
    """A gang of two ranks that keeps its checkpoints there."""
    notes = Notes()
    return on_this_machine(functools.partial(train, **how), *args, checkpoint_uri=uri, observers=[notes]), notes


@pytest.mark.parametrize("moment", DOOMED)
def test_rank_that_is_killed_in_a_save_costs_no_more_than_that_save(tmp_path: Path, moment: str) -> None:
    futures, notes = run(str(tmp_path), 5, moment=moment)
    first = DOOMED_STEP if moment == "after the commit" else DOOMED_STEP - 1
    assert futures.result() == [[first, 15]] * 2, notes.texts
    assert notes.resumed_steps == [first]
    assert notes.kept_steps == [1, 2, *([3] if first == 3 else []), *range(first + 1, 6)]
    there = sorted(f"{path.parent.name}/{path.name[0]}" for path in (tmp_path / "gang").glob("step-*/*"))
    assert there == ["step-4/1", "step-5/1"]


# ---- Storage --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(weed: Weed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Has driver and ranks reach it by an endpoint; the URI."""
    weed.make_bucket("faults")

    def enter(endpoint: str) -> str:
        for name, value in weed.env(endpoint).items():
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # what it has opened before knows another endpoint
        return f"s3://faults/{tmp_path.name}"

    yield enter
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("fault", [denied("ExpiredToken"), UNAVAILABLE, RESET], ids=["token", "503", "reset"])
def test_storage_that_fails_while_shards_are_written_or_committed_costs_a_line(
    proxy: FaultProxy, bucket: Callable[..., str], fault: Fault
) -> None:
    uri = bucket(proxy.endpoint)
    for key, times in ((".distcp", 3), (".metadata", 1), ("manifest.json", 1)):
        proxy.fail(fault, key=key, times=times, methods=("PUT", "POST"))
    futures, notes = run(uri, 3)
    assert futures.result() == [[0, 6]] * 2
    assert notes.kept_steps == [1, 2, 3]


def save_and_fail() -> None:
    """A whole checkpoint that the driver has, perhaps not storage yet."""
    current_rank().checkpoint.save({"step": 1}, 1)
    current_rank().checkpoint.flush()
    dist.barrier()  # rank 1 has nothing to save, and must not fail first
    raise LookupError("no such label")


def test_gang_that_fails_waits_for_its_newest_checkpoint_to_reach_slow_storage(
    proxy: FaultProxy, bucket: Callable[..., str]
) -> None:
    uri = bucket(proxy.endpoint)
    proxy.fail(late(1.0), methods=("PUT",))
    with pytest.raises(LookupError, match="no such label"):
        on_this_machine(save_and_fail, checkpoint_uri=uri, max_restarts=0, grace_period=100.0).result()
    assert S3FileSystem().exists(f"{uri}/gang/manifest.json")


def test_disk_that_is_full_costs_the_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    with small_disk(tmp_path / "disk", "8m") as disk:
        futures, notes = run(str(disk), 3, size=1 << 18, gates=str(gates))
        (gates / "1").touch()
        until(lambda: notes.kept_steps == [1] or futures.done(), "the first checkpoint")
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(16 << 20))
        (gates / "2").touch()
        until(lambda: notes.told("of step 2 was not kept") or futures.done(), "the second to be given up")
        filler.unlink()
        (gates / "3").touch()
        assert futures.result() == [[0, 6]] * 2
        assert notes.kept_steps == [1, 3]
        assert notes.told(r"was not kept \(OSError: \[Errno 28\] No space left on device .*\(rank \d\)")


# ---- Programs that do not wait for a save ---------------------------------------------------------------------------


STATE = {str(number): torch.zeros(2) for number in range(40)}


def write_slowly() -> None:
    """Have rank 1 take two seconds for a save of `STATE`."""
    from flytekitplugins.daskpytorch.rank import shards

    if current_rank().rank == 1:
        stream: Any = shards.HashedStream
        shards.HashedStream = lambda write: (time.sleep(0.1), stream(write))[1]


def save_and_leave(*, destroys: bool) -> None:
    write_slowly()
    current_rank().checkpoint.save_sharded(STATE, 1)
    if destroys:
        dist.destroy_process_group()


@pytest.mark.parametrize("destroys", [True, False])
def test_save_counts_that_a_program_does_not_wait_for(tmp_path: Path, destroys: bool) -> None:
    notes = Notes()
    leave = functools.partial(save_and_leave, destroys=destroys)
    futures = on_this_machine(leave, checkpoint_uri=str(tmp_path), observers=[notes])
    assert futures.result() == [None] * 2, notes.texts
    assert notes.kept_steps == [1], notes.texts


def save_twice() -> None:
    """Rank 0 waits in the second call for rank 1's first save."""
    write_slowly()
    for step in (1, 2):
        current_rank().checkpoint.save_sharded(STATE, step)


def test_ranks_that_wait_for_anothers_slow_save_do_not_hang(tmp_path: Path) -> None:
    notes = Notes()
    futures = on_this_machine(save_twice, checkpoint_uri=str(tmp_path), observers=[notes], hang_timeout=1.0)
    assert futures.result() == [None] * 2, notes.texts
    assert notes.kept_steps == [1, 2]
