"""All workflows can be registered, and the backend receives the recorded specs."""

import runpy
from pathlib import Path

import pytest

import specs
from pages import REPOSITORY


def test_what_the_backend_is_told_has_not_changed(tmp_path: Path) -> None:
    found = specs.packaged(tmp_path)
    written = {profile: specs.committed(profile) for profile in specs.PROFILES}
    assert found == written, "is that meant? Then run: python tests/support/specs.py, and commit what it writes"


def test_every_workflow_is_pinned() -> None:
    pinned = {name.split(".")[-2] for name in specs.committed("sandbox") if name.startswith("workflow ")}
    assert pinned == {
        path.stem for path in (REPOSITORY / "workflows").glob("*.py") if "\n@workflow" in path.read_text()
    }


# ---- The profile


def resources(monkeypatch: pytest.MonkeyPatch, profile: str) -> dict[str, object]:
    monkeypatch.setenv("DASKPYTORCH_PROFILE", profile)
    return runpy.run_path(str(REPOSITORY / "workflows" / "resources.py"))


def test_a_profile_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="DASKPYTORCH_PROFILE='gpus': must be one of sandbox, gpu"):
        resources(monkeypatch, "gpus")


def test_an_empty_profile_is_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources(monkeypatch, "")["PROFILE"] == "sandbox"


@pytest.mark.parametrize("text", ["two", "-1", "1.5", "0"])
def test_a_number_of_workers_that_is_none_is_refused_by_its_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOGS_WORKERS", text)
    number = resources(monkeypatch, "gpu")["number"]
    with pytest.raises(ValueError, match=rf"DOGS_WORKERS='{text}': must be a whole number from 1 up"):
        number("DOGS_WORKERS", 2)  # type: ignore[operator]


def test_a_workflows_own_variable_overrides_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workflows.resources.NUM_GPUS", 1)
    for given, found in ((None, "1"), ("0", None), ("3", "3")):
        if given is not None:
            monkeypatch.setenv("DOGS_GPUS", given)
        train = runpy.run_path(str(REPOSITORY / "workflows" / "dogs.py"), run_name=f"dogs_on_{given}_gpus")["train"]
        assert train.task_config.workers.limits.gpu == found
        assert train.environment["DOGS_GPUS"] == (given or "1")
