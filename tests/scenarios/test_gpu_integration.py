"""Promises of gangs on real GPUs, which simulated devices cannot show. Each test runs on the CPU, too, where it can.

`python benchmarks/gpu.py --part checks` runs this file, in this order, on a machine with a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed as dist

from flytekitplugins.daskpytorch import Gang, GangError, Observer, RankUsage, WorkerLostError, current_rank, dispatch
from flytekitplugins.daskpytorch.node import fork_client, hardware
from flytekitplugins.daskpytorch.process import gpu_vendor
from flytekitplugins.daskpytorch.rank import process_group
from processes import nothing_left_behind, until
from warm import start_cold

if TYPE_CHECKING:
    from flytekitplugins.daskpytorch.task.run import RunFutures

FOUND = hardware.gpus_here()
"""Counted in a process of its own, as this one stays without CUDA."""
SECONDS = 120.0
"""For each gang: a bound that catches hangs."""
STATE_SIZE = {"cpu": 8 << 20, "cuda": 1 << 30}
"""Bytes of the saved state, for each rank of a sharded one."""
Run = Callable[..., "RunFutures"]
ON_CPU = pytest.param("cpu", marks=pytest.mark.slow)
"""For checks whose subject other tests have on the CPU; `gpu.py` runs them, too."""
only_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.fixture(params=[ON_CPU, "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where the ranks compute."""
    if request.param == "cuda" and not FOUND.names:
        pytest.skip(f"needs a GPU: {FOUND.problem}")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def own_fork_server() -> Iterator[None]:
    """Starts as users' do: with nothing imported ahead, and without CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        start_cold(patch)
        patch.setenv("DASKPYTORCH_CHECKPOINTS", "")
        fork_client.shutdown()
        with nothing_left_behind():
            yield


@pytest.fixture
def run(device: str) -> Iterator[Run]:
    """Starts a gang on this machine, with a rank for each GPU, or two on the CPU."""
    started: list[RunFutures] = []

    def start(function: Callable[..., Any], *args: Any, num_ranks: int = 0, **settings: Any) -> RunFutures:
        num_ranks = num_ranks or (len(FOUND.names) if device == "cuda" else 2)
        gang = Gang(ranks_per_worker=num_ranks, **{"max_restarts": 0} | settings)
        started.append(dispatch.run(None, function, device, *args, gang=gang))
        return started[-1]

    yield start
    for futures in started:
        futures.cancel()


# ---- Before the training


@only_cuda
@pytest.mark.usefixtures("device")
def test_the_doctor_finds_no_problem() -> None:
    command = [sys.executable, "-m", "flytekitplugins.daskpytorch", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [gpus] = re.findall(r"^ok +GPUs +(.*)$", ran.stdout, re.MULTILINE)
    assert [name for name in FOUND.names.values() if name not in gpus] == []


def device_files(pid: int | str) -> list[str]:
    """Files of the GPU driver that a process has open: a process that has only imported torch has none."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            found.add(str(file.readlink()))
    return sorted(name for name in found if name.startswith(("/dev/nvidia", "/dev/dxg")))


def look_before_use(device: str) -> tuple[bool, bool, list[str], list[str]]:
    """Return the state of CUDA and the open device files before a rank uses its device. The device then has to work."""
    found = torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), device_files("self"), device_files(os.getppid())
    assert torch.ones(2, device=device).sum().item() == 2.0
    return found


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda", "gloo"), ("cuda", "nccl")], indirect=["device"]
)
def test_a_rank_begins_without_a_context_but_with_nccl_and_its_fork_server_has_none(
    run: Run, device: str, backend: str
) -> None:
    for is_initialized, is_in_bad_fork, own, of_fork_server in run(look_before_use, backend=backend).result():
        assert (is_initialized, is_in_bad_fork, of_fork_server) == (backend == "nccl", False, [])
        assert bool(own) or backend == "gloo"
        assert device == "cuda" or not own  # NVML, which the rank has asked about its GPU, may keep files open
    assert device_files("self") == []


DRIVER = """
import sys
import torch
from flytekitplugins.daskpytorch import Gang, dispatch

def total(device):
    number = torch.ones(1, device=device)
    torch.distributed.all_reduce(number)
    return number.item()

if __name__ == "__main__":
    torch.ones(1, device=sys.argv[1])
    print(dispatch.run(None, total, sys.argv[1], gang=Gang(ranks_per_worker=1, max_restarts=0)).result())
"""


def test_ranks_of_a_driver_that_has_used_its_device_start_afresh(device: str, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, "driver.py", device]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert ran.stdout.splitlines()[-1:] == ["[1.0]"], ran.stderr


def add_up(device: str) -> float:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return total.item()


def check_by_nvml(device: str) -> tuple[tuple[int | None, float | None], list[str]]:
    """Memory and utilisation of the rank's own GPU, and its faults."""
    uuid = str(torch.cuda.get_device_properties(current_rank().device).uuid)
    return gpu_vendor.usage(uuid), gpu_vendor.faults_of(uuid)


@only_cuda
def test_the_check_before_the_use_of_a_gpu_finds_no_fault(
    run: Run, record_property: Callable[[str, object], None]
) -> None:
    for (memory, utilization), faults in run(check_by_nvml).result():
        record_property("NVML", str((memory, utilization)))
        assert faults == []
        assert memory
    for check in ("off", "quick", "off", "quick"):
        began = time.monotonic()
        run(add_up, gpu_check=check).result()
        record_property(f"seconds with gpu_check={check}", round(time.monotonic() - began, 2))


# ---- Devices and process groups


def find_own(device: str) -> tuple[str, bool, int]:
    rank = current_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # as most scripts begin
    is_current = torch.cuda.current_device() == rank.device.index
    return str(torch.cuda.get_device_properties(rank.device).uuid), is_current, torch.cuda.device_count()


@only_cuda
@pytest.mark.parametrize("devices", ["own", "all"])
def test_each_rank_has_its_own_gpu_by_uuid(run: Run, devices: str) -> None:
    visible = len(FOUND.names) if devices == "all" else 1
    assert run(find_own, devices=devices).result() == [(uuid, True, visible) for uuid in FOUND.uuids]
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    assert [uuid for uuid in FOUND.uuids if uuid not in said] == []


def exchange(device: str) -> dict[str, Any]:
    """Return the results of collectives in the present default group."""
    summed = torch.tensor([dist.get_rank() + 1.0], device=device)
    sent = summed.clone()
    dist.all_reduce(summed)
    dist.broadcast(sent, dist.get_world_size() - 1)
    found = {"backend": dist.get_backend(), "sum": summed.tolist(), "sent": sent.tolist()}
    found["new group"] = dist.get_backend(dist.new_group())
    dist.barrier()
    return found


def compare_groups(device: str, folder: str) -> tuple[list[dict[str, Any]], float, list[Any]]:
    """The same in the gang's group, in torch's own, and in the gang's formed again; and the gang's on the CPU."""
    rank = current_rank()
    found = [exchange(device)]
    on_cpu, objects = torch.ones(1), [None] * rank.world_size
    dist.all_reduce(on_cpu)
    dist.all_gather_object(objects, rank.rank)
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", rank.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(found[0]["backend"], store=store, rank=rank.rank, world_size=rank.world_size)
    found.append(exchange(device))
    dist.destroy_process_group()
    dist.init_process_group()
    found.append(exchange(device))
    return found, on_cpu.item(), objects


@pytest.mark.parametrize(
    ("device", "backend"),
    [pytest.param("cpu", "gloo", marks=pytest.mark.slow), ("cuda", "nccl"), ("cuda", "gloo")],
    indirect=["device"],
)
def test_the_gangs_group_is_as_torchs_own(run: Run, backend: str, tmp_path: Path) -> None:
    results = run(compare_groups, str(tmp_path), backend=backend).result()
    size = len(results)
    for found, on_cpu, objects in results:
        assert found[0]["backend"] == backend
        assert found[0]["sum"] == [size * (size + 1) / 2]
        assert found[1:] == found[:1] * 2
        assert (on_cpu, objects) == (float(size), list(range(size)))


# ---- Failures


def wait_until_kept(step: int) -> None:
    while all(kept.step != step for kept in current_rank().checkpoint.list()):
        time.sleep(0.01)
    dist.barrier()


def busy(device: str, num_kernels: int) -> torch.Tensor:
    """The result of kernels that are still queued on a GPU."""
    side = 4096 if device == "cuda" else 64
    matrix = torch.rand(side, side, device=device)
    for _ in range(num_kernels):
        matrix = torch.tanh(matrix @ matrix)
    return matrix


def die_amid_kernels(device: str) -> tuple[int, int]:
    """The free memory of the GPU when the first context starts, and the second; the last rank is killed once."""
    rank = current_rank()
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 20
    held = torch.empty(int(0.8 * free), dtype=torch.uint8, device=device).fill_(1)
    before = rank.checkpoint.load()
    if before is not None:
        return before["free"], free
    rank.checkpoint.save({"free": free}, 1)
    wait_until_kept(1)
    matrix = busy(device, 500)
    if rank.rank == rank.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while held.numel():
        dist.all_reduce(matrix)
    return 0, 0


def test_a_rank_killed_amid_kernels_leaves_its_memory_to_the_next_attempt(
    run: Run, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    free = run(die_amid_kernels, max_restarts=1, checkpoint_uri=str(tmp_path)).result()
    record_property("seconds with the restart", round(time.monotonic() - began, 2))
    record_property("free bytes at both starts", free)
    assert all(after >= 0.95 * before > 0 for before, after in free)


# ---- Checkpoints


def bytes_of(rank: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randint(0, 256, (STATE_SIZE[device],), dtype=torch.uint8, device=device, generator=generator)


def state_of(local: torch.Tensor, way: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if way == "save":
        return {"bytes": local}
    mesh = init_device_mesh(local.device.type, (dist.get_world_size(),))
    return {"bytes": DTensor.from_local(local, mesh, [Shard(0)])}


def resident(key: str = "VmRSS") -> int:
    """Bytes of this process in main memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def save_under_load(device: str, way: str) -> dict[str, float]:
    """Save while kernels run on another stream, change the state at once, and measure."""
    rank = current_rank()
    local = bytes_of(rank.rank if way == "save_sharded" else 0, device)
    state = state_of(local, way)
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
        busy(device, 500)
    dist.barrier()
    with contextlib.suppress(OSError):  # not every kernel can
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = resident(), time.perf_counter()
    getattr(rank.checkpoint, way)(state, 1)
    stall = time.perf_counter() - began
    local.zero_()
    wait_until_kept(1)
    seconds = time.perf_counter() - began
    return {"stall": stall, "kept": seconds, "bytes at the peak": max(0, resident("VmHWM") - before)}


def compare_saved(device: str, way: str) -> bool:
    """Return True if each byte is as it was at the save."""
    rank = current_rank()
    wanted = bytes_of(rank.rank if way == "save_sharded" else 0, device)
    if way == "save":
        found = rank.checkpoint.load()
        return found is not None and torch.equal(found["bytes"].to(device), wanted)
    loaded = torch.zeros_like(wanted)
    return rank.checkpoint.load_sharded(state_of(loaded, way)) == 1 and torch.equal(loaded, wanted)


@pytest.mark.parametrize("way", ["save", "save_sharded"])
def test_a_state_saved_under_load_comes_back_byte_by_byte(
    run: Run, device: str, way: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    kept = {"checkpoint_uri": str(tmp_path), "key": "state"}
    figures = run(save_under_load, way, **kept).result()
    for name in figures[0]:
        record_property(name, round(max(each[name] for each in figures), 3))
    assert all(run(compare_saved, way, **kept).result())
    assert max(each["bytes at the peak"] for each in figures) < 2.5 * STATE_SIZE[device] + (256 << 20)


# ---- Errors of the code on a GPU


def run_out_of_memory(device: str) -> None:
    if device == "cpu":
        torch.empty(1 << 60, dtype=torch.uint8)
    held = []
    while True:
        held.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))


def index_out_of_bounds(device: str) -> None:
    table = torch.zeros(4, device=device)
    table[torch.tensor([7], device=device)].sum().item()


FAULTS = {"memory": run_out_of_memory, "assert": index_out_of_bounds}
SAYS = {
    ("memory", "cuda"): "CUDA out of memory",
    ("memory", "cpu"): "can't allocate memory",
    ("assert", "cuda"): "device-side assert",
    ("assert", "cpu"): "out of bounds",
}


def fail_once(device: str, fault: str) -> float:
    """The ranks' sum; in the first attempt, the last rank has the fault."""
    rank = current_rank()
    total = add_up(device)
    if rank.checkpoint.load() is None:
        rank.checkpoint.save({"step": 1}, 1)
        wait_until_kept(1)
        if rank.rank == rank.world_size - 1:
            FAULTS[fault](device)
        dist.barrier()
    return total


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_the_code_is_blamed_and_the_next_attempt_is_clean(
    run: Run, device: str, fault: str, tmp_path: Path
) -> None:
    failed = run(fail_once, fault, checkpoint_uri=str(tmp_path / "failed"))
    error = failed.exception()
    blamed = error if isinstance(error, GangError) else error.__cause__
    assert isinstance(blamed, GangError)
    assert not isinstance(blamed, WorkerLostError), "an error of the code is no loss of infrastructure"
    assert blamed.rank == len(failed) - 1
    assert SAYS[fault, device] in f"{error} {blamed}"
    results = run(fail_once, fault, max_restarts=1, checkpoint_uri=str(tmp_path / "again")).result()
    assert results == [float(len(failed))] * len(failed)


def recall_collectives(device: str) -> list[Any]:
    """The last collectives as torch's flight recorder has them."""
    for _ in range(3):
        dist.all_reduce(torch.ones(4, device=device))
    newest: list[Any] = []

    def are_done() -> bool:
        recalled = process_group.recall()
        newest[:] = recalled.collectives[-3:] if recalled is not None else []
        return bool(newest) and all(each.is_done for each in newest)

    until(are_done, lambda: f"the collectives to be done: {newest}")
    return [(each.group, each.operation, [*each.inputs], each.is_done) for each in newest]


def test_the_flight_recorder_has_the_collectives_of_this_backend(run: Run, device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    for shown in run(recall_collectives).result():
        assert shown == [(f"the default group ({backend})", "all_reduce", [(4,)], True)] * 3


def wait_in_vain(device: str) -> None:
    dist.init_process_group(timeout=timedelta(seconds=5))
    dist.barrier()
    rank, number = current_rank(), torch.ones(1, device=device)
    if rank.world_size == 1:
        torch.cuda._sleep(100 * 10**9)  # clock ticks, about a minute: the collective waits for its turn on the GPU
    while rank.rank and rank.rank == rank.world_size - 1:
        time.sleep(0.1)
    dist.all_reduce(number)
    number.item()


def test_a_collective_that_never_ends_is_told_and_its_process_ends(
    run: Run, device: str, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    futures = run(wait_in_vain)
    error = futures.exception(SECONDS)
    record_property("seconds to the error of a timeout of 5 s", round(time.monotonic() - began, 1))
    told = f"{error} {error.__cause__}"
    record_property("error", told[:500])
    if len(futures) > 1:
        assert f"rank {len(futures) - 1} has not called collective" in told
    if device == "cuda":
        assert "NCCL watchdog" in told
        assert "all_reduce" in told.lower().replace("allreduce", "all_reduce")


def return_before_the_last_call(device: str) -> None:
    number = torch.ones(1, device=device)
    dist.all_reduce(number)
    if current_rank().is_main:
        dist.all_reduce(number)
        number.item()


def test_a_rank_that_waits_for_one_that_has_returned_ends_the_gang(
    run: Run, device: str, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    futures = run(return_before_the_last_call)
    if len(futures) == 1:
        pytest.skip("needs two GPUs")
    error = futures.exception(SECONDS)
    record_property("seconds to the error", round(time.monotonic() - began, 1))
    assert isinstance(error, GangError)
    assert error.kind == "desync"
    assert " returned; rank 0 was still in all_reduce" in error.cause


# ---- CUDA graphs, compiled models, usage

USAGES: list[RankUsage] = []


class Usages(Observer):
    """Keeps each rank's samples."""

    def on_usage(self, usage: RankUsage) -> None:
        USAGES.append(usage)


@pytest.fixture
def usages() -> list[RankUsage]:
    USAGES.clear()
    return USAGES


def capture_for_seconds(device: str) -> tuple[bool, float, float]:
    """Capture a graph for so long that the rank's usage is sampled meanwhile, and replay it: the result, and when."""

    def work(values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values @ values / 64)

    values = torch.rand(64, 64, device=device)
    wanted = work(work(values))  # and cuBLAS is ready
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        began = time.time()
        result = work(values)
        time.sleep(3.0)
        result = work(result)
        ended = time.time()
    graph.replay()
    torch.cuda.synchronize()
    return torch.allclose(result, wanted), began, ended


@only_cuda
def test_a_usage_sample_during_the_capture_of_a_graph_does_no_harm(run: Run, usages: list[RankUsage]) -> None:
    for is_right, began, ended in run(capture_for_seconds, observers=(Usages,)).result():
        assert is_right
        assert any(began < usage.time < ended for usage in usages)


def use_device(device: str, seconds: float) -> int:
    """Compute for some seconds; the bytes that torch has allocated on the GPU."""
    end, step = time.monotonic() + seconds, 0
    held = torch.empty(STATE_SIZE[device], dtype=torch.uint8, device=device)
    while time.monotonic() < end:
        step += 1
        current_rank().log({"mean": busy(device, 50).mean()}, step)
    return torch.cuda.memory_allocated() if device == "cuda" else held.nbytes


def test_the_deck_has_each_ranks_use_of_its_gpu(
    run: Run, device: str, usages: list[RankUsage], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    futures = run(use_device, 5.0, observers=(Usages,))
    held = futures.result()
    page = futures.report(tmp_path / "page.html").read_text()
    assert {usage.rank for usage in usages} == set(range(len(held)))
    assert ("GPU memory (GiB)" in page) == (device == "cuda")
    if device == "cuda":
        record_property("most bytes of GPU memory", max(usage.gpu_memory or 0 for usage in usages))
        record_property("highest utilisation", max(usage.gpu_utilization or 0.0 for usage in usages))
        for rank, size in enumerate(held):
            assert max(usage.gpu_memory or 0 for usage in usages if usage.rank == rank) >= size
        assert "GPU utilization (%)" in page
        assert max(usage.gpu_utilization or 0.0 for usage in usages) > 0.5


# ---- What comes back, shared GPUs


def return_from_device(device: str) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2).to(device)
    torch.nn.init.constant_(model.weight, 0.5)
    numbers = torch.arange(6.0, device=device)
    return {"model": model, "view": numbers[::2], "half": numbers.bfloat16(), "parameter": torch.nn.Parameter(numbers)}


def test_a_returned_model_and_tensors_arrive_on_the_cpu(run: Run) -> None:
    for found in run(return_from_device).result():
        tensors = [*found.pop("model").parameters(), *found.values()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert tensors[0].tolist() == [[0.5] * 3] * 2
        assert found["view"].tolist() == [0.0, 2.0, 4.0]
        assert found["half"].dtype == torch.bfloat16
        assert found["parameter"].requires_grad
    assert device_files("self") == []


def share(device: str) -> tuple[str, str, float]:
    total = torch.tensor(float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    return dist.get_backend(), str(torch.cuda.get_device_properties(current_rank().device).uuid), total.item()


@only_cuda
def test_two_ranks_share_a_gpu_by_gloo(run: Run) -> None:
    num_ranks = 2 * len(FOUND.names)
    results = run(share, num_ranks=num_ranks).result()
    assert {(backend, total) for backend, _, total in results} == {("gloo", num_ranks * (num_ranks + 1) / 2)}
    assert sorted(uuid for _, uuid, _ in results) == sorted(2 * FOUND.uuids)
