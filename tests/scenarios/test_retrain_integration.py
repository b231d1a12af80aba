"""Daily retrainings promote the right models, and leave a valid registry if one is killed."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pages import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program
from tasks.challenger import STATE
from tasks.char_lstm import CharLSTM, evaluate, windows
from tasks.embedded_names import EMBEDDED_NAMES
from tasks.names import split_by_hash
from tasks.registry import Registry

HP = {"epochs": 1, "batch_size": 64, "learning_rate": 0.005}
FEW = EMBEDDED_NAMES[::3]
MORE = [*FEW, *EMBEDDED_NAMES[1::6]]
DAYS = ("2026-01-01", "2026-01-02", "2026-01-03")
STAGES = {
    "after the version": (2, False),
    "after the pointer change": (2, True),
}
"""Where a retraining is killed; how many versions there are then, and whether the new one is the champion."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the workflow, by a process."""

    code: int
    said: str
    outputs: Mapping[str, str] = field(default_factory=dict)

    def output(self, name: str) -> str:
        assert name in self.outputs, self.said
        return self.outputs[name]

    @property
    def has_trained(self) -> bool:
        """True if ranks were started. False if Flyte's cache had the result."""
        assert self.output("version")
        return "train: starting 2 ranks" in self.said


@dataclass(frozen=True, kw_only=True)
class Home:
    """A home directory with Flyte's cache, the names of three days, and a registry."""

    folder: Path

    @property
    def data(self) -> str:
        return f"{self.folder}/names/{{date}}.json"

    @property
    def registry(self) -> str:
        return str(self.folder / "registry")

    def call(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(self.folder), "TMPDIR": f"{self.folder}/tmp", "PET_NAMES_REGISTRY": self.registry}
        own |= {"WANDB_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
        with nothing_left_behind():
            return run_program(command, cwd=self.folder, env=own)

    def retrain(self, name: str, day: str) -> Run:
        """By pyflyte run, on the names of the day."""
        given = ("--data", self.data, "--kickoff_time", day, "--hp", json.dumps(HP))
        done = self.call(SCRIPTS / "pyflyte", "run", REPOSITORY / "workflows" / "retrain.py", name, *given)
        found = re.search(r"Retraining\((.*)\)$", done.stdout, re.MULTILINE)
        outputs = dict(re.findall(r"(\w+)=['\"](.*?)['\"](?:, |$)", found[1])) if found else {}
        return Run(code=done.returncode, said=done.stdout + done.stderr, outputs=outputs)

    def retrain_directly(self, inputs: Mapping[str, Any], stage: str = "") -> Run:
        """A retraining that is killed at this stage."""
        given = {"data": self.data, "registry": self.registry, "hp": HP, **inputs}
        done = self.call(str(REPOSITORY / "tests/support/retrain_victims.py"), stage, json.dumps(given))
        outputs = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        return Run(code=done.returncode, said=done.stdout + done.stderr, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class Story:
    """Three days, and what the registry was like before the third."""

    home: Home
    days: list[Run]
    two_days: Path
    """A copy of the registry after two days."""

    @property
    def versions(self) -> list[str]:
        return [run.output("version") for run in self.days]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The same names on the second day, in another order; more of them on the third."""
    folder = tmp_path_factory.mktemp("retrain")
    (folder / "tmp").mkdir()
    (folder / "names").mkdir()
    for day, some in zip(DAYS, (FEW, FEW[::-1], MORE), strict=True):
        (folder / "names" / f"{day}.json").write_text(json.dumps(list(some)))
    return Home(folder=folder)


@pytest.fixture(scope="module")
def story(home: Home) -> Story:
    """The first day by the launch plan, the third by the workflow's name."""
    days = [home.retrain("retrain_daily", DAYS[0]), home.retrain_directly({"kickoff_time": DAYS[1]})]
    two_days = shutil.copytree(home.registry, home.folder / "two_days")
    return Story(home=home, days=[*days, home.retrain("retrain", DAYS[2])], two_days=two_days)


def test_three_days_and_a_roll_back(story: Story, tmp_path: Path) -> None:
    first, second, third = story.days
    registry = Registry(story.home.registry)
    assert first.has_trained
    assert first.output("outcome") == "promoted: there was no champion (promotion 1)"
    assert not second.has_trained
    assert second.output("version") == first.output("version")
    assert second.output("outcome") == "not promoted: it is the champion itself: nothing has changed"
    assert third.has_trained
    assert re.search(r"better, more than the margin of 0\.001 \(promotion 2\)", third.output("outcome"))
    assert registry.versions() == [first.output("version"), third.output("version")]

    card = registry.card(third.output("version"))
    assert card["start"] == card["champion"] == first.output("version")
    assert (card["data"]["num_names"], card["data"]["num_new"]) == (len(MORE), len(MORE) - len(FEW))
    _, held_out = split_by_hash(sorted(MORE), 0.1)
    for version, loss in zip(registry.versions(), ("champion_loss", "loss"), strict=True):
        state = torch.load(registry.fetch(version, STATE, tmp_path), weights_only=True)
        found = evaluate(CharLSTM.from_state_dict(state), windows(held_out)).loss
        assert card["comparison"][loss] == pytest.approx(found, rel=1e-5)

    done = story.home.call("-m", "tasks.registry", "roll-back", "--reason", "too many names with q")
    assert done.returncode == 0, done.stderr
    told = story.home.call("-m", "tasks.registry", "history").stdout.splitlines()
    one, other = story.versions[0], story.versions[2]
    reason = third.output("outcome").removeprefix("promoted: ").removesuffix(" (promotion 2)")
    assert [line.split(maxsplit=2)[2] for line in told] == [
        f"{one}: there was no champion",
        f"{other} instead of {one}: {reason}",
        f"{one} instead of {other}: too many names with q",
    ]
    again = story.home.retrain_directly({"kickoff_time": DAYS[2]})
    assert again.output("version") == other  # the same training again, which the cache has
    assert "promotion 2 made it the champion once" in again.output("outcome")
    assert registry.champion().version == one


def test_a_killed_retraining_leaves_a_whole_champion_and_the_next_one_ends_it(story: Story, tmp_path: Path) -> None:
    registries = {stage: Registry(str(shutil.copytree(story.two_days, tmp_path / stage))) for stage in STAGES}
    inputs = {stage: {"kickoff_time": DAYS[2], "registry": str(tmp_path / stage)} for stage in STAGES}
    for stage, some in inputs.items():
        assert story.home.retrain_directly(some, stage).code == -signal.SIGKILL
    for (stage, (num_versions, is_new)), registry in zip(STAGES.items(), registries.values(), strict=True):
        versions = registry.versions()
        assert (stage, len(versions)) == (stage, num_versions)
        assert registry.champion().version == versions[-1 if is_new else 0]
        for version in versions:
            CharLSTM.from_state_dict(torch.load(registry.fetch(version, STATE, tmp_path / "got"), weights_only=True))

    again = [story.home.retrain_directly(some) for some in inputs.values()]
    wanted = Registry(story.home.registry).card(story.versions[2])["state_sha256"]
    for (_, is_new), registry, run in zip(STAGES.values(), registries.values(), again, strict=True):
        assert ("nothing has changed" if is_new else "promoted: ") in run.output("outcome")
        assert run.output("version") == registry.champion().version == registry.versions()[-1]
        assert len(registry.history()) == len(registry.versions()) == 2
        assert registry.card(run.output("version"))["state_sha256"] == wanted  # what an undisturbed one made


def test_names_that_have_drifted_end_the_day_and_the_champion_stays(story: Story, tmp_path: Path) -> None:
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps([f"{a}{b}{a}x" for a in "qxzj" for b in "qxzj"] * 20 + ["Ω"] * 100))
    run = story.home.retrain_directly({"kickoff_time": DAYS[2], "registry": str(story.two_days), "data": str(strange)})
    text = " ".join(run.said.split())
    assert run.code == 1
    for problem in ("320 usable names, fewer than min_names=500", "23.8% of the 420 entries", "have moved by"):
        assert problem in text
    champion = story.versions[0]
    assert "the retraining has failed: Error encountered while executing 'workflows.retrain.prepare'" in text
    assert "fn0" not in text  # the node of the task that says this
    assert f"the champion is {champion} (promotion 1)" in text
    assert Registry(str(story.two_days)).champion().version == champion
