"""A rank that fails or hangs costs a restart, and is blamed. Each item is seen once.

`benchmarks/chaos.py` draws signals to ranks at random moments: SIGKILL, SIGSEGV, SIGINT and a suspension.
"""

import functools
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from socket import gethostname
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from distributed import Client
from torch.utils.data import TensorDataset

import fault_training as ft
from flytekitplugins.daskpytorch import Gang, GangError, Observer, RankObserver, current_rank, dispatch
from flytekitplugins.daskpytorch.data import RankLoader
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.ranks import TAIL_SIZE
from flytekitplugins.daskpytorch.protocol.failure import MAX_TEXT
from processes import MAX_SECONDS, Cluster, fork_server, nothing_left_behind

RANK_1 = f"rank 1 on {gethostname()} (tcp://127.0.0.3"
"""How rank 1 is called where it is blamed."""


def check_recovered(watched: ft.Watched, starts: list[int]) -> None:
    """The gang started again where it should, soon, and its result is that of an undisturbed run."""
    assert watched.futures.result() == [ft.expected()] * 2
    assert watched.starts(0) == watched.starts(1) == starts
    if len(starts) > 1:
        assert watched.formed_at[-1] - watched.broke_at() < MAX_SECONDS


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("close and raise", "SpoiltError: the batch is spoilt"),
        ("os._exit", "exit code 3"),
        ("ignore SIGTERM", "SpoiltError"),
    ],
)
def test_a_rank_that_fails_once_costs_a_restart(client: Client, launch: ft.Launch, fault: str, said: str) -> None:
    watched = launch(client, fault)
    check_recovered(watched, [0, ft.SAVED_AT])
    assert any(RANK_1 in note and said in note for note in watched.notes), watched.notes


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("hold the interpreter", "does not answer"),
        ("loader", "has not called collective 6 of the default group (gloo)"),
    ],
)
def test_a_rank_that_hangs_is_found(client: Client, launch: ft.Launch, fault: str, why: str) -> None:
    watched = launch(client, fault, gang=Gang(hang_timeout=2.0))
    check_recovered(watched, [0, ft.SAVED_AT])
    blamed = next(note for note in watched.notes if "it hangs" in note)
    assert RANK_1 in blamed
    assert why in blamed


def test_what_a_rank_has_to_say_is_cut_short(client: Client, launch: ft.Launch) -> None:
    watched = launch(client, "shout", gang=Gang(max_restarts=0))
    with pytest.raises(GangError) as caught:
        watched.futures.result()
    assert len(caught.value.log_tail) == TAIL_SIZE
    assert "SpoiltError: the batch is very very" in caught.value.cause
    assert caught.value.cause.endswith("very spoilt")
    assert len(str(caught.value)) < 3 * MAX_TEXT + TAIL_SIZE


def test_a_straggler_is_left_alone(client: Client, launch: ft.Launch) -> None:  # 19
    watched = launch(client, pace=0.6, gang=Gang(hang_timeout=4.0))  # less than the whole of it takes
    check_recovered(watched, [0])


def step_for_six_seconds() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(20):
        time.sleep(0.3)
        optimizer.step()


def test_a_training_that_logs_nothing_lives_by_its_optimizers_steps(client: Client) -> None:
    assert dispatch.run(client, step_for_six_seconds, gang=Gang(hang_timeout=4.0)).result() == [None] * 2


class OpensInRank0(Observer):
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def for_rank(self) -> Callable[[], RankObserver]:
        return functools.partial(opened, self.trace)


def opened(trace: Path) -> RankObserver:
    trace.write_text(f"{trace.read_text()} opened")
    return RankObserver()


@pytest.mark.parametrize("last_line", ["", "raise LookupError('cannot be imported')"])
def test_observers_in_rank_0_open_once_the_users_modules_are_imported(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_line: str
) -> None:
    """What they import, in threads, those import, too."""
    trace, name = tmp_path / "trace", f"imports_{uuid4().hex}"  # a module that no other test has imported
    (tmp_path / f"{name}.py").write_text(
        "import os\nfrom pathlib import Path\n\n\ndef train():\n    return 1\n\n\n"
        f"if os.environ.get('RANK') == '0':\n    Path({str(trace)!r}).write_text('imported')\n    {last_line}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    train = import_module(name).train
    gang = Gang(max_restarts=0, observers=(functools.partial(OpensInRank0, trace),))
    error = dispatch.run(client, train, gang=gang).exception()
    assert isinstance(error, LookupError) == bool(last_line)
    assert trace.read_text() == "imported opened"


def test_the_fork_server_of_a_node_is_killed(launch: ft.Launch) -> None:
    """With it all ranks die, and the agent: on the task's own node nobody else would bring them back."""
    with nothing_left_behind():
        watched = launch(None, pace=0.2, gang=Gang(ranks_per_worker=2))
        watched.wait_for("kept-4")
        fork_server().kill()
        assert watched.futures.result() == [ft.expected()] * 2
        assert watched.starts(0) == [0, ft.SAVED_AT]
        assert any("its worker was lost" in note for note in watched.notes)
        fork_client.shutdown()


# ---- The position of a loader


NUMBERS = TensorDataset(torch.arange(50))
NUM_EPOCHS = 2


def see(folder: str, fault: str) -> list[list[int]]:
    """Two epochs of what the ranks see together at each step; breaks in the first one, two steps after a checkpoint."""
    rank = current_rank()
    loader = RankLoader(NUMBERS, 4, seed=5, num_workers=2, prefetch_factor=4, persistent_workers=True)
    steps: list[list[int]] = []
    if (state := rank.checkpoint.load()) is not None:
        loader.load_state_dict(state["loader"])
        steps = state["steps"]
    ft._leave(folder, f"start-{rank.rank}", str(len(steps)))
    while loader.epoch < NUM_EPOCHS:
        for (items,) in loader:
            if len(steps) == ft.BREAKS_AT and rank.rank == 1 and not ft._has(folder, "broken"):
                ft._await(folder, f"kept-{ft.SAVED_AT}")
                ft._leave(folder, "broken", fault)
                ft.FAULTS[fault]()
            shares: list[list[int]] = [[]] * rank.world_size
            dist.all_gather_object(shares, items.tolist())
            steps.append([item for share in shares for item in share])
            if len(steps) == ft.SAVED_AT:
                rank.checkpoint.save({"loader": loader.state_dict(), "steps": steps}, len(steps))
    return steps


def undisturbed() -> list[int]:
    loader = RankLoader(NUMBERS, 1, seed=5, rank=0, world_size=1)
    return [int(item) for _ in range(NUM_EPOCHS) for (item,) in loader]


def check(steps: list[list[int]], starts: list[int], world_size: int) -> None:
    assert starts == [0, ft.SAVED_AT]
    assert max(map(len, steps[ft.SAVED_AT :])) == 4 * world_size
    assert [item for step in steps for item in step] == undisturbed()


def test_one_rank_goes_on_with_the_next_item_of_two(
    breakable: Cluster, client: Client, launch: ft.Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ft, "train", see)
    watched = launch(client, "wait", gang=Gang(min_workers=1))
    watched.wait_for("broken")
    breakable.kill_worker(1)
    check(watched.futures[0].result(), watched.starts(0), world_size=1)
