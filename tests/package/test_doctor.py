"""The doctor prints a line for each check. The command lists its commands."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import __main__, doctor
from flytekitplugins.daskpytorch.node import hardware
from flytekitplugins.daskpytorch.process import gpu_vendor

# ---- GPUs


@pytest.fixture(autouse=True)
def _without_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_here", lambda _: "fine")


@pytest.mark.parametrize(
    ("num_amd", "names", "has_driver", "verdict", "said"),
    [
        (0, {"0": "NVIDIA H200", "1": "NVIDIA L4"}, True, "ok", "0: NVIDIA H200; 1: NVIDIA L4"),
        (0, {}, False, "ok", "none; ranks train on the CPU"),
        (0, {}, True, "ok", "torch says: no. Likely causes: "),
        (2, {}, True, "problem", "HIP_VISIBLE_DEVICES=-1"),
    ],
)
def test_gpus_are_listed_and_those_that_torch_does_not_find_are_named(
    num_amd: int,
    names: dict[str, str],
    has_driver: bool,
    verdict: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_vendor, "NVIDIA_FILES", (Path("/dev/null"),) if has_driver else ())
    monkeypatch.setattr(gpu_vendor, "num_amd_gpus", lambda: num_amd)
    monkeypatch.setattr(
        hardware, "gpus_here", lambda: hardware.FoundGpus(names, problem="" if names else "torch says: no")
    )
    for variable in gpu_vendor.AMD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert __main__.main(["doctor"]) == (verdict == "problem")
    [line] = [line for line in capsys.readouterr().out.splitlines() if " GPUs " in line]
    assert line.startswith(verdict)
    assert said in line


# ---- The command


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(words) == 0
    text = capsys.readouterr().out
    for name in ("run", "attach", "doctor"):
        assert re.search(rf"^  {name} +[A-Z].*[^.]\.$", text, re.MULTILINE), text
        assert __main__.main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: daskpytorch {name} [OPTIONS]")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://127.0.0.1:9", "OSError: Timed out trying to connect to tcp://127.0.0.1:9"),
        ("nonsense://there", "nonsense"),
    ],
)
def test_problems_make_the_exit_code_1_and_their_lines_say_what_to_do(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
    assert __main__.main(["doctor", "--timeout", "0.5"]) == 1
    text = capsys.readouterr().out
    assert f"torch {version('torch')}, " in text
    assert said in text.partition("\nproblem  ranks on the cluster  ")[2]
    assert "Mend what the errors name" in text


@pytest.mark.parametrize("seconds", ["0", "inf", "soon"])
def test_the_time_limit_must_be_one(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor", "--timeout", seconds]) == 2
    assert "--timeout" in capsys.readouterr().err
