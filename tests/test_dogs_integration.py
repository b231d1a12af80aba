"""The dogs' workflow runs in the real `pyflyte`, with generated pictures and a bucket of a real S3 server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import runpy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from flytekit.types.file import FlyteFile
from PIL import Image
from torchvision.datasets import ImageFolder

from conftest import REPOSITORY
from pages import command
from seaweed import PUBLIC
from tasks.backbones import Classifier
from tasks.photos import BREEDS, write_photos
from tasks.records import TRAINING, Record, read_records
from tasks.transfer import Hyperparameters, split, transform
from test_report import chart_data
from workflow_runs import Run
from workflows.dogs import index

if TYPE_CHECKING:
    from seaweed import Weed

WORKFLOW = REPOSITORY / "workflows" / "dogs.py"
CHANCE = 1 / len(BREEDS)
SMALL_HP = {"backbone": "small", "resize": 64, "crop": 60, "batch_size": 16, "epochs": 1, "num_loader_workers": 1}


class Dogs(Run):
    """One run of the workflow, with what it left in its folder."""

    def output(self, name: str) -> str:
        """As the script printed it."""
        found = re.search(rf"[( ]{name}=(\[.*?\]|'.*?'|[^,)]+)[,)]", self.done.stdout)
        assert found, self.done.stdout + self.done.stderr
        return found[1]

    @property
    def accuracies(self) -> list[float]:
        found: list[float] = json.loads(self.output("epoch_accuracies"))
        return found

    @property
    def records(self) -> list[Record]:
        return read_records(self.output("records"))

    @property
    def deck(self) -> Path:
        """The Decks of all tasks, which in a local run come together in the last one's."""
        return max(self.folder.glob("tmp/flyte*/sandbox/local_flytekit/*/deck.html"), key=os.path.getmtime)


dogs = partial(Dogs.of, "dogs")


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: loader workers listen on sockets below it, whose paths may have 107 characters."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Dogs:
    """Without a flag."""
    return dogs(tmp_path_factory.mktemp("usual"), "first")


def test_without_a_bucket_it_says_what_it_trains_on_and_learns_it(usual: Dogs) -> None:
    assert "600 images of 20 classes: generated photographs, since no bucket was given" in usual.done.stdout
    assert "train: starting 2 ranks on 2 workers" in usual.done.stderr
    assert len(usual.accuracies) == Hyperparameters().epochs
    assert usual.accuracies[-1] >= 3 * CHANCE
    said = (
        f"held-out accuracy {usual.accuracies[-1]:.1%} after epoch 8, where chance is 5.0%; of the 24 held-out images"
    )
    assert said in usual.output("summary")


def test_the_state_is_that_of_the_accuracy(usual: Dogs, tmp_path: Path) -> None:
    classifier = Classifier.load(usual.output("model_state"))
    assert (classifier.backbone, classifier.classes) == ("small", sorted(BREEDS))
    hp = Hyperparameters().settled(has_bucket=False)
    pictures = ImageFolder(str(write_photos(tmp_path)), transform=transform(hp))
    images, labels = zip(*(pictures[place] for place in split(pictures, hp)[1]), strict=True)
    with torch.no_grad():
        guesses = classifier(torch.stack(images)).argmax(dim=1)
    assert (guesses == torch.tensor(labels)).double().mean().item() == pytest.approx(usual.accuracies[-1], abs=0.01)


def test_the_deck_shows_pictures_with_names_and_both_curves(usual: Dogs) -> None:
    page = usual.deck.read_text()
    captions = re.findall(r"<figcaption>([\w-]+) (\d+)%, [\w-]+ \d+%, [\w-]+ \d+%; it is ([\w-]+)</figcaption>", page)
    assert len(captions) == 24
    num_right = sum(guess == truth for guess, _, truth in captions)
    assert f"of the 24 held-out images in the Deck {num_right} are recognised" in page
    pictures = [base64.b64decode(data) for data in re.findall(r'<img src="data:image/\w+;base64,([^"]+)"', page)]
    shown = [np.asarray(Image.open(io.BytesIO(picture))) for picture in pictures]
    assert [picture.shape[:2] for picture in shown] == [(60, 60)] * 24
    assert all(picture.std() > 10 for picture in shown)  # not blank
    charts = {chart["title"]: {line["name"] for line in chart["lines"]} for chart in chart_data(page)}
    assert charts["loss"] >= {"training", "evaluation"} <= charts["accuracy"]


def test_the_guides_command() -> None:
    assert command("pyflyte run workflows/dogs.py dogs")


def test_a_bucket_needs_nothing_but_its_address(weed: Weed, home: Path) -> None:
    flags = bucket_of(weed, "kennel", write_photos(home / "photos", num_per_class=5))
    run = dogs(home, "first", *flags, "--hp", json.dumps(SMALL_HP))
    assert "100 images of 20 classes in s3://public/kennel\n" in run.done.stdout
    assert run.has_trained
    assert sum(record.count for record in run.records if record.phase == TRAINING) == 80


def bucket_of(weed: Weed, prefix: str, photos: Path) -> tuple[str, ...]:
    """Put photographs into the public bucket; the flags that name them."""
    weed.put_all(PUBLIC, {f"{prefix}/{file.relative_to(photos)}": file.read_bytes() for file in photos.rglob("*.jpg")})
    return "--bucket", f"s3://{PUBLIC}/{prefix}", "--anon", "--endpoint_url", weed.endpoint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefix": "dogs", "anon": True}, r"prefix='dogs', anon=True without a bucket"),
        (
            {"hp": Hyperparameters(backbone="resnet5")},
            "backbone='resnet5': must be auto, small or one of torchvision's",
        ),
        ({"hp": Hyperparameters(crop=100)}, "crop=100: must not be above resize=64"),
        ({"hp": Hyperparameters(held_out=0.001)}, r"held_out=0\.001 of 600 items in 20 classes leaves nothing to test"),
        ({"state": b"no weights"}, r"cannot read the weights in .*state\.pt: "),
        ({"state": {"weight": torch.zeros(1)}}, "the weights to start from are not those of SmallNet"),
        ({"bucket": "s3://public/nothing-here"}, "s3://public/nothing-here/ has no pictures"),
    ],
)
def test_bad_input_is_refused_before_a_cluster_starts(
    tmp_path: Path, weed: Weed, given: dict[str, Any], said: str
) -> None:
    inputs = {"bucket": "", "prefix": "", "anon": False, "endpoint_url": "", "state": None, "hp": Hyperparameters()}
    inputs |= given
    if inputs["bucket"]:
        inputs |= {"anon": True, "endpoint_url": weed.endpoint}
    if inputs["state"] is not None:
        path = tmp_path / "state.pt"
        path.write_bytes(given["state"]) if isinstance(given["state"], bytes) else torch.save(given["state"], path)
        inputs["state"] = FlyteFile(str(path))
    with pytest.raises(Exception, match=said):
        index(**inputs)


def test_too_few_pictures_for_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOGS_WORKERS", "500")
    alone = runpy.run_path(str(WORKFLOW), run_name="dogs_on_many")["index"]
    with pytest.raises(
        Exception, match=r"images to train on: 480 items cannot be shared by 500 ranks, .* \(DOGS_WORKERS\)"
    ):
        alone(bucket="", prefix="", anon=False, endpoint_url="", state=None, hp=Hyperparameters())


def test_a_worker_with_gpus_has_a_rank_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOGS_WORKERS", "3")
    monkeypatch.setenv("DOGS_GPUS", "4")
    train = runpy.run_path(str(WORKFLOW), run_name="dogs_on_gpus")["train"]
    assert train.task_config.workers.number_of_workers == 3
    assert train.task_config.workers.limits.gpu == "4"
    pods = {"DASKPYTORCH_PROFILE": "sandbox", "DOGS_WORKERS": "3", "DOGS_GPUS": "4"}  # which they read again
    assert train.environment == pods
