"""`Goodput`: the record of a gang's time."""

import math

import pytest

from flytekitplugins.daskpytorch import Goodput


def goodput(**seconds: float) -> Goodput:
    names = ("starting", "preparing", "stepping", "data", "evaluation", "saving", "waiting", "lost")
    parts = {name: seconds.get(name, 0.0) for name in names}
    return Goodput(total=math.fsum(parts.values()), **parts)


def test_a_line_names_the_share_of_the_steps_and_all_that_took_time():
    assert str(goodput(starting=1.2, preparing=5.0, stepping=120.1, data=18.0, lost=0.01)) == (
        "goodput 83 %: 120.1 s of 144.3 s stepping; starting 1.2 s, preparing 5.0 s, data 18.0 s"
    )


def test_a_gang_that_has_only_stepped_says_nothing_else():
    assert str(goodput(stepping=2.0)) == "goodput 100 %: 2.0 s of 2.0 s stepping"


def test_no_time_at_all_is_no_goodput():
    assert goodput().share == 0.0


def test_the_dictionary_has_the_whole_first():
    names = list(goodput().as_dict())
    assert names == ["total", "starting", "preparing", "stepping", "data", "evaluation", "saving", "waiting", "lost"]


def test_nothing_of_it_can_be_changed():
    with pytest.raises(AttributeError):
        goodput().total = 1.0
