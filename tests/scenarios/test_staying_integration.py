"""A gang that stays keeps its ranks from call to call, outlives their exceptions and ends with a lost rank.

All processes are real. `benchmarks/chaos.py --staying 20` draws kills and Ctrl-C, in a call and between two.
"""

import gc
import importlib
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangError, current_rank, dispatch
from processes import MAX_SECONDS, nothing_left_behind, num_open_files, running, until

COUNTS: list[int] = []
"""State of this module, which each rank has for itself."""


def load(size: int) -> torch.Tensor:
    return torch.full((size,), float(current_rank().rank + 1))


def total(values: torch.Tensor, factor: float = 1.0) -> tuple[int, float]:
    """The rank's process, and what only a formed gang has."""
    COUNTS.append(1)
    result = values.sum()
    dist.all_reduce(result)
    current_rank().log({"total": result.item()}, step=len(COUNTS))
    return os.getpid(), factor * result.item()


def fails_on(rank: int, then: str = "") -> int:
    """One rank raises, and the others return, or wait in a collective for ever."""
    if current_rank().rank == rank:
        raise ZeroDivisionError(f"rank {rank} has divided by zero")
    if then == "barrier":
        dist.barrier()
    return len(COUNTS)


def add(values: torch.Tensor) -> None:
    values += 1


def numbers_of(array: np.ndarray, values: list[torch.Tensor]) -> tuple[float, np.ndarray, int]:
    return float(array.sum()), array[:: len(array) // 4], sum(len(each) for each in values)


def test_on_dask_workers_state_stays_exceptions_are_survived_and_a_killed_rank_ends_it(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dispatch.gang(client) as gang:
        values = gang.keep(load, 10)
        first = gang.call(total, values)
        (pid, result), (other, _) = first.result()
        assert result == 30.0
        assert pid != other
        assert first.metrics == {"total": 30.0}
        gang.call(add, values)  # no wait: the calls run in their order
        assert gang.call(total, values, factor=2.0).result() == [(pid, 100.0), (other, 100.0)]
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            gang.call(add, values, by=2).result()
        with pytest.raises(ZeroDivisionError, match="rank 1 has divided") as caught:
            gang.call(fails_on, 1).result()
        assert isinstance(caught.value.__cause__, GangError)
        assert caught.value.__cause__.rank == 1
        assert caught.value.__cause__.step is None  # that of an earlier call says nothing
        futures = gang.call(fails_on, 0)
        assert isinstance(futures[0].exception(), ZeroDivisionError)
        assert futures[1].result() == 2  # the module's state
        array = np.arange(1 << 18, dtype=np.float64)  # 2 MiB, which travel apart from the call
        assert gang.call(numbers_of, array, [values]).result()[1][0] == float(array.sum())
        os.kill(other, signal.SIGKILL)
        until(lambda: "ended" in repr(gang), "the end of the gang")
        with pytest.raises(GangError, match=r"this gang has ended.*rank 1 of 2 failed.*Begin a new gang") as ended:
            gang.call(total, values)
        assert ended.value.kind == "signal"
    with dispatch.gang(client) as again:
        assert [result for _, result in again.call(total, torch.ones(1)).result()] == [2.0, 2.0]
        with pytest.raises(LookupError, match=r"keeps no value.*gang\.keep returned its reference in another gang"):
            again.call(total, values).result()
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "imported_later.py").write_text("def f(): pass\n")
        with pytest.raises(ModuleNotFoundError, match="imported_later") as unknown:
            again.call(importlib.import_module("imported_later").f).result()
        assert unknown.value.__notes__[0].endswith("import this one, and begin anew.")
        again.close()
        with pytest.raises(GangError, match="this gang is closed"):
            again.call(total, 1)


def test_with_fewer_workers_than_wanted_a_call_has_a_future_for_each_rank_that_is_there(client: Client) -> None:
    settings = Gang(workers=3, min_workers=2)
    with dispatch.gang(client, gang=settings) as gang:
        futures = gang.call(total, torch.ones(1))
        assert [result for _, result in futures.result()] == [2.0, 2.0]
        assert len(futures) == 2


def test_a_rank_left_in_a_collective_ends_the_gang_and_a_new_one_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    settings = Gang(ranks_per_worker=2, checkpoint_uri=str(tmp_path / "kept"), key="k", hang_timeout=2.5)
    with nothing_left_behind():
        with dispatch.gang(gang=settings) as gang:
            gang.call(save, 7).result()
            with pytest.raises(ZeroDivisionError) as caught:
                gang.call(fails_on, 1, "barrier").result()
            assert "waiting for other ranks" in str(caught.value.__cause__)
            with pytest.raises(GangError, match="It goes on from the newest checkpoint"):
                gang.keep(load, 1)
        with dispatch.gang(gang=settings) as gang:
            assert gang.call(loaded).result() == [7, 7]


def save(step: int) -> None:
    current_rank().checkpoint.save({"step": step}, step)
    current_rank().checkpoint.flush()


def loaded() -> int:
    state = current_rank().checkpoint.load()
    assert state is not None
    return state["step"]


def state_of_rank() -> tuple[int, int]:
    """Numbers of descriptors and threads."""
    return num_open_files(), threading.active_count()


def log_often() -> None:
    """So that records wait, and have a thread that sends them."""
    for step in range(100):
        current_rank().log({"x": 1.0}, step=step)


def error_of_wait(futures: Sequence[Future[Any]]) -> Exception | None:
    try:
        futures[0].exception(timeout=20)
    except Exception as error:
        return error
    return None


def test_many_calls_leave_no_descriptors_and_threads_and_an_idle_gang_takes_no_time(tmp_path: Path) -> None:
    with nothing_left_behind(), dispatch.gang(gang=Gang(ranks_per_worker=2)) as gang:
        values = gang.keep(load, 10)
        for _ in range(20):
            gang.call(total, values).result()
        gang.call(log_often).result()
        ranks_before, files, threads = gang.call(state_of_rank).result(), num_open_files(), threading.active_count()
        for _ in range(200):
            kept = gang.keep(load, 5)
            assert gang.call(total, kept).result()[0][1] == 15.0
        assert gang.call(state_of_rank).result() == ranks_before
        assert num_open_files() <= files  # those of earlier tests may end meanwhile
        assert threading.active_count() <= threads
        pids = [pid for pid, _ in gang.call(total, values).result()]
        ranks = [psutil.Process(pid) for pid in pids]
        used = [sum(rank.cpu_times()[:2]) for rank in ranks]
        time.sleep(1.0)
        assert all(sum(rank.cpu_times()[:2]) - was < 0.2 for rank, was in zip(ranks, used, strict=True))
        del kept
        gc.collect()
        lock = gang.keep(make_lock)
        assert gang.call(type_of, {"lock": lock}).result() == ["lock", "lock"]
        assert gang.call(num_kept).result() == [2, 2]
        first, later, refused = gang.call(wait_for, str(tmp_path / "go")), gang.call(num_kept), []
        first[1].add_done_callback(lambda _: refused.append(error_of_wait(later)))
        (tmp_path / "go").touch()
        assert later.result() == [2, 2]
        assert [type(error) for error in refused] == [RuntimeError]  # callbacks run in the gang's thread
        began = time.monotonic()
    assert time.monotonic() - began < MAX_SECONDS
    assert not any(psutil.pid_exists(pid) for pid in pids)


def make_lock() -> Any:
    """What cannot be pickled."""
    return threading.Lock()


def type_of(values: dict[str, Any]) -> str:
    return type(values["lock"]).__name__


def num_kept() -> int:
    from flytekitplugins.daskpytorch.protocol.function import values

    return len(values)


def wait_for(path: str) -> str:
    """Until the file is there, by Python's code only."""
    Path(path + str(current_rank().rank)).touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return "done"


def test_a_waiting_call_is_dropped_a_running_one_ends_the_gang_and_closing_cancels_the_rest(tmp_path: Path) -> None:
    path = str(tmp_path / "end")
    with nothing_left_behind():
        with dispatch.gang(gang=Gang(ranks_per_worker=2)) as gang:
            running, waiting, later = gang.call(wait_for, path), gang.call(wait_for, path), gang.call(wait_for, path)
            until(lambda: all(Path(path + rank).exists() for rank in "01"), "the call")
            assert waiting.cancel()
            with pytest.raises(CancelledError, match="the call was cancelled"):
                waiting.result()
            assert not running.done()
            assert running.cancel()
            for futures in (running, later):
                with pytest.raises(CancelledError, match="gang was cancelled"):
                    futures.result()
            assert not running.cancel()
            with pytest.raises(GangError, match=r"this gang has ended.*gang was cancelled\. Begin a new gang"):
                gang.call(wait_for, path)
        Path(path).unlink(missing_ok=True)
        with dispatch.gang(gang=Gang(ranks_per_worker=2)) as gang:
            last = gang.call(wait_for, path)
            gang.close()
            with pytest.raises(CancelledError):
                last.result()


PROGRAM = """
from pathlib import Path
import torch, torch.distributed as dist
from flytekitplugins.daskpytorch import Gang, GangError, current_rank, dispatch

def busy():
    while True:
        dist.all_reduce(torch.ones(1))
        Path(f"busy-{current_rank().rank}").touch()

if __name__ == "__main__":
    with dispatch.gang(gang=Gang(ranks_per_worker=2)) as gang:
        try:
            gang.call(busy).result()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        try:
            gang.call(busy)
        except GangError as error:
            print(error, flush=True)
"""


def test_ctrl_c_in_a_call_ends_the_gang_and_a_later_call_says_so(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with nothing_left_behind(), running(["program.py"], cwd=tmp_path, log=tmp_path / "said") as program:
        until(lambda: all((tmp_path / f"busy-{rank}").exists() for rank in range(2)), "the call")
        os.killpg(program.pid, signal.SIGINT)
        code, said = program.wait(), (tmp_path / "said").read_text()
    assert (code, said.splitlines().count("interrupted")) == (0, 1), said
    [refused] = re.findall("^this gang has ended, .*", said, re.MULTILINE)
    assert "what its ranks kept is gone: gang was ended: Ctrl-C; " in refused
    assert "Begin a new gang by dispatch.gang(...)" in refused
    assert "busy: interrupted after " in said, said
