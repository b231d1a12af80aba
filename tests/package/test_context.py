"""`current_rank()`: rank 0 of 1 outside a gang, plain numbers in records, silent forks, stops at the same step."""

import logging
import math
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from enum import IntEnum
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from flytekitplugins.daskpytorch import RankContext, context, current_rank
from flytekitplugins.daskpytorch.context import Link, RankAttempt, StopSignal
from flytekitplugins.daskpytorch.records import LogRecord
from gangs import Logged


@pytest.fixture
def records() -> list[LogRecord]:
    return []


@pytest.fixture
def rank_2_of_4(records: list[LogRecord]) -> Iterator[RankContext]:
    """This process as rank 2 of a gang of four, for the time of a test."""
    before = current_rank()
    context.enter(RankContext(rank=2, local_rank=1, world_size=4, local_world_size=2, link=Logged(records)))
    yield current_rank()
    context.enter(before)


def test_outside_a_gang_this_is_rank_0_of_1() -> None:
    rank = current_rank()
    assert (rank.rank, rank.local_rank, rank.world_size, rank.local_world_size) == (0, 0, 1, 1)
    assert rank.is_main


class Money(float):
    """A number of a class of the user's."""


class Level(IntEnum):
    HIGH = 3


class Colour(str):
    """A text that shows itself as another one."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (True, True),
        ("late", "late"),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (torch.tensor(7), 7),
        (torch.tensor([[4.0]], requires_grad=True), 4.0),
        (np.float32(0.5), 0.5),
        (np.array([8]), 8),
        (Money(2.5), 2.5),
        (Level.HIGH, 3),
        (Colour("red"), "red"),
    ],
)
def test_log_makes_plain_values_of_scalars_and_one_element_tensors(
    rank_2_of_4: RankContext, records: list[LogRecord], given: object, plain: object
) -> None:
    rank_2_of_4.log({"x": given})
    assert records[0].metrics == {"x": plain}
    assert type(records[0].metrics["x"]) is type(plain)


def test_steps_count_all_earlier_calls_unless_given(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    rank_2_of_4.log({"loss": 3.0})
    rank_2_of_4.log({"loss": 2.0})
    rank_2_of_4.log({"loss": 1.0}, step=100)
    rank_2_of_4.log({"loss": 0.5})
    assert [record.step for record in records] == [0, 1, 100, 3]


@pytest.mark.parametrize(
    ("given", "epoch"), [(3, 3), (2.7, 2), (True, 1), (-1, -1), (math.nan, None), (math.inf, None), ("3", None)]
)
def test_the_epoch_is_what_can_be_counted(given: object, epoch: int | None) -> None:
    assert LogRecord(rank=0, step=0, num_steps=None, time=0.0, metrics={"epoch": given}).epoch == epoch
    assert LogRecord(rank=0, step=0, num_steps=None, time=0.0, metrics={}).epoch is None


@pytest.mark.parametrize("number", [-3, True, 7.0, torch.tensor([7]), np.int64(7)])
def test_steps_are_whole_numbers(rank_2_of_4: RankContext, records: list[LogRecord], number: Any) -> None:
    rank_2_of_4.log({}, step=number, num_steps=number)
    assert (records[0].step, records[0].num_steps) == (int(number), int(number))
    assert {type(records[0].step), type(records[0].num_steps)} == {int}


def test_a_refused_step_is_no_sign_of_life(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        rank_2_of_4.log({"loss": 1.0}, step=math.nan)  # type: ignore[arg-type]
    assert (records, rank_2_of_4.progress.num_moves) == ([], 0)


def test_log_outside_a_gang_goes_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flytekitplugins.daskpytorch"):
        RankContext().log({"loss": torch.tensor(0.5)}, step=4)
        RankContext().log({"huge": 10**5_000}, step=5)
    assert "step 4: loss=0.5" in caplog.text
    assert "step 5: huge=inf" in caplog.text


def look_in_fork() -> tuple[int, int, int, int]:
    copy = current_rank()
    copy.log({"loss": 1.0})
    assert type(copy.link) is Link
    return copy.rank, copy.local_rank, copy.world_size, copy.local_world_size


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_gets_a_copy_that_reports_nowhere(rank_2_of_4: RankContext) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(look_in_fork).result() == (2, 1, 4, 2)
    assert current_rank() is rank_2_of_4


# ---- Progress -------------------------------------------------------------------------------------------------------


def test_everything_that_a_rank_calls_is_a_sign_of_life(rank_2_of_4: RankContext) -> None:
    progress = rank_2_of_4.progress
    rank_2_of_4.log({"loss": 1.0})
    assert (progress.step, progress.num_moves) == (None, 1)
    rank_2_of_4.log({"loss": 1.0}, step=torch.tensor(3))  # type: ignore[arg-type]
    assert (progress.step, progress.num_moves, progress.num_moves_since) == (3, 2, 0)
    rank_2_of_4.should_stop()
    assert (progress.step, progress.num_moves, progress.num_moves_since) == (3, 3, 1)


# ---- Stopping together ----------------------------------------------------------------------------------------------


def test_call_beyond_the_last_is_true_and_so_are_those_after_it() -> None:
    signal = StopSignal()
    assert not signal()
    assert signal.hold() == 1
    signal.release(3)
    assert [signal() for _ in range(4)] == [False, False, True, True]
    assert signal.has_fired


def test_rank_that_never_reached_the_call_has_not_stopped() -> None:
    signal = StopSignal()
    signal.hold()
    signal.release(2)
    assert [signal(), signal()] == [False, False]
    assert not signal.has_fired


def test_call_is_held_back_until_the_release() -> None:
    signal, returned = StopSignal(), []
    signal.hold()
    thread = threading.Thread(target=lambda: returned.append(signal()))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    signal.release(0)
    thread.join()
    assert returned == [True]


@pytest.mark.parametrize("moment", range(1, 7))
def test_first_true_call_is_the_one_after_the_last_at_whatever_moment_calls_are_held(moment: int) -> None:
    signal, held, moments = StopSignal(), [], count(1)

    def hold_in_time(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is StopSignal.__call__.__code__ and event == "line" and next(moments) == moment:
            held.append(signal.hold())
            signal.release(held[0])
        return hold_in_time

    tracing = sys.gettrace()
    sys.settrace(hold_in_time)
    try:
        first_true = next(number for number in range(1, 9) if signal())
    finally:
        sys.settrace(tracing)
    assert [first_true - 1] == held


# ---- Micro batches


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [
        (32, [(32, 1), (16, 2), (8, 4), (4, 8)]),
        (10, [(10, 1), (5, 2), (3, 4), (2, 5)]),
        (7, [(7, 1), (4, 2), (2, 4), (1, 7)]),
        (1, [(1, 1)] * 4),
    ],
)
def test_micro_batches_halve_with_each_lack_of_memory(batch_size: int, expected: list[tuple[int, int]]) -> None:
    ranks = [RankContext(attempt=RankAttempt(number, number)) for number in range(4)]
    assert [rank.micro_batch(batch_size) for rank in ranks] == expected
    assert [rank.attempt.after_memory for rank in ranks] == [0, 1, 2, 3]
    assert [(size, len(torch.zeros(batch_size).split(size))) for size, _ in expected] == expected


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "8"])
def test_a_batch_without_samples_is_refused(batch_size: Any) -> None:
    with pytest.raises(ValueError, match=r"^micro_batch\(.*\): must be a whole number of samples, from 1 up"):
        current_rank().micro_batch(batch_size)
