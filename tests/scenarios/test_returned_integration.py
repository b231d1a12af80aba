"""Large return values of real ranks: the memory that they take, and a rank that dies during the transfer."""

import json
import os
from pathlib import Path
from typing import Any

from flytekitplugins.daskpytorch import Gang, current_rank
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.agent import OwnNode
from flytekitplugins.daskpytorch.protocol.messages import PIECE_SIZE
from processes import nothing_left_behind, run_program

SIZE = 100
"""MiB that each rank returns."""

MEMORY = f"""
import atexit
import json
from pathlib import Path
from flytekitplugins.daskpytorch import Gang
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node import fork_client
from flytekitplugins.daskpytorch.node.agent import OwnNode


def mebibytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def train(size):
    import torch
    from flytekitplugins.daskpytorch import current_rank

    rank = current_rank().rank
    returned = torch.full((size << 18,), float(rank))
    before = mebibytes("VmRSS")
    note = lambda: Path(f"rank-{{rank}}").write_text(str(mebibytes("VmHWM") - before))
    atexit.register(note)
    return returned


def run(size):
    settings = Gang(ranks_per_worker=2, max_restarts=0)
    return GangFutures(Supervisor(request_for(train, (size,), {{}}, settings), OwnNode()), 2).result()


if __name__ == "__main__":
    run(1)  # imports what is imported late
    before = mebibytes("VmRSS")
    results = run({SIZE})
    growth = mebibytes("VmHWM") - before
    print(json.dumps([[returned.mean().item() for returned in results], growth]))
    fork_client.shutdown()
"""


def test_the_driver_holds_little_more_than_the_results_and_a_rank_no_copy(tmp_path: Path) -> None:
    (tmp_path / "memory.py").write_text(MEMORY)
    with nothing_left_behind():
        ran = run_program(["memory.py"], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    values, growth = json.loads(ran.stdout)
    assert values == [0.0, 1.0]
    assert growth < 2.5 * SIZE
    assert [float((tmp_path / f"rank-{rank}").read_text()) < 0.5 * SIZE for rank in range(2)] == [True, True]


class DiesOnItsWay:
    """Ends the rank that pickles it, once."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.trace.exists():
            self.trace.touch()
            os._exit(9)
        return str, ("it is here",)


def return_much(trace: str) -> tuple[bytes, object]:
    rank = current_rank().rank
    return bytes([rank]) * (3 * PIECE_SIZE), DiesOnItsWay(Path(trace)) if rank == 1 else None


def test_a_rank_that_dies_while_its_result_is_on_its_way_has_not_delivered(tmp_path: Path) -> None:
    request = request_for(return_much, (str(tmp_path / "died"),), {}, Gang(ranks_per_worker=2, max_restarts=1))
    supervisor = Supervisor(request, OwnNode())
    results = GangFutures(supervisor, 2).result()
    assert (tmp_path / "died").exists()
    assert [(set(data), len(data), rest) for data, rest in results] == [
        ({0}, 3 * PIECE_SIZE, None),
        ({1}, 3 * PIECE_SIZE, "it is here"),
    ]
