"""A rank ends as a Python program does. Each other kind of end is reported. Cancels during the start leave nothing."""

import atexit
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client
from flytekit import task
from flytekit.core.context_manager import FlyteContextManager
from flytekit.models.literals import LiteralMap
from torch.utils.data import DataLoader

from flytekitplugins.daskpytorch import Gang, GangError, SpawnDDP, current_rank, dispatch
from flytekitplugins.daskpytorch.driver import state
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.state import Deadlines
from flytekitplugins.daskpytorch.process import ending
from flytekitplugins.daskpytorch.rank import main
from gangs import Notes, on_this_machine
from processes import num_open_files, until

ONCE = Gang(max_restarts=0)
MAX_WAIT = 600.0
"""Seconds, on a busy machine, for what would take hours otherwise."""
AMPLE = 10.0
"""Seconds for the exit functions of failed ranks in place of one: a busy machine needs more."""


# ---- What the ranks run


def end_by(codes: list[int | None]) -> str:
    """Meet the others for the last time, and exit, each rank by its code; rank 0 goes on for a while, and returns."""
    import torch.distributed as dist

    dist.barrier()
    if current_rank().is_main:
        time.sleep(0.3)  # its export
        return "exported"
    sys.exit(codes[current_rank().rank])


class TogetherError(ValueError):
    """Is reported once both ranks have raised it, so that the gang ends none of them before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        (self.folder / f"raised-{current_rank().rank}").touch()
        until(lambda: len(list(self.folder.glob("raised-*"))) == 2, "the other rank's exception")
        return TogetherError, (self.folder,)


def fail_together(folder: Path, *, has_thread: bool) -> None:
    """Fail in both ranks with an open file and an exit function, perhaps while a thread still works."""
    rank = current_rank().rank
    KEPT.append(file := (folder / str(rank)).open("w"))
    file.write("all of it")
    if not has_thread:  # whose end the rank would wait for
        main.EXIT_TIME = AMPLE
    else:
        threading.Thread(target=time.sleep, args=(MAX_WAIT,)).start()
    atexit.register(touch_later, folder / f"exit-{rank}")
    raise TogetherError(folder)


def fork_and_return(how: str) -> str:
    """Both the rank and a fork of it come back from here."""
    rank = current_rank()
    rank.log({"loss": 1.0}, step=1)
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        return f"rank, and its fork ended with {os.waitstatus_to_exitcode(status)}"
    rank.log({"loss": 2.0}, step=2)  # of the rank that it was
    if how == "raise":
        raise ValueError("only the fork's")
    if how == "exit":
        sys.exit(7)
    return "fork"


def leave_work_behind(folder: str) -> str:
    """Return while executors, loaders and files are open, and while threads have still to do what Python waits for."""
    pool = ProcessPoolExecutor(1)
    assert pool.submit(abs, -1).result() == 1
    batches = iter(DataLoader(range(9), num_workers=1))  # type: ignore[arg-type, var-annotated]
    next(batches)
    file = Path(folder, f"file-{current_rank().rank}").open("w")  # noqa: SIM115 - never closed
    file.write("all of it")
    KEPT.extend([pool, batches, file])  # else they would be closed as garbage
    marks = [Path(folder, f"{what}-{current_rank().rank}") for what in ("executor", "thread")]
    ThreadPoolExecutor(1).submit(touch_later, marks[0])
    threading.Thread(target=touch_later, args=(marks[1],)).start()
    return "returned"


def touch_later(path: Path) -> None:
    """Need some time for it."""
    time.sleep(0.3)
    path.touch()


def never_end() -> str:
    """Return while something goes on for ever, on each rank something else."""
    ending.NOTICE_AFTER, ending.MAX_WAIT = 0.5, 1.5
    match current_rank().rank:
        case 0:
            threading.Thread(target=time.sleep, args=(600,), name="feeder").start()
        case 1:
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="server").start()
        case _:
            atexit.register(time.sleep, 600)
    return "returned"


KEPT: list[object] = []


def return_sharded_model() -> Any:
    """Return a model as it is trained, with the loss, after a checkpoint to go on from."""
    from torch.distributed.fsdp import fully_shard

    current_rank().checkpoint.save({}, 1)
    current_rank().checkpoint.load(step=1)
    return fully_shard(torch.nn.Linear(2, 1)), 0.5


@task(task_config=SpawnDDP(nproc=2))
def returns_model() -> torch.nn.Module:
    """As the blog post's `train()`."""
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))


# ---- The tests


@pytest.fixture
def ample_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents give ranks so much time to end that `AMPLE` is a part of it."""

    class Ample(Deadlines):
        def __init__(self, grace_period: float) -> None:
            super().__init__(grace_period)
            self.stop = 1.5 * AMPLE

    monkeypatch.setattr(state, "Deadlines", Ample)


def test_a_rank_that_exits_with_0_has_returned_none(client: Client) -> None:
    futures = dispatch.run(client, end_by, [1, None, 0, 0], gang=Gang(max_restarts=0, ranks_per_worker=2))
    assert futures.result() == ["exported", None, None, None]


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 7)])
def test_only_the_rank_itself_reports_of_a_rank_that_forks(client: Client, how: str, code: int) -> None:
    futures = dispatch.run(client, fork_and_return, how, gang=ONCE)
    assert futures.result(MAX_WAIT) == [f"rank, and its fork ended with {code}"] * 2


def test_what_python_waits_for_at_its_end_is_done_in_a_rank(
    client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dispatch.run(client, leave_work_behind, str(tmp_path), gang=ONCE).result(MAX_WAIT) == ["returned"] * 2
    texts = {"executor": "", "thread": "", "file": "all of it"}
    wanted = {f"{what}-{rank}": text for what, text in texts.items() for rank in range(2)}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == wanted
    told = capfd.readouterr()
    assert "had not ended by then" not in told.out + told.err


@pytest.mark.usefixtures("ample_end")
@pytest.mark.parametrize("has_thread", [False, True])
def test_each_failed_rank_has_time_for_its_exit_functions_and_files_and_ends_soon(
    client: Client, tmp_path: Path, *, has_thread: bool
) -> None:
    began = time.monotonic()
    failed = dispatch.run(client, fail_together, tmp_path, has_thread=has_thread, gang=ONCE)
    assert isinstance(failed.exception(MAX_WAIT), ValueError)
    assert time.monotonic() - began < MAX_WAIT / 2  # the threads take longer
    assert len(list(tmp_path.glob("exit-?"))) == (0 if has_thread else 2)
    assert {path.name: path.read_text() for path in tmp_path.glob("?")} == {"0": "all of it", "1": "all of it"}


def test_what_would_never_end_is_ended_and_named(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    futures = dispatch.run(client, never_end, gang=replace(ONCE, ranks_per_worker=2))
    assert futures.result(MAX_WAIT) == ["returned"] * 4
    told = capfd.readouterr()
    for rank, named in enumerate(("thread 'feeder'", "process 'server' (pid ", "an exit function")):
        assert f"rank {rank} has ended, and its process waits for at most 1.5 s for {named}" in told.out + told.err
        assert f"rank {rank} is ended after 1.5 s, with what had not ended by then: {named}" in told.out + told.err
    assert "most recent call first" in told.out + told.err


def test_a_sharded_model_is_refused_in_its_rank_and_not_trained_again(client: Client) -> None:
    gang = Gang(max_restarts=1, observers=(lambda: notes,))
    notes = Notes()
    with pytest.raises(TypeError, match=r"a FSDPLinear belongs to all ranks together.*get_model_state_dict") as caught:
        dispatch.run(client, return_sharded_model, gang=gang).result()
    assert isinstance(caught.value.__cause__, GangError)
    assert (notes.kept_steps, notes.resumed_steps) == ([1], [])


def test_a_task_leaves_a_model_that_loads_without_a_group() -> None:
    made = returns_model.dispatch_execute(FlyteContextManager.current_context(), LiteralMap(literals={}))
    written = made.literals["o0"].scalar.blob.uri
    assert type(torch.load(written, weights_only=False)) is torch.nn.Linear


# ---- Cancels during the start


def start() -> GangFutures:
    return on_this_machine(os.getpid, max_restarts=0)


def test_cancels_in_the_start_up_leave_no_agent_no_thread_and_no_file() -> None:
    others = ours()
    assert len(start().result()) == 2  # the fork server stays
    until(lambda: ours() <= others, lambda: f"the first gang's threads to end: {ours() - others}")
    files = num_open_files()
    for moment in range(8):
        futures = start()
        time.sleep(0.008 * moment)
        futures.cancel()
        if futures.exception() is not None:
            with pytest.raises(CancelledError):
                futures.result()
    until(lambda: ours() <= others, lambda: f"the threads to end: {ours() - others}")
    until(lambda: num_open_files() <= files, "the files to be closed")


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("daskpytorch-")}
