"""The gangs of a task have the same keys in every attempt, whatever the arguments of their calls."""

from collections.abc import Callable

import pytest

from flytekitplugins.daskpytorch.driver.storage import Keys


def train() -> None: ...


class Model:
    def train(self) -> None: ...


def make() -> Callable[[], None]:
    def train() -> None: ...

    return train


def test_each_function_has_numbers_of_its_own() -> None:
    task, own = object(), Keys()
    taken = [own.take(function, None, task=task) for function in (train, Model.train, make(), train, lambda: None)]
    assert own.take(train, None, ["-0", "-1"], task) == ["train-3-0", "train-3-1"]  # the gangs of one call
    assert own.take(train, "mine", ["-0", "-1"], task) == ["mine-0", "mine-1"]
    assert taken == [["train-1"], ["Model-train-1"], ["make-train-1"], ["train-2"], [f"{_test_name()}-lambda-1"]]


def _test_name() -> str:
    return test_each_function_has_numbers_of_its_own.__name__


def test_a_key_is_given_once_in_a_task() -> None:
    task, own = object(), Keys()
    assert [own.take(train, "mine") for _ in range(2)] == [["mine"]] * 2  # outside a task
    assert own.take(train, "mine", task=task) == ["mine"]
    with pytest.raises(ValueError, match=r"Gang\(key='mine'\): another gang of this task has this key"):
        own.take(train, "mine", task=task)
    with pytest.raises(ValueError, match="another gang of this task has this key"):
        own.take(train, "mine", ["-0"], task)
    assert own.take(train, "train-1", task=task) == ["train-1"]
    assert own.take(train, None, task=task) == ["train-2"]
    with pytest.raises(ValueError, match="another gang of this task has this key"):
        own.take(train, "train-2", task=task)


def test_another_task_of_the_same_process_begins_anew() -> None:
    own = Keys()
    for task in (object(), object()):
        assert own.take(train, "mine", task=task) == ["mine"]
        assert own.take(train, None, task=task) == ["train-1"]
        assert own.take(train, None, task=None) == ["train-2"]  # a thread, which does not know its task
        assert own.take(train, None, task=task) == ["train-3"]
