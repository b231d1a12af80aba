"""The error of a hang or mismatch names the collectives in which the ranks' records differ."""

import pytest

from flytekitplugins.daskpytorch.driver.collectives import compare, in_words, named, users_frames
from flytekitplugins.daskpytorch.driver.parts.hang import explain_failure
from flytekitplugins.daskpytorch.protocol.failure import NOT_THE_USERS, Collective, Recalled

ALL = "the default group (gloo)"
ROW, COLUMN = "group 1 (gloo)", "group 2 (gloo)"


def call(number: int, operation: str = "all_reduce", *shape: int, group: str = ALL, **more: object) -> Collective:
    """A collective that is done, with a tensor of 4 numbers."""
    shapes = [shape or (4,)]
    how = {"dtypes": ["Float"], "is_done": True, "frames": [f'File "/code/train.py", line {number} in train']} | more
    return Collective(group=group, number=number, operation=operation, inputs=shapes, outputs=shapes, **how)


def waiting(number: int, operation: str = "all_reduce", *shape: int, **more: object) -> Collective:
    return call(number, operation, *shape, is_done=False, **more)


def of(*collectives: Collective, groups: tuple[str, ...] = (ALL,)) -> Recalled:
    newest = {group: max((each.number for each in collectives if each.group == group), default=0) for group in groups}
    return Recalled(groups=newest, collectives=collectives)


def test_rank_that_has_not_called_what_others_wait_in_is_named() -> None:
    waits = of(call(1), waiting(2, "broadcast", 3, 5))
    difference = compare({0: waits, 1: of(call(1)), 2: waits})
    assert difference is not None
    assert difference.rank == 1
    assert difference.what == (
        "rank 1 has not called collective 2 of the default group (gloo), broadcast of Float [3, 5], in which "
        "ranks 0, 2 wait"
    )
    assert difference.shown == (
        "Collective 2 of the default group (gloo), as torch's flight recorder has it:\n"
        '  ranks 0, 2: broadcast of Float [3, 5], waiting, called from:\n    File "/code/train.py", line 2 in train\n'
        "  rank 1: not called; its last was collective 1 of the default group (gloo), all_reduce of Float [4], done, "
        'called from:\n    File "/code/train.py", line 1 in train'
    )


OF_ROW, OF_COLUMN = {"group": ROW}, {"group": COLUMN}


@pytest.mark.parametrize(
    "recalled",
    [
        {},
        {0: of(), 1: of()},
        {0: of(call(1), call(2)), 1: of(call(1), call(2))},
        {0: of(waiting(2)), 1: of(waiting(2))},
        pytest.param({0: of(call(2)), 1: of(call(2, "all_reduce", 5))}, id="other shapes in what is done"),
        {
            0: of(waiting(2, "all_to_all_single", 8)),
            1: of(waiting(2, "all_to_all_single", 5)),
        },  # shapes that may differ
        {0: of(waiting(2, "scatter", 8)), 1: of(waiting(2, "scatter", 5))},
        pytest.param({0: of(waiting(1, **OF_ROW), groups=(ALL, ROW)), 2: of()}, id="a rank outside the group"),
        pytest.param({0: of(*map(call, range(1, 9))), 1: of(*map(call, range(5, 9)))}, id="forgotten collectives"),
    ],
)
def test_ranks_that_agree_differ_in_nothing(recalled: dict[int, Recalled]) -> None:
    assert compare(recalled) is None


@pytest.mark.parametrize(
    ("recalled", "rank", "told"),
    [
        ({0: of(waiting(1)), 1: of()}, 1, "rank 1 has not called collective 1"),
        (
            {0: of(waiting(7)), 1: of(waiting(7)), 2: of(waiting(7, "broadcast", 9))},
            2,
            f"rank 2 called broadcast of Float [9] as collective 7 of {ALL}, ranks 0, 1 all_reduce of Float [4]",
        ),
        pytest.param(
            {1: of(waiting(7, "barrier")), 0: of(waiting(7))}, 1, "called barrier", id="of two the first is right"
        ),
        ({0: of(call(5, "barrier"), waiting(6)), 1: of(waiting(5), waiting(6, "broadcast"))}, 1, "as collective 5 of"),
        ({0: of(waiting(2)), 1: of(waiting(2, "all_reduce", 5))}, 1, "all_reduce of Float [5]"),
        ({0: of(waiting(2)), 1: of(waiting(2, dtypes=["Double"]))}, 1, "all_reduce of Double [4]"),
        pytest.param({0: of(call(2)), 1: of(call(2, "broadcast"))}, 1, "called broadcast", id="done, but another"),
        pytest.param(
            {
                0: of(waiting(3, **OF_ROW), groups=(ALL, ROW)),
                1: of(call(2, **OF_ROW), waiting(9), groups=(ALL, ROW)),
                2: of(call(8)),
            },
            2,
            "collective 9 of the default group",
            id="the last in a line of ranks that wait for each other",
        ),
        (
            {0: of(waiting(1, **OF_ROW), groups=(ROW, COLUMN)), 1: of(waiting(1, **OF_COLUMN), groups=(ROW, COLUMN))},
            1,
            "the ranks wait in a circle",
        ),
    ],
)
def test_the_rank_that_differs_is_named(recalled: dict[int, Recalled], rank: int, told: str) -> None:
    difference = compare(recalled)
    assert difference is not None
    assert (difference.rank, told in difference.what) == (rank, True), difference.what


def test_failed_collective_counts_as_not_done_whatever_the_recorder_says() -> None:
    recalled = {0: of(call(1), call(2)), 1: of(call(1))}
    assert compare(recalled) is None
    difference = compare(recalled, failed=[0])
    assert difference is not None
    assert difference.rank == 1
    assert compare({0: of(), 1: of()}, failed=[0]) is None


def test_words_for_collectives_and_ranks() -> None:
    many = Collective(
        group=ALL, number=1, operation="all_gather", inputs=[], outputs=[(2,)] * 9, dtypes=["Long"], is_done=True
    )
    barrier = Collective(group=ALL, number=1, operation="barrier", inputs=[], outputs=[], dtypes=[], is_done=True)
    assert in_words(many) == "all_gather of Long [2], [2], [2], [2], ..."
    assert in_words(barrier) == "barrier"
    assert named([3]) == "rank 3"
    assert named(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)"


def test_frames_of_the_user_alone_are_shown() -> None:
    frames = [f'File "{file}", line 1 in f' for file in ["/usr/lib64/python3.12/threading.py", "/code/a.py"]]
    difference = compare({0: of(waiting(1, frames=frames)), 1: of()})
    assert difference is not None
    assert "rank 1: not called, nor any other before" in difference.shown
    shown = [line.strip() for line in difference.shown.splitlines() if "File" in line]
    assert shown == frames[1:]


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        *((file, True) for file in ("/code/a.py", "<ipython-input-1-ab>", "<stdin>", "<python-input-0>")),
        *((file, True) for file in ("<doctest a.f[0]>", "<command-12>", "<torch_package_0>.a.py", "<strings>")),
        *((file, False) for file in ("<frozen runpy>", "<string>", "<unknown>", "<template>", "<decorator-gen-12>")),
        *(
            (file, False)
            for file in ("<eval_with_key>.1", "<__array_function__ internals>", "<attrs generated init A>")
        ),
        *((f"/usr/lib/{python}/queue.py", False) for python in ("python3.11", "python3.13t")),
        ("/usr/lib64/python3.12/queue.py", False),
        ("/venv/lib/python3.11/site-packages/torch/x.py", False),
        ("/code/plugins/flytekitplugins/daskpytorch/rank/main.py", False),
    ],
)
def test_the_users_files_are_all_but_those_of_libraries_and_of_generated_code(file: str, *, is_users: bool) -> None:
    assert users_frames([frame := f'File "{file}", line 1 in f']) == [frame] * is_users
    assert bool(NOT_THE_USERS.match(file)) != is_users


def test_explained_failure_says_what_the_missing_rank_was_doing() -> None:
    stacks = 'Current thread 0x1 (most recent call first):\n  File "/code/project/data.py", line 31 in read\n'
    told = explain_failure({0: of(call(1)), 1: of(), 2: None}, [0], {1: stacks})
    assert told is not None
    assert told.startswith("rank 1 has not called collective 1")
    assert told.endswith('rank 1 was in:\n  File "/code/project/data.py", line 31 in read')
    assert explain_failure({0: None, 1: None}, [0], {}) is None
