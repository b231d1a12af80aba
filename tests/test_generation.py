"""One incarnation of a gang: what the reports and exits of its ranks add up to."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from flytekitplugins.daskpytorch.context import LogRecord
from flytekitplugins.daskpytorch.driver.attempt import Generation
from flytekitplugins.daskpytorch.driver.blame import describe, verdict
from flytekitplugins.daskpytorch.errors import WorkerLostError
from flytekitplugins.daskpytorch.protocol import relay
from flytekitplugins.daskpytorch.protocol.checkpoint_file import CheckpointFile
from flytekitplugins.daskpytorch.protocol.failure import Failure
from flytekitplugins.daskpytorch.protocol.messages import Exited
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks

NODES = [
    Node(worker=f"tcp://10.0.0.{i}:1", host=f"h{i}", num_cores=4, gpus=(), gpu_names=(), interface=None, versions={})
    for i in (1, 2)
]
OWN = ValueError("bad batch")
PEER_LOST = ConnectionResetError("Connection reset by peer")


@pytest.fixture
def generation() -> Generation:
    """Four ranks on two workers."""
    made = Generation(number=0, places={})
    for node, places in zip(NODES, place_ranks(NODES, 2), strict=True):
        made.places |= {place.rank: (place, node) for place in places}
    return made


def report(generation: Generation, rank: int, kind: str, value: object = None) -> tuple[str, Any]:
    [taken] = generation.take(rank, relay.pack(kind, value))
    return taken


def fail(generation: Generation, rank: int, error: Exception, at: float = 0.0, step: int | None = None) -> None:
    report(generation, rank, "failure", Failure.of(error, at, position=(step, 0)))


def leave(generation: Generation, rank: int, exitcode: int = 0, *, stopped: bool = False, at: float = 0.0) -> None:
    generation.note_exit(
        Exited(rank=rank, exitcode=exitcode, stopped=stopped, out_of_memory=False, log_tail=f"tail {rank}", time=at)
    )


def log(generation: Generation, rank: int, step: int) -> None:
    report(generation, rank, "log", LogRecord(rank=rank, step=step, num_steps=None, time=0.0, metrics={}))


# ---- How far it has come --------------------------------------------------------------------------------------------


def test_it_knows_its_workers_and_size(generation: Generation) -> None:
    assert generation.ranks_of == {"tcp://10.0.0.1:1": [0, 1], "tcp://10.0.0.2:1": [2, 3]}
    assert generation.world_size == 4
    assert generation.running == [0, 1, 2, 3]
    assert generation.unaccounted() == generation.ranks_of.keys()
    assert not generation.is_failing


def test_it_is_formed_when_all_ranks_are_ready(generation: Generation) -> None:
    for rank in (3, 0, 1):
        report(generation, rank, "ready")
        assert not generation.is_formed
        assert generation.stillness is None
    assert report(generation, 2, "ready") == ("ready", None)
    assert generation.is_formed
    assert generation.stillness is not None


def test_it_has_delivered_when_all_functions_have_returned(generation: Generation) -> None:
    for rank in range(4):
        assert not generation.has_delivered
        report(generation, rank, "result", rank * 10)
    assert generation.has_delivered
    assert generation.results == {0: 0, 1: 10, 2: 20, 3: 30}
    assert not generation.is_over
    assert generation.running == []


def test_it_is_over_when_all_ranks_have_left(generation: Generation) -> None:
    for rank in range(4):
        assert not generation.is_over
        report(generation, rank, "result")
        leave(generation, rank)
    assert generation.is_over
    assert generation.unaccounted() == set()
    assert generation.bad_exits == []
    assert generation.unclean_exits == []
    assert not generation.is_failing


def test_ranks_that_returned_failed_or_left_are_not_running(generation: Generation) -> None:
    report(generation, 0, "result")
    fail(generation, 1, OWN)
    leave(generation, 2, -signal.SIGSEGV)
    assert generation.running == [3]


def test_signs_of_life_count_once_all_have_met(generation: Generation) -> None:
    report(generation, 0, "moves", 5)
    for rank in range(4):
        report(generation, rank, "ready")
    assert generation.stillness is not None
    met_at = generation.stillness.oldest([0])
    time.sleep(0.01)
    report(generation, 0, "moves", 6)
    assert generation.stillness.oldest([0, 1]) == generation.stillness.oldest([1]) == met_at
    assert generation.stillness.oldest([0]) != met_at


def test_reports_that_came_together_are_taken_one_by_one(generation: Generation) -> None:
    reports = [("ready", None), ("moves", 3), ("held", 7), ("result", "done"), ("folder", None)]
    assert generation.take(2, b"".join(relay.pack(*report) for report in reports)) == reports
    assert generation.ready == {2}
    assert (generation.held, generation.results) == ({2: 7}, {2: "done"})


def test_newest_step_of_a_rank_comes_from_logs_and_checkpoints(generation: Generation) -> None:
    log(generation, 0, 3)
    log(generation, 1, 4)
    report(generation, 0, "saved", CheckpointFile(generation=0, step=5, size=1, digest="0" * 64))
    assert generation.steps == {0: 5, 1: 4}


def test_ranks_that_stopped_early_are_known(generation: Generation) -> None:
    report(generation, 2, "stopped")
    report(generation, 2, "result")
    leave(generation, 2)
    assert generation.stopped_early == {2}
    assert not generation.is_failing


# ---- Questions ------------------------------------------------------------------------------------------------------


def test_all_have_answered_when_the_last_one_has(generation: Generation) -> None:
    for rank, calls in enumerate([7, 8, 7]):
        report(generation, rank, "held", calls)
        assert not generation.have_answered(generation.held)
    report(generation, 3, "held", 8)
    assert generation.have_answered(generation.held)
    assert generation.held == {0: 7, 1: 8, 2: 7, 3: 8}


def test_ranks_that_failed_or_left_need_not_answer(generation: Generation) -> None:
    report(generation, 0, "collectives", 12)
    fail(generation, 1, OWN)
    generation.lose(NODES[1].worker)
    assert generation.have_answered(generation.num_collectives)


def test_rank_whose_function_has_returned_can_still_answer(generation: Generation) -> None:
    for rank in range(3):
        report(generation, rank, "collectives", 12)
    report(generation, 3, "result")
    assert not generation.have_answered(generation.num_collectives)
    report(generation, 3, "collectives", None)
    assert generation.have_answered(generation.num_collectives)


# ---- Failing --------------------------------------------------------------------------------------------------------


def test_own_error_is_earnest_and_the_loss_of_a_peer_is_not(generation: Generation) -> None:
    fail(generation, 0, PEER_LOST)
    assert generation.is_failing
    assert not generation.has_earnest_failure
    assert not generation.has_own_failure
    fail(generation, 1, OWN)
    assert generation.has_earnest_failure
    assert generation.has_own_failure


def test_crash_is_the_functions_own_and_a_loss_is_not(generation: Generation) -> None:
    generation.lose(NODES[1].worker)
    assert generation.is_failing
    assert generation.has_earnest_failure
    assert not generation.has_own_failure
    leave(generation, 0, -signal.SIGSEGV)
    assert generation.has_own_failure


def test_hang_is_earnest(generation: Generation) -> None:
    generation.hang = (1, "it hangs")
    assert generation.is_failing
    assert generation.has_earnest_failure


def test_rank_that_was_stopped_is_not_earnest(generation: Generation) -> None:
    leave(generation, 0, 143, stopped=True)
    assert generation.is_failing
    assert not generation.has_earnest_failure


def test_rank_that_has_delivered_is_out_of_danger(generation: Generation) -> None:
    report(generation, 0, "result", 1)
    leave(generation, 0, -signal.SIGKILL)
    assert generation.bad_exits == []
    assert not generation.is_failing
    assert [exit_.rank for exit_ in generation.unclean_exits] == [0]


def test_exit_says_who_where_and_how(generation: Generation) -> None:
    log(generation, 2, 6)
    leave(generation, 2, 3, at=5.0)
    [exit_] = generation.bad_exits
    assert (exit_.rank, exit_.worker, exit_.host) == (2, "tcp://10.0.0.2:1", "h2")
    assert (exit_.exitcode, exit_.log_tail, exit_.time, exit_.step) == (3, "tail 2", 5.0, 6)


def test_lost_worker_takes_its_ranks_along(generation: Generation) -> None:
    leave(generation, 2, -signal.SIGSEGV)
    generation.lose(NODES[1].worker)
    assert {rank: exit_.exitcode for rank, exit_ in generation.exits.items()} == {2: -signal.SIGSEGV, 3: None}
    assert generation.exits[3].is_infrastructure
    assert generation.unaccounted() == {NODES[0].worker}
    generation.lose("tcp://10.9.9.9:1")  # one that carries no ranks
    assert set(generation.exits) == {2, 3}


def test_agent_that_broke_is_why_its_ranks_went(generation: Generation) -> None:
    generation.lose(NODES[1].worker, "Traceback ...\nOSError: a full disk\n")
    culprit = generation.culprit()
    assert describe(culprit) == "the agent that watches it failed: OSError: a full disk"
    assert culprit.is_infrastructure
    error = verdict(culprit, 4)
    assert isinstance(error, WorkerLostError)
    assert "Traceback of its agent:\nTraceback ..." in str(error)


def test_own_error_comes_before_that_of_an_agent(generation: Generation) -> None:
    fail(generation, 3, OWN)
    generation.lose(NODES[1].worker, "OSError: a full disk")
    culprit = generation.culprit()
    assert culprit.rank == 3
    assert describe(culprit) == "ValueError: bad batch"


# ---- Whose fault it is ----------------------------------------------------------------------------------------------


def test_rank_that_failed_is_the_culprit_before_it_has_left(generation: Generation) -> None:
    leave(generation, 0, 1)
    fail(generation, 1, OWN, step=9)
    culprit = generation.culprit()
    assert (culprit.rank, culprit.worker, culprit.position) == (1, NODES[0].worker, (9, 0))
    assert culprit.failure is not None
    assert culprit.failure.message == "bad batch"


def test_first_of_several_failures_is_the_culprits(generation: Generation) -> None:
    fail(generation, 0, PEER_LOST, at=1.0)
    fail(generation, 3, OWN, at=3.0)
    fail(generation, 2, OWN, at=2.0)
    leave(generation, 3, 1)
    assert generation.culprit().rank == 2


def test_exit_has_the_failure_that_was_reported_before(generation: Generation) -> None:
    fail(generation, 1, OWN)
    leave(generation, 1, 1)
    culprit = generation.culprit()
    assert culprit.failure is not None
    assert culprit.log_tail == "tail 1"


def test_rank_that_hangs_is_the_culprit_before_and_after_it_was_stopped(generation: Generation) -> None:
    log(generation, 2, 4)
    generation.hang = (2, "it hangs\nstacks")
    assert (generation.culprit().rank, generation.culprit().hang) == (2, "it hangs\nstacks")
    assert generation.culprit().position == (4, None)
    for rank in range(4):
        leave(generation, rank, -signal.SIGKILL, stopped=True)
    assert (generation.culprit().rank, generation.culprit().hang) == (2, "it hangs\nstacks")
    assert generation.exits[0].hang is None


def test_rank_whose_function_returned_too_early_can_be_the_one_that_hangs(generation: Generation) -> None:
    report(generation, 1, "result")
    generation.hang = (1, "its function has returned")
    for rank in range(4):
        leave(generation, rank, 0 if rank == 1 else 143, stopped=rank != 1)
    assert generation.culprit().rank == 1


def test_error_that_comes_while_a_hang_is_looked_into_takes_the_blame(generation: Generation) -> None:
    generation.hang = (2, "it hangs")
    fail(generation, 0, OWN)
    assert generation.culprit().rank == 0


def test_lost_worker_is_to_blame_for_the_peers_that_noticed(generation: Generation) -> None:
    fail(generation, 0, PEER_LOST, at=1.0)
    leave(generation, 1, 143, stopped=True)
    generation.lose(NODES[1].worker)
    culprit = generation.culprit()
    assert culprit.worker == NODES[1].worker
    assert culprit.is_infrastructure


def test_rank_that_left_in_good_order_is_never_the_culprit(generation: Generation) -> None:
    report(generation, 0, "result")
    leave(generation, 0, 0, at=1.0)
    leave(generation, 1, 143, stopped=True, at=2.0)
    assert generation.culprit().rank == 1
