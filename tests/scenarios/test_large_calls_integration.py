"""Large arguments reach each worker once, whatever happens to its ranks."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.agent import OwnNode
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.job import LARGE


def add_up(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> tuple[int, int, list[int]]:
    """The sums of the arguments, and what this rank has in them once all have written to theirs."""
    rank = current_rank().rank
    sums = int(array.sum()), int(tensor.sum())
    array[0] = tensor[0] = 10 + rank
    torch.distributed.barrier()
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
    return *sums, [int(array[0]), int(tensor[0])]


def run(max_restarts: int) -> GangFutures:
    array, tensor = np.ones(3 * LARGE, dtype=np.uint8), torch.ones(2 * LARGE, dtype=torch.uint8)
    request = request_for(add_up, (array,), {"tensor": tensor}, Gang(ranks_per_worker=2, max_restarts=max_restarts))
    return GangFutures(Supervisor(request, OwnNode()), 2)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the calls that the driver sends, in multiples of `LARGE`."""
    noted: list[int] = []
    send = Connection.send_raw
    monkeypatch.setattr(Connection, "send_raw", lambda self, data: (noted.append(len(data) // LARGE), send(self, data)))
    return noted


def test_a_restart_has_the_arguments_again_which_came_once(sent: list[int]) -> None:
    results = run(max_restarts=1).result()
    assert results == [(3 * LARGE, 2 * LARGE, [10 + rank] * 2) for rank in range(2)]
    assert sent == [5]


def test_arguments_that_do_not_come_fail_the_gang_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "send_raw", lambda *_: None)
    error = run(max_restarts=0).exception()
    assert isinstance(error, OSError)
    assert "large arguments did not arrive on this node: EOFError: the connection closed after 0 of the" in str(error)


def total_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.sum())


def test_each_call_of_a_gang_that_stays_has_its_own_arguments(sent: list[int]) -> None:
    with dispatch.gang(nproc=2) as gang:
        for value in (1, 2):
            array = np.full(value * LARGE, value, dtype=np.uint8)
            assert gang.call(total_of, array).result() == [value * value * LARGE] * 2
        assert gang.call(total_of, np.ones(3)).result() == [3, 3]
    assert sent == [1, 2]
