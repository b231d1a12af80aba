"""The end of an attempt: the blamed rank and its error. `test_brain.py` has the decision that follows."""

from __future__ import annotations

import signal

import pytest

from flytekitplugins.daskpytorch.driver.attempt import Attempt
from flytekitplugins.daskpytorch.protocol.messages import Exited
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks

NODES = [
    Node(worker=f"tcp://10.0.0.{i}:1", host=f"h{i}", num_cores=4, gpus=(), gpu_names=(), interface=None, versions={})
    for i in (1, 2)
]


@pytest.fixture
def attempt() -> Attempt:
    """Four ranks on two workers."""
    made = Attempt(number=0, places={})
    for node, places in zip(NODES, place_ranks(NODES, 2), strict=True):
        made.places |= {place.rank: (place, node) for place in places}
    return made


def leave(attempt: Attempt, rank: int, exitcode: int = 0, *, stopped: bool = False, at: float = 0.0) -> None:
    attempt.note_exit(
        Exited(rank=rank, exitcode=exitcode, stopped=stopped, out_of_memory=False, log_tail=f"tail {rank}", time=at)
    )


# ---- Failing


def test_crash_is_the_functions_own_and_a_loss_is_not(attempt: Attempt) -> None:
    attempt.lose(NODES[1].worker)
    assert attempt.is_failing
    assert attempt.has_independent_failure
    assert not attempt.has_own_failure
    leave(attempt, 0, -signal.SIGSEGV)
    assert attempt.has_own_failure


def test_rank_that_has_delivered_is_out_of_danger(attempt: Attempt) -> None:
    attempt.results[0] = 1
    leave(attempt, 0, -signal.SIGKILL)
    assert attempt.bad_exits == []
    assert not attempt.is_failing
    assert [exit_.rank for exit_ in attempt.unclean_exits] == [0]


# ---- Whose fault it is ----------------------------------------------------------------------------------------------


def test_rank_that_hangs_is_the_culprit_before_and_after_it_was_stopped(attempt: Attempt) -> None:
    attempt.steps[2] = 4
    attempt.hang = (2, "it hangs\nstacks")
    assert (attempt.root_failure().rank, attempt.root_failure().hang) == (2, "it hangs\nstacks")
    assert attempt.root_failure().position == (4, None)
    for rank in range(4):
        leave(attempt, rank, -signal.SIGKILL, stopped=True)
    assert (attempt.root_failure().rank, attempt.root_failure().hang) == (2, "it hangs\nstacks")
    assert attempt.exits[0].hang is None


def test_rank_whose_function_returned_too_early_can_be_the_one_that_hangs(attempt: Attempt) -> None:
    attempt.results[1] = None
    attempt.hang = (1, "its function has returned")
    for rank in range(4):
        leave(attempt, rank, 0 if rank == 1 else 143, stopped=rank != 1)
    assert attempt.root_failure().rank == 1
