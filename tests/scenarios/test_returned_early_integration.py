"""A rank that returns while others wait for it fails them as under `torchrun`, and work that needs no rank goes on."""

import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from flytekitplugins.daskpytorch import Gang, current_rank, dispatch
from processes import run_program, warm_python

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
OURS = ("-m", "flytekitplugins.daskpytorch", "run", "--nproc")
HEAD = """
import sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, one = dist.get_rank(), torch.ones(1)
pair = dist.new_group([0, 1])
dist.all_reduce(one)
dist.all_reduce(one, group=pair)
"""
BY_HAND = "\nimport os; threading._shutdown(); sys.stdout.flush(); os._exit(0)"
"""Last line under `torchrun`, as torch's threads may abort Python's exit."""
DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(3 - rank): model(torch.ones(1, 2)).sum().backward()"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
if rank == 0: accelerator.wait_for_everyone()"""
LIGHTNING = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False, barebones=True)
trainer.fit(BoringModel())
if rank == 0: trainer.strategy.barrier()"""
FAILS = {
    "before a barrier": ("if rank == 0: dist.barrier()", 1, "barrier"),
    "before a message": ("if rank == 0: dist.recv(one, src=1)", 1, "recv"),
    "in a group that a variable holds": ("if rank == 1: dist.all_reduce(one, group=pair)", 0, "all_reduce"),
    "by its own destroy_process_group": ("dist.destroy_process_group() if rank else dist.barrier()", 1, "barrier"),
    "by sys.exit(0)": ("sys.exit(0) if rank else dist.all_gather_object([None, None], 1)", 1, "all_gather_object"),
    "in a backward pass": (DDP, 1, "backward"),
    "in Accelerate's wait": (ACCELERATE, 1, "wait_for_everyone"),
    "in Lightning's barrier": (LIGHTNING, 1, "barrier"),
}
"""Programs, each with the rank that returns early, and the call in which the other rank waits for that rank."""
ON, SENDS, HEARS = "time.sleep(6); print('worked on')", "dist.send(one, dst=1 - rank)", "dist.recv(one, src=1 - rank)"
LATER = f"threading.Timer(5, lambda: {SENDS}).start()"
GOES_ON = {
    "rank 1 works on, and uses the store": (
        f"dist.barrier()\nif rank == 1: {ON}; dist.new_group([1], use_local_synchronization=True)"
    ),
    "a thread of rank 0 sends later": f"if rank == 0: {LATER}\nelse: {HEARS}; print('worked on')",
    "rank 1 waits for no isend": f"if rank == 1: time.sleep(1); dist.isend(one, dst=0)\nelse: {HEARS}; {ON}",
}
OFTEN = {
    *("before a message", "in a group that a variable holds", "in a backward pass"),
    *("rank 1 works on, and uses the store", "a thread of rank 0 sends later"),
}
"""The programs that are not run at night alone."""
AT_NIGHT = (FAILS | GOES_ON).keys() - OFTEN


def written(folder: Path, body: str) -> int:
    """Write a program. Return the number of its last line."""
    folder.mkdir()
    text = HEAD + body + "\n"
    (folder / "program.py").write_text(text)
    return text.count("\n")


def run_all(folders: Iterable[Path], num_ranks: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run programs, several at a time, since they mostly wait."""
    warm_python()
    command = [*OURS, str(num_ranks), "program.py"]
    with ThreadPoolExecutor(5) as pool:
        return list(pool.map(lambda folder: run_program(command, cwd=folder), folders))


@pytest.mark.parametrize("hows", [OFTEN, pytest.param(AT_NIGHT, marks=pytest.mark.slow)], ids=["often", "at night"])
def test_a_rank_that_waits_for_one_that_has_returned_fails_and_others_go_on(tmp_path: Path, hows: set[str]) -> None:
    lines = {how: written(tmp_path / how, (FAILS[how][0] if how in FAILS else GOES_ON[how])) for how in sorted(hows)}
    for how, done in zip(lines, run_all(tmp_path / how for how in lines), strict=True):
        said = done.stderr + done.stdout
        if how in GOES_ON:
            assert (done.returncode, done.stdout.count("worked on")) == (0, 1), (how, said)
            continue
        _, leaver, call = FAILS[how]
        words = f"rank {leaver} returned; rank {1 - leaver} was still in {call} at program.py:{lines[how]}"
        assert (done.returncode, words in said, "starting again" in said) == (1, True, False), (how, said)


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILS | GOES_ON)
def test_torchrun_ends_these_programs_alike(tmp_path: Path, how: str) -> None:
    written(tmp_path / how, GOES_ON[how] + BY_HAND if how in GOES_ON else FAILS[how][0])
    words = [*TORCHRUN, "program.py"]
    done = subprocess.run(words, cwd=tmp_path / how, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout.count("worked on")) == ((0, 1) if how in GOES_ON else (1, 0)), done.stderr


def test_of_three_ranks_two_go_on_without_the_third_or_its_exception_is_the_cause(tmp_path: Path) -> None:
    written(tmp_path / "on", f"if rank < 2: {ON}; dist.all_reduce(one.fill_(1), group=pair); print(one.item())")
    written(tmp_path / "raises", "if rank == 2: raise ValueError('bad batch')\nif rank == 0: dist.barrier()")
    on, raises = run_all([tmp_path / "on", tmp_path / "raises"], num_ranks=3)
    assert (on.returncode, on.stdout.count("2.0")) == (0, 2), on.stderr
    assert raises.returncode == 1
    assert "ValueError: bad batch" in raises.stderr + raises.stdout
    assert "returned; rank" not in raises.stderr + raises.stdout


def add(seconds: float) -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    if current_rank().is_main:
        time.sleep(seconds)
    return float(total)


def test_a_rank_that_returns_from_a_call_is_there_for_the_next() -> None:
    with dispatch.gang(None, gang=Gang(ranks_per_worker=2)) as gang:
        assert gang.call(add, 4.0).result() == [2.0, 2.0]
        assert gang.call(add, 0.0).result() == [2.0, 2.0]
