"""The hang detector finds the rank that holds up the others, by collectives and stacks."""

import pytest

from flytekitplugins.daskpytorch.driver.parts.hang import RankState, Stillness, find_hung, report_hang

IN_BARRIER = """\
Thread 0x00007fbaaad296c0 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4614 in barrier
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/code/project/train.py", line 9 in train
"""
IN_BACKWARD = """\
Current thread 0x00007f67dc86db80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward
  File "/venv/lib/python3.11/site-packages/torch/autograd/__init__.py", line 359 in backward
  File "/code/project/train.py", line 12 in train
"""
IN_DDP_INIT = """\
Thread 0x00007f521e878b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/utils.py", line 299 in _verify_param_shape
  File "/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 1076 in __init__
  File "/code/project/train.py", line 3 in train
"""
LOADS = """\
Thread 0x00007fbaaad296c0 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4614 in barrier
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f67dc86db80 (most recent call first):
  File "/code/project/data.py", line 31 in read
  File "/code/project/train.py", line 8 in train
"""
CALLED_BY_TORCH = """\
Current thread 0x00007f67dc86db80 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/code/project/hooks.py", line 5 in compress
  File "/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 1640 in forward
  File "/code/project/train.py", line 8 in train
"""


def state(
    *, has_answered: bool = True, stacks: str = IN_BARRIER, still_for: float = 9.0, is_done: bool = False
) -> RankState:
    return RankState(is_done=is_done, has_answered=has_answered, still_for=still_for, stacks=stacks)


# ---- Stillness ------------------------------------------------------------------------------------------------------


def test_silence_that_is_explained_is_none_but_what_was_slow_before_stays_so() -> None:
    stillness = Stillness([0], now=10.0)
    stillness.note(0, 1, now=60.0)
    stillness.excuse(900.0)
    assert stillness.still_for(0, now=901.0) == 1.0
    stillness.note(0, 2, now=910.0)
    assert stillness.hangs_at([0], "auto") == 910.0 + 10 * 50.0


# ---- Who is it? -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "rank", "told"),
    [
        ([state(stacks=LOADS), state(has_answered=False), state()], 1, "it does not answer"),
        ([state(), state(stacks=LOADS, still_for=0.1), state()], 1, "it is not inside a collective"),
        ([state(stacks=LOADS, still_for=still) for still in (3.0, 5.0, 4.0)], 1, "it is not inside a collective"),
        ([state(is_done=True, stacks=LOADS, still_for=99.0), state(stacks=LOADS, still_for=1.0)], 1, "is not inside"),
        ([state(still_for=still) for still in (8.0, 9.5, 9.0)], 1, "all ranks wait for each other"),
    ],
)
def test_rank_that_holds_up_the_others_is_named_with_the_reason(states: list[RankState], rank: int, told: str) -> None:
    found, why = find_hung(dict(enumerate(states)))
    assert (found, told in why) == (rank, True), why


# ---- The report -----------------------------------------------------------------------------------------------------


def test_report_shows_the_users_frames_of_the_main_threads() -> None:
    rank, report = report_hang({0: state(), 1: state(stacks=LOADS, still_for=2.0), 2: state()}, 8)
    assert rank == 1
    assert report == (
        "it hangs, or holds up the others: no sign of life for 9.0 s (hang_timeout=8); it is not inside a collective\n"
        "What the main threads were doing, the innermost call first (all threads are in the log):\n\n"
        'ranks 0, 2, waiting for other ranks, called from:\n  File "/code/project/train.py", line 9 in train\n\n'
        'rank 1, in:\n  File "/code/project/data.py", line 31 in read\n  File "/code/project/train.py", line 8 in train'
    )


def test_report_has_ten_lines_of_a_deep_stack_and_what_there_is_without_frames() -> None:
    deep = "Current thread 0x1 (most recent call first):\n" + "".join(
        f'  File "/code/project/deep.py", line {line} in go\n' for line in range(50)
    )
    _, report = report_hang({0: state(stacks=deep), 1: state(has_answered=False, stacks="it did not answer")}, 8.0)
    assert report.count("deep.py") == 10
    assert "rank 1, it did not answer" in report


# ---- Inside a collective?


@pytest.mark.parametrize(
    ("stacks", "is_outside"),
    [
        *((stacks, False) for stacks in (IN_BARRIER, IN_BACKWARD, IN_DDP_INIT)),
        # Other threads and outer frames do not count, nor do missing stacks.
        *((stacks, True) for stacks in (LOADS, CALLED_BY_TORCH, "", "it did not answer", "(no stacks)")),
        *((IN_BARRIER + LOADS, True), (LOADS + IN_BARRIER, False)),  # the newest of several dumps
    ],
)
def test_main_thread_that_waits_for_other_ranks_is_inside(stacks: str, *, is_outside: bool) -> None:
    rank, why = find_hung({0: state(still_for=99.0), 1: state(stacks=stacks)})
    assert (rank == 1 and why == "it is not inside a collective") is is_outside
