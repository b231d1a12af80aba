"""The doctor draws the right verdict from each finding."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch import __main__, doctor
from flytekitplugins.daskpytorch.doctor import Finding
from flytekitplugins.daskpytorch.node import hardware

# ---- GPUs


def found_by_the_doctor(what: str) -> Finding:
    [finding] = [each for each in doctor.examine(None, 60.0) if each.what == what]
    return finding


@pytest.fixture(autouse=True)
def _without_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gang_here", lambda _: ())


def test_a_driver_whose_gpus_torch_does_not_find_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "DRIVER_FILES", (Path("/dev/null"),))
    monkeypatch.setattr(hardware, "gpus_here", lambda: hardware.FoundGpus(problem="torch says: no"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = found_by_the_doctor("GPUs")
    assert finding.verdict == "warning"
    assert "torch says: no" in finding.value
    assert "CUDA_VISIBLE_DEVICES=''" in finding.advice


def test_amd_gpus_that_torch_does_not_know_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_amd_gpus", lambda: 2)
    monkeypatch.setattr(hardware, "gpus_here", lambda: hardware.FoundGpus(problem="torch says: no"))
    for variable in hardware.AMD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    finding = found_by_the_doctor("GPUs")
    assert finding.verdict == "problem"
    assert "HIP_VISIBLE_DEVICES=-1" in finding.value


def test_gpus_are_listed_and_a_machine_without_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus_here", lambda: hardware.FoundGpus({"0": "NVIDIA H200", "1": "NVIDIA L4"}))
    assert found_by_the_doctor("GPUs") == Finding("GPUs", "0: NVIDIA H200; 1: NVIDIA L4")
    monkeypatch.setattr(hardware, "DRIVER_FILES", ())
    monkeypatch.setattr(hardware, "gpus_here", hardware.FoundGpus)
    assert found_by_the_doctor("GPUs").verdict == "ok"


# ---- Nothing stops the examination


def test_a_check_that_breaks_is_a_problem_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(timeout: float) -> Iterator[Finding]:
        yield Finding(what="first", value="fine")
        raise OSError("the disk is gone")

    monkeypatch.setattr(doctor, "_gang_here", check)
    *_, first, second = doctor.examine(None, 60.0)
    assert first.verdict == "ok"
    assert (second.what, second.value) == ("ranks on this node", "OSError: the disk is gone")
    assert second.verdict == "problem"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://there"])
def test_an_address_without_a_scheduler_is_a_problem(address: str) -> None:
    *_, finding = doctor.examine(address, 0.5)
    assert (finding.what, finding.verdict) == ("scheduler", "problem")
    assert address.partition(":")[0] in finding.value


# ---- The command


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(words) == 0
    text = capsys.readouterr().out
    for name in ("run", "attach", "doctor"):
        assert re.search(rf"^  {name} +[A-Z].*[^.]\.$", text, re.MULTILINE), text
        assert __main__.main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: daskpytorch {name} [OPTIONS]")


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["train.py"]) == 2
    assert "No such command 'train.py'" in capsys.readouterr().err


def test_problems_make_the_exit_code_1_and_their_lines_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    assert __main__.main(["doctor", "--timeout", "0.5"]) == 1
    text = capsys.readouterr().out
    assert f"torch {version('torch')}, " in text
    assert "\nproblem  scheduler                    OSError: Timed out trying to connect to tcp://127.0.0.1:9" in text
    assert "its address, its port and its log" in text


@pytest.mark.parametrize("seconds", ["0", "inf", "soon"])
def test_the_time_limit_must_be_one(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor", "--timeout", seconds]) == 2
    assert "--timeout" in capsys.readouterr().err


def test_an_end_of_file_is_an_error_and_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(*_: object, **__: object) -> Iterator[Finding]:
        raise EOFError("the file is cut short")

    monkeypatch.setattr(doctor, "examine", examine)
    with pytest.raises(EOFError, match="the file is cut short"):
        __main__.main(["doctor"])
