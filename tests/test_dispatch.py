"""What `dispatch` refuses before anything starts, and the futures of a gang whose end is simulated."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangError, GangStartError, dispatch
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.results import DaskResultsHandler


class Ended:
    """A supervisor whose gang has ended."""

    def __init__(self, outcome: Callable[[], list[Any]]) -> None:
        self.received = ReceivedResults()
        self.run = outcome


def futures_of(values: list[Any], world_size: int) -> GangFutures:
    supervisor: Any = Ended(lambda: [pickle.dumps(value) for value in values])
    return GangFutures(supervisor, world_size)


def test_a_gang_that_ended_smaller_has_the_results_of_the_ranks_there_were(tmp_path: Any) -> None:
    futures = futures_of([10, 11], 4)
    assert futures.result(10) == [10, 11]
    assert futures.exception(10) is None
    assert len(futures) == 4
    assert futures[1].result() == 11
    for rank in (2, 3):
        with pytest.raises(GangStartError, match=f"2 of 4 ranks, as its min_workers allows; there was no rank {rank}"):
            futures[rank].result(10)
    DaskResultsHandler().process_results(tmp_path, futures)  # which raises the errors of gangs that failed


def test_a_failed_gang_fails_whole() -> None:
    def fail() -> list[Any]:
        raise GangError("rank 1 of 2 failed")

    supervisor: Any = Ended(fail)
    futures = GangFutures(supervisor, 3)
    assert {str(future.exception(10)) for future in futures} == {"rank 1 of 2 failed"}
    assert isinstance(futures.exception(), GangError)
    with pytest.raises(GangError, match="rank 1 of 2 failed"):
        futures.result()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tcp://127.0.0.1:1", len), r"run\(client='tcp://127.0.0.1:1'\): must be a distributed.Client"),
        ((None, 5), r"run\(pytorch_function=5\): must be something that can be called"),
        ((None, "x" * 100_000), r"run\(pytorch_function='x{199}\.\.\. \(100002 characters\)\): must be"),
    ],
)
def test_run_refuses_arguments_of_the_wrong_kind(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        dispatch.run(*arguments)
    assert len(str(caught.value)) < 1_000


@pytest.fixture
def unconnected() -> Client:
    """Nothing that is refused is ever asked of it."""
    return Client.__new__(Client)


@pytest.mark.parametrize("call", [dispatch.run, dispatch.map])
@pytest.mark.parametrize("gang", ["gloo", {"min_workers": 1}, 2, Gang, False])
def test_a_gang_is_none_or_a_gang(unconnected: Client, call: Any, gang: Any) -> None:
    with pytest.raises(ValueError, match=r"dispatch\.\w+\(gang=.*\): must be None or a Gang"):
        call(unconnected, len, [], gang=gang)


def test_run_refuses_other_values(unconnected: Client) -> None:
    with pytest.raises(ValueError, match=r"pass_local_rank='yes'\): must be True or False"):
        dispatch.run(unconnected, len, pass_local_rank="yes")  # type: ignore[arg-type]
    for backend in ("mpi", None, 7):
        with pytest.raises(ValueError, match=rf"Gang\(backend={backend!r}\): must be one of auto, gloo, nccl"):
            dispatch.run(unconnected, len, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("experiments", value) for value in ("abc", b"abc", {"a": 1}, {1, 2}, frozenset({1}), 5, None)),
        ("stop_early", "loss"),
        ("wandb", "project"),
    ],
)
def test_map_refuses_arguments_of_the_wrong_kind(unconnected: Client, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"dispatch\.map\({name}=.*\): must be "):
        dispatch.map(unconnected, len, **{"experiments": [], name: value})
