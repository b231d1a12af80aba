"""Tell breeds of dogs apart by transfer learning on the pictures of an S3 bucket, as a Flyte workflow.

Steps: index (lists the bucket once) -> train (with DDP on a Dask cluster) -> classify

Run the workflow on this machine without a bucket, on generated photographs and with a small network (under a minute on
two cores):

    pyflyte run workflows/dogs.py dogs

Try a tiny training first:

    pyflyte run workflows/dogs.py dogs --hp '{"epochs": 1}'

Train on a bucket that holds prefix/class/image, such as Stanford Dogs. The training starts from torchvision's ResNet-50
and trains only its last layer in the first epoch. Credentials are those that AWS's own tools find. `--anon` is for
public buckets, and `--endpoint_url` for servers other than AWS:

    pyflyte run workflows/dogs.py dogs --bucket s3://my-bucket/dogs/Images --hp '{"epochs": 5, "frozen_epochs": 1}'

Run the workflow on a Flyte backend with the Dask operator, on four workers with a GPU each. Build the image from the
Dockerfile first. If the pods cannot download torchvision's weights, pass the file as `--state`:

    DOGS_WORKERS=4 DOGS_GPUS=1 pyflyte run --remote --image registry/daskpytorch:tag workflows/dogs.py dogs \
        --bucket my-bucket --prefix dogs/Images --state ./resnet50-11ad3fa6.pth

The first task checks all inputs before any cluster starts. Flyte caches the training by the bucket's listing, the
initial weights and the hyper-parameters. A change of one of the three causes a new training. The local cache is in
~/.flyte, and `pyflyte local-cache clear` empties it.

The following environment variables are read when the workflow is registered or run here. `DOGS_WORKERS` sets the number
of Dask workers. `DOGS_GPUS` sets the number of GPUs of each worker, with one rank on each GPU. A worker without GPUs
runs one rank. `DASKPYTORCH_PROFILE=gpu` gives each worker a GPU.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import torch
from flytekit import Cache, Deck, HashMethod, current_context, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from torch.utils.data import Subset

from flytekitplugins.daskpytorch import DaskDDP, Gang, Wandb, current_rank, report
from flytekitplugins.daskpytorch.data import RankLoader, S3ImageFolder
from flytekitplugins.daskpytorch.results import DaskResultsHandler
from tasks import backbones, records, transfer
from tasks.backbones import Classifier, Start
from tasks.photos import write_photos
from tasks.pictures import Picture, picture_grid
from tasks.transfer import Hyperparameters, Pictures
from workflows import resources

NUM_WORKERS = resources.number("DOGS_WORKERS", 2)
NUM_GPUS = resources.number("DOGS_GPUS", resources.NUM_GPUS, least=0)
NUM_RANKS = NUM_WORKERS * max(1, NUM_GPUS)
SETTINGS = resources.SETTINGS | {"DOGS_WORKERS": str(NUM_WORKERS), "DOGS_GPUS": str(NUM_GPUS)}
"""Environment variables of the tasks' pods, which import this file again."""
LISTED = "listed.pkl"
"""Name of the pickled dataset in the directory of pictures, if the pictures stay in a bucket."""
NUM_PICTURES = 24
"""Number of held-out images in the Deck."""
PIXELS = 128
"""Longer edge of an image in the Deck, in pixels."""
NUM_NAMES = 3
"""Number of classes in an image's caption, the likeliest first."""


def _content_hash(data: FlyteFile | FlyteDirectory) -> str:
    """Return a hash of a file's content, or of a directory's files and their names."""
    root, digest = Path(data.path), hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]:
        digest.update(f"{file.relative_to(root)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


HashedPictures = Annotated[FlyteDirectory, HashMethod(_content_hash)]
HashedState = Annotated[PythonPickledFile, HashMethod(_content_hash)]
"""Inputs with equal content have the same key in Flyte's cache, wherever they came from and whenever they were
listed."""


@dataclass
class Place:
    """Location of the pictures."""

    bucket: str = ""
    """Name of the bucket, or s3://bucket/prefix. Empty: generated pictures."""
    prefix: str = ""
    anon: bool = False
    endpoint_url: str = ""


class Source(NamedTuple):
    """Checked inputs of the training."""

    pictures: HashedPictures
    """Directory with the bucket's listing, or with the generated pictures."""
    place: Place
    start: HashedState
    """Initial weights."""
    hp: Hyperparameters
    """Hyper-parameters with every automatic value replaced."""


class TrainingOutputs(NamedTuple):
    """Outputs of the training."""

    epoch_accuracies: list[float]
    """Share of the held-out images whose class the model ranks first, after each epoch, from 0 to 1."""
    model_state: PythonPickledFile
    """File for `Classifier.load`. `torch.load(..., weights_only=True)` returns a dict of backbone, classes and
    model."""
    records: FlyteDirectory
    """Statistics of each step and rank, for `tasks.records.read_records`."""


class Dogs(NamedTuple):
    """The outputs of the workflow."""

    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    summary: str
    records: FlyteDirectory


@task(requests=resources.SMALL, environment=SETTINGS)
def index(
    bucket: str, prefix: str, anon: bool, endpoint_url: str, state: FlyteFile | None, hp: Hyperparameters
) -> Source:
    """List the bucket or generate pictures. Inputs that cannot be trained on fail here, before any cluster starts."""
    _check_place(bucket, prefix, anon, endpoint_url)
    hp = hp.settled(has_bucket=bool(bucket))
    folder = Path(current_context().working_directory, "pictures")
    folder.mkdir()
    if not bucket:
        write_photos(folder, seed=hp.seed)
    place = Place(bucket=bucket, prefix=prefix, anon=anon, endpoint_url=endpoint_url)
    pictures = _open(str(folder), place, hp)
    print(_describe(pictures, place))
    _check_number(pictures, hp)
    start = _start(state, hp, pictures.classes)
    path = Path(current_context().working_directory, "start.pt")
    backbones.save_start(start, path)
    return Source(
        pictures=FlyteDirectory(path=str(folder)), place=place, start=PythonPickledFile(path=str(path)), hp=hp
    )


@task(
    task_config=DaskDDP(
        scheduler=resources.SCHEDULER,
        workers=resources.workers(NUM_WORKERS, NUM_GPUS),
        gang=Gang(start_timeout=600, max_restarts=3),
        wandb=Wandb(project="dogs"),
    ),
    requests=resources.SMALL,
    environment=SETTINGS,
    retries=2,
    cache=Cache(version="1", ignored_inputs=("place",)),
    enable_deck=True,
)
def train(pictures: FlyteDirectory, place: Place, start: PythonPickledFile, hp: Hyperparameters) -> TrainingOutputs:
    """Train in all ranks. The task returns the outputs of rank 0."""
    opened = _open(pictures.download(), place, hp)
    result = transfer.train(opened, hp, backbones.read_start(start.download()))
    home = Path(current_context().working_directory)
    if current_rank().is_main:
        result.classifier.save(home / "model_state.pt")
    return TrainingOutputs(
        epoch_accuracies=[epoch.held_out_accuracy for epoch in result.epochs],
        model_state=PythonPickledFile(path=str(home / "model_state.pt")),
        records=DaskResultsHandler().directory(),
    )


@task(requests=resources.SMALL, environment=SETTINGS, enable_deck=True)
def classify(
    pictures: FlyteDirectory,
    place: Place,
    hp: Hyperparameters,
    model_state: PythonPickledFile,
    statistics: FlyteDirectory,
    epoch_accuracies: list[float],
) -> str:
    """Classify held-out images with the received weights, and show the result in a line and in a Deck."""
    classifier = Classifier.load(model_state.download())
    opened = _open(pictures.download(), place, hp)
    shown = _classify(classifier, opened, _sample(transfer.split(opened, hp)[1]))
    num_right = sum(not picture.is_wrong for picture in shown)
    text = (
        f"held-out accuracy {epoch_accuracies[-1]:.1%} after epoch {len(epoch_accuracies)}, where chance is "
        f"{1 / len(opened.classes):.1%}; of the {len(shown)} held-out images in the Deck {num_right} are recognised"
    )
    Deck(
        "Dogs",
        report.page(
            report.status("done", "Dogs", tone="good"),
            report.text(text),
            report.section("Is it learning?", _curves(statistics.download())),
            report.section("Held-out images", picture_grid(shown, pixels=PIXELS), note="a wrong guess has a red frame"),
        ),
    )
    print(text)
    return text


@workflow
def dogs(
    bucket: str = "",
    prefix: str = "",
    anon: bool = False,
    endpoint_url: str = "",
    state: FlyteFile | None = None,
    hp: Hyperparameters = Hyperparameters(),
) -> Dogs:
    """Train on the pictures of a bucket and show the result.

    Args:
        bucket: Name of an S3 bucket, or s3://bucket/prefix. Empty: generated pictures.
        prefix: Prefix in the bucket, below which the pictures lie as class/image.
        anon: True for a public bucket, which is read without credentials.
        endpoint_url: Address of an S3 server other than AWS.
        state: File of initial weights: a state_dict such as torchvision's, or the model_state of an earlier run. Empty:
            the weights that hp.weights names.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
    """
    source = index(bucket=bucket, prefix=prefix, anon=anon, endpoint_url=endpoint_url, state=state, hp=hp)
    trained = train(pictures=source.pictures, place=source.place, start=source.start, hp=source.hp)
    summary = classify(
        pictures=source.pictures,
        place=source.place,
        hp=source.hp,
        model_state=trained.model_state,
        statistics=trained.records,
        epoch_accuracies=trained.epoch_accuracies,
    )
    return Dogs(
        epoch_accuracies=trained.epoch_accuracies,
        model_state=trained.model_state,
        summary=summary,
        records=trained.records,
    )


def _check_place(bucket: str, prefix: str, anon: bool, endpoint_url: str) -> None:
    """Raise a `ValueError` if an option for a bucket is set and the bucket is not."""
    given = {"prefix": prefix, "anon": anon, "endpoint_url": endpoint_url}
    if not bucket and (alone := [f"{name}={value!r}" for name, value in given.items() if value]):
        raise ValueError(f"{', '.join(alone)} without a bucket: give bucket, too, or nothing for generated pictures")


def _check_number(pictures: Pictures, hp: Hyperparameters) -> None:
    """Raise a `ValueError` if the ranks cannot share the pictures."""
    for kind, indices in zip(("to train on", "held out"), transfer.split(pictures, hp), strict=True):
        try:
            RankLoader(indices, hp.batch_size, rank=0, world_size=NUM_RANKS)
        except ValueError as error:
            raise ValueError(f"the images {kind}: {error} (DOGS_WORKERS)") from error


def _open(folder: str, place: Place, hp: Hyperparameters) -> Pictures:
    """Return the bucket's pictures, as listed in the folder if they are, or the folder's own pictures."""
    if (listed := Path(folder, LISTED)).exists():
        return cast("S3ImageFolder", pickle.loads(listed.read_bytes()))  # noqa: S301 - our own first task's file
    if place.bucket:
        pictures = S3ImageFolder(
            place.bucket,
            place.prefix,
            transform=transfer.transform(hp),
            anon=place.anon,
            storage_options={"endpoint_url": place.endpoint_url or None},
            on_error=hp.on_error,
        )
        listed.write_bytes(pickle.dumps(pictures))
        return pictures
    from torchvision.datasets import ImageFolder

    return ImageFolder(folder, transform=transfer.transform(hp))


def _describe(pictures: Pictures, place: Place) -> str:
    """Return a line with the number of pictures, of classes, and their source."""
    numbers = f"{len(pictures.targets):,} images of {len(pictures.classes)} classes"
    if place.bucket:
        return f"{numbers} in {'/'.join(filter(None, ('s3://' + place.bucket.removeprefix('s3://'), place.prefix)))}"
    return f"{numbers}: generated photographs, since no bucket was given (--bucket s3://bucket/prefix)"


def _start(state: FlyteFile | None, hp: Hyperparameters, classes: Sequence[str]) -> Start:
    """Return the initial weights, after loading them into the network once.

    Raises:
        ValueError: The weights belong to another network, or cannot be read.
        ConnectionError: The weights cannot be downloaded.
    """
    start = backbones.download(hp.backbone, hp.weights) if state is None else backbones.read_start(state.download())
    backbones.load_start(backbones.build(hp.backbone, len(classes)), start, classes)
    return start


def _sample(held_out: Sequence[int]) -> list[int]:
    """Return the indices of held-out images, evenly spaced over their list."""
    chosen = torch.linspace(0, len(held_out) - 1, min(NUM_PICTURES, len(held_out))).round().long()
    return [held_out[index] for index in chosen.tolist()]


@torch.no_grad()
def _classify(classifier: Classifier, pictures: Pictures, chosen: Sequence[int]) -> list[Picture]:
    """Return the chosen images with the likeliest classes and their scores."""
    items = Subset(pictures, chosen).__getitems__(range(len(chosen)))  # one request if the pictures support it
    images = torch.stack([image for image, _ in items])
    device = current_rank().device
    scores, guesses = classifier.to(device)(images.to(device)).softmax(dim=1).cpu().sort(dim=1, descending=True)
    return [
        Picture(
            image=image,
            caption=_caption(classifier.classes, guesses[row].tolist(), scores[row].tolist(), label),
            is_wrong=int(guesses[row, 0]) != label,
        )
        for row, (image, label) in enumerate(items)
    ]


def _caption(classes: Sequence[str], guesses: Sequence[int], scores: Sequence[float], label: int) -> str:
    named = ", ".join(
        f"{classes[guess]} {score:.0%}" for guess, score in zip(guesses[:NUM_NAMES], scores[:NUM_NAMES], strict=True)
    )
    return f"{named}; it is {classes[label]}"


def _curves(folder: str) -> str:
    """Return charts of loss and accuracy against the step, in training and in evaluation."""
    found = records.read_records(folder)
    training, evaluation = (records.curve(found, phase) for phase in (records.TRAINING, records.EVALUATION))
    losses = {"training": [(p.step, p.loss) for p in training], "evaluation": [(p.step, p.loss) for p in evaluation]}
    accuracies = {
        "training": [(p.step, p.accuracy) for p in training],
        "evaluation": [(p.step, p.accuracy) for p in evaluation],
    }
    return report.grid(
        report.line_chart("loss", losses, "step", best={"evaluation": "min"}),
        report.line_chart("accuracy", accuracies, "step", best={"evaluation": "max"}),
    )
