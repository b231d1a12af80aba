"""Real ranks that call mismatched collectives: their records, and the error that names the mismatch."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from flytekitplugins.daskpytorch import GangError, GangHungError, current_rank
from gangs import on_this_machine

IN_ALL_REDUCE = "all_reduce of Float [3], waiting, called from:\n    File "


def error_of(function: Callable[[], None], **settings: float) -> BaseException:
    """What two ranks on this machine end with."""
    error = on_this_machine(function, max_restarts=0, **settings).exception()
    assert error is not None
    return error


def call_two_operations() -> None:
    dist.barrier()
    tensor = torch.zeros(3)
    if current_rank().is_main:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, 0)
        dist.broadcast(tensor, 1)


def bring_two_shapes() -> None:
    dist.barrier()
    dist.all_reduce(torch.zeros(3 + 1000 * current_rank().rank))


def loop_endlessly() -> None:
    dist.barrier()
    dist.init_process_group(timeout=timedelta(seconds=2))
    while not current_rank().is_main:
        time.sleep(0.01)
    dist.all_reduce(torch.zeros(3))


def test_hang_of_two_operations_names_both_with_their_lines() -> None:
    error = error_of(call_two_operations, hang_timeout=2.5)
    assert isinstance(error, GangHungError)
    assert error.rank == 1
    assert (
        "rank 1 called broadcast of Float [3] as collective 2 of the default group (gloo), rank 0 all_reduce of "
        "Float [3]" in error.cause
    )
    assert f"rank 0: {IN_ALL_REDUCE}" in str(error)
    assert "in call_two_operations" in str(error)


def test_rank_that_gloo_aborts_for_another_shape_has_said_which() -> None:
    error = error_of(bring_two_shapes)
    assert isinstance(error, GangError)
    assert "SIGABRT" in error.cause
    assert "collective 2 of the default group (gloo), rank 0 all_reduce of Float [3]" in str(error)
    assert "all_reduce of Float [1003]" in str(error)
    assert f"rank 0: {IN_ALL_REDUCE}" in str(error)


def test_time_out_names_the_rank_that_was_waited_for_and_where_it_was() -> None:
    error = error_of(loop_endlessly)
    assert isinstance(error, RuntimeError)
    told = str(error.__cause__)
    assert "rank 1 has not called collective 2 of the default group (gloo), all_reduce of Float [3]" in told
    assert f"rank 0: {IN_ALL_REDUCE}" in told
    assert "in loop_endlessly" in told[told.index("rank 1 was in:") :]


def test_hang_without_the_recorder_is_told_by_the_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    error = error_of(call_two_operations, hang_timeout=2.5)
    assert isinstance(error, GangHungError)
    assert "flight recorder" not in str(error)
    assert "all ranks wait for each other" in error.cause
    assert str(error).count("in call_two_operations") == 2
