"""The futures of a call are settled whatever a callback does, and a wait that could never end is refused."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from flytekitplugins.daskpytorch.driver.parts.calls import Calls, Outcome, StayingCall
from flytekitplugins.daskpytorch.driver.received import ReceivedResults
from flytekitplugins.daskpytorch.task.staying import CallFutures

WAIT = 20.0


class Asked:
    """Calls of a gang of two ranks, whose outcomes the test decides. `thread` stands for the gang's thread."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.calls = Calls()
        self.thread = thread
        self.settler = thread.submit(threading.current_thread).result()
        self.ended: list[str] = []

    def ask(self, number: int) -> CallFutures:
        supervisor: Any = SimpleNamespace(received=ReceivedResults(), preempt=lambda *_, **__: None)
        futures = CallFutures(supervisor, 2, self.settler, lambda: self.ended.append("ended"), keep=None)
        call = StayingCall(number=number, name="f", call=b"", log=futures.log, settle=futures.settle)
        assert self.calls.ask(call)
        return futures

    def settle(self, number: int, **values: Callable[[], Any]) -> None:
        loads = {rank: values.get(f"rank{rank}", lambda: "value") for rank in range(2)}
        call = self.calls.open.pop(number)
        self.thread.submit(call.settle, Outcome(values=loads))

    def end(self) -> None:
        self.thread.submit(self.calls.note_end, None).result()


@pytest.fixture
def asked() -> Iterator[Asked]:
    with ThreadPoolExecutor(1) as thread:
        asked = Asked(thread)
        yield asked
        asked.end()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_callback_that_waits_for_its_own_call_or_a_later_one_gets_an_error(asked: Asked, has_ended: bool) -> None:
    first, second = asked.ask(1), asked.ask(2)
    errors: list[BaseException] = []

    def wait_for_all(_: object) -> None:
        for wait in (first.result, second.exception, second[1].result):
            try:
                wait(timeout=WAIT)
            except (RuntimeError, TimeoutError) as error:
                errors.append(error)

    first[1].add_done_callback(wait_for_all)
    if has_ended:
        asked.end()
        assert isinstance(first.exception(timeout=WAIT), BaseException)
    else:
        asked.settle(1)
        assert first.result(timeout=WAIT) == ["value", "value"]
    assert ["would wait for ever" in str(error) for error in errors] == [True] * 3, errors


def test_an_exit_in_a_callback_or_at_the_load_of_a_value_leaves_no_future_unsettled(asked: Asked) -> None:
    first, second, third = asked.ask(1), asked.ask(2), asked.ask(3)
    first[1].add_done_callback(lambda _: sys.exit())
    asked.settle(1)
    asked.settle(2, rank0=sys.exit)
    asked.settle(3)
    assert first.result(timeout=WAIT) == ["value", "value"]
    assert isinstance(second.exception(timeout=WAIT), RuntimeError)
    assert third.result(timeout=WAIT) == ["value", "value"]
