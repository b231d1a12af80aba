"""A convolutional network for digits and its training loop. Runs in every rank of a gang, or in one process alone.

There is neither Flyte nor Dask in here: `current_rank()` says who this process is, and torch.distributed does the rest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from tasks.checks import is_number, is_whole, raise_if_wrong
from tasks.digits import Digits, DigitSet
from tasks.pictures import predictions_table
from tasks.together import sum_over_ranks

__all__ = ["CNN", "EpochMetrics", "Evaluation", "Hyperparameters", "Recorded", "TrainingResult", "evaluate", "train"]

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
        count = "a whole number from 1 up"
        checks = {
            "backend": (self.backend in BACKENDS, f"one of {', '.join(BACKENDS)}"),
            "batch_size": (is_whole(self.batch_size, 1), count),
            "test_batch_size": (is_whole(self.test_batch_size, 1), count),
            "epochs": (is_whole(self.epochs, 1), count),
            "learning_rate": (is_number(self.learning_rate) and self.learning_rate > 0, "a finite number above 0"),
            "sgd_momentum": (
                is_number(self.sgd_momentum) and 0 <= self.sgd_momentum < 1,
                "a number from 0 to below 1",
            ),
            "seed": (is_whole(self.seed, 0) and self.seed < 2**63, "a whole number from 0 up and below 2**63"),
            "log_interval": (is_whole(self.log_interval, 1), count),
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
class EpochMetrics:
    """One epoch, as the whole gang saw it."""

    epoch: int
    """1 … epochs."""
    loss: float
    """Mean cross-entropy in nats per image over the epoch's training steps."""
    held_out_loss: float
    """The same over the test set, at the end of the epoch."""
    held_out_accuracy: float
    """The share of the test images whose digit the model ranks first."""
    samples_per_second: float
    """Training images per second of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training run leaves; the same on every rank."""

    state_dict: dict[str, Tensor]
    """The trained weights as CPU tensors, for `CNN.from_state_dict`."""
    epochs: list[EpochMetrics]
    """One entry per epoch, in order; fewer than were wanted if the gang was told to stop."""
    evaluation: Evaluation | None
    """That of the last epoch; None if none came to its end."""


@dataclass(frozen=True, kw_only=True)
class _TrainingState:
    """A checkpoint at the end of an epoch: all that the steps to come depend on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    step: int
    epochs: list[EpochMetrics]
    evaluation: Evaluation


class CNN(nn.Module):
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

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor]) -> CNN:
        """A model with the weights of a `TrainingResult`, on this rank's device.

        Raises:
            RuntimeError: The weights are those of another model.
        """
        model = cls().to(current_rank().device)
        model.load_state_dict(state_dict)
        return model.eval()

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
    ranks can share them evenly; at the end of an epoch, ranks that miss an image get one from its beginning again.
    Seeds torch's global random generator.

    Saves a checkpoint after each epoch, and goes on after the last whole epoch where the gang has one. Returns at once,
    with what there is, when the gang is to stop.

    Args:
        digits: What to train on, and to test on after every epoch.
        hp: How to train.
        recorded: What rank 0 records besides the curves.

    Raises:
        ValueError: `hp.backend` is nccl and this rank has no GPU.
    """
    trainer = _Trainer(digits, hp, recorded)
    if (state := current_rank().checkpoint.load()) is not None:
        trainer.resume(state)
    trainer.run()
    return TrainingResult(state_dict=trainer.state_dict(), epochs=trainer.epochs, evaluation=trainer.evaluation)


class _Trainer:
    """One rank's part in the training."""

    def __init__(self, digits: Digits, hp: Hyperparameters, recorded: Recorded) -> None:
        self.rank = current_rank()
        self.hp = hp
        self.recorded = recorded
        self.group = _group(hp.backend)
        self.training, self.test = (part.to(self.rank.device) for part in (digits.training, digits.test))
        self.sampler: DistributedSampler[int] = DistributedSampler(
            range(len(self.training)), num_replicas=self.rank.world_size, rank=self.rank.rank, seed=hp.seed
        )
        self.batch_size = math.ceil(hp.batch_size / self.rank.world_size)
        self.num_steps = hp.epochs * math.ceil(len(self.sampler) / self.batch_size)
        self.step = 0
        self.epochs: list[EpochMetrics] = []
        self.evaluation: Evaluation | None = None
        torch.manual_seed(hp.seed)  # the same initial weights, whatever the number of ranks
        self.model = CNN().to(self.rank.device)
        self.gang_model = (
            DistributedDataParallel(self.model, process_group=self.group) if self.rank.world_size > 1 else self.model
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=hp.learning_rate, momentum=hp.sgd_momentum)
        if recorded.gradients:
            self.rank.watch(self.model)

    def run(self) -> None:
        """Train to the end of the last epoch, or until the gang is to stop."""
        while len(self.epochs) < self.hp.epochs:
            self._start_epoch()
            if not self._take_steps():
                return
            self._end_epoch()

    def resume(self, state: _TrainingState) -> None:
        """Go on after the last epoch of a checkpoint; every rank is given the same."""
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        self.step = state.step
        self.epochs = list(state.epochs)
        self.evaluation = state.evaluation
        logger.info("goes on after epoch %d, step %d", len(self.epochs), self.step)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights as CPU tensors, under the names that a `CNN` without a gang gives them."""
        return {name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()}

    def _start_epoch(self) -> None:
        """Before the first step of an epoch."""
        self.started = time.perf_counter()
        self.num_seen = 0
        # The loss stays on the device: to read it at every step would make the host wait for each.
        self.loss_sum = torch.zeros((), device=self.rank.device)
        self.sampler.set_epoch(len(self.epochs))
        self.model.train()

    def _take_steps(self) -> bool:
        """See this rank's share of the epoch; False if the gang is to stop before it is over."""
        for share in torch.tensor(list(self.sampler), device=self.rank.device).split(self.batch_size):
            loss = self._take_step(share)
            self.loss_sum += loss * len(share)
            self.num_seen += len(share)
            if self.step % self.hp.log_interval == 0:
                self._log_step(loss)
            if self.rank.should_stop():
                return False
        return True

    def _take_step(self, share: Tensor) -> Tensor:
        """Follow the gradient of the mean loss; returns it for this rank's share."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.hp.learning_rate * (1 - self.step / self.num_steps)
        loss = F.cross_entropy(self.gang_model(self.training.images[share]), self.training.labels[share])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def _log_step(self, loss: Tensor) -> None:
        """Report the loss over the gang's batch; all ranks call this at the same steps."""
        metrics = {
            "epoch": len(self.epochs) + 1,
            "loss": sum_over_ranks(loss.clone(), self.group) / self.rank.world_size,  # all shares are of one size
            "samples_per_second": self._samples_per_second(),
        }
        self.rank.log(metrics, step=self.step, num_steps=self.num_steps)

    def _end_epoch(self) -> None:
        """Evaluate, report and save."""
        loss = float(sum_over_ranks(self.loss_sum, self.group)) / (self.num_seen * self.rank.world_size)
        samples_per_second = self._samples_per_second()
        self.evaluation = evaluate(self.model, self.test, self.hp.test_batch_size, self.group)
        metrics = EpochMetrics(
            epoch=len(self.epochs) + 1,
            loss=loss,
            held_out_loss=self.evaluation.loss,
            held_out_accuracy=self.evaluation.accuracy,
            samples_per_second=samples_per_second,
        )
        self.epochs.append(metrics)
        self.rank.log(asdict(metrics) | self._table(self.evaluation), step=self.step, num_steps=self.num_steps)
        state = _TrainingState(
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            step=self.step,
            epochs=self.epochs,
            evaluation=self.evaluation,
        )
        self.rank.checkpoint.save(state, self.step)

    def _samples_per_second(self) -> float:
        return self.num_seen * self.rank.world_size / (time.perf_counter() - self.started)

    def _table(self, evaluation: Evaluation) -> dict[str, Any]:
        """The predictions to record, on rank 0; where there is no run for them, they go nowhere."""
        if not (self.rank.is_main and self.recorded.num_batches and self.recorded.num_images):
            return {}
        try:
            table = predictions_table(
                self.test.images,
                self.test.labels,
                evaluation.scores,
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
    _check_all_seen(sum_over_ranks(times_seen, group))
    logits = sum_over_ranks(logits, group)
    return Evaluation(
        loss=F.cross_entropy(logits, test.labels).item(),
        accuracy=(logits.argmax(dim=1) == test.labels).double().mean().item(),
        scores=logits.softmax(dim=1).cpu(),
    )


def _check_all_seen(times_seen: Tensor) -> None:
    if not bool((times_seen == 1).all()):
        raise RuntimeError(
            f"the ranks evaluated {int((times_seen == 0).sum())} of {len(times_seen)} test images not at all and "
            f"{int((times_seen > 1).sum())} more than once, but each must be counted once. The likely cause is that "
            "the ranks were given different test sets; give all of them the same."
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
