"""Real deadlocked ranks end within seconds, with an error that names them. Slow programs run on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from flytekitplugins.daskpytorch import GangHungError, current_rank
from gangs import on_this_machine

LIMIT = 250.0
"""Seconds that keep a hang out: without a proof these gangs take more, and another attempt after it."""


def return_before_a_barrier() -> None:
    dist.all_reduce(torch.ones(2))
    if current_rank().is_main:
        dist.barrier()


def exit_before_objects_are_gathered() -> None:
    if not current_rank().is_main:
        sys.exit(0)
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, 1)


def return_before_a_message() -> None:
    if current_rank().is_main:
        dist.recv(torch.ones(2), 1)


def receive_from_each_other() -> None:
    dist.recv(torch.ones(2), 1 - current_rank().rank)


def receive_what_is_never_sent() -> None:
    if current_rank().is_main:
        dist.recv(torch.ones(2), 1)
    dist.barrier()


def return_before_the_last_batch() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(3 + current_rank().is_main):
        model(torch.ones(1, 2)).sum().backward()


def call_two_groups_in_another_order() -> None:
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if current_rank().is_main else reversed(groups):
        dist.all_reduce(torch.ones(2), group=group)


@pytest.mark.parametrize(
    ("function", "rank", "told"),
    [
        (return_before_a_barrier, 1, "barrier, in which rank 0 waits; its function has returned"),
        (exit_before_objects_are_gathered, 1, "exit code 0"),
        (return_before_a_message, 1, "rank 1 returned while rank 0 waits in recv"),
        (receive_from_each_other, None, "rank 1 waits in recv while rank 0 waits in recv"),
        (receive_what_is_never_sent, None, "rank 1 waits in barrier while rank 0 waits in recv"),
        (return_before_the_last_batch, 1, "its function has returned"),
        (call_two_groups_in_another_order, None, "the ranks wait in a circle"),
    ],
)
def test_deadlock_is_proved_within_seconds(function: Callable[[], None], rank: int | None, told: str) -> None:
    began = time.monotonic()
    error = on_this_machine(function).exception()
    assert time.monotonic() - began < LIMIT
    assert isinstance(error, GangHungError)
    assert rank in (None, error.rank)
    assert told in str(error)
    assert "Not started again, because it is certain to come again." in str(error)
    assert function.__name__ in str(error)


def evaluate_on_one_rank() -> int:
    if current_rank().is_main:
        time.sleep(7)
    dist.barrier()
    if current_rank().is_main:
        time.sleep(7)  # an export
    return current_rank().rank


def test_ranks_that_wait_for_one_that_works_are_left_alone() -> None:
    assert on_this_machine(evaluate_on_one_rank).result() == [0, 1]
