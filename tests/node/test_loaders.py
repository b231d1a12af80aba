"""A SIGTERM to all processes does not disturb the DataLoader workers of a real rank."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.fork_client import ForkServerClient
from processes import fork_server, nothing_left_behind
from test_fork_server import Rank

LOADING = """
    import multiprocessing, os, time
    from torch.utils.data import DataLoader
    from flytekitplugins.daskpytorch.rank import libraries

    # Without a change of sys.path some editable installations of this package are not found; see `forkserver`.
    os.environ["PYTHONPATH"] = {folder!r}
    with open({folder!r} + "/widened.py", "w") as file:
        file.write("import sys; sys.path.append('/nowhere')")
    libraries.shield()
    multiprocessing.set_forkserver_preload(["__main__", "widened"])
    batches = iter(DataLoader(range(10_000), num_workers=2, multiprocessing_context={method!r}))
    next(batches), next(batches)  # one of each
    print("ready")
    while not os.path.exists({folder!r} + "/gate"):
        time.sleep(0.01)
    print(sum(1 for _ in zip(range(1_000), batches)))
    [first, second] = batches._workers
    first.terminate()
    first.join()
    print(first.exitcode, second.is_alive())
    os._exit(0)
"""


@pytest.fixture
def client() -> Iterator[ForkServerClient]:
    """A client of a fork server that ends with the test."""
    with nothing_left_behind(), contextlib.ExitStack() as stack:
        stack.callback(fork_client.shutdown)
        yield stack.enter_context(contextlib.closing(fork_client.connect()))


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("spawn", "forkserver"))]
)
def test_workers_end_by_no_sigterm_but_their_ranks(method: str, client: ForkServerClient, tmp_path: Path) -> None:
    rank = Rank.running(client, 0, LOADING.format(method=method, folder=str(tmp_path)))
    assert rank.line() == "ready"  # each may have to import torch
    family = psutil.Process(fork_server().pid).children(recursive=True)
    assert len(family) >= 3
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    (tmp_path / "gate").touch()
    assert rank.line() == "1000"
    assert rank.line() == "-9 True"  # by the rank's own word, which is never without effect
    assert client.next_exit() == (0, 0)


STARTING = """
    import gc, os, weakref
    from torch.utils.data import DataLoader, Dataset
    from flytekitplugins.daskpytorch.rank import libraries

    class Decoded(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            import subprocess

            decoder = subprocess.Popen(["sleep", "600"])
            decoder.terminate()
            return decoder.wait()

    libraries.shield()
    gc.disable()
    loader = DataLoader(Decoded(), num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    handle = weakref.ref(batches._workers[0]._popen)
    print([int(code) for code in batches])
    del batches
    print(handle())
    os._exit(0)
"""


def test_programs_that_a_worker_starts_end_by_sigterm_and_nothing_of_a_worker_stays(client: ForkServerClient) -> None:
    rank = Rank.running(client, 0, STARTING)
    assert rank.line() == "[-15]"
    assert rank.line() == "None"


SAMPLING = """
    import os
    from torch.utils.data import DataLoader
    from flytekitplugins.daskpytorch.rank import libraries

    class Sampler:
        def __len__(self):
            return 1

        def __iter__(self):
            import multiprocessing, subprocess, time

            self.program = subprocess.Popen(["sleep", "600"])
            self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            self.process.start()
            yield 0

    libraries.shield()
    sampler = Sampler()
    list(DataLoader(range(1), num_workers=1, sampler=sampler, multiprocessing_context="fork"))
    sampler.process.terminate()
    sampler.program.terminate()
    sampler.process.join(20)
    print(sampler.process.exitcode, sampler.program.wait(20))
    os._exit(0)
"""


def test_processes_that_a_sampler_starts_end_by_sigterm(client: ForkServerClient) -> None:
    assert Rank.running(client, 0, SAMPLING).line() == "-15 -15"
