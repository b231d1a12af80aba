"""A whole checkpoint of a real gang is written once on the driver's machine, and uploaded from elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.protocol.framing import Connection
from flytekitplugins.daskpytorch.protocol.observer import Observer
from gangs import on_this_machine, put_driver_elsewhere
from processes import until


def train_until_kept(folder: str) -> float:
    """Save, and be killed when that is safe; the mean of what is loaded then."""
    rank = current_rank()
    state = rank.checkpoint.load()
    if state is None:
        rank.checkpoint.save({"weights": torch.full((1 << 22,), 3.0)}, 1)
        until(lambda: Path(folder, "kept").exists(), "the checkpoint to be safe")
        os.kill(os.getpid(), signal.SIGKILL)
    return float(state["weights"].mean())


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_not_a_byte_of_a_checkpoint_travels_on_the_drivers_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_elsewhere: bool
) -> None:
    class Watch(Observer):
        def on_checkpoint(self, step: int) -> None:
            (tmp_path / "kept").touch()

    sizes: list[int] = []
    read: Callable[[Connection, int], bytes] = Connection.read

    def counting(self: Connection, size: int) -> bytes:
        data = read(self, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(Connection, "read", counting)
    if is_elsewhere:
        put_driver_elsewhere(monkeypatch)
    gang = on_this_machine(train_until_kept, str(tmp_path), num_ranks=1, observers=[Watch()])
    assert gang.result() == [3.0]
    assert (sum(sizes) > 16 << 20) == is_elsewhere
