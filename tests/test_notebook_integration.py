"""`dispatch.run` in notebooks of Jupyter: a table, the interrupt of a cell, a kernel that dies, and the run goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from processes import Cluster, dask_cluster, nothing_left_behind, until

pytestmark = pytest.mark.timeout(400)

FIRST_CELL = """
import os, time
from distributed import Client
from flytekitplugins.daskpytorch import current_rank, dispatch

client = Client({address!r})

def train(trace, last):
    rank = current_rank()
    start = (rank.checkpoint.load() or {{"step": -1}})["step"] + 1
    for step in range(start, last):
        rank.log({{"loss": 1 / (step + 1)}}, step=step, num_steps=last)
        rank.checkpoint.save({{"step": step}}, step)
        rank.checkpoint.flush()
        if rank.is_main:
            with open(trace, "a") as file:
                file.write(f"{{step}}\\n")
        time.sleep(0.02)
    return start
"""
ENDLESS = "futures = dispatch.run(client, train, {trace!r}, 1_000_000)\nfutures.result()"


class Notebook:
    """A notebook with a kernel of its own, whose cells run one after the other."""

    def __init__(self, cluster: Cluster, trace: Path) -> None:
        self.trace, self._address = trace, cluster.address
        self._client = NotebookClient(nbformat.v4.new_notebook(), timeout=200, allow_errors=True, kernel_name="python3")

    def __enter__(self) -> Self:
        self._kernel = self._client.setup_kernel()
        self._kernel.__enter__()
        self.run(FIRST_CELL.format(address=self._address))
        return self

    def __exit__(self, *exception: object) -> None:
        self._kernel.__exit__(*exception)

    def run(self, cell: str, meanwhile: Callable[[], None] = lambda: None) -> list[nbformat.NotebookNode]:
        """Run a cell, and return its outputs. Another thread calls `meanwhile` once ten more steps are trained."""
        begun = self.num_steps()

        def meddle() -> None:
            until(lambda: self.num_steps() >= begun + 10, "ten steps")
            meanwhile()

        thread = threading.Thread(target=meddle)
        if "train," in cell:
            thread.start()
        node = nbformat.v4.new_code_cell(cell)
        self._client.nb.cells.append(node)
        self._client.execute_cell(node, len(self._client.nb.cells) - 1)
        if thread.ident is not None:
            thread.join()
        return list(node.outputs)

    def num_steps(self) -> int:
        """Return the number of steps that were trained, in all kernels."""
        return len(self.trace.read_text().splitlines()) if self.trace.exists() else 0

    def end_of(self, signum: int) -> Callable[[], None]:
        """Return a function that sends the kernel a signal, as Jupyter's buttons for interrupts and restarts do."""
        return lambda: os.kill(self._client.km.provisioner.pid, signum)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two workers, and a folder for the checkpoints of the kernels' runs."""
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    with nothing_left_behind(), dask_cluster(tmp_path / "cluster") as running:
        yield running


def text_of(outputs: list[nbformat.NotebookNode]) -> str:
    """Return what a cell has printed."""
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_a_run_goes_on_after_an_interrupt_and_after_the_death_of_its_kernel(cluster: Cluster, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    endless = ENDLESS.format(trace=str(trace))
    with Notebook(cluster, trace) as notebook:
        outputs = notebook.run(endless, notebook.end_of(signal.SIGINT))
        tables = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
        assert any("loss" in table for table in tables)
        assert [output.ename for output in outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
        shown = text_of(notebook.run("print(futures.newest_checkpoint.step, futures.records[-1].step)"))
        newest, num_first = int(shown.split()[0]), notebook.num_steps()
        assert newest >= 8
        with pytest.raises(DeadKernelError):
            notebook.run("os.environ['DASKPYTORCH_RESUME'] = '1'\n" + endless, notebook.end_of(signal.SIGKILL))
    steps = [int(line) for line in trace.read_text().splitlines()]
    with Notebook(cluster, trace) as notebook:
        ends = ENDLESS.format(trace=str(trace)).replace("1_000_000", str(max(steps) + 20))
        shown = text_of(notebook.run(f"os.environ['DASKPYTORCH_RESUME'] = '1'\n{ends}\nprint(futures.result())"))
    assert steps[num_first] == newest + 1
    assert newest + 1 < int(shown.rpartition("[")[2].split(",")[0]) <= max(steps) + 1
