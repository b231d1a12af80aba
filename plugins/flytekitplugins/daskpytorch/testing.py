"""Fixtures for tests of code that trains. Runs in pytest.

In a `conftest.py`: `from flytekitplugins.daskpytorch.testing import one_rank`.
"""

import pytest

from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE

__all__ = ["one_rank"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tasks and `dispatch.run` train in one rank, which is the test's own process; checkpoints go with the run."""
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", "")
