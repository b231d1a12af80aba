"""Fixtures for tests of code that trains. Runs in pytest.

In a `conftest.py`: `from flytekitplugins.daskpytorch.testing import one_rank`.
"""

import pytest

from flytekitplugins.daskpytorch.settings import DEBUG_VARIABLE

__all__ = ["one_rank"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tasks and `dispatch.run` train in one rank, which is the test's process. Checkpoints are removed at the end.

    Examples:
        >>> from flytekit import task
        >>> from flytekitplugins.daskpytorch import DaskDDP, current_rank
        >>> from flytekitplugins.daskpytorch.testing import one_rank
        >>> @task(task_config=DaskDDP())
        ... def train(epochs: int) -> int:
        ...     return epochs * current_rank().world_size
        >>> def test_it_trains(one_rank: None) -> None:
        ...     assert train(epochs=3) == 3
    """
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    monkeypatch.setenv("DASKPYTORCH_CHECKPOINTS", "")
