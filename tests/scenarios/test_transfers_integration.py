"""Checkpoints, large arguments and return values between the driver and real ranks travel once, and arrive whole."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.job import LARGE
from flytekitplugins.daskpytorch.protocol.messages import PIECE_SIZE
from flytekitplugins.daskpytorch.protocol.observer import Observer
from gangs import on_this_machine, put_driver_elsewhere
from processes import nothing_left_behind, run_program, until

# ---- Checkpoints


def fail_beside_a_slow_save(folder: str) -> int:
    """Rank 1 fails while rank 0's checkpoint is being written, which is slow."""
    rank, begun = current_rank(), Path(folder, "begun")
    if (state := rank.checkpoint.load()) is not None:
        return state["step"]
    save = torch.save

    def save_slowly(*args: Any) -> None:
        begun.touch()
        time.sleep(0.4)
        save(*args)

    torch.save = save_slowly
    rank.checkpoint.save({"step": 3}, 3)
    if rank.rank == 1:
        until(begun.exists, "the save to begin")
        raise ValueError("the batch is spoilt")
    time.sleep(60)
    return 0


def test_a_checkpoint_that_is_being_written_when_another_rank_fails_is_gone_on_from(tmp_path: Path) -> None:
    assert on_this_machine(fail_beside_a_slow_save, str(tmp_path), max_restarts=1).result() == [3, 3]


def train_until_kept(folder: str) -> float:
    """Save, and be killed when that is safe; the mean of what is loaded then."""
    rank = current_rank()
    state = rank.checkpoint.load()
    if state is None:
        rank.checkpoint.save({"weights": torch.full((1 << 22,), 3.0)}, 1)
        until(lambda: Path(folder, "kept").exists(), "the checkpoint to be safe")
        os.kill(os.getpid(), signal.SIGKILL)
    return float(state["weights"].mean())


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_not_a_byte_of_a_checkpoint_travels_on_the_drivers_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_elsewhere: bool
) -> None:
    class Watch(Observer):
        def on_checkpoint(self, step: int) -> None:
            (tmp_path / "kept").touch()

    sizes: list[int] = []
    read: Callable[[Connection, int], bytes] = Connection.read

    def counting(self: Connection, size: int) -> bytes:
        data = read(self, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(Connection, "read", counting)
    if is_elsewhere:
        put_driver_elsewhere(monkeypatch)
    gang = on_this_machine(train_until_kept, str(tmp_path), num_ranks=1, observers=[Watch()])
    assert gang.result() == [3.0]
    assert (sum(sizes) > 16 << 20) == is_elsewhere


# ---- Large arguments


def add_up(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> tuple[int, int, list[int]]:
    """The sums of the arguments, and what this rank has in them once all have written to theirs."""
    rank = current_rank().rank
    sums = int(array.sum()), int(tensor.sum())
    array[0] = tensor[0] = 10 + rank
    torch.distributed.barrier()
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
    return *sums, [int(array[0]), int(tensor[0])]


def run(max_restarts: int) -> GangFutures:
    array, tensor = np.ones(3 * LARGE, dtype=np.uint8), torch.ones(2 * LARGE, dtype=torch.uint8)
    return on_this_machine(add_up, array, tensor, max_restarts=max_restarts)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the calls that the driver sends, in multiples of `LARGE`."""
    noted: list[int] = []
    send = Connection.send_raw
    monkeypatch.setattr(Connection, "send_raw", lambda self, data: (noted.append(len(data) // LARGE), send(self, data)))
    return noted


def test_a_restart_has_the_arguments_again_which_came_once(sent: list[int]) -> None:
    results = run(max_restarts=1).result()
    assert results == [(3 * LARGE, 2 * LARGE, [10 + rank] * 2) for rank in range(2)]
    assert sent == [5]


def test_arguments_that_do_not_come_fail_the_gang_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "send_raw", lambda *_: None)
    error = run(max_restarts=0).exception()
    assert isinstance(error, OSError)
    assert "large arguments did not arrive on this node: EOFError: the connection closed after 0 of the" in str(error)


def total_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.sum())


def test_each_call_of_a_gang_that_stays_has_its_own_arguments(sent: list[int]) -> None:
    with dispatch.gang(gang=Gang(ranks_per_worker=2)) as gang:
        for value in (1, 2):
            array = np.full(value * LARGE, value, dtype=np.uint8)
            assert gang.call(total_of, array).result() == [value * value * LARGE] * 2
        assert gang.call(total_of, np.ones(3)).result() == [3, 3]
    assert sent == [1, 2]


# ---- Return values


SIZE = 100
"""MiB that each rank returns."""

MEMORY = f"""
import atexit
import json
from pathlib import Path
from flytekitplugins.daskpytorch import Gang, dispatch


def mebibytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def train(size):
    import torch
    from flytekitplugins.daskpytorch import current_rank

    rank = current_rank().rank
    returned = torch.full((size << 18,), float(rank))
    before = mebibytes("VmRSS")
    note = lambda: Path(f"rank-{{rank}}").write_text(str(mebibytes("VmHWM") - before))
    atexit.register(note)
    return returned


def run(size):
    return dispatch.run(None, train, size, gang=Gang(ranks_per_worker=2, max_restarts=0)).result()


if __name__ == "__main__":
    run(1)  # imports what is imported late
    before = mebibytes("VmRSS")
    results = run({SIZE})
    growth = mebibytes("VmHWM") - before
    print(json.dumps([[returned.mean().item() for returned in results], growth]))
"""


def test_the_driver_holds_little_more_than_the_results_and_a_rank_no_copy(tmp_path: Path) -> None:
    (tmp_path / "memory.py").write_text(MEMORY)
    with nothing_left_behind():
        ran = run_program(["memory.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    values, growth = json.loads(ran.stdout)
    assert values == [0.0, 1.0]
    assert growth < 2.5 * SIZE
    assert [float((tmp_path / f"rank-{rank}").read_text()) < 0.5 * SIZE for rank in range(2)] == [True, True]


class DiesOnItsWay:
    """Ends the rank that pickles it, once."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.trace.exists():
            self.trace.touch()
            os._exit(9)
        return str, ("it is here",)


def return_much(trace: str) -> tuple[bytes, object]:
    rank = current_rank().rank
    return bytes([rank]) * (3 * PIECE_SIZE), DiesOnItsWay(Path(trace)) if rank == 1 else None


def test_a_rank_that_dies_while_its_result_is_on_its_way_has_not_delivered(tmp_path: Path) -> None:
    results = on_this_machine(return_much, str(tmp_path / "died"), max_restarts=1).result()
    assert (tmp_path / "died").exists()
    assert [(set(data), len(data), rest) for data, rest in results] == [
        ({0}, 3 * PIECE_SIZE, None),
        ({1}, 3 * PIECE_SIZE, "it is here"),
    ]
