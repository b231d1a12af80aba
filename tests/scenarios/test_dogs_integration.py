"""The dogs' workflow runs in the real `pyflyte`, with generated pictures and a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from flytekit.types.file import FlyteFile

from seaweed import PUBLIC
from tasks.backbones import Classifier
from tasks.photos import BREEDS, write_photos
from tasks.records import TRAINING, read_records
from tasks.transfer import Hyperparameters
from workflow_runs import Run
from workflows.dogs import index

if TYPE_CHECKING:
    from seaweed import Weed

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


dogs = partial(Dogs.of, "dogs")


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: loader workers listen on sockets below it, whose paths may have 107 characters."""
    return tmp_path_factory.mktemp("d")


@pytest.mark.slow
def test_without_a_bucket_it_says_what_it_trains_on_and_learns_it(home: Path) -> None:
    usual = dogs(home, "first")
    assert "600 images of 20 classes: generated photographs, since no bucket was given" in usual.done.stdout
    assert "train: starting 2 ranks on 2 workers" in usual.done.stderr
    assert len(usual.accuracies) == Hyperparameters().epochs
    assert usual.accuracies[-1] >= 3 * CHANCE
    said = (
        f"held-out accuracy {usual.accuracies[-1]:.1%} after epoch 8, where chance is 5.0%; of the 24 held-out images"
    )
    assert said in usual.output("summary")
    assert Classifier.load(usual.output("model_state")).classes == sorted(BREEDS)
    decks = usual.folder.glob("tmp/flyte*/sandbox/local_flytekit/*/deck.html")  # the last has all tasks'
    assert len(re.findall(r"; it is [\w-]+</figcaption>", max(decks, key=os.path.getmtime).read_text())) == 24


def test_a_bucket_needs_nothing_but_its_address(weed: Weed, home: Path) -> None:
    flags = bucket_of(weed, "kennel", write_photos(home / "photos", num_per_class=5))
    run = dogs(home, "first", *flags, "--hp", json.dumps(SMALL_HP))
    assert "100 images of 20 classes in s3://public/kennel\n" in run.done.stdout
    assert run.has_trained
    records = read_records(run.output("records"))
    assert sum(record.count for record in records if record.phase == TRAINING) == 80


def bucket_of(weed: Weed, prefix: str, photos: Path) -> tuple[str, ...]:
    """Put photographs into the public bucket; the flags that name them."""
    weed.put_all(PUBLIC, {f"{prefix}/{file.relative_to(photos)}": file.read_bytes() for file in photos.rglob("*.jpg")})
    return "--bucket", f"s3://{PUBLIC}/{prefix}", "--anon", "--endpoint_url", weed.endpoint


HALF = Hyperparameters(held_out=0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefix": "dogs", "anon": True}, r"prefix='dogs', anon=True without a bucket"),
        (
            {"hp": Hyperparameters(backbone="resnet5")},
            "backbone='resnet5': must be auto, small or one of torchvision's",
        ),
        ({"hp": Hyperparameters(crop=100)}, "crop=100: must not be above resize=64"),
        ({"hp": Hyperparameters(held_out=0.001)}, r"held_out=0\.001 of 40 items in 20 classes leaves nothing to test"),
        ({"state": b"no weights", "hp": HALF}, r"cannot read the weights in .*state\.pt: "),
        ({"state": {"weight": torch.zeros(1)}, "hp": HALF}, "the weights to start from are not those of SmallNet"),
        ({"bucket": "s3://public/nothing-here"}, "s3://public/nothing-here/ has no pictures"),
    ],
)
def test_bad_input_is_refused_before_a_cluster_starts(
    tmp_path: Path, weed: Weed, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflows.dogs.write_photos", partial(write_photos, num_per_class=2))
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
