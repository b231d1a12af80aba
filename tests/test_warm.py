"""Programs that are forks of the tests' warm Python: what they have of whoever starts them."""

from __future__ import annotations

import json
import os
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
    cold = run_cold(["-c", code], cwd=tmp_path, env={})
    warm = run_program(["-c", code], cwd=tmp_path)
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout), warm.stderr
    assert last_words(warm.stderr) == last_words(cold.stderr)


def last_words(text: str) -> list[str]:
    """Without the lines of a traceback that say where: a warm one has more of them."""
    return [line for line in text.splitlines() if not line.startswith("  ")]


def test_what_a_program_forks_ends_by_its_own_code(tmp_path: Path) -> None:
    forks = "import os, sys; child = os.fork(); code = os.WEXITSTATUS(os.waitpid(child, 0)[1]) if child else 3"
    done = run_program(["-c", f"{forks}; print(code, flush=True); sys.exit(code + 1)"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (5, "3\n4\n")


def test_what_a_program_forks_has_its_modules_until_it_has_ended(tmp_path: Path) -> None:
    """As a rank, which calls what is to be called at its end while threads of its still work."""
    forked = "atexit._run_exitfuncs(); print('torch' in sys.modules, flush=True); os._exit(0)"
    program = f"import atexit, os, sys\nif os.fork() == 0:\n    {forked}\nos.wait()"
    assert run_program(["-c", program], cwd=tmp_path).stdout == "True\n"


FLYTEKIT = """
import importlib.util, json, os, signal, sys
found = {"before": [name for name in sys.modules if name.split(".")[0] == "flytekit"]}
found["there"] = importlib.util.find_spec("flytekit").origin
import flytekit
from flytekit.clis.sdk_in_container import utils
from flytekit.configuration import Config, DataConfig
from flytekit.core import context_manager, data_persistence, tracker, type_engine

current = context_manager.FlyteContextManager.current_context()
folders = [Config().local_sandbox_path, Config.auto().local_sandbox_path, data_persistence.flyte_tmp_dir,
    current.file_access.local_sandbox_dir, current.file_access.raw_output_prefix,
    flytekit.current_context().working_directory]
found["folders"] = [os.path.exists(folder) for folder in folders]
found["places"] = [os.path.relpath(folder, os.environ["TMPDIR"]).count("/") for folder in folders]
found["is one sandbox"] = folders[0] == folders[1]
found["all"] = len(os.listdir(os.environ["TMPDIR"]))
found["endpoint"] = current.file_access.data_config.s3.endpoint
found["signal"] = signal.getsignal(signal.SIGINT).__qualname__
found["hook"] = sys.excepthook.__qualname__
found["level"] = flytekit.logger.level, [type(each).__name__ for each in flytekit.logger.handlers]
found["plugin"] = "flytekitplugins.daskpytorch.flyte.context" in sys.modules
found["project"] = utils.project_option.default
found["root"] = tracker.FeatureFlags.FLYTE_PYTHON_PACKAGE_ROOT
found["at once"] = type_engine._TYPE_ENGINE_COROS_BATCH_SIZE
found["grpc"] = os.environ["GRPC_VERBOSITY"]
found["spec"] = flytekit.__spec__.origin, flytekit.__loader__.name, flytekit.__file__
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "variables",
    [
        {"FLYTE_SDK_LOGGING_LEVEL": "10", "FLYTE_AWS_ENDPOINT": "http://there:1"},
        {"FLYTE_SDK_RICH_TRACEBACKS": "0", "GRPC_VERBOSITY": "INFO"},
        {"FLYTE_DEFAULT_PROJECT": "ours", "_F_TE_MAX_COROS": "3", "FLYTE_PYTHON_PACKAGE_ROOT": "."},
    ],
)
def test_flytekit_is_to_a_program_as_if_it_had_imported_it(variables: dict[str, str], tmp_path: Path) -> None:
    """It has read the variables of the program, and made the program's own folders."""
    found = []
    for run in (run_program, run_cold):
        (folder := tmp_path / run.__name__).mkdir()
        done = run(["-c", FLYTEKIT], cwd=tmp_path, env=variables | {"TMPDIR": str(folder)})
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]


def run_cold(command: list[str], *, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What becomes of a program of Python's."""
    every = os.environ | env
    return subprocess.run([sys.executable, *command], cwd=cwd, env=every, capture_output=True, text=True, check=False)
