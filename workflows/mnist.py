"""Recognise handwritten digits with a small CNN that the ranks of one node train together, as a Flyte workflow.

Steps: digits -> train (with DDP, in processes of one node) -> report

Run the workflow on this machine, on MNIST, which is downloaded once. Without a network, the workflow trains on the
small digits that scikit-learn includes (well under two minutes on two cores, start included):

    pyflyte run workflows/mnist.py mnist

Try a tiny training first, or train on MNIST in a directory with torchvision's layout (a path or s3://):

    pyflyte run workflows/mnist.py mnist --hp '{"epochs": 1}' --num_logged_batches 1
    pyflyte run workflows/mnist.py mnist --data_dir path/to/mnist

Run the workflow on a Flyte backend, after building the image from the Dockerfile. `pyflyte` uploads a local directory:

    MNIST_GPUS=4 pyflyte run --remote --image registry/daskpytorch:tag workflows/mnist.py mnist --data_dir ./mnist

Flyte caches the training by the content of the digits and the hyper-parameters. Options that only change the records,
such as `--watch`, do not train again. The local cache is in ~/.flyte, and `pyflyte local-cache clear` empties it.

`MNIST_GPUS` sets the number of a node's GPUs to train on when the workflow is registered or run here, with one rank on
each GPU. The default is one GPU with `DASKPYTORCH_PROFILE=gpu`, and none otherwise. Without GPUs, `MNIST_RANKS` sets
the number of ranks that share the node's CPUs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from flytekit import Cache, Deck, HashMethod, current_context, task, workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flytekitplugins.daskpytorch import Gang, SpawnDDP, Wandb, current_rank
from flytekitplugins.daskpytorch import report as pieces
from tasks import cnn
from tasks.cnn import CNN, Evaluation, Hyperparameters, Recorded
from tasks.digits import Digits, DigitSet, load_digits
from tasks.pictures import Picture, confusion_matrix, picture_grid
from workflows import resources

NUM_GPUS = resources.number("MNIST_GPUS", resources.NUM_GPUS, least=0)
NUM_RANKS = resources.number("MNIST_RANKS", 2)
SETTINGS = resources.SETTINGS | {"MNIST_GPUS": str(NUM_GPUS), "MNIST_RANKS": str(NUM_RANKS)}
"""Environment variables of the tasks' pods, which import this file again."""
NUM_PICTURES = 40
"""Number of digits in a Deck."""


def _content_hash(file: FlyteFile) -> str:
    return hashlib.sha256(Path(file.path).read_bytes()).hexdigest()


DigitsFile = FlyteFile["pt"]
HashedDigits = Annotated[DigitsFile, HashMethod(_content_hash)]
"""Equal digits have the same key in Flyte's cache, wherever they came from."""


class TrainingOutputs(NamedTuple):
    """Outputs of the training."""

    epoch_accuracies: list[float]
    """Share of the test images that the model recognises, after each epoch, from 0 to 1."""
    model_state: PythonPickledFile
    """Weights of a `CNN`. Load them with `torch.load(..., weights_only=True)`."""


class Mnist(NamedTuple):
    """The outputs of the workflow."""

    epoch_accuracies: list[float]
    model_state: PythonPickledFile
    summary: str


@task(requests=resources.SMALL, environment=SETTINGS)
def prepare(
    data_dir: FlyteDirectory | None, hp: Hyperparameters, num_logged_batches: int, num_logged_images: int
) -> HashedDigits:
    """Load or download the digits once. Inputs that cannot be trained on fail here, before any rank starts."""
    _check(hp, num_logged_batches, num_logged_images)
    digits = _load(data_dir, hp.seed)
    print(digits.report)
    path = Path(current_context().working_directory, "digits.pt")
    digits.save(path)
    return DigitsFile(path=str(path))


@task(
    task_config=SpawnDDP(
        nproc="auto" if NUM_GPUS else NUM_RANKS, gang=Gang(max_restarts=3), wandb=Wandb(project="mnist")
    ),
    requests=resources.machine(NUM_GPUS),
    environment=SETTINGS,
    retries=2,
    cache=Cache(version="1", ignored_inputs=("num_logged_batches", "num_logged_images", "watch")),
    enable_deck=True,
)
def train(
    digits: DigitsFile, hp: Hyperparameters, num_logged_batches: int, num_logged_images: int, watch: bool
) -> TrainingOutputs:
    """Train in all ranks. The task returns the outputs of rank 0."""
    loaded = Digits.load(_fetch(digits))
    recorded = Recorded(num_batches=num_logged_batches, num_images=num_logged_images, gradients=watch)
    result = cnn.train(loaded, hp, recorded)
    if result.evaluation is not None and current_rank().is_main:
        Deck("Predictions", _predictions(loaded.test, result.evaluation))
    path = Path(current_context().working_directory, "model_state.pt")
    torch.save(result.state_dict, path)
    return TrainingOutputs(
        epoch_accuracies=[epoch.held_out_accuracy for epoch in result.epochs],
        model_state=PythonPickledFile(path=str(path)),
    )


@task(requests=resources.SMALL, enable_deck=True)
def report(digits: DigitsFile, epoch_accuracies: list[float], model_state: PythonPickledFile) -> str:
    """Classify a few test digits with the received weights, and show the result in a line and in a Deck."""
    pictures = _classify(_load_model(model_state), Digits.load(digits.download()).test)
    num_right = sum(not picture.is_wrong for picture in pictures)
    text = (
        f"test accuracy {epoch_accuracies[-1]:.2%} after epoch {len(epoch_accuracies)}; of the {len(pictures)} test "
        f"digits in the Deck {num_right} are recognised"
    )
    Deck(
        "Digits",
        pieces.page(
            pieces.status("done", "Digits", tone="good"),
            pieces.text(text),
            pieces.section(
                "Is it learning?",
                pieces.line_chart(
                    "test accuracy", {"CNN": list(enumerate(epoch_accuracies, 1))}, "epoch", best={"CNN": "max"}
                ),
            ),
            pieces.section("Test digits", picture_grid(pictures), note="a wrong guess has a red frame"),
        ),
    )
    print(text)
    return text


@workflow
def mnist(
    data_dir: FlyteDirectory | None = None,
    hp: Hyperparameters = Hyperparameters(),
    num_logged_batches: int = 10,
    num_logged_images: int = 32,
    watch: bool = False,
) -> Mnist:
    """Train on handwritten digits and show the result.

    Args:
        data_dir: A directory with torchvision's layout of MNIST, which contains MNIST/raw (a path or s3://). None:
            MNIST is downloaded.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
        num_logged_batches: Number of test batches whose predictions are logged to Weights & Biases as a table after
            each epoch.
        num_logged_images: Number of images of each of these batches.
        watch: True to record histograms of the gradients in Weights & Biases.
    """
    digits = prepare(
        data_dir=data_dir, hp=hp, num_logged_batches=num_logged_batches, num_logged_images=num_logged_images
    )
    trained = train(
        digits=digits,
        hp=hp,
        num_logged_batches=num_logged_batches,
        num_logged_images=num_logged_images,
        watch=watch,
    )
    summary = report(digits=digits, epoch_accuracies=trained.epoch_accuracies, model_state=trained.model_state)
    return Mnist(epoch_accuracies=trained.epoch_accuracies, model_state=trained.model_state, summary=summary)


def _check(hp: Hyperparameters, num_logged_batches: int, num_logged_images: int) -> None:
    """Raise one `ValueError` that names every problem. `hp` has already checked each of its own fields."""
    counts = {"num_logged_batches": num_logged_batches, "num_logged_images": num_logged_images}
    problems = [f"{name}={count}: must be a whole number from 0 up" for name, count in counts.items() if count < 0]
    if hp.backend == "nccl" and not NUM_GPUS:
        problems.append(
            "hp.backend='nccl': needs GPUs; set MNIST_GPUS to their number, or use 'auto', which is gloo without them"
        )
    if problems:
        raise ValueError("; ".join(problems))


def _load(data_dir: FlyteDirectory | None, seed: int) -> Digits:
    if data_dir is None:
        return load_digits(seed=seed)
    return load_digits(data_dir.download(), source=str(data_dir.remote_source or data_dir.path), seed=seed)


def _fetch(digits: DigitsFile) -> str:
    """Return the path of the file on this node, which rank 0 downloads for all ranks."""
    path = [digits.download() if current_rank().is_main else ""]
    dist.broadcast_object_list(path)
    return path[0]


def _predictions(test: DigitSet, evaluation: Evaluation) -> str:
    """Return the confusion matrix, and the digits whose true class has the smallest probability."""
    right = evaluation.scores.gather(1, test.labels[:, None])[:, 0]
    worst = right.argsort()[:NUM_PICTURES]
    return pieces.page(
        pieces.card(f"All {evaluation.num_images:,} test digits", confusion_matrix(test.labels, evaluation.guesses)),
        pieces.section(f"The {len(worst)} recognised worst", picture_grid(_pictures(test, evaluation.guesses, worst))),
    )


@torch.no_grad()
def _classify(model: CNN, test: DigitSet) -> list[Picture]:
    """Return test digits, evenly spaced over the test set, with the model's guesses."""
    chosen = torch.linspace(0, len(test) - 1, NUM_PICTURES).long().unique()
    guesses = torch.zeros_like(test.labels)
    guesses[chosen] = model(test.images[chosen].to(current_rank().device)).argmax(dim=1).cpu()
    return _pictures(test, guesses, chosen)


def _pictures(test: DigitSet, guesses: torch.Tensor, chosen: torch.Tensor) -> list[Picture]:
    return [
        Picture(image=image, caption=f"guess {guess}, truth {truth}", is_wrong=guess != truth)
        for image, guess, truth in zip(
            test.images[chosen], guesses[chosen].tolist(), test.labels[chosen].tolist(), strict=True
        )
    ]


def _load_model(model_state: PythonPickledFile) -> CNN:
    return CNN.from_state_dict(torch.load(model_state.download(), map_location="cpu", weights_only=True))
