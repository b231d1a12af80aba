"""A driver's listener, and the calls that it queues for the gang's thread."""

import queue
from collections.abc import Iterator

import pytest

from ear import TOKEN, listening
from flytekitplugins.daskpytorch.driver.agents import Action
from flytekitplugins.daskpytorch.driver.listener import Listener


@pytest.fixture
def events() -> queue.SimpleQueue[Action]:
    return queue.SimpleQueue()


@pytest.fixture
def listener(events: queue.SimpleQueue[Action]) -> Iterator[Listener]:
    ear = listening(TOKEN, events)
    yield ear
    ear.end()
