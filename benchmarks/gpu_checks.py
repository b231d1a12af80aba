"""Run tests, and write each result to a file as it ends: gpu_checks.py TESTS FILE LIMIT [options].

`gpu.py` starts this program, and starts it again with `--done` after a test that has hung or has ended the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Notes:
    """Plugin of pytest that appends a line of JSON for each event to a file."""

    def __init__(self, file: Path, done: list[str]) -> None:
        self._file, self._done = file, done
        self._result: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the tests that are done, and write the names of the others."""
        items[:] = [item for item in items if item.name not in self._done]
        self._write({"planned": [item.name for item in items]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test begins."""
        self._result = {"what": nodeid.rpartition("::")[2], "outcome": "passed", "seconds": 0.0, "said": "", "text": ""}
        self._write({"begins": self._result["what"]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a part of a test, its preparation, call or end, to the result. Write the result after the end."""
        result = self._result
        result["seconds"] += report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else report.longreprtext
            result.update(outcome="failed", said=said, text=f"{result['text']}{report.longreprtext}\n")
        elif report.skipped:
            result.update(outcome="skipped", said=report.longrepr[2].removeprefix("Skipped: "))
        if report.when == "teardown":
            self._write({"ended": result | {"figures": dict(report.user_properties)}})

    def _write(self, event: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(f"{json.dumps(event, default=str)}\n")


def main() -> int:
    """Run the tests that are not done, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", help="a file of tests")
    parser.add_argument("file", type=Path, help="the file for the results")
    parser.add_argument("limit", type=float, help="seconds for each test")
    parser.add_argument("--on", default="", help="only tests with this text in their names, such as cuda")
    parser.add_argument("--done", nargs="*", default=[], metavar="TEST", help="leave these out")
    arguments = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the machine may have others, for other tests
    import pytest

    # Without conftest.py, which imports the packages of all other tests.
    options = ["--noconftest", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-q", "--tb=short"]
    options += [f"--rootdir={ROOT}", f"--timeout={arguments.limit:g}", "-k", arguments.on, arguments.tests]
    sys.stdout = sys.stderr  # a benchmark's standard output is its table
    return int(pytest.main(options, plugins=[Notes(arguments.file, arguments.done)]))


if __name__ == "__main__":
    sys.exit(main())
