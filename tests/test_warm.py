"""A program in a fork of the tests' warm Python runs as the same program under `python` does."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from processes import run_program

BLOCKED = "import signal; print([int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())])"
MODULE = "import sys; print(__name__, __spec__.name, [Path(sys.argv[0]).name, *sys.argv[1:]])"


def test_a_program_blocks_the_signals_that_its_starter_blocks(tmp_path: Path) -> None:
    run_program(["-c", "pass"], cwd=tmp_path)  # the warm Python is there, and blocks none
    before = signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
    try:
        blocking = run_program(["-c", BLOCKED], cwd=tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert blocking.stdout == f"[{signal.SIGUSR1.value}]\n", blocking.stderr


@pytest.mark.parametrize("name", ["plain", "package.inner"])
def test_a_module_is_run_as_python_runs_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"from pathlib import Path; {MODULE}")
    done = run_program(["-m", name, "--flag", "x"], cwd=tmp_path)
    assert done.stdout == f"__main__ {name} {[path.name, '--flag', 'x']}\n", done.stderr


def test_a_program_ends_with_its_own_code_and_words(tmp_path: Path) -> None:
    program = "import atexit, sys; atexit.register(print, 'called'); sys.exit('no such file')"
    done = run_program(["-c", program], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "called\n", "no such file\n")
