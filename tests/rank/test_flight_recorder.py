"""The record of a rank's collectives with torch's NCCL backends. The entries come from torch's `fake` backend."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from flytekitplugins.daskpytorch.rank import process_group

if not hasattr(c10d, "FlightRecorderHook"):
    pytest.skip("this torch records nccl by itself alone", allow_module_level=True)


@pytest.fixture
def group() -> Iterator[Any]:
    """Stand for the default group of a gang on GPUs, whose collectives are recorded by the hook of torch 2.15."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = dist.distributed_c10d._get_default_group()
    hook = c10d.FlightRecorderHook.attach(group, [0, 1])
    dist.distributed_c10d._world.pg_backend_config[group] = "cpu:gloo,cuda:nccl"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c10d, "_dump_nccl_trace", lambda *_: pickle.dumps({"entries": []}), raising=False)
            yield group
    finally:
        hook.remove()
        dist.destroy_process_group()


def recorded_as(name: str) -> Callable[..., bytes]:
    """Return a recorder of one backend, which has the entries of the fake one under its own name."""

    def dump(*options: bool, backend: str = "gloo") -> bytes:
        if backend != name:
            return pickle.dumps({"entries": []})
        entries = pickle.loads(kept(*options, backend="fake"))["entries"]
        for entry in entries:
            entry["profiling_name"] = entry["profiling_name"].replace("fake:", f"{name}:")
        return pickle.dumps({"entries": entries})

    kept = c10d._dump_fr_trace
    return dump


@pytest.mark.parametrize("name", ["nccl2", "nccl-lazy"])
def test_collectives_of_torchs_new_nccl_are_recalled_as_those_of_the_group_nccl(
    name: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.all_reduce(torch.ones(3))
    monkeypatch.setattr(c10d, "_dump_fr_trace", recorded_as(name))
    world = dist.distributed_c10d._world
    monkeypatch.setitem(world.pg_map, group, ("nccl", world.pg_map[group][1]))
    recalled = process_group.recall()
    assert recalled is not None
    assert recalled.groups == {"the default group (gloo)": 0, "the default group (nccl)": 1}
    newest = recalled.collectives[-1]
    assert (newest.group, newest.operation, newest.inputs) == ("the default group (nccl)", "all_reduce", [(3,)])


def test_groups_that_a_full_recorder_may_have_forgotten_are_left_out(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*options: bool, backend: str = "gloo") -> bytes:
        entries = pickle.loads(recorded(*options, backend=backend))["entries"]
        return pickle.dumps({"entries": entries[-1:]})

    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
    recorded = recorded_as("nccl2")
    monkeypatch.setattr(c10d, "_dump_fr_trace", forgetful)
    recalled = process_group.recall()
    assert recalled is not None
    assert recalled.groups == {"the default group (nccl)": 2}


def test_older_torch_that_has_no_such_recorder_still_recalls(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.all_reduce(torch.ones(3))
    entries = recorded_as("nccl")(True, True, False, backend="nccl")

    def dump(include_collectives: bool, include_stacks: bool, only_active: bool) -> bytes:
        return pickle.dumps({"entries": []})

    monkeypatch.setattr(c10d, "_dump_fr_trace", dump)
    monkeypatch.setattr(c10d, "_dump_nccl_trace", lambda *_: entries, raising=False)
    recalled = process_group.recall()
    assert recalled is not None
    assert recalled.collectives[-1].group == "the default group (nccl)"


def test_rank_reports_before_a_backend_with_abort_hooks_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: dict[int, Callable[[], None]] = {}

    class Backend:
        supports_abort_hooks = True
        register_abort_hook = staticmethod(hooks.__setitem__)

    class Group:
        def _get_backend(self, _: torch.device) -> Backend:
            return Backend()

    monkeypatch.setattr(type(dist.distributed_c10d._world), "pg_map", {Group(): ("nccl", None)})
    monkeypatch.setattr(process_group, "_set_terminate", None)
    reports: list[str] = []
    process_group.call_before_abort(lambda: reports.append("reported"))
    [hook] = hooks.values()
    hook()
    assert reports == ["reported"]


DUMP = """
import os
import sys
import torch
from torch import distributed
from flytekitplugins.daskpytorch.protocol import torch_parts


distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
distributed.all_reduce(torch.ones(1))
[records] = torch_parts.flight_records(has_nccl=False)
assert b"all_reduce" in records
assert "torch._inductor" not in sys.modules, "the dump has imported the compiler"
assert "_inductor" in torch._lazy_modules
distributed.destroy_process_group()  # without it, a thread of gloo's can abort Python's exit (pytorch/pytorch#190489)
"""


def test_a_dump_imports_no_compiler_and_torch_has_the_names_that_this_needs(tmp_path: Path) -> None:
    """With the compiler, the first dump of a rank takes seconds."""
    options = {"cwd": tmp_path, "env": os.environ | {"TORCH_FR_BUFFER_SIZE": "10"}, "timeout": 120}
    ended = subprocess.run([sys.executable, "-c", DUMP], capture_output=True, text=True, check=False, **options)
    assert not ended.returncode, ended.stderr
