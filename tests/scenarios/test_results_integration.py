"""Submitted results of real gangs become files, complete and in order, whatever happens to the ranks."""

import multiprocessing
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
from distributed import Client
from flytekit import task
from flytekit.types.directory import FlyteDirectory

from flytekitplugins.daskpytorch import Gang, SpawnDDP, WorkerLostError, current_rank, dispatch
from flytekitplugins.daskpytorch.results import DaskResultsHandler
from processes import files, nothing_left_behind

ONCE = Gang(max_restarts=0)
MIB = 1 << 20

handler = DaskResultsHandler(uuid.uuid4().hex)
"""As the forerunner's users write it."""


# ---- What the ranks run


def submit_until_killed(notes: str) -> None:
    """Write down each submission after it returned, and what is on its way; killed some time after the twentieth."""
    rank = current_rank().rank
    with Path(notes, str(rank)).open("a") as note:
        number = 0
        while True:
            if number == 20:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            handler.submit_result(f"rank-{rank}/{number}", f"{number}-" + "x" * (number % 7 * 500_000))  # or pieces
            note.write(f"{number}\n")
            note.flush()
            number += 1


# ---- The tests


def test_a_killed_rank_loses_nothing_that_it_had_submitted(client: Client, tmp_path: Path) -> None:
    notes, results = tmp_path / "notes", tmp_path / "results"
    notes.mkdir()
    futures = dispatch.run(client, kill_oneself_while_submitting, str(notes), gang=ONCE)
    with pytest.raises(WorkerLostError, match="SIGKILL"):
        handler.process_results(results, futures)
    num_submitted = len((notes / "1").read_text().splitlines())
    assert num_submitted >= 20
    for number in range(num_submitted):
        assert (results / f"rank-1/{number}").read_text() == f"{number}-" + "x" * (number % 7 * 500_000)
    assert len(list((results / "rank-1").iterdir())) in (num_submitted, num_submitted + 1)  # killed before its note


def kill_oneself_while_submitting(notes: str) -> None:
    if current_rank().rank == 1:
        submit_until_killed(notes)
    time.sleep(60)


@task(task_config=SpawnDDP(nproc=2))
def train_twice(folder: str) -> FlyteDirectory:
    """The first attempt's rank 1 dies, a path is refused, and a process that is no rank tries, too."""
    import torch.distributed as dist

    rank, is_first = current_rank().rank, not Path(folder, str(current_rank().rank)).exists()
    Path(folder, str(rank)).touch()
    DaskResultsHandler("one").submit_result(f"common-{rank}", f"first {is_first}")
    DaskResultsHandler("other").submit_result(f"first-{is_first}/{rank}", "x" * (2 * MIB))
    dist.barrier()
    if is_first and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    handler.submit_result("../escaped", "bad") if rank == 1 else None
    child = multiprocessing.get_context("fork").Process(target=handler.directory)
    child.start()
    child.join()
    handler.submit_result(f"of-the-child-{rank}", str(child.exitcode))
    return handler.directory()


def test_a_task_on_its_own_node_gathers_what_two_attempts_submit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with nothing_left_behind():
        folder = Path(train_twice(folder=str(tmp_path)).path)
        assert files(folder) == {
            **{f"common-{rank}": b"first False" for rank in range(2)},
            **{f"first-{is_first}/{rank}": b"x" * (2 * MIB) for rank in range(2) for is_first in (True, False)},
            **{f"of-the-child-{rank}": b"1" for rank in range(2)},
        }
        said = capfd.readouterr().err
        assert said.count(f"rank 1 submitted for the path '../escaped' was not written below {folder}: ") == 1
        assert said.count(f"  results: {folder}\n") == 1
        assert not (folder.parent / "escaped").exists()
