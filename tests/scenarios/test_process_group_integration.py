"""Programs that call `init_process_group` themselves, as under `torchrun`, run in real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import init_process_group  # what a module imports ahead of its ranks

from flytekitplugins.daskpytorch import Gang, current_rank
from flytekitplugins.daskpytorch.protocol.job import Job
from flytekitplugins.daskpytorch.protocol.placement import Node, place_ranks
from flytekitplugins.daskpytorch.rank import process_group
from gangs import JOB, on_this_machine
from processes import run_program


def gang(function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    """What two ranks on this machine return."""
    return on_this_machine(function, *args, **{"max_restarts": 0} | settings).result()


def total() -> float:
    """What only ranks 0 and 1 of one group can say: 1 + 10."""
    number = torch.tensor(10.0 ** dist.get_rank())
    dist.all_reduce(number)
    return number.item()


def ask_for_all() -> list[tuple[float, int] | str]:
    """Form the group as plain PyTorch code does, again and again."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fits: list[dict[str, Any]] = [
        {},
        {"backend": "cpu:gloo", "init_method": "env://"},
        {"rank": rank, "world_size": size, "init_method": "tcp://127.0.0.1:1"},
        {"world_size": size, "backend": "GLOO", "timeout": timedelta(seconds=77)},
    ]
    found: list[Any] = []
    for how in fits:
        init_process_group(**how)
        found.append((total(), dist.get_world_size()))
    for how in ({"backend": "nccl"}, {"backend": "cpu:gloo,cuda:nccl"}, {"world_size": 4, "rank": 1 - rank}):
        try:
            init_process_group(**how)
        except ValueError as error:
            found.append(str(error))
    return found


def test_calls_that_fit_the_gang_change_nothing_and_others_say_what_differs() -> None:
    for rank, (*fitted, nccl, both, sizes) in enumerate(gang(ask_for_all)):
        assert fitted == [(11.0, 2)] * 4
        assert nccl.endswith("the backend is gloo, not nccl: see Gang(backend=...)")
        assert "the backend is gloo, not cpu:gloo,cuda:nccl" in both
        assert re.search(rf"there are 2 ranks, not 4: .*; this is rank {rank}, not {1 - rank}", sizes)


def set_the_timeout() -> float:
    dist.init_process_group(timeout=timedelta(seconds=3))
    if dist.get_rank() == 0:
        dist.barrier()
    return 0.0


def test_a_timeout_counts_also_for_a_group_that_is_there() -> None:
    """Rank 1 never comes to the barrier, and stays until rank 0 has left."""
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        gang(set_the_timeout)


def again_and_again(times: int) -> list[float]:
    sums = [total()]
    for count in range(times):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        if count % 2:
            dist.init_process_group("gloo", rank=current_rank().rank, world_size=2)
        else:
            dist.init_process_group()
        sums.append(total())
    return sums


def test_groups_are_destroyed_and_formed_again() -> None:
    assert gang(again_and_again, 10) == [[11.0] * 11] * 2


def meet_at_master() -> tuple[bool, str]:
    """Whether anything was in the store before, and which attempt it is; rank 0 is killed in the first one."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
    was_used = store.check(["used"])
    dist.barrier()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if current_rank().is_main:
        store.set("used", attempt)
        if attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    return was_used, store.get("used").decode()


def test_each_attempt_has_a_store_of_its_own_that_anybody_may_join() -> None:
    assert gang(meet_at_master, max_restarts=1) == [(False, "1")] * 2


DRIVER = """
import sys
from flytekitplugins.daskpytorch import Gang, current_rank
from flytekitplugins.daskpytorch.driver.futures import GangFutures
from flytekitplugins.daskpytorch.driver.request import request_for
from flytekitplugins.daskpytorch.driver.supervisor import Supervisor
from flytekitplugins.daskpytorch.node.agent import OwnNode

if __name__ == "__main__":
    request = request_for(lambda: current_rank().world_size, (), {}, Gang(ranks_per_worker=2))
    print([GangFutures(Supervisor(request, OwnNode()), 2).result(), "torch" in sys.modules])
"""


@pytest.mark.slow  # starts cold
def test_a_driver_need_not_import_torch_for_its_ranks_to_meet(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    driver = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert driver.stdout.strip() == "[[2, 2], False]"


def of_its_own(folder: str) -> tuple[float, bool]:
    total()  # whoever leaves gloo while others still connect, under torchrun too, has them fail
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{current_rank().rank}")  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    number = torch.tensor(7.0)
    dist.all_reduce(number)
    try:
        dist.init_process_group()
    except ValueError as error:
        return number.item(), "twice" in str(error)
    return number.item(), False


def test_a_group_with_a_rendezvous_of_its_own_is_none_of_the_gangs(tmp_path: Path) -> None:
    assert gang(of_its_own, str(tmp_path)) == [(7.0, True)] * 2


# ---- Beside torchrun

SCRIPT = "import json, os, sys; open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w').write(json.dumps(dict(os.environ)))"

EXPLAINED = {
    # Set before torchrun starts its agent, for that: which signals end it.
    "TORCHELASTIC_SIGNALS_TO_HANDLE": ("SIGTERM,SIGINT,SIGHUP,SIGQUIT", None),
    # The real one, also where LOCAL_RANK numbers the only GPU that a rank sees.
    "NODE_LOCAL_RANK": (None, ...),
    # One under torchrun, which warns of it; ours is the rank's share of the cores.
    "OMP_NUM_THREADS": ("1", ...),
    # torchrun leaves it to gloo, which listens where the host's name resolves to, and to NCCL.
    "GLOO_SOCKET_IFNAME": (None, "lo"),
    "NCCL_SOCKET_IFNAME": (None, "lo"),
    # Under torchrun nobody asks for what torch remembers of the last 2000 collectives; here a report waits for it.
    "TORCH_FR_BUFFER_SIZE": (None, "64"),
    # No GPU is hidden from a torchrun's rank; one of ours without a GPU of its own sees none.
    "CUDA_VISIBLE_DEVICES": (None, ""),
    # Without them each of torchrun's ranks trains alone on CPUs, with Lightning's defaults and by Accelerate.
    "PL_TRAINER_NUM_NODES": (None, "1"),
    "LT_NUM_NODES": (None, "1"),
    "ACCELERATE_USE_CPU": (None, "true"),
    # Names and places, which differ from one run to the next.
    "MASTER_ADDR": (..., ...),
    "MASTER_PORT": (..., ...),
    "TORCHELASTIC_RUN_ID": (..., ...),
    "TORCHELASTIC_ERROR_FILE": (..., ...),
}
"""Under torchrun, and in a rank; `...` is any value, None is no variable."""


def environment_here() -> dict[str, str]:
    return dict(os.environ)


def test_the_environment_is_that_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MALLOC_TRIM_THRESHOLD_"):  # as Dask may have set them
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    done = run_program([*command, tmp_path / "script.py", tmp_path], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours = gang(environment_here, max_restarts=3)
    for rank in range(2):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        names = {name for name in theirs.keys() | ours[rank].keys() if theirs.get(name) != ours[rank].get(name)}
        assert names <= EXPLAINED.keys()
        for name in names:
            for value, expected in zip((theirs.get(name), ours[rank].get(name)), EXPLAINED[name], strict=True):
                assert value == expected or (expected is ... and value), (name, value)


TOP = """
import os
from torch import distributed as dist
from flytekitplugins.daskpytorch import current_rank

RANK = current_rank()
if "RANK" in os.environ:  # in a rank, as libraries do that look for their world
    dist.init_process_group("gloo")
WORLD = dist.get_world_size() if dist.is_initialized() else 1


def place():
    return RANK.rank, WORLD, RANK is current_rank()
"""


def test_a_module_that_asks_at_its_top_is_told_of_the_gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_at_its_top.py").write_text(TOP)
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("asks_at_its_top")
    assert module.place() == (0, 1, True)
    assert gang(module.place, start_timeout=30.0) == [(0, 2, True), (1, 2, True)]


def test_a_gang_with_nccl_is_called_so_and_exchanges_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ON_GPUS", "cpu:gloo,cuda:gloo")  # as far as a machine without GPUs goes
    node = Node(worker="w", host="h", num_cores=1, gpus=(), gpu_names=(), interface="lo", versions={})
    [[place]] = place_ranks([node], 1)
    job = Job(**{**JOB, "backend": "nccl", "settings": Gang(start_timeout=30.0)})
    process_group.install()
    process_group.expect(process_group.Membership(place, job, lambda: None))
    process_group.join()
    try:
        assert dist.get_backend() == "nccl"
        assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"
        assert total() == 1.0  # on the CPU
    finally:
        process_group.leave()
