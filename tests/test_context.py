"""Who am I: rank 0 of 1 outside a gang, plain numbers in records, and forked children that report nowhere."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flytekitplugins.daskpytorch import RankContext, context, current_rank
from flytekitplugins.daskpytorch.context import LogRecord


@pytest.fixture
def records() -> list[LogRecord]:
    return []


@pytest.fixture
def rank_2_of_4(records: list[LogRecord]) -> Iterator[RankContext]:
    """This process as rank 2 of a gang of four, for the time of a test."""
    before = current_rank()
    entered = RankContext(rank=2, local_rank=1, world_size=4, local_world_size=2, sink=records.append)
    context.enter(entered)
    yield entered
    context.enter(before)


def test_outside_a_gang_this_is_rank_0_of_1() -> None:
    rank = current_rank()
    assert (rank.rank, rank.local_rank, rank.world_size, rank.local_world_size) == (0, 0, 1, 1)
    assert rank.is_main


def test_entered_context_is_this_processs_own(rank_2_of_4: RankContext) -> None:
    assert current_rank() is rank_2_of_4
    assert not current_rank().is_main


def test_device_is_cpu_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert current_rank().device == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_is_the_first_visible_gpu() -> None:
    assert current_rank().device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (3, 3),
        (0.25, 0.25),
        ("late", "late"),
        (True, True),
        (torch.tensor(1.5), 1.5),
        (torch.tensor(7), 7),
        (torch.tensor([2.5]), 2.5),
        (torch.tensor([[4.0]], requires_grad=True), 4.0),
        (np.float32(0.5), 0.5),
        (np.int64(9), 9),
        (np.array(1.25), 1.25),
        (np.array([8]), 8),
    ],
)
def test_log_makes_plain_values_of_scalars_and_one_element_tensors(
    rank_2_of_4: RankContext, records: list[LogRecord], given: object, plain: object
) -> None:
    rank_2_of_4.log({"x": given})
    assert records[0].metrics == {"x": plain}
    assert type(records[0].metrics["x"]) is type(plain)


def test_log_leaves_other_objects_as_they_are(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    image, many = object(), torch.tensor([1.0, 2.0])
    rank_2_of_4.log({"image": image, "many": many})
    assert records[0].metrics["image"] is image
    assert records[0].metrics["many"] is many


def test_record_has_rank_time_and_the_number_of_steps(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    earliest = time.time()
    rank_2_of_4.log({"loss": 1.0}, step=5, num_steps=10)
    [record] = records
    assert (record.rank, record.step, record.num_steps) == (2, 5, 10)
    assert earliest <= record.time <= time.time()


def test_steps_count_all_earlier_calls_unless_given(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    rank_2_of_4.log({"loss": 3.0})
    rank_2_of_4.log({"loss": 2.0})
    rank_2_of_4.log({"loss": 1.0}, step=100)
    rank_2_of_4.log({"loss": 0.5})
    assert [record.step for record in records] == [0, 1, 100, 3]


def test_metric_names_become_strings(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    rank_2_of_4.log({1: 0.5})  # type: ignore[dict-item]
    assert records[0].metrics == {"1": 0.5}


def test_numbers_are_the_metrics_that_are_numbers_as_floats() -> None:
    record = LogRecord(rank=0, step=0, num_steps=None, time=0.0, metrics={"a": 1, "b": 0.5, "c": "text", "d": None})
    assert record.numbers == {"a": 1.0, "b": 0.5}
    assert all(type(value) is float for value in record.numbers.values())


def test_log_outside_a_gang_goes_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flytekitplugins.daskpytorch"):
        RankContext().log({"loss": torch.tensor(0.5)}, step=4)
    assert "step 4: loss=0.5" in caplog.text


@pytest.mark.timeout(30)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_gets_a_copy_that_reports_nowhere(rank_2_of_4: RankContext, records: list[LogRecord]) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            copy = current_rank()
            places = (copy.rank, copy.local_rank, copy.world_size, copy.local_world_size)
            copy.log({"loss": 1.0})
            os.write(write, repr((places, copy.sink, copy is rank_2_of_4, len(records))).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as answer:
        told = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert told == repr(((2, 1, 4, 2), None, False, 0))
    assert current_rank() is rank_2_of_4


@pytest.mark.timeout(30)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_multiprocessing_worker_is_not_a_rank_that_reports(rank_2_of_4: RankContext) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_rank_and_whether_it_reports) == (2, False)
    pool.join()


def _rank_and_whether_it_reports() -> tuple[int, bool]:
    return current_rank().rank, current_rank().sink is not None
