"""Check and measure gangs on a machine with GPUs by one command, without a network, within ten minutes.

    python benchmarks/gpu.py --bundle wheels              # here: wheels for the machine with GPUs, for Python 3.12
    python benchmarks/gpu.py --wheels wheels              # there: all of it, into gpu.md and gpu.json
    python benchmarks/gpu.py --part checks                # right or wrong, in minutes
    python benchmarks/gpu.py --part speed --minutes 20    # the benchmarks beside their peers
    python benchmarks/gpu.py --require-cuda               # fail at once if torch finds no GPU

The machine needs Python and torch with CUDA. The wheels have everything else, and go into a virtual environment.
Without a folder of wheels, the packages of this Python are used.

checks  `tests/scenarios/test_gpu_integration.py`, with a rank for each GPU: contexts, devices, process groups, kills,
        checkpoints, errors, CUDA graphs, returned tensors, usage. Without GPUs, those that can run on the CPU
speed   launch, recovery and throughput beside `torchrun`, checkpoints beside torch's, the pet-names recipe beside the
        usual one. Without GPUs, small sizes on the CPU with gloo

The two files are written again after each result, so they are there after an error, a timeout or SIGTERM, too. A part
that lacks a package is named at once and skipped. If a check fails, or a part exceeds its time, the others still run,
and the exit code is 1.

This process imports only the standard library. Other processes run the checks and the measured programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import gpu_wheels
from figures import FILE, MISSING, machine, version_of
from running import nothing_left

BENCHMARKS = Path(__file__).resolve().parent
OURS = ("torch", "distributed", "flytekitplugins-daskpytorch")
CHECKS = BENCHMARKS.parent / "tests/scenarios/test_gpu_integration.py"
CHECKS_NEED = (*OURS, "pytest", "pytest-timeout")
SPEED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "launch.py": ((), ("--rounds", "2")),
    "recovery.py": (("--only", "rank", "torchrun"), ("--rounds", "2")),
    "training.py": ((), ("--starts", "1")),
    "checkpoints.py": (("--only", "disk"), ()),
    "recipe.py": ((), ("--rounds", "2")),
}
"""Options of each benchmark: always, and only without --quick. The script launch.py gets the backend's name, too."""
FAREWELL = 20.0
"""Seconds for a benchmark to end its processes after SIGTERM."""
LINES = 40
"""Number of lines of a failed benchmark's standard error that the report has."""
RESERVE = 40.0
"""Seconds that a benchmark leaves to each of those after it."""
CHECK_LIMIT = 150.0
"""Timeout of each check in seconds, for gangs that hang. pytest ends the check, or else this process ends pytest."""
START_LIMIT = 150.0
"""Timeout in seconds for pytest to import torch and find the checks."""
CHECKS_SHARE = 0.5
"""Share of the time that the checks may take if the speed is measured afterwards."""
HEAD_OF_RESULTS = ("| part | what | outcome | took | |", "|---|---|---|---|---|")
QUESTION = """
import json, torch
from torch import cuda
gpus = []
for index in range(cuda.device_count()):
    found = cuda.get_device_properties(index)
    gpus.append([found.name, str(getattr(found, "uuid", "")), round(found.total_memory / 2**30, 1)])
nccl = ".".join(map(str, cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
print(json.dumps({"torch": torch.__version__, "built for CUDA": torch.version.cuda, "NCCL": nccl, "GPUs": gpus}))
"""


@dataclass(kw_only=True)
class Result:
    """Result of a check or benchmark."""

    part: str
    what: str
    outcome: str = "not run"
    """passed, failed, skipped or not run."""
    seconds: float = 0.0
    said: str = ""
    """Reason of a failure or skip, in one line."""
    figures: Any = field(default_factory=dict)
    text: str = ""
    """Output of a benchmark, or the whole error of a check."""

    @property
    def row(self) -> str:
        """Row of the table."""
        found = "; ".join(f"{name}: {value}" for name, value in self.figures.items()) if self.part == "checks" else ""
        said = " ".join(f"{self.said} {found}".split())[:400].replace("|", "/")
        outcome = f"**{self.outcome}**" if self.outcome == "failed" else self.outcome
        return f"| {self.part} | `{self.what}` | {outcome} | {self.seconds:.1f} s | {said} |"


class Report:
    """Results so far, as a Markdown page and as JSON beside it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.about: dict[str, Any] = {"command": shlex.join(sys.argv), "began": time.strftime("%Y-%m-%d %H:%M:%S")}
        self.results: dict[str, Result] = {}
        self._began = time.monotonic()

    def put(self, result: Result) -> None:
        """Add a result, or replace the result of the same name, and write both files."""
        self.results[result.what] = result
        if result.outcome != "not run":
            said = f": {result.said}" if result.said else ""
            print(
                f"---- {result.what}: {result.outcome}, {result.seconds:.1f} s{said}"[:500], file=sys.stderr, flush=True
            )
        self.write()

    def write(self, ended: str = "") -> None:
        """Write both files. `ended` says how the command ended. Empty while the command runs."""
        self.about |= {"seconds": round(time.monotonic() - self._began, 1), "ended": ended or "still running"}
        results = [asdict(result) for result in self.results.values()]
        _write(self._file.with_suffix(".json"), json.dumps({"about": self.about, "results": results}, indent=1))
        _write(self._file, self.page())

    def page(self) -> str:
        """Return the Markdown page."""
        gpus = [f"{name}, {size} GiB ({uuid})" for name, uuid, size in self.about.get("GPUs", ())]
        lines = [f"# Seen on {'; '.join(gpus)}" if gpus else "# There is no GPU here: the CPU, with gloo", ""]
        lines += [f"- {name}: {value}" for name, value in self.about.items() if name != "GPUs"]
        lines += ["", *HEAD_OF_RESULTS, *(result.row for result in self.results.values())]
        texts = [f"## {each.what}\n\n{each.text.strip()}\n" for each in self.results.values() if each.text.strip()]
        return "\n".join([*lines, "", *texts])

    @property
    def has_failed(self) -> bool:
        """True if a check or benchmark failed, or has not run."""
        return any(result.outcome in ("failed", "not run") for result in self.results.values())


def _write(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


# ---- Benchmarks


def run(part: list[str], limit: float) -> Result:
    """Run one benchmark, pass on its standard error, and return its result without figures."""
    print(f"---- {' '.join(part)}, at most {limit:.0f} s", file=sys.stderr, flush=True)
    began = time.monotonic()
    last, left_out = deque[str](maxlen=LINES), list[str]()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / part[0]), *part[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        talk = threading.Thread(target=pass_on, args=(process.stderr, last, left_out), daemon=True)
        talk.start()
        try:
            code = process.wait(limit)
            talk.join(1)  # its processes may keep the standard error open
            failure = f"exit code {code}: {(last or ['it says nothing'])[-1]}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {limit:.0f} s; it was at: {(last or ['it says nothing'])[-1]}"
        finally:
            put_down(process)
        output.seek(0)
        said = "\n".join([*left_out, output.read()])
    said += f"\n```text\n{chr(10).join(last)}\n```\n" if failure else ""  # rounds that were done, too
    outcome, seconds = "failed" if failure else "passed", time.monotonic() - began
    return Result(part="speed", what=shlex.join(part), outcome=outcome, seconds=seconds, said=failure, text=said)


def pass_on(lines: IO[str], last: deque[str], left_out: list[str]) -> None:
    """Pass on the lines. Keep the last ones, and those that name contestants without their packages."""
    for line in lines:
        sys.stderr.write(line)
        if line.strip():
            last.append(line.strip())
        if " is left out, since " in line:
            left_out.append(line.strip())


def put_down(process: subprocess.Popen[Any]) -> None:
    """End a benchmark, with time to end its own processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FAREWELL)
    process.kill()
    process.wait()


def speed(report: Report, deadline: float, *, quick: bool) -> None:
    """Run the benchmarks in turn."""
    has_gpus = bool(report.about["GPUs"])
    is_quick = quick or not has_gpus
    chosen = [script for script in SPEED if report.results[script].outcome == "not run"]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(os.environ.setdefault(FILE, f"{folder}/figures"))
        figures.touch()
        for number, script in enumerate(chosen):
            always, usually = SPEED[script]
            line = [script, *always, *(["--quick"] if is_quick else usually)]
            line += ["--backend", "nccl" if has_gpus else "gloo"] if script == "launch.py" else []
            limit = deadline - time.monotonic() - RESERVE * (len(chosen) - number - 1)
            if limit < 1:
                report.put(Result(part="speed", what=script, said="no time was left, see --minutes"))
                continue
            before = len(figures.read_text().splitlines())
            result = run(line, limit)
            rows = [json.loads(row) for row in figures.read_text().splitlines()[before:]]
            report.put(replace(result, what=script, figures=rows))


# ---- Checks


def checks(report: Report, deadline: float) -> None:
    """Run the checks. After one that hangs or ends the whole process, start again with the others."""
    on, done, is_broken = "cuda" if report.about["GPUs"] else "", list[str](), True
    while is_broken and time.monotonic() < deadline:
        is_broken = False
        for event in _events(on, done, deadline):
            report.results.pop("tests", None)
            for what in event.get("planned", ()):
                report.put(Result(part="checks", what=what))
            if ended := event.get("ended"):
                done.append(ended["what"])
                report.put(Result(part="checks", **ended))
            is_broken = event.get("is_broken", False)


def _events(on: str, done: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one process that runs checks, and at its end the check that broke the process, if one did."""
    with nothing_left("gpu-checks") as folder:
        (file := folder / "events").touch()
        told = [str(CHECKS), str(file), str(CHECK_LIMIT), f"--on={on}", "--done", *done]
        command = [sys.executable, str(BENCHMARKS / "gpu_checks.py"), *told]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        began, limit, num_read, running, code = time.monotonic(), START_LIMIT, 0, "", None
        try:
            while code is None and time.monotonic() < min(began + limit, deadline):
                time.sleep(0.1)
                code = process.poll()
                lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
                for event in map(json.loads, lines[num_read:]):
                    running = event.get("begins", "" if "ended" in event else running)
                    yield event
                if lines[num_read:]:
                    began, limit, num_read = time.monotonic(), CHECK_LIMIT + FAREWELL, len(lines)
        finally:
            put_down(process)
    if code not in (0, 1, 5):  # 1: a check has failed, 5: there are no checks
        said = "not done in time" if code is None else f"the process of the checks ended with exit code {code}"
        ended = {"what": running or "the checks", "outcome": "failed", "said": said}
        yield {"is_broken": bool(running), "ended": ended | {"seconds": time.monotonic() - began}}


# ---- The command


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", choices=("checks", "speed", "both"), default="both", help="what to run (default: both)")
    add("--minutes", type=float, default=10.0, metavar="N", help="time for all of it, in minutes (default: 10)")
    add("--to", type=Path, default=Path("gpu.md"), metavar="FILE.md", help="page to write, with FILE.json beside it")
    add("--quick", action="store_true", help="smallest sizes, to check that the benchmarks still run")
    add("--require-cuda", action="store_true", help="fail at once if torch finds no GPU")
    add("--wheels", type=Path, metavar="DIR", help="folder of --bundle (default: wheels beside this script, if there)")
    add("--venv", type=Path, metavar="DIR", help="where the wheels are installed (default: venv in their folder)")
    bundle = parser.add_argument_group("make the folder of wheels, with pip's network")
    bundle.add_argument("--bundle", type=Path, metavar="DIR", help="fill this folder with wheels, and run nothing")
    bundle.add_argument("--python", default="3.12", metavar="X.Y", help="Python of the other machine (default: 3.12)")
    bundle.add_argument("--machine", default="x86_64", help="its processor, x86_64 (default) or aarch64")
    bundle.add_argument("--without", nargs="+", default=[], metavar="NAME", help="packages that it has, such as numpy")
    found = parser.parse_args()
    if found.to.suffix != ".md" or not found.to.parent.is_dir():
        parser.error(f"--to {found.to}: must end in .md and lie in a folder that is there")
    return found


def enter_wheels(arguments: argparse.Namespace) -> None:
    """Go on in a Python that has the wheels, if there is a folder of wheels and this Python is another one.

    The time for the installation counts.
    """
    began = time.monotonic()
    wheels = arguments.wheels or BENCHMARKS / "wheels"
    if arguments.wheels is None and not wheels.is_dir():
        return
    folder = (arguments.venv or wheels / "venv").resolve()
    if Path(sys.prefix) == folder:
        return
    print(f"---- {wheels.resolve()} is installed into {folder}", file=sys.stderr, flush=True)
    python = str(gpu_wheels.python_with(wheels.resolve(), folder))
    left = arguments.minutes - (time.monotonic() - began) / 60
    os.execv(python, [python, *sys.argv, f"--minutes={left:.2f}"])


def facts() -> dict[str, Any]:
    """Return what torch says of itself and of the GPUs, and this machine in a line."""
    command = [sys.executable, "-c", QUESTION]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHECK_LIMIT)
    if asked.returncode:
        raise RuntimeError(f"torch cannot be used by {sys.executable}: {asked.stderr.strip()[-1000:]}")
    return json.loads(asked.stdout.splitlines()[-1]) | {"machine": machine()}


def planned(report: Report, part: str) -> None:
    """Add all parts to the report, and name at once what a part lacks."""
    wanted = {script: ("speed", OURS) for script in SPEED if part != "checks"}
    wanted |= {"tests": ("checks", CHECKS_NEED)} if part != "speed" else {}
    for what, (kind, needs) in wanted.items():
        lacking = [name for name in needs if version_of(name) == MISSING]
        said = f"needs {', '.join(lacking)}: pip install, or --wheels DIR" if lacking else ""
        report.put(Result(part=kind, what=what, outcome="skipped" if lacking else "not run", said=said))


def run_parts(report: Report, arguments: argparse.Namespace) -> None:
    """Run the parts, and put their results into the report."""
    deadline = time.monotonic() + 60 * arguments.minutes - FAREWELL
    enter_wheels(arguments)
    report.about |= facts()
    report.write()
    if arguments.require_cuda and not report.about["GPUs"]:
        built = report.about["built for CUDA"] or "no CUDA"
        driver = "there" if Path("/dev/nvidiactl").exists() else "missing"
        raise RuntimeError(
            f"--require-cuda: torch {report.about['torch']} (built for {built}) finds no GPU, and /dev/nvidiactl is "
            f"{driver}. Look at nvidia-smi and CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
        )
    planned(report, arguments.part)
    if "tests" in report.results and report.results["tests"].outcome == "not run":
        share = CHECKS_SHARE if arguments.part == "both" else 1.0
        checks(report, time.monotonic() + share * (deadline - time.monotonic()))
    if arguments.part != "checks":
        speed(report, deadline, quick=arguments.quick)


def main() -> None:
    """Fill a folder with wheels, or run the parts and write what was seen."""
    arguments = parsed()
    if arguments.bundle:
        print(gpu_wheels.make(arguments.bundle, arguments.python, arguments.machine, arguments.without))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report, ended = Report(arguments.to), "stopped"
    try:
        run_parts(report, arguments)
        ended = "with failures" if report.has_failed else "well"
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        report.put(Result(part="setup", what="environment", outcome="failed", said=f"{type(error).__name__}: {error}"))
        ended = "before the parts"
    finally:
        report.write(ended)
        print(report.page(), end="", flush=True)
    sys.exit(ended != "well")


if __name__ == "__main__":
    main()
