"""Classes of a script, and the interpreter's own objects, in the script's ranks and on the way back."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import nothing_left_behind, run_program

HEAD = """
import abc, dataclasses, enum, functools, logging, os, sys, threading, typing, warnings, weakref
from datetime import date
from os import environ
from random import random as draw
from sys import argv, modules, path, stdout

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


class Planet(enum.Enum):
    EARTH = (5.976e24, 6.37814e6)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius

    @property
    def gravity(self):
        return 6.673e-11 * self.mass / self.radius**2


class Pixel(bytes, enum.Enum):
    X = (1, "km")

    def __new__(cls, value, unit):
        made = bytes.__new__(cls, [value])
        made._value_, made.unit = value, unit
        return made


class Day(date, enum.Enum):
    FIRST = 2020, 1, 1


class Keyed:
    registry = {}

    def __init_subclass__(cls, *, key):
        Keyed.registry[key] = cls


class First(Keyed, key="first"):
    def name(self):
        return __class__.__name__


class Listed:
    kinds, alive = [], weakref.WeakValueDictionary()

    def __init_subclass__(cls):
        Listed.kinds.append(cls)
        Listed.alive[cls.__name__] = cls


class Only(Listed):
    pass


class Meta(abc.ABCMeta):
    made = []

    def __new__(kind, name, bases, namespace, *, tag):
        Meta.made.append(name)
        return super().__new__(kind, name, bases, namespace)

    def __init__(cls, name, bases, namespace, *, tag):
        super().__init__(name, bases, namespace)
        cls.tag = tag

    def __setattr__(cls, name, value):
        if name in vars(cls):
            raise AttributeError(f"{name} stays as it is")
        super().__setattr__(name, value)


class Abstract(metaclass=Meta, tag="abstract"):
    @abc.abstractmethod
    def run(self): ...


class Concrete(Abstract, tag="concrete"):
    def run(self): ...


class Methods:
    count = 0

    @functools.cached_property
    def cached(self):
        self.count += 1
        return self.count

    @functools.singledispatchmethod
    def kind(self, value):
        return "any"

    @kind.register
    def _(self, value: int):
        return "int"


@functools.singledispatch
def kind(value):
    return "any"


@kind.register
def _(value: int):
    return "int"


class Slots:
    __slots__ = ("a",)


class MoreSlots(Slots):
    __slots__ = ("b", "__private")


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
    assert round(Planet.EARTH.gravity, 1) == 9.8 and Pixel(1).unit == "km" and Day.FIRST.year == 2020
    assert Keyed.registry == {"first": First} and First().name() == "First"
    assert Listed.kinds == [Only] == [*Listed.alive.values()]
    assert Meta.made == ["Abstract", "Concrete"] and Concrete.tag == "concrete" and isinstance(Concrete(), Abstract)
    try:
        Abstract()
    except TypeError:
        pass
    else:
        raise AssertionError("an abstract class was made")
    several = Methods()
    assert (several.cached, several.cached, several.kind(1), several.kind("")) == (1, 1, "int", "any")
    assert (kind(1), kind("")) == ("int", "any")
    slots = MoreSlots()
    slots.a = slots.b = 3
    assert not hasattr(slots, "__dict__")

    class Local(Listed, enum.Enum):
        A = 1
        B = 1

    assert Listed.kinds.pop() is Local
    Methods.count, Only.lock = 99, threading.Lock()  # classes of the ranks alone, with what no pickle takes
    values = [Color.CRIMSON, Perm.RW, Perm(0), Word.ALSO, Planet.EARTH, Pixel.X, Day.FIRST, First(), Only(), Concrete()]
    return [*values, several, slots, IntBox(), Point(), Pair(1), NeedsWordsError(code=3), Local.B]


if __name__ == "__main__":
    *returned, local = in_ranks(check)[0]
    assert [type(value) for value in returned] == [
        *(Color, Perm, Perm, Word, Planet, Pixel, Day, First, Only, Concrete),
        *(Methods, MoreSlots, IntBox, Point, Pair, NeedsWordsError),
    ]
    own = [Color.RED, Perm.RW, Perm(0), Word.A, Planet.EARTH, Pixel.X, Day.FIRST]
    assert all(a is b for a, b in zip(returned, own))
    assert (returned[-3], returned[-1].code, str(returned[-1]), local.name) == (Point(), 3, "code 3", "A")
    assert (Keyed.registry, Listed.kinds, Meta.made) == ({"first": First}, [Only], ["Abstract", "Concrete"])
    assert Methods.count == 0 and returned[10].cached == 1 and returned[11].b == 3
"""
)
INTERPRETER = (
    HEAD
    + """
ENVIRONMENT, ROOT, FILTERS, INPUT, write = os.environ, logging.root, warnings.filters, sys.stdin, sys.stdout.write


class Settings:
    environment, path = os.environ, sys.path


def check(given=os.environ):
    assert environ is ENVIRONMENT is given is Settings.environment is os.environ
    assert environ["RANK"] == str(current_rank().rank)
    assert (argv, path, modules, stdout) == (sys.argv, sys.path, sys.modules, sys.stdout)
    assert argv is sys.argv and path is sys.path is Settings.path and modules is sys.modules and stdout is sys.stdout
    assert ROOT is logging.root and FILTERS is warnings.filters and INPUT is sys.stdin
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


class Elsewhere:
    def __setstate__(self, state):
        assert "RANK" in environ, "only a rank reads this"
        vars(self).update(state)


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
        print(note)
        os.environ["RANK"] = "0"
        with open(note.partition("kept in ")[2].partition(". Read")[0], "rb") as file:
            data, *buffers = pickle.load(file)
        assert (pickle.loads(data, buffers=buffers).weights == numpy.arange(size)).all()
        del os.environ["RANK"]
"""
)


@pytest.mark.parametrize("name", ["script.py", "-"])
def test_classes_of_a_script_are_the_same_in_its_ranks_and_on_their_way_back(name: str, tmp_path: Path) -> None:
    """Also of a program from standard input, which has no file that could be imported."""
    (tmp_path / "script.py").write_text(CLASSES)
    ran = subprocess.run(
        [sys.executable, name], input=CLASSES, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_objects_of_the_interpreter_in_a_scripts_globals_are_the_ranks_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERPRETER)
    with nothing_left_behind():
        ran = run_program(["script.py", "--of-the-script"], cwd=tmp_path, env={"PASSWORD": "the-password"})
    assert ran.returncode == 0, ran.stderr


def test_a_return_value_that_the_driver_cannot_unpickle_is_kept_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNREADABLE)
    ran = run_program(["script.py"], cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("raised while the return value of rank 0 was unpickled in the driver. The pickle is") == 2
    assert len([*tmp_path.glob("daskpytorch-returned-*.pickle")]) == 4  # of two ranks
