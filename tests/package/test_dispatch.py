"""`dispatch` refuses wrong calls before anything starts. Futures follow the simulated end of a gang."""

import functools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client

from flytekitplugins.daskpytorch import Gang, dispatch
from flytekitplugins.daskpytorch.driver.futures import GangFuture
from flytekitplugins.daskpytorch.driver.received import ReceivedResults


def test_signal_that_another_thread_was_given_is_heard_by_who_waits() -> None:
    future = GangFuture(ReceivedResults())
    before = signal.signal(signal.SIGUSR1, lambda *_: future.set_result("heard"))
    other = threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
    try:
        other.start()
        assert future.result() == "heard"
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join()


def test_waiting_has_the_limits_that_are_asked_for() -> None:
    future = GangFuture(ReceivedResults())
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            wait(0.01)
    error = TimeoutError("the gang's own")
    future.set_exception(error)
    assert future.exception() is error
    with pytest.raises(TimeoutError, match="the gang's own"):
        future.result(10)


@pytest.fixture
def unconnected() -> Client:
    """Nothing that is refused is ever asked of it."""
    return Client.__new__(Client)


def train(hp: int, *, epochs: int = 1) -> int:
    return hp * epochs


async def train_soon(hp: int) -> int:
    return hp


def train_slowly(hp: int) -> Iterator[int]:
    yield hp


class Trainer:
    def __init__(self, hp: int) -> None:
        self.hp = hp

    async def __call__(self, hp: int) -> int:
        return hp


NO_TRAINING = [
    (dask.delayed(train), "is a dask.delayed object"),
    (train_soon, "train_soon is a coroutine function"),
    (train_slowly, "train_slowly is a generator function"),
    (functools.partial(train_slowly, 3), "is a generator function"),
    (Trainer, "Trainer is a class"),
    (Trainer(1), "is a coroutine function"),
]


@pytest.mark.parametrize("call", [dispatch.run, dispatch.map])
@pytest.mark.parametrize(("function", "said"), NO_TRAINING)
def test_what_does_not_train_when_it_is_called_is_refused(
    unconnected: Client, call: Any, function: Any, said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        call(unconnected, function, [3])


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'hp'"),
        ((3,), {"epohcs": 2}, "got an unexpected keyword argument 'epohcs'"),
        ((3, 4), {}, "too many positional arguments"),
        ((3,), {"pass_local_rank": True}, "got an unexpected keyword argument 'local_rank'"),
    ],
)
def test_arguments_are_bound_before_any_worker_is_asked(unconnected: Client, args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"^train\(hp: .* cannot be called .*{said}"):
        dispatch.run(unconnected, train, *args, **kwargs)


def nothing() -> None:
    """A function without a parameter for an experiment."""


RUN: list[tuple[dict[str, Any], str]] = [
    ({"client": "tcp://127.0.0.1:1"}, r"run\(client='tcp://127.0.0.1:1'\): must be (None or )?a distributed.Client"),
    ({"pytorch_function": 5}, r"run\(pytorch_function=5\): must be something that can be called"),
    ({"pass_local_rank": "yes"}, r"pass_local_rank='yes'\): must be True or False"),
    *(({"backend": name}, rf"Gang\(backend={name!r}\): must be one of auto, gloo, nccl") for name in ("mpi", None, 7)),
]
MAP: list[tuple[dict[str, Any], str]] = [
    *(
        ({"experiments": value}, r"map\(experiments=.*\): must be ")
        for value in ("abc", b"abc", {"a": 1}, {1}, 5, None)
    ),
    ({"stop_early": "loss"}, r"map\(stop_early='loss'\): must be "),
    ({"wandb": "project"}, r"map\(wandb='project'\): must be "),
    ({"gang": Gang(workers=2)}, r"dispatch\.map\(gang\.workers=2\): must be left out; dispatch\.map"),
]
NO_GANGS = [({"gang": gang}, r"\(gang=.*\): must be None or a Gang") for gang in ("gloo", {"a": 1}, 2, Gang, False)]


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        *((dispatch.run, *refused) for refused in (*RUN, *NO_GANGS)),
        *((dispatch.map, *refused) for refused in (*MAP, *NO_GANGS)),
    ],
)
def test_wrong_arguments_are_refused_in_few_words(
    unconnected: Client, call: Any, given: dict[str, Any], said: str
) -> None:
    usual = {"client": unconnected, "pytorch_function": print} | ({"experiments": []} if call is dispatch.map else {})
    with pytest.raises(ValueError, match=said) as caught:
        call(**usual | given)
    assert len(str(caught.value)) < 1_000


def test_an_experiment_that_the_function_does_not_take_is_refused(unconnected: Client) -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        dispatch.map(unconnected, nothing, [1])
