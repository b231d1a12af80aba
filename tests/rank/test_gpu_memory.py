"""A CUDA out-of-memory error says what holds the GPU's memory. Torch and NVML are simulated.

`test_gpu_integration.py` has a GPU without memory.
"""

import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_gpus
from fake_gpus import SOUND
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.protocol.job import RankOrder
from flytekitplugins.daskpytorch.rank import own_gpu
from gangs import order_for
from processes import SCRIPTS, nothing_left_behind, run_program

GIB, MIB = 1 << 30, 1 << 20
OF_TORCH = {"filename": "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
OF_MODEL = {"filename": "/home/ada/model.py", "line": 31, "name": "forward"}
OF_SCRIPT = {"filename": "/home/ada/train.py", "line": 7, "name": "main"}
MESSAGE = (
    "CUDA out of memory. Tried to allocate 6.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 2.00 GiB is free."
)


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"size": size, "state": state, "frames": list(frames)}


def segment(device: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"device": device, "total_size": sum(each["size"] for each in blocks), "blocks": list(blocks)}


def segments() -> list[dict[str, Any]]:
    """Segments of two devices, as of `torch.cuda.memory_snapshot()`."""
    return [
        segment(0, block(50 * GIB, OF_SCRIPT)),
        segment(1, block(24 * GIB, OF_TORCH, OF_MODEL, OF_SCRIPT), block(24 * GIB, OF_TORCH, OF_MODEL, OF_SCRIPT)),
        segment(1, block(1 * GIB, OF_SCRIPT), block(512 * MIB, state="inactive"), block(20 * MIB, state="inactive")),
        segment(1, block(2 * GIB, OF_TORCH, state="active_awaiting_free")),
    ]


# ---- What a snapshot says


def test_a_snapshot_says_what_is_reserved_and_which_lines_hold_the_most() -> None:
    reserved, *others = own_gpu.describe({"segments": segments()}, 1)
    assert reserved == (
        "Torch's memory on CUDA device 1: 51.5 GiB reserved, of which 51.0 GiB are allocated and 532 MiB are free, in "
        "pieces of at most 512 MiB."
    )
    assert others == [
        "Largest live allocations:",
        "  48.0 GiB in 2: /home/ada/model.py:31 in forward",
        "  2.0 GiB in 1: a line that torch has not recorded, 2.0 GiB each",
        "  1.0 GiB in 1: /home/ada/train.py:7 in main",
    ]


# ---- What the error says


@pytest.fixture
def order() -> RankOrder:
    """The order of a rank whose own GPU is device 1 of those that it sees."""
    order = order_for(attempt=2)
    place = replace(order.place, gpu="5", visible_gpus=("4", "5"), gpu_uuid="GPU-1")
    return replace(order, place=place)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    process = {"pid": 812, "pid_memory": 20 * GIB}
    return fake_gpus.install(tmp_path, monkeypatch, {"GPU-1": SOUND | {"used": 78 * GIB} | process})


def explained(error: BaseException, order: RankOrder) -> tuple[list[str], dict[str, bytes]]:
    """The lines that are added to the error, and the files that are submitted."""
    files: dict[str, bytes] = {}
    own_gpu.explain(error, order, lambda path, data: files.update({path: data}))
    return [line for note in getattr(error, "__notes__", []) for line in note.splitlines()], files


def test_the_error_names_lines_other_processes_and_the_snapshots_file(
    order: RankOrder, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", segments)
    lines, files = explained(torch.OutOfMemoryError(MESSAGE), order)
    path = "profiles/rank-0-out-of-memory-2.pickle"
    assert {name: pickle.loads(data) for name, data in files.items()} == {
        path: {"segments": segments(), "device_traces": [[]] * torch.cuda.device_count()}
    }
    assert files[path][:2] == b"\x80\x04"  # the viewer reads no newer pickles
    assert "  48.0 GiB in 2: /home/ada/model.py:31 in forward" in lines
    assert lines[-2:] == [
        f"Snapshot of the memory: {path} among the results (open it at pytorch.org/memory_viz).",
        "In use on the GPU: 78.0 GiB of 80.0 GiB, by other processes: process 812 20.0 GiB.",
    ]
    wrapped = RuntimeError("no step")
    wrapped.__cause__ = torch.OutOfMemoryError(MESSAGE)
    assert explained(wrapped, order)[0] == lines
    monkeypatch.setattr(own_gpu, "MAX_SNAPSHOT", 100)
    assert explained(torch.OutOfMemoryError(MESSAGE), order) == ([*lines[:-2], lines[-1]], {})  # too large to submit


def test_other_errors_cost_nothing(order: RankOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("a snapshot was made"))
    assert explained(RuntimeError("CUDA out of luck"), order) == ([], {})
    assert explained(MemoryError(), order) == ([], {})
    monkeypatch.setitem(sys.modules, "torch", None)  # each import of torch fails
    assert explained(ImportError("libcudart.so.12"), order) == ([], {})


def test_lines_are_recorded_only_on_request(order: RankOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *what, **how: calls.append((what, how)))
    own_gpu.record(order)
    monkeypatch.setenv("DASKPYTORCH_MEMORY_HISTORY", "1")
    own_gpu.record(order_for())  # without a GPU
    assert not calls
    own_gpu.record(order)
    assert calls == [(("state",), {"stacks": "python"})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="recording would not end with this test")
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch has no memory of GPUs")
def test_torch_has_the_private_names() -> None:
    """Without a GPU, recording fails only as it initialises CUDA."""
    assert torch_parts.memory_snapshot()["segments"] == []
    with pytest.raises(RuntimeError, match="driver"):
        torch_parts.record_memory()


# ---- In a task

FLOW = """
import torch
from flytekit import task
from flytekitplugins.daskpytorch import SpawnDDP, current_rank


def snapshot():  # as torch makes it on a GPU
    frames = [{"filename": "/home/ada/train.py", "line": 7, "name": "main"}]
    block = {"size": 2 << 30, "state": "active_allocated", "frames": frames}
    return [{"device": 0, "total_size": 3 << 30, "blocks": [block]}]


@task(task_config=SpawnDDP(nproc=2), enable_deck=True)
def train() -> None:
    if current_rank().rank == 1:
        torch.cuda.memory_snapshot = snapshot
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 79.10 GiB")
"""


@pytest.mark.timeout(200)
def test_a_task_out_of_memory_explains_itself_and_its_deck_links_the_snapshot(tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(FLOW)
    with nothing_left_behind():
        done = run_program([SCRIPTS / "pyflyte", "run", "flow.py", "train"], cwd=tmp_path)
    assert done.returncode != 0
    assert "OutOfMemoryError: CUDA out of" in done.stdout
    assert "  2.0 GiB in 1: /home/ada/train.py:7 in main" in done.stdout
    deck = re.search(r"its Deck, to be opened and reloaded: (\S+)", done.stderr)
    assert deck is not None
    link = re.search(r'<a href="file://(\S+/profiles/rank-1-out-of-memory-0\.pickle)"', Path(deck[1]).read_text())
    assert link is not None
    assert pickle.loads(Path(link[1]).read_bytes())["segments"][0]["total_size"] == 3 << 30
