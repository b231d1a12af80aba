"""The matrix of versions: how it reads pytest's output, and the table that it writes."""

from __future__ import annotations

import re

import matrix
from matrix import verdict, with_rows


def test_of_two_summaries_the_last_counts() -> None:
    assert verdict("a test's own: \n5 passed in 1.00s\n3 failed, 1 error in 2.00s\n") == "3 failed, 1 error"


def test_tests_that_do_not_get_to_a_summary_broke() -> None:
    assert verdict("ImportError: no torch\nSegmentation fault") == "broke: Segmentation fault"


def test_a_corners_row_is_written_anew_and_the_others_stay() -> None:
    page = with_rows(f"# Versions\n{matrix.BEGIN}\n{matrix.END}\nrest", {"lowest": "| lowest | 1 |"})
    page = with_rows(page, {"newest": "| newest | 2 |"})
    page = with_rows(page, {"lowest": "| lowest | 3 |"})
    assert re.findall(r"^\| \w+ \| \d \|$", page, re.MULTILINE) == ["| newest | 2 |", "| lowest | 3 |"]
    assert page.startswith("# Versions\n")
    assert page.endswith("\nrest")
