"""Classes of a script, and the interpreter's own objects, in the script's ranks and on the way back."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import nothing_left_behind, run_program

HEAD = """
import abc, dataclasses, enum, functools, logging, os, sys, threading, typing
from os import environ
from random import random as draw
from sys import stdout

from flytekitplugins.daskpytorch import Gang, dispatch, current_rank


def in_ranks(function, *args):
    return dispatch.run(None, function, *args, gang=Gang(ranks_per_worker=2, max_restarts=0)).result()


"""
CLASSES = (
    HEAD
    + """
class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = 2


class Perm(enum.Flag):
    R = 4
    W = 2
    RW = R | W


class Word(str, enum.Enum):
    A = "a"
    ALSO = "a"


class Abstract(abc.ABC):
    @abc.abstractmethod
    def run(self): ...


class Concrete(Abstract):
    def run(self): ...


class Methods:
    count = 0

    @functools.cached_property
    def cached(self):
        self.count += 1
        return self.count


class Slots:
    __slots__ = ("a",)


class MoreSlots(Slots):
    __slots__ = ("b",)


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    pass


class IntBox(Box[int]):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int = 1
    color: Color = Color.CRIMSON


class Pair(typing.NamedTuple):
    a: int


class NeedsWordsError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


def check():
    assert Color.CRIMSON is Color.RED and Color(1) is Color.RED and [*Color] == [Color.RED, Color.BLUE]
    assert Perm.RW is Perm(6) and Perm.R | Perm.W is Perm.RW and Word.ALSO is Word.A and Word.A == "a"
    assert isinstance(Concrete(), Abstract)
    try:
        Abstract()
    except TypeError:
        pass
    else:
        raise AssertionError("an abstract class was made")
    several = Methods()
    assert (several.cached, several.cached) == (1, 1)
    slots = MoreSlots()
    slots.a = slots.b = 3
    assert not hasattr(slots, "__dict__")

    class Local(enum.Enum):
        A = 1
        B = 1

    Methods.count, Concrete.lock = 99, threading.Lock()  # classes of the ranks alone, with what no pickle takes
    values = [Color.CRIMSON, Perm.RW, Perm(0), Word.ALSO, Concrete()]
    return [*values, several, slots, IntBox(), Point(), Pair(1), NeedsWordsError(code=3), Local.B]


if __name__ == "__main__":
    *returned, local = in_ranks(check)[0]
    assert [type(value) for value in returned] == [
        *(Color, Perm, Perm, Word, Concrete),
        *(Methods, MoreSlots, IntBox, Point, Pair, NeedsWordsError),
    ]
    own = [Color.RED, Perm.RW, Perm(0), Word.A]
    assert all(a is b for a, b in zip(returned, own))
    assert (returned[-3], returned[-1].code, str(returned[-1]), local.name) == (Point(), 3, "code 3", "A")
    assert Methods.count == 0 and returned[5].cached == 1 and returned[6].b == 3
"""
)
INTERPRETER = (
    HEAD
    + """
import torch

ENVIRONMENT, ROOT, INPUT, write = os.environ, logging.root, sys.stdin, sys.stdout.write


class Settings:
    environment, classes = os.environ, "abc"


def check(given=os.environ):
    assert torch.tensor(len(Settings.classes)).item() == 3  # there is a torch.classes, of a type of its own
    assert environ is ENVIRONMENT is given is Settings.environment is os.environ
    assert environ["RANK"] == str(current_rank().rank)
    assert stdout is sys.stdout and ROOT is logging.root and INPUT is sys.stdin
    write("written\\n")
    return draw()


def sent(value):
    return value


if __name__ == "__main__":
    from flytekitplugins.daskpytorch.protocol import pickling

    assert b"the-password" not in pickling.dumps(check)
    first, second = in_ranks(check)
    assert first != second
    assert in_ranks(sent, ["--an-argument", *sys.argv])[0] == ["--an-argument", *sys.argv]
"""
)
UNREADABLE = (
    HEAD
    + """
import pickle

import numpy


class PanicError(BaseException):
    pass  # as extensions written in Rust raise


class Elsewhere:
    def __setstate__(self, state):
        vars(self).update(state)
        if "RANK" not in environ:
            raise (AssertionError if len(self.weights) == 10 else PanicError)("only a rank reads this")


def train(size):
    made = Elsewhere()
    made.weights = numpy.arange(size)
    return made


if __name__ == "__main__":
    for size in (10, 1 << 20):  # in the report, and in a file
        try:
            in_ranks(train, size)
        except AssertionError as error:
            [note] = error.__notes__
        except RuntimeError as error:
            assert "PanicError: only a rank reads this" in str(error)
            [note] = error.__cause__.__notes__
        print(note)
        os.environ["RANK"] = "0"
        with open(note.partition("kept in ")[2].partition(". Read")[0], "rb") as file:
            assert (pickle.load(file).weights == numpy.arange(size)).all()
        del os.environ["RANK"]
"""
)


@pytest.mark.parametrize("has_file", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_classes_of_a_script_are_the_same_in_its_ranks_and_on_their_way_back(has_file: bool, tmp_path: Path) -> None:
    """Also of a program from standard input, which has no file that could be imported."""
    (tmp_path / "script.py").write_text(CLASSES)
    if has_file:
        ran = run_program(["script.py"], cwd=tmp_path)
    else:
        ran = subprocess.run(
            [sys.executable, "-"], input=CLASSES, cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert ran.returncode == 0, ran.stderr


def test_objects_of_the_interpreter_in_a_scripts_globals_are_the_ranks_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERPRETER)
    with nothing_left_behind():
        ran = run_program(["script.py", "--of-the-script"], cwd=tmp_path, env={"PASSWORD": "the-password"})
    assert ran.returncode == 0, ran.stderr


def test_a_return_value_that_the_driver_cannot_unpickle_is_an_error_and_kept_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNREADABLE)
    ran = run_program(["script.py"], cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("raised while the return value of rank 0 was unpickled in the driver. The pickle is") == 2
    assert len([*tmp_path.glob("daskpytorch-returned-*.pickle")]) == 4  # of two ranks
