"""Measure the first step of a compiled model on a new machine, with and without what an earlier one has compiled.

Each launch is a process with a HOME, a folder for temporary files and a cache of torch's of its own. The time is from
the call of `dispatch.run`, in a process that has imported torch, to the end of the first step.
"""

from functools import partial
from pathlib import Path

from figures import Figure, at_most, report
from running import Program, asked, nothing_left, take_turns

PROGRAM = """
import sys, time, torch
from flytekitplugins.daskpytorch import Gang, dispatch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(width, width + 1), torch.nn.LayerNorm(width + 1)
    def forward(self, values):
        return torch.nn.functional.gelu(self.norm(self.linear(values)))

def train(num_blocks):
    model = torch.compile(torch.nn.Sequential(*(Block(64 + number) for number in range(num_blocks))))
    model(torch.randn(8, 64)).sum().backward()
    return time.time()

if __name__ == "__main__":
    began = time.time()
    gang = Gang(ranks_per_worker=1, compile_cache=sys.argv[1])
    [ended] = dispatch.run(None, train, int(sys.argv[2]), gang=gang).result()
    print("@seconds", ended - began, flush=True)
"""


class Bench:
    """Launches on new machines."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.folder, self.num_blocks = folder, num_blocks
        self._num_started = 0

    def launch(self, store: str) -> float:
        """Return the seconds to the end of the first step. An empty `store` is a new one."""
        self._num_started += 1
        own = self.folder / str(self._num_started)
        environment = {name: str(own) for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
        store = store or str(own / "store")
        program = Program.of(PROGRAM, own, store, str(self.num_blocks), environment=environment)
        seconds = float(program.hear("seconds"))
        if program.wait():
            raise program.failure("failed")
        return seconds


if __name__ == "__main__":
    options = asked(__doc__, rounds=(3, 1, "rounds that count"), blocks=(16, 2, "blocks of the model"))
    with nothing_left("compile_cache") as folder:
        bench = Bench(folder, options.blocks)
        kept = str(folder / "kept")
        bench.launch(kept)
        ways = {"kept": partial(bench.launch, kept), "new": partial(bench.launch, "")}
        found = take_turns(ways, options.rounds, uncounted=0)
    what = "first step of a compiled model on a new machine, with `Gang(compile_cache=...)`"
    row = {"what": what, "here": found["kept"], "goals": at_most(0.34)}
    report([Figure.beside("without", found["new"], share=True, **row)], options.on)
