"""A convolutional network for digits and its training loop. Runs in every rank of a gang, or in one process alone.

There is neither Flyte nor Dask in here: `current_rank()` says who this process is, and torch.distributed does the rest.
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

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from flytekitplugins.daskpytorch.data import RankLoader
from tasks.checks import COUNT, is_whole, raise_if_wrong
from tasks.digits import Digits, DigitSet
from tasks.pictures import predictions_table
from tasks.together import check_seen_once, sum_over_ranks
from tasks.training import EpochMetrics, Model, Rows, Trainer

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "gloo", "nccl")
PIXEL_MEAN, PIXEL_DEVIATION = 0.1307 * 255, 0.3081 * 255
"""Of MNIST's training images."""


@dataclass
class Hyperparameters(StrictInputs):
    """How to train. A plain dataclass, so that it can be the input of a workflow."""

    backend: str = "auto"
    """What carries gradients and sums between the ranks: `gloo`, `nccl`, or the gang's own choice."""
    batch_size: int = 64
    """Images per step of the whole gang; the share of a rank is rounded up."""
    test_batch_size: int = 1000
    """The same where no gradient is kept."""
    epochs: int = 3
    """How often every training image is seen."""
    learning_rate: float = 0.03
    """The step size of stochastic gradient descent at the start; it falls evenly to zero at the end."""
    sgd_momentum: float = 0.9
    """The share of the last step that goes into the next."""
    seed: int = 0
    """Fixes the initial weights and the order of the images; without MNIST, also which digits are the test set."""
    log_interval: int = 10
    """Steps between two reports of the loss; each report waits for the device."""

    def __post_init__(self) -> None:
        checks = {
            "backend": (self.backend in BACKENDS, f"one of {', '.join(BACKENDS)}"),
            "test_batch_size": (is_whole(self.test_batch_size, 1), COUNT),
        }
        raise_if_wrong(self, checks)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What Weights & Biases gets besides the curves. It changes nothing about the result."""

    num_batches: int = 0
    """Test batches whose predictions are shown after each epoch; 0: no table."""
    num_images: int = 0
    """Images of each of these batches."""
    gradients: bool = False
    """Whether there are histograms of the gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a model makes of the whole test set; the same on every rank."""

    loss: float
    """Mean cross-entropy in nats per image."""
    accuracy: float
    """The share of the images whose digit the model ranks first."""
    scores: Tensor
    """The ten probabilities of each image, (num_images, 10), float32 on the CPU, in the order of the test set."""

    @property
    def num_images(self) -> int:
        """How many images the ranks evaluated together, each once."""
        return len(self.scores)

    @property
    def guesses(self) -> Tensor:
        """The digit ranked first for each image, (num_images,), int64."""
        return self.scores.argmax(dim=1)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training run leaves; the same on every rank."""

    state_dict: dict[str, Tensor]
    """The trained weights as CPU tensors, for `CNN.from_state_dict`."""
    epochs: list[EpochMetrics]
    """One entry per epoch, in order; fewer than were wanted if the gang was told to stop."""
    evaluation: Evaluation | None
    """That of the last epoch; None if none came to its end."""


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
    """Train a `CNN` together with the other ranks of the gang; every rank calls this with the same arguments.

    Gangs of any size start from the same weights and draw the same order, and cut it into the same batches where their
    ranks can share them evenly. What becomes of checkpoints and of a gang that is to stop, `Trainer` says.

    Args:
        digits: What to train on, and to test on after every epoch.
        hp: How to train.
        recorded: What rank 0 records besides the curves.

    Raises:
        ValueError: `hp.backend` is nccl and this rank has no GPU, or there are fewer digits than ranks.
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
        torch.manual_seed(hp.seed)  # the same initial weights, whatever the number of ranks
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
        if recorded.gradients:
            self.rank.watch(self.model)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean over this rank's share, weighted; its sum, and the number of images."""
        loss = F.cross_entropy(self.gang_model(images), labels)
        count = torch.full_like(loss, len(self.loader.share))
        return loss * self.loader.weight, torch.stack([loss.detach() * count, count]).double()

    def follow(self, loss: Tensor) -> None:
        """As always, by a step whose size falls evenly to zero."""
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
        """With the predictions to record, on rank 0; where there is no run for them, they go nowhere."""
        return super().shown(metrics) | self._table()

    def state(self) -> dict[str, Any]:
        return super().state() | {"evaluation": self.evaluation}

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        self.evaluation = state["evaluation"]

    def _table(self) -> dict[str, Any]:
        if not (self.rank.is_main and self.recorded.num_batches and self.recorded.num_images and self.evaluation):
            return {}
        try:
            table = predictions_table(
                self.test.images,
                self.test.labels,
                self.evaluation.scores,
                batch_size=self.hp.test_batch_size,
                num_batches=self.recorded.num_batches,
                num_images=self.recorded.num_images,
            )
        except Exception as error:  # the disk may be full, say; what is only recorded must not end the training
            logger.warning("no table of predictions: %s: %s. The training goes on.", type(error).__name__, error)
            return {}
        return {"predictions": table}


@torch.no_grad()
def evaluate(model: nn.Module, test: DigitSet, batch_size: int, group: dist.ProcessGroup | None = None) -> Evaluation:
    """Test the model on every image once.

    In a gang every rank calls this with the same arguments, evaluates its share and gets the result for all images;
    elsewhere one process evaluates them all. Leaves the model in evaluation mode.

    Args:
        model: The model, not wrapped in DistributedDataParallel.
        test: The digits.
        batch_size: Images per forward pass of all ranks together.
        group: The process group that the ranks exchange their results by; None is the gang's own.

    Raises:
        RuntimeError: The ranks together did not see every image exactly once.
    """
    rank = current_rank()
    test = test.to(rank.device)
    model.eval()
    # Each rank fills in its own rows of what all of them will have: the sum over the ranks is the whole.
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
    """The process group for gradients and sums: the gang's own (None), or one of the backend that was asked for.

    Raises:
        ValueError: That is nccl, and this rank has no GPU.
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
