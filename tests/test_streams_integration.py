"""Users' scripts without standard streams, and at Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from processes import nothing_left_behind

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "driving.py"


@pytest.mark.parametrize(
    ("how", "closed"),
    [("threads", "2>&-"), ("processes", "2>&-"), ("task", "2>&-"), ("task", ">&-"), ("threads", "<&- >&- 2>&-")],
)
def test_closed_standard_streams_are_nothing_to_a_gang(how: str, closed: str, tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" "{SCRIPT}" {how} "{tmp_path}" once {closed}'
    with nothing_left_behind():
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "results").read_text() == ("[2.0]" if how == "task" else "[2.0, 2.0]")
    assert "Traceback" not in done.stdout + done.stderr
    assert ("by C code" in done.stderr) == ("2>" not in closed)
