"""A SIGTERM to all processes does not disturb the DataLoader workers of a real rank."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.fork_client import ForkServerClient
from processes import fork_server, nothing_left_behind
from test_fork_server import Rank, next_exit

LOADING = """
    import atexit, os, time
    from torch.utils.data import DataLoader
    from flytekitplugins.daskpytorch.rank import libraries

    libraries.shield()
    batches = iter(DataLoader(range(10_000), num_workers=2, multiprocessing_context={method!r}))
    next(batches), next(batches)  # one of each
    print("ready")
    while not os.path.exists({folder!r} + "/gate"):
        time.sleep(0.01)
    print(sum(1 for _ in zip(range(1_000), batches)))
    atexit._run_exitfuncs()  # as at the end of a program
    os._exit(0)
"""


@pytest.fixture
def client() -> Iterator[ForkServerClient]:
    """A client of a fork server that ends with the test."""
    with nothing_left_behind(), contextlib.ExitStack() as stack:
        stack.callback(fork_client.shutdown)
        yield stack.enter_context(contextlib.closing(fork_client.connect()))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_end_by_no_sigterm_and_with_their_rank(method: str, client: ForkServerClient, tmp_path: Path) -> None:
    rank = Rank.running(client, 0, LOADING.format(method=method, folder=str(tmp_path)))
    assert rank.line() == "ready"  # each may have to import torch
    family = psutil.Process(fork_server().pid).children(recursive=True)
    assert len(family) >= 3
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    (tmp_path / "gate").touch()
    assert rank.line() == "1000"
    assert next_exit(client) == [0, 0]
