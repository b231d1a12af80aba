"""An error in code that only speeds up or measures a gang does not stop its ranks."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import DataLoader

from flytekitplugins.daskpytorch import preload
from flytekitplugins.daskpytorch.node import fork_client, fork_server
from flytekitplugins.daskpytorch.protocol import torch_parts
from flytekitplugins.daskpytorch.rank import usage


def fails(*_: Any, **__: Any) -> NoReturn:
    """Stand for a part of torch, the kernel or the container that is other than it was known to be."""
    raise AttributeError("no such thing here")


def test_rank_trains_where_torchs_loader_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_parts, "loader_iterator", fails)
    ledger = usage.Ledger()
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight])
    usage.watch(ledger)
    assert len(list(DataLoader(range(4)))) == 4  # type: ignore[arg-type]
    optimizer.step()
    assert ledger.num_steps == 1


def test_fork_server_goes_on_without_a_module_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_server, "_settle", lambda: None)
    monkeypatch.setattr("flytekitplugins.daskpytorch.rank.process_group.install", lambda: None)
    with caplog.at_level(logging.WARNING):
        fork_server.import_for_ranks(["no_such_module_to_be_imported_ahead"])
    assert caplog.text.count("and is left out") == 1


def test_dask_worker_starts_where_its_fork_server_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start: Callable[[], None] = fails
    monkeypatch.setattr(fork_client, "connect", start)
    preload.dask_setup(SimpleNamespace(nanny=None))
    assert "Starting the fork server ahead failed" in caplog.text
