"""Programs that are forks of the tests' warm Python: what they have of whoever starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import run_program

BLOCKED = "import signal; print([int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())])"
MODULE = "import sys; print(__name__, __spec__.name, [Path(sys.argv[0]).name, *sys.argv[1:]])"


def test_a_program_blocks_the_signals_that_its_starter_blocks(tmp_path: Path) -> None:
    """Whatever the warm Python was started with."""
    run_program(["-c", "pass"], cwd=tmp_path)
    before = signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1})
    try:
        blocking = run_program(["-c", BLOCKED], cwd=tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert blocking.stdout == f"[{signal.SIGUSR1.value}]\n", blocking.stderr
    assert run_program(["-c", BLOCKED], cwd=tmp_path).stdout == f"{[int(each) for each in before]}\n"


@pytest.mark.parametrize("name", ["plain", "package.inner"])
def test_a_module_is_run_as_python_runs_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"from pathlib import Path; {MODULE}")
    done = run_program(["-m", name, "--flag", "x"], cwd=tmp_path)
    assert done.stdout == f"__main__ {name} {[path.name, '--flag', 'x']}\n", done.stderr


ENDS = {
    "of itself": "pass",
    "with a code": "import sys; sys.exit(7)",
    "with a large code": "raise SystemExit(-1)",
    "with a message": "raise SystemExit('no such file')",
    "with an error": "raise ValueError('x')",
    "with Ctrl-C": "raise KeyboardInterrupt",
    "with a callback that fails": "atexit.register(divmod, 1, 0)",
    "with a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('x'))).start()",
    "with closed streams": "import sys; print('x'); sys.stdout.close()",
    "with nobody who reads": "import os, sys; print('x'); os.close(1)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_pythons_own_do(how: str, tmp_path: Path) -> None:
    """With the same code and words, its callbacks called; only quicker."""
    code = f"import atexit, os; atexit.register(os.write, 2, b'called\\n'); {ENDS[how]}"
    cold = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    warm = run_program(["-c", code], cwd=tmp_path)
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout), warm.stderr
    assert last_words(warm.stderr) == last_words(cold.stderr)


def last_words(text: str) -> list[str]:
    """Without the lines of a traceback that say where: a warm one has more of them."""
    return [line for line in text.splitlines() if not line.startswith("  ")]


def test_what_a_program_forks_ends_by_its_own_code(tmp_path: Path) -> None:
    forks = "import os, sys; child = os.fork(); code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 3"
    done = run_program(["-c", f"{forks}; print(code, flush=True); sys.exit(code + 1)"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (5, "3\n4\n")
