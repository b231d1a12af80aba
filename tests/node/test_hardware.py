"""A node finds its cores, memory, network interfaces and GPUs."""

import asyncio
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from flytekitplugins.daskpytorch.errors import GangStartError
from flytekitplugins.daskpytorch.node import hardware
from flytekitplugins.daskpytorch.node.hardware import interface_of
from flytekitplugins.daskpytorch.process import gpu_vendor


def test_each_address_of_this_machine_leads_to_its_interface() -> None:
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert addresses
    assert {address: interface_of(address.split("%")[0]) for address in addresses} == addresses
    assert interface_of("127.0.0.2") == "lo"  # the system lists the first loopback address alone
    assert interface_of("192.0.2.1") is None  # for documentation: no machine has it


# ---- GPUs

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Make this machine one with a GPU driver, where torch answers by `question`."""

    def make(question: str = hardware.QUESTION, *, has_driver: bool = True) -> None:
        (tmp_path / "nvidiactl").touch()
        files = (tmp_path / "nvidiactl",) if has_driver else (tmp_path / "none",)
        monkeypatch.setattr(gpu_vendor, "NVIDIA_FILES", files)
        monkeypatch.setattr(hardware, "QUESTION", question)
        monkeypatch.setattr(hardware, "LOOK_TIMEOUT", 300.0)  # a busy machine takes long to import torch
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        for variable in gpu_vendor.ASKING_VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        hardware._look.cache_clear()

    yield make
    hardware._look.cache_clear()


def answer(*uuids: str, problem: str = "") -> str:
    """Return a question whose answer is that there are such GPUs."""
    return f"import json; print(json.dumps([[['Test GPU', uuid] for uuid in {uuids!r}], {problem!r}]))"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (answer(problem="RuntimeError: system not yet initialized"), "system not yet initialized"),
        ("import sys; sys.exit('torch is broken')", "torch is broken"),
        (answer("a"), r"2, 1 found \(GPU 0: Test GPU\)"),
    ],
)
def test_gpus_that_were_asked_for_and_are_not_found_are_an_error(machine: Machine, question: str, said: str) -> None:
    machine(question)
    where = rf"on host {socket.gethostname()} \(worker w\): the limits ask for 2"
    with pytest.raises(GangStartError, match=where) as error:
        hardware.describe_node("w", None, 2)
    assert error.match(said)


def test_a_driver_that_hangs_is_not_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("import time; time.sleep(100)")
    monkeypatch.setattr(hardware, "LOOK_TIMEOUT", 0.5)
    began = time.monotonic()
    with pytest.raises(GangStartError, match=r"Torch did not count the GPUs within 0\.5 s; the GPU driver may hang"):
        hardware.require_gpus(1, "w")
    assert hardware.require_gpus(0, "w").names == {}
    assert time.monotonic() - began < 30


def test_without_a_driver_limits_and_the_device_plugin_ask_for_gpus(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(has_driver=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    assert hardware.require_gpus(0, "w").names == {}
    with pytest.raises(GangStartError, match="no GPU driver reaches this process"):
        hardware.require_gpus(1, "w")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    with pytest.raises(GangStartError, match="NVIDIA_VISIBLE_DEVICES asks for 2, 0 found"):
        hardware.require_gpus(0, "w")


def test_a_wrong_list_of_visible_gpus_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(answer("a"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,9")
    with pytest.raises(GangStartError, match=r"CUDA_VISIBLE_DEVICES asks for 2, 1 found .* CUDA_VISIBLE_DEVICES='3,9'"):
        hardware.require_gpus(0, "w")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,-1,4")
    hardware._look.cache_clear()
    assert hardware.require_gpus(1, "w") == hardware.FoundGpus({"3": "Test GPU"}, ("a",))


def test_gpus_have_uuids_and_instances_their_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(answer("a", "b"))
    assert hardware.describe_node("w", None, 2).gpu_uuids == ("a", "b")
    assert asyncio.run(hardware.host_and_gpus()) == (socket.gethostname(), ("a", "b"))
    machine(answer("a"))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    found = hardware.require_gpus(2, "w")
    assert (list(found.names), found.uuids) == (["MIG-1", "MIG-2"], ("MIG-1", "MIG-2"))
    machine(answer("a"))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "MIG-1")
    assert hardware.require_gpus(1, "w") == hardware.FoundGpus({"0": "Test GPU"}, ("MIG-1",))


# ---- AMD


@pytest.fixture
def amd(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make this machine one with AMD's driver and such devices (processor cores, units of a GPU)."""

    def make(question: str, *devices: tuple[int, int]) -> None:
        machine(question, has_driver=False)
        for number, (num_cores, num_units) in enumerate(devices):
            (tmp_path / f"nodes/{number}").mkdir(parents=True)
            (tmp_path / f"nodes/{number}/properties").write_text(
                f"cpu_cores_count {num_cores}\nsimd_count {num_units}\nmem_banks_count 1\n"
            )
        (tmp_path / "kfd").touch()
        monkeypatch.setattr(gpu_vendor, "AMD_DRIVER", tmp_path / "kfd")
        monkeypatch.setattr(gpu_vendor, "AMD_DEVICES", tmp_path / "nodes")
        for variable in gpu_vendor.AMD_VARIABLES:
            monkeypatch.delenv(variable, raising=False)

    return make


NO_CUDA = answer(problem="AssertionError: Torch not compiled with CUDA enabled")
PROCESSOR, CARD, GRAPHICS_OF_PROCESSOR = (16, 0), (0, 304), (8, 24)


@pytest.mark.parametrize(
    ("variable", "value", "is_refused"),
    [("HOME", "/", True), ("ROCR_VISIBLE_DEVICES", "0,1", True), ("HIP_VISIBLE_DEVICES", "-1", False)],
    ids=["none", "by Slurm", "hidden"],
)
def test_amd_gpus_that_torch_does_not_know_are_not_left_idle_in_silence(
    amd: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, *, is_refused: bool
) -> None:
    amd(NO_CUDA, PROCESSOR, CARD, CARD)
    monkeypatch.setenv(variable, value)
    if not is_refused:
        assert hardware.require_gpus(0, "w").names == {}
        return
    with pytest.raises(GangStartError, match=r"w\) has 2 AMD GPUs, of which torch .* finds none \(torch says: Ass"):
        hardware.require_gpus(0, "w")


def test_graphics_of_a_processor_are_no_gpu_for_training(amd: Callable[..., None]) -> None:
    amd("raise ValueError('torch is not asked')", GRAPHICS_OF_PROCESSOR)
    assert hardware.require_gpus(0, "w").names == {}


def test_a_container_with_some_of_the_hosts_amd_gpus_counts_its_own(
    amd: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses the properties of the others: `node_show` in amdkfd returns EPERM."""
    amd(NO_CUDA, PROCESSOR, CARD, CARD)
    read = Path.read_text

    def read_own(path: Path) -> str:
        if path.parent.name == "1":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_text", read_own)
    assert gpu_vendor.num_amd_gpus() == 1


def test_torch_for_rocm_counts_its_gpus_by_hips_variable(
    amd: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    amd(answer("a", "b"), PROCESSOR, CARD, CARD)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,6")
    assert hardware.require_gpus(0, "w") == hardware.FoundGpus({"4": "Test GPU", "6": "Test GPU"}, ("a", "b"))


def test_an_amd_gpu_is_known_by_its_pci_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = SimpleNamespace(name="MI300X", uuid="ab", pci_domain_id=1, pci_bus_id=0x43, pci_device_id=2)
    cuda = SimpleNamespace(init=lambda: None, device_count=lambda: 1, get_device_properties=lambda _: about)
    for version, key in ((None, "ab"), ("6.4", "0001:43:02.0")):
        torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=version))
        monkeypatch.setitem(sys.modules, "torch", torch)
        exec(hardware.QUESTION, {})
        assert json.loads(capsys.readouterr().out) == [[["MI300X", key]], ""]
