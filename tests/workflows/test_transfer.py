"""Transfer learning: alone, frozen, interrupted, and in real gangs of two ranks."""

import contextlib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder

from flytekitplugins.daskpytorch.context import StopSignal
from flytekitplugins.daskpytorch.records import LogRecord
from gangs import FakeCheckpoint, KilledError, logging_to, run_ranks
from tasks.backbones import Start, build
from tasks.photos import BREEDS, write_photos
from tasks.records import EVALUATION, TRAINING
from tasks.transfer import Hyperparameters, TrainingResult, split, train, transform

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TRAINING, NUM_HELD_OUT = 100, 20
HP = Hyperparameters(
    backbone="small",  # has batch normalisation and dropout
    batch_size=9,
    epochs=3,
    frozen_epochs=1,
    resize=40,
    crop=32,
    checkpoint_interval=2,
    log_interval=3,
    patience=0,
    base_lr=0.5,  # so much that the held-out loss does not fall each time
).settled(has_bucket=False)
"""Of 100 images two ranks make six steps per epoch, with global batches of 17 and 16."""
SAVED = [2, 4, 6, 8, 10, 12, 14, 16, 18]
SAVE = {"frozen": 1, "mid_epoch": 5}
"""The save after which the ranks die."""
STOP_AFTER = {"between_saves": 8}
"""Calls of `should_stop` before the one that is true."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), num_per_class=6)


class Watched(ImageFolder):
    """Notes which pictures are read."""

    def __init__(self, folder: Path, hp: Hyperparameters) -> None:
        super().__init__(str(folder), transform=transform(hp))
        self.seen: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return super().__getitem__(index)


@dataclass
class Trained:
    """What one rank's attempt left."""

    result: TrainingResult | None = None
    """None if it died."""
    log: list[LogRecord] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """At which it saved."""


def train_once(
    folder: Path,
    hp: Hyperparameters,
    checkpoint: FakeCheckpoint | None = None,
    *,
    stop_after: int | None = None,
    start: Start | None = None,
) -> Trained:
    """Train as one attempt of a gang, or alone."""
    trained, pictures, signal = Trained(), Watched(folder, hp), StopSignal()
    if stop_after is not None:
        signal.release(stop_after)
    own = {} if checkpoint is None else {"checkpoint": checkpoint}
    with contextlib.suppress(KilledError), logging_to(trained.log, stop_signal=signal, **own):
        trained.result = train(pictures, hp, start)
    trained.seen = pictures.seen
    trained.steps = checkpoint.steps if checkpoint is not None else []
    return trained


def run_cases(directory: Path) -> dict[str, Trained]:
    """The attempt after each interruption, as a rank of a gang of two has trained it."""
    folder = Path((directory / "photos").read_text())
    found = {"uninterrupted": train_once(folder, HP, FakeCheckpoint(directory / "uninterrupted"))}
    for name in SAVE | STOP_AFTER:
        checkpoint = FakeCheckpoint(directory / name, die_after=SAVE.get(name))
        first = train_once(folder, HP, checkpoint, stop_after=STOP_AFTER.get(name))
        assert (first.result is None) == (name in SAVE)
        found[name] = train_once(folder, HP, FakeCheckpoint(directory / name))
    return found


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> list[dict[str, Any]]:
    """What each rank of a gang of two brought back from `run_cases`."""
    folder = tmp_path_factory.mktemp("gang")
    (folder / "photos").write_text(str(photos))
    return run_ranks(run_cases, 2, folder)


def untimed(epochs: list[Any]) -> list[dict[str, float]]:
    """Metrics of epochs that do not depend on the clock."""
    clock = {"samples_per_second", "waiting_share"}
    return [{name: value for name, value in asdict(epoch).items() if name not in clock} for epoch in epochs]


def assert_equal(found: Trained, expected: Trained) -> None:
    assert found.result is not None
    assert expected.result is not None
    torch.testing.assert_close(
        found.result.classifier.state_dict(), expected.result.classifier.state_dict(), rtol=0, atol=0
    )
    assert untimed(found.result.epochs) == untimed(expected.result.epochs)
    assert found.result.records == expected.result.records


# Training alone


def test_frozen_epochs_train_the_head_alone(photos: Path) -> None:
    torch.manual_seed(5)
    weights = {name: weight.clone() for name, weight in build(HP.backbone, len(BREEDS)).state_dict().items()}
    start = Start(weights=weights, classes=BREEDS)
    frozen = train_once(photos, replace(HP, epochs=1), start=start).result
    assert frozen is not None
    changed = {n for n, w in frozen.classifier.model.state_dict().items() if not torch.equal(w, weights[n])}
    assert changed == {"classifier.weight", "classifier.bias"}  # no batch statistics, either
    thawed = train_once(photos, replace(HP, epochs=2, base_lr=0.01), start=start).result
    assert thawed is not None
    still = {n for n, w in thawed.classifier.model.state_dict().items() if torch.equal(w, weights[n])}
    assert not still


def test_other_classes_than_the_checkpoints_are_refused(photos: Path, tmp_path: Path) -> None:
    train_once(photos, HP, FakeCheckpoint(tmp_path / "state", die_after=1))
    state = torch.load(tmp_path / "state", weights_only=False)
    torch.save(state | {"classes": [*BREEDS[1:], "wolf"]}, tmp_path / "state")
    with pytest.raises(ValueError, match="was saved with 20 classes, but now there are 20 or others"):
        train_once(photos, HP, FakeCheckpoint(tmp_path / "state"))


# In a gang


def test_the_ranks_see_each_training_image_once_and_test_each_held_out_one_once(
    gang: list[dict[str, Any]], photos: Path
) -> None:
    training, held_out = split(ImageFolder(str(photos)), HP)
    assert (len(training), len(held_out)) == (NUM_TRAINING, NUM_HELD_OUT)
    ranks: list[Trained] = [rank["uninterrupted"] for rank in gang]
    seen = Counter(index for rank in ranks for index in rank.seen)
    assert seen == dict.fromkeys([*training, *held_out], HP.epochs)
    for rank in ranks:
        of_phase = {phase: [r for r in rank.result.records if r.phase == phase] for phase in (TRAINING, EVALUATION)}
        assert [r.count for r in of_phase[TRAINING] if r.epoch == 1] in ([9, 9, 9, 9, 8, 8], [8, 8, 8, 8, 8, 8])
        assert [r.worker for r in rank.result.records] == [rank.result.records[0].worker] * 24
        assert of_phase[TRAINING][-1].sample == sum(r.count for r in of_phase[TRAINING])
    first, second = (rank.result for rank in ranks)
    assert untimed(first.epochs) == untimed(second.epochs)
    torch.testing.assert_close(first.classifier.state_dict(), second.classifier.state_dict(), rtol=0, atol=0)
    assert first.epochs[0].learning_rate == HP.base_lr * 2
    for epoch in first.epochs:
        own = [r for rank in (first, second) for r in rank.records if (r.epoch, r.phase) == (epoch.epoch, EVALUATION)]
        assert sum(r.count for r in own) == NUM_HELD_OUT
        assert epoch.held_out_accuracy == sum(r.correct for r in own) / NUM_HELD_OUT
        assert epoch.held_out_loss == pytest.approx(sum(r.loss * r.count for r in own) / NUM_HELD_OUT)


@pytest.mark.parametrize("interruption", SAVE | STOP_AFTER)
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(gang: list[dict[str, Any]], interruption: str) -> None:
    for rank in gang:
        assert rank["uninterrupted"].steps == SAVED
        assert_equal(rank[interruption], rank["uninterrupted"])


# The generated photographs


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}


def test_photos_are_of_all_breeds_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first = content(write_photos(tmp_path / "first", num_per_class=3, seed=1))
    assert sorted(first) == sorted(f"{breed}/{number:04}.jpg" for breed in BREEDS for number in range(3))
    assert content(write_photos(tmp_path / "again", num_per_class=3, seed=1)) == first
    others = content(write_photos(tmp_path / "other", num_per_class=3, seed=2))
    assert len(set(first.values()) | set(others.values())) == 2 * len(first)
