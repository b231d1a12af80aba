"""Compilations that outlive their gang. Each gang compiles in a folder of its own, as another machine would."""

import os
from pathlib import Path

import pytest
import torch

from flytekitplugins.daskpytorch import current_rank
from gangs import on_this_machine


def build_once() -> bool:
    """Build a file where torch would. Return False if it is there."""
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.name == "compiled"  # of the agent, and not of all programs
    built = folder / "ab" / f"built-by-{current_rank().rank}"
    if built.exists():
        return False
    built.parent.mkdir(parents=True, exist_ok=True)
    built.write_text("built")
    torch.distributed.barrier()  # the first rank of a node stores all files when it ends
    return True


def test_ranks_store_for_the_next_gang_where_torch_builds(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert on_this_machine(build_once, compile_cache=store).result() == [True, True]
    assert on_this_machine(build_once, compile_cache=store).result() == [False, False]


def wave(values: torch.Tensor) -> torch.Tensor:
    return torch.sin(values) * 2 + torch.cos(values)


def compile_once() -> tuple[float, bool]:
    from torch._dynamo.utils import counters

    total = torch.compile(wave)(torch.full((64,), 3.0)).sum().item()
    return total, counters["inductor"]["fxgraph_cache_hit"] == 1


@pytest.mark.slow
def test_second_gang_loads_what_torch_compiled_in_the_first(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    [(first, first_hit)] = on_this_machine(compile_once, num_ranks=1, compile_cache=store).result()
    [(second, second_hit)] = on_this_machine(compile_once, num_ranks=1, compile_cache=store).result()
    assert (first_hit, second_hit) == (False, True)
    assert first == second
