"""The benchmarks' harness: rows, the table of `benchmarks/all.py`, options, and turns of the compared ways."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # they import each other as scripts do

import all as everything
from figures import FILE, Figure, Goal, report
from running import take_turns

from pages import PAGES

ON = "2026-11-23; 2 cores, load 0.4 before the start; Python 3.11.7"


def kept(*figures: Figure, on: str = ON) -> dict[str, object]:
    return json.loads(
        json.dumps({"command": "python benchmarks/a.py", "on": on, "figures": list(map(asdict, figures))})
    )


def test_what_takes_seconds_is_faster_the_less_of_them_it_takes():
    figure = Figure.beside("peer", [4.0, 6.0], what="launch", here=[2.0, 2.0])
    assert figure.ratios == [2.0, 3.0]
    assert figure.cells() == ["launch", "2 s (2-2)", "peer 5 s (4-6)", "2.5 x (2-3) as fast", "-"]


def test_a_goal_that_was_missed_stands_in_bold_where_it_was_missed():
    goals = [Goal(bound=1.5, of="here", at_most=True), Goal(bound=2)]
    figure = Figure.beside("peer", [3.0], what="launch", here=[2.0], goals=goals)
    assert figure.cells()[1:] == ["**2 s**", "peer 3 s", "**1.5 x as fast**", "at most 1.5 s; at least 2 x"]


def test_the_quickest_of_several_peers_is_the_measure_of_each_round():
    figure = Figure.beside_quickest({"a": [4.0, 2.0], "b": [3.0, 9.0]}, what="launch", here=[1.0, 1.0])
    assert figure.ratios == [3.0, 2.0]
    assert figure.peer.startswith("a 3 s (2-4), b 6 s (3-9)")


def test_figures_are_printed_and_written_down_only_where_they_are_asked_for(tmp_path, monkeypatch, capsys):
    figure = Figure.beside("peer", [3.0], what="launch", here=[2.0], goals=[Goal(bound=1)])
    report([figure], ON)
    printed = capsys.readouterr().out
    assert ON in printed
    assert "| launch | 2 s |" in printed
    monkeypatch.setenv(FILE, str(tmp_path / "figures"))
    report([figure], ON)
    (line,) = (tmp_path / "figures").read_text().splitlines()
    assert everything.figures_of({"figures": [json.loads(line)]}) == [figure]


def test_the_page_is_written_between_its_marks_and_nowhere_else(tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{everything.BEGIN}\nold\n{everything.END}\nafter\n")
    monkeypatch.setattr(everything, "PAGE", page)
    for _ in range(2):
        everything.write_page({"a.py": kept(Figure(what="launch", here=[2.0])), "b.py": kept()})
    text = page.read_text()
    assert text.startswith(f"before\n{everything.BEGIN}\n")
    assert text.endswith(f"{everything.END}\nafter\n")
    assert "old" not in text
    assert "| launch | 2 s | - | - | - | [1] | `a.py` |" in text
    assert "1. 2026-11-23; 2 cores; Python 3.11.7" in text


def test_every_command_is_a_benchmark_that_reports_its_figures():
    for script, *_ in everything.COMMANDS:
        assert "report(" in (everything.BENCHMARKS / script).read_text(), script


def test_pages_repeat_the_figures_of_the_benchmarks_page():
    page = everything.PAGE.read_text()
    cells = re.findall(r"^\| .+? \| ([^|]+) \| ([^|]+) \|(?: [^|]+ \|){2} \[\d\] \|", page, re.MULTILINE)
    measured = [tuple(map(_number, row)) for row in cells]
    compared = PAGES["README.md"].partition("## How it compares")[2]
    shown = re.findall(r"^\| [^|]+ \| ([\d.,]+)[^|]*\| ([^|]*) \|", compared, re.MULTILINE)
    assert len(shown) > 10
    assert [row for row in shown if tuple(map(_number, row)) not in measured] == []
    medians = re.findall(r"^\|.+\| ([\d.]+ s) \| ([\d.]+)\W([\d.]+) s \|", PAGES["docs/benchmarks.md"], re.MULTILINE)
    assert len(medians) > 9
    assert [row for row in medians if "{} ({}-{})".format(*row) not in page] == []


def _number(text: str) -> str:
    """The first number of a cell that is no part of a word. Empty: the cell has none."""
    found = re.search(r"(?<![\w.])[\d.,]*\d", text)
    return found[0] if found else ""


def test_a_new_measurement_takes_the_place_of_all_rows_of_the_same_name():
    of = {"a.py": kept(Figure(what="launch", here=[2.0])), "old.py": kept(Figure(what="launch", here=[3.0]))}
    everything.replace(of, "a.py", kept(Figure(what="launch", here=[1.0])))
    assert [each["figures"][0]["here"] for each in of.values()] == [[1.0]]


def test_each_round_has_each_way_once_and_the_first_round_does_not_count():
    calls = []
    found = take_turns({name: lambda it=name: calls.append(it) or len(calls) for name in "ab"}, 2)
    assert calls == list("ababab")
    assert found == {"a": [3, 5], "b": [4, 6]}
