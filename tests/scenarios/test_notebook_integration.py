"""Notebooks of Jupyter: interrupts of cells, and gangs that stay."""

import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import nbformat
import pytest
from distributed import Client
from nbclient import NotebookClient

from processes import nothing_left_behind, until

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
    """A notebook with a kernel of its own, whose cells run one after the other in the trace's folder."""

    def __init__(self, first_cell: str, trace: Path) -> None:
        self.trace, self._first_cell = trace, first_cell
        resources = {"metadata": {"path": str(trace.parent)}}
        self._client = NotebookClient(nbformat.v4.new_notebook(), timeout=200, allow_errors=True, resources=resources)

    def __enter__(self) -> Self:
        self._sockets = tempfile.TemporaryDirectory(prefix="kernel-")
        manager = self._client.create_kernel_manager()  # else others may take the ports before the kernel binds them
        manager.transport, manager.ip = "ipc", f"{self._sockets.name}/socket"
        self._kernel = self._client.setup_kernel()
        self._kernel.__enter__()
        self.run(self._first_cell)
        return self

    def __exit__(self, *exception: object) -> None:
        self._kernel.__exit__(*exception)
        self._sockets.cleanup()

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
        """Return the number of steps that were trained."""
        return len(self.trace.read_text().splitlines()) if self.trace.exists() else 0

    def interrupt(self) -> None:
        """Send the kernel a signal, as Jupyter's button does."""
        os.kill(self._client.km.provisioner.pid, signal.SIGINT)


def text_of(outputs: list[nbformat.NotebookNode]) -> str:
    """Return what a cell has printed."""
    return "".join(output.text for output in outputs if output.output_type == "stream")


def errors_of(outputs: list[nbformat.NotebookNode]) -> list[str]:
    """Return the errors of a cell, each with the traceback as the notebook shows it."""
    traces = ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
    return [re.sub(r"\x1b\[[0-9;]*m", "", trace) for trace in traces]


GANG_CELL = """
from flytekitplugins.daskpytorch import Gang, current_rank, dispatch

gang = dispatch.gang(gang=Gang(ranks_per_worker=2))

def load():
    return [current_rank().rank]

def factor():
    return 2

def scaled(values):
    current_rank().log({"loss": 0.5}, step=3, num_steps=4)
    return [factor() * each for each in values]

def fails(values):
    if values[0] == 1:
        raise ZeroDivisionError("rank 1 has divided")
    return values
"""


def test_a_run_goes_on_after_an_interrupt_and_a_gang_stays_from_cell_to_cell(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", str(tmp_path / "kept"))
    trace = tmp_path / "trace"
    first_cell = FIRST_CELL.format(address=client.scheduler.address)
    with nothing_left_behind(), Notebook(first_cell, trace) as notebook:
        outputs = notebook.run(ENDLESS.format(trace=str(trace)), notebook.interrupt)
        assert "loss" in text_of(outputs)
        assert [output.ename for output in outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
        shown = text_of(notebook.run("print(futures.newest_checkpoint.step, futures.records[-1].step)"))
        newest = int(shown.split()[0])
        assert newest >= 8
        ends = ENDLESS.format(trace=str(trace)).replace("1_000_000", str(newest + 20))
        shown = text_of(notebook.run(f"os.environ['DASKPYTORCH_RESUME'] = '1'\n{ends}\nprint(futures.result())"))
        assert int(shown.rpartition("[")[2].split(",")[0]) == newest + 1

        notebook.run("del os.environ['DASKPYTORCH_RESUME']" + GANG_CELL)
        outputs = notebook.run("state = gang.keep(load)\nprint(gang.call(scaled, state).result())")
        assert text_of(outputs).endswith("[[0], [2]]\n")

        notebook.run("def factor(): return 3")
        assert text_of(notebook.run("print(gang.call(scaled, state).result())")).endswith("[[0], [3]]\n")

        outputs = notebook.run("gang.call(fails, state).result()")
        [error] = errors_of(outputs)
        assert error.endswith("ZeroDivisionError: rank 1 has divided")
        assert "rank 1 of 2 failed" in error
        assert "daskpytorch/" not in error  # all frames are the user's

        notebook.run("gang.close()")
        [error] = errors_of(notebook.run("gang.call(scaled, state).result()"))
        assert "this gang is closed, and its ranks have ended: begin a new one by dispatch.gang(...)" in error
