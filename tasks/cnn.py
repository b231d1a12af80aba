"""Convolutional network for digits and its training loop. Runs in every rank of a gang, or in one process alone.

`current_rank()` says which rank this process is, and torch.distributed connects the ranks. Flyte and Dask are not
imported here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor, nn

from flytekitplugins.daskpytorch import Histogram, StrictInputs, current_rank
from flytekitplugins.daskpytorch.data import RankLoader
from tasks.checks import COUNT, is_whole, raise_if_wrong
from tasks.digits import Digits, DigitSet
from tasks.pictures import predictions_table
from tasks.together import check_seen_once, sum_over_ranks
from tasks.training import EpochMetrics, Model, Rows, Trainer

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "gloo", "nccl")
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307 * 255, 0.3081 * 255
"""Mean and deviation of the pixels of MNIST's training images, from 0 to 255."""


@dataclass
class Hyperparameters(StrictInputs):
    """Hyper-parameters. A plain dataclass can be the input of a workflow."""

    backend: str = "auto"
    """Backend for gradients and sums between the ranks: `gloo`, `nccl`, or `auto` for the gang's own backend."""
    batch_size: int = 64
    """Images per step of the whole gang. Each rank's share is rounded up."""
    test_batch_size: int = 1000
    """Images per step of the whole gang in evaluations."""
    epochs: int = 3
    """Number of epochs. Each sees every training image once."""
    learning_rate: float = 0.03
    """Initial learning rate of stochastic gradient descent, which falls linearly to zero."""
    sgd_momentum: float = 0.9
    """Momentum of stochastic gradient descent, from 0 to below 1."""
    seed: int = 0
    """Seed of the initial weights and the order of the images. Without MNIST, also the seed of the test set."""
    log_interval: int = 10
    """Number of steps between two reports of the loss. Each report waits for the device."""

    def __post_init__(self) -> None:
        checks = {
            "backend": (self.backend in BACKENDS, f"one of {', '.join(BACKENDS)}"),
            "test_batch_size": (is_whole(self.test_batch_size, 1), COUNT),
        }
        raise_if_wrong(self, checks)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Records in Weights & Biases in addition to the curves. The records have no effect on the result."""

    num_batches: int = 0
    """Number of test batches whose predictions are shown after each epoch. 0: no table."""
    num_images: int = 0
    """Number of images of each of these batches."""
    gradients: bool = False
    """True to record histograms of the gradients at the end of each epoch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Results of a model on the whole test set, the same on every rank."""

    loss: float
    """Mean cross-entropy in nats per image."""
    accuracy: float
    """Share of the images whose digit the model ranks first, from 0 to 1."""
    scores: Tensor
    """Ten probabilities of each image, (num_images, 10), float32 on the CPU, in the order of the test set."""

    @property
    def num_images(self) -> int:
        """Number of images that the ranks evaluated together, each once."""
        return len(self.scores)

    @property
    def guesses(self) -> Tensor:
        """Digit that the model ranks first for each image, (num_images,), int64."""
        return self.scores.argmax(dim=1)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Result of a training. Only the timing differs between ranks."""

    state_dict: dict[str, Tensor]
    """Trained weights as CPU tensors, for `CNN.from_state_dict`."""
    epochs: list[EpochMetrics]
    """Metrics of the epochs, in order. A gang that was stopped has fewer epochs than `Hyperparameters.epochs`."""
    evaluation: Evaluation | None
    """Evaluation of the last epoch. None if no epoch was completed."""


class CNN(Model):
    """Two convolutions, each with pooling, and a dense layer that scores the ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(8, 32, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Score the digits.

        Args:
            images: (batch, 28, 28), uint8.

        Returns:
            Logits, (batch, 10), float.
        """
        return self.layers((images[:, None].float() - PIXEL_MEAN) / PIXEL_DEVIATION)


def train(digits: Digits, hp: Hyperparameters, recorded: Recorded = Recorded()) -> TrainingResult:
    """Train a `CNN` together with the other ranks. Every rank calls this function with the same arguments.

    Gangs of any size start from the same weights and draw the same order of images. Batches are equal, too, if the
    ranks can share a batch evenly. `Trainer` describes checkpoints and the stop of a gang.

    Args:
        digits: Digits for the training, and for a test after every epoch.
        hp: Hyper-parameters.
        recorded: Records of rank 0 in addition to the curves.

    Raises:
        ValueError: `hp.backend` is nccl and this rank has no GPU, or the digits are fewer than the ranks.
    """
    trainer = _Trainer(digits, hp, recorded)
    trainer.train()
    return TrainingResult(state_dict=trainer.weights(), epochs=trainer.epochs, evaluation=trainer.evaluation)


class _Trainer(Trainer):
    """One rank's part in the training."""

    def __init__(self, digits: Digits, hp: Hyperparameters, recorded: Recorded) -> None:
        rank = current_rank()
        self.hp, self.recorded = hp, recorded
        self.test = digits.test.to(rank.device)
        self.evaluation: Evaluation | None = None
        group = _group(hp.backend)
        torch.manual_seed(hp.seed)  # the same initial weights for any number of ranks
        model = CNN().to(rank.device)
        training = digits.training.to(rank.device)
        batch_size = math.ceil(hp.batch_size / rank.world_size)
        super().__init__(
            model,
            torch.optim.SGD(model.parameters(), lr=hp.learning_rate, momentum=hp.sgd_momentum),
            RankLoader(Rows(training.images, training.labels), batch_size, seed=hp.seed, collate_fn=tuple),
            hp,
            group=group,
        )

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted mean loss over this rank's share, the sum of the loss, and the number of images."""
        loss = F.cross_entropy(self.gang_model(images), labels)
        count = torch.full_like(loss, len(self.loader.share))
        return loss * self.loader.weight, torch.stack([loss.detach() * count, count]).double()

    def follow(self, loss: Tensor) -> None:
        """Update the weights, with a learning rate that falls linearly to zero."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.hp.learning_rate * (1 - (self.step - 1) / self.num_steps)
        super().follow(loss)

    def try_out(self) -> Tensor:
        return self.gang_model(self.test.images[:1]).sum()

    def judge(self, sums: Tensor, seconds: float) -> EpochMetrics:
        self.evaluation = evaluate(self.model, self.test, self.hp.test_batch_size, self.group)
        loss_sum, count = sums.tolist()
        return EpochMetrics(
            epoch=len(self.epochs) + 1,
            loss=loss_sum / count,
            held_out_loss=self.evaluation.loss,
            held_out_accuracy=self.evaluation.accuracy,
            samples_per_second=count / seconds,
        )

    def shown(self, metrics: EpochMetrics) -> dict[str, Any]:
        """Return the metrics, on rank 0 with gradients and predictions. Without Weights & Biases, these are dropped."""
        shown = super().shown(metrics)
        if self.rank.is_main and self.recorded.gradients:
            parameters = self.model.named_parameters()
            shown |= {
                f"gradients/{name}": Histogram.of(each.grad) for name, each in parameters if each.grad is not None
            }
        if self.rank.is_main and self.recorded.num_batches and self.recorded.num_images and self.evaluation:
            try:
                shown["predictions"] = predictions_table(
                    self.test.images,
                    self.test.labels,
                    self.evaluation.scores,
                    batch_size=self.hp.test_batch_size,
                    num_batches=self.recorded.num_batches,
                    num_images=self.recorded.num_images,
                )
            except Exception as error:  # such as a full disk; a record must not fail the training
                logger.warning("no table of predictions: %s: %s. The training goes on.", type(error).__name__, error)
        return shown

    def state(self) -> dict[str, Any]:
        return super().state() | {"evaluation": self.evaluation}

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        self.evaluation = state["evaluation"]


@torch.no_grad()
def evaluate(model: nn.Module, test: DigitSet, batch_size: int, group: dist.ProcessGroup | None = None) -> Evaluation:
    """Test the model on every image once.

    In a gang, every rank calls this function with the same arguments and evaluates its share. All ranks return the
    result for all images. Without a gang, one process evaluates all images. The model stays in evaluation mode.

    Args:
        model: The model, not wrapped in DistributedDataParallel.
        test: The test digits.
        batch_size: Images per forward pass of all ranks together.
        group: Process group for the exchange of results. None: the gang's own group.

    Raises:
        RuntimeError: The ranks together did not see every image exactly once.
    """
    rank = current_rank()
    test = test.to(rank.device)
    model.eval()
    # Each rank fills in its own rows of the logits. The sum over the ranks has all rows.
    logits = torch.zeros(len(test), 10, device=rank.device)
    times_seen = torch.zeros(len(test), device=rank.device)
    own = torch.arange(len(test), device=rank.device)[rank.rank :: rank.world_size]
    for share in own.split(math.ceil(batch_size / rank.world_size)):
        logits[share] = model(test.images[share])
        times_seen[share] += 1
    check_seen_once(sum_over_ranks(times_seen, group), "test images")
    logits = sum_over_ranks(logits, group)
    return Evaluation(
        loss=F.cross_entropy(logits, test.labels).item(),
        accuracy=(logits.argmax(dim=1) == test.labels).double().mean().item(),
        scores=logits.softmax(dim=1).cpu(),
    )


def _group(backend: str) -> dist.ProcessGroup | None:
    """Return the process group for gradients and sums: None for the gang's own, or a new one with this backend.

    Raises:
        ValueError: The backend is nccl, and this rank has no GPU.
    """
    rank = current_rank()
    if backend == "nccl" and rank.device.type != "cuda":
        raise ValueError(
            f"backend='nccl' needs a GPU, and rank {rank.rank} has none; run on a node with GPUs, or use "
            "backend='auto', which is gloo on the CPU"
        )
    if rank.world_size == 1 or backend in ("auto", dist.get_backend()):
        return None
    return dist.new_group(backend=backend)
