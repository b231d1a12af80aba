"""Common parts of all trainings: epochs, steps, checkpoints, metrics. Runs in every rank, or in one process alone.

`current_rank()` says which rank this process is, and torch.distributed connects the ranks. Flyte and Dask are not
imported here.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from flytekitplugins.daskpytorch import current_rank
from flytekitplugins.daskpytorch.data import RankLoader
from tasks.together import check_seen_once, gather_from_ranks, generators, set_generators, sum_over_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """Metrics of one epoch over all ranks. Losses are means of the cross-entropy in nats."""

    epoch: int
    """Number of the epoch, from 1."""
    loss: float
    """Loss over the epoch's training steps."""
    held_out_loss: float
    """Loss at the end of the epoch, over data that the model never trains on."""
    held_out_accuracy: float
    """Share of the held-out data that the model ranks first, from 0 to 1."""
    samples_per_second: float
    """Training samples per second of all ranks together."""


class Hyperparameters(Protocol):
    """Hyper-parameters that each training has."""

    epochs: int
    seed: int
    log_interval: int
    """Number of steps between two reports of the loss."""


class Model(nn.Module):
    """Model that `from_state_dict` restores from a state dictionary."""

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor]) -> Self:
        """Return a model with these weights, on this rank's device and in evaluation mode.

        Raises:
            RuntimeError: The weights belong to another model.
        """
        model = cls().to(current_rank().device)
        model.load_state_dict(state_dict)
        return model.eval()


class Rows(TensorDataset):
    """Rows of tensors, from which one indexing operation cuts a batch. The loader needs `collate_fn=tuple`."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices, device=self.tensors[0].device)]  # type: ignore[no-any-return]


class Trainer(ABC):
    """One rank's part in a training. Subclasses define the model, its loss and its metrics.

    All ranks together see each sample exactly once per epoch, or the training fails. The trainer saves a checkpoint
    after each epoch, every `checkpoint_interval` steps (0: none within an epoch), and when the gang is asked to stop.
    The training then ends early.

    A restarted training resumes from the gang's checkpoint. On a CPU and with the same number of ranks, weights and
    losses are bit for bit those of a training without interruption. With another number of ranks, the training resumes
    with the next sample. The trainer seeds torch's global random generator.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: RankLoader,
        hp: Hyperparameters,
        *,
        checkpoint_interval: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = current_rank()
        self.model, self.optimizer, self.loader, self.group = model, optimizer, loader, group
        self.num_epochs, self.seed, self.log_interval = hp.epochs, hp.seed, hp.log_interval
        self.checkpoint_interval = checkpoint_interval
        self.parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        """Objects in a checkpoint, by name. Each is saved with its own state_dict."""
        self.step = 0
        """Number of steps in all epochs, including the current step."""
        self.epochs: list[Any] = []
        """Metrics of the completed epochs."""
        self.records: list[Any] = []
        """Further records of this rank. Rank 0 also keeps the records of ranks that left the gang."""
        self._start_epoch()

    # ---- Methods that each training defines

    @abstractmethod
    def loss(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of this rank's share of a batch with `gang_model`.

        Returns:
            The loss whose gradient DDP averages over the ranks, and a float64 tensor of sums over the share. The first
            sum is that of the loss. The last sum is the number of items that the mean loss divides by.
        """

    @abstractmethod
    def try_out(self) -> Tensor:
        """Return a single number that `gang_model` computes from any input."""

    @abstractmethod
    def judge(self, sums: Tensor, seconds: float) -> EpochMetrics:
        """Evaluate the model after an epoch, given the sums over all ranks and the epoch's duration in seconds."""

    # ---- Methods that a training may override

    def set_mode(self) -> None:
        """Put the model into training mode."""
        self.model.train()

    def follow(self, loss: Tensor) -> None:
        """Update the weights with the gradient of the loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def wrap(self) -> None:
        """Wrap the model so that DDP averages the gradients. DDP looks up the trainable weights only here."""
        self.gang_model = self.model
        if self.rank.world_size > 1:
            self.gang_model = DistributedDataParallel(self.model, process_group=self.group)
            # After its first backward pass, DDP regroups the gradients and changes the order of their addition. A trial
            # pass here puts all steps of new and resumed trainings after the regrouping.
            self.try_out().backward()
            self.optimizer.zero_grad()

    def log_step(self, sums: Tensor) -> None:
        """Log the loss over the gang's batch. All ranks call this method at the same steps."""
        loss, *_, count = sum_over_ranks(sums.clone(), self.group)
        samples_per_second = self.loader.num_seen / (time.perf_counter() - self.started)
        self.log({"epoch": len(self.epochs) + 1, "loss": loss / count, "samples_per_second": samples_per_second})

    def shown(self, metrics: Any) -> dict[str, Any]:
        """Return the metrics of an epoch that are logged."""
        return asdict(metrics)

    def state(self) -> dict[str, Any]:
        """Return the state of the training for a checkpoint. All ranks call this method at the same steps."""
        own = {"sums": self.sums.cpu(), "generators": generators(), "records": list(self.records)}
        return {name: part.state_dict() for name, part in self.parts.items()} | {
            "step": self.step,
            "epochs": self.epochs,
            "seconds": time.perf_counter() - self.started,
            "waited": self.waited,
            "times_seen": self._all_times_seen(),
            "ranks": gather_from_ranks(own),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the training from a checkpoint's state, which is equal on all ranks."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.step, self.waited = state["step"], state["waited"]
        self.started -= state["seconds"]
        before, own = state["ranks"], state["ranks"][self.rank.rank : self.rank.rank + 1]
        for rank in own:  # a new rank has no entry, and keeps the generators that it seeded
            set_generators(rank["generators"])
        if self.rank.is_main:  # takes the counts of all ranks, and the rest of ranks that left
            self.times_seen += state["times_seen"]
            own += before[self.rank.world_size :]
        for rank in own:
            self.sums = self.sums + rank["sums"].to(self.rank.device)
            self.records += rank["records"]
        logger.info("goes on after step %d, in epoch %d", self.step, len(self.epochs) + 1)

    def save(self) -> None:
        """Save a checkpoint."""
        self.rank.checkpoint.save(self.state(), self.step)

    # ---- Methods that all trainings share

    def train(self) -> None:
        """Train to the end of the last epoch, or until the gang is asked to stop."""
        state = self.rank.checkpoint.load()
        if state is not None:
            self.epochs = list(state["epochs"])
        self.wrap()
        torch.manual_seed(self.seed + self.rank.rank + 1)  # each rank has its own dropout
        if state is not None:
            self.resume(state)
        while len(self.epochs) < self.num_epochs and self._take_steps():
            self._end_epoch()
            self.save()

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights as CPU tensors, under the names that they have without DDP."""
        return {name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()}

    @property
    def num_steps(self) -> int:
        """Return the number of all steps: those taken, and those left with batches of this gang's size."""
        return self.step + self.loader.num_batches_left(self.num_epochs)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics of this step, or of the given step."""
        self.rank.log(metrics, step=step or self.step, num_steps=self.num_steps)

    def timed(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the loader's batches on the device, and add up the seconds of waiting for batches."""
        batches = iter(loader)
        asked = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - asked
            yield tuple(part.to(self.rank.device, non_blocking=True) for part in batch)
            asked = time.perf_counter()

    def _start_epoch(self) -> None:
        self.started, self.waited = time.perf_counter(), 0.0
        self.times_seen = torch.zeros(self.loader.num_items, dtype=torch.int32)
        # On the device, because the host would wait for the device whenever it reads the sums.
        self.sums = torch.zeros((), dtype=torch.float64, device=self.rank.device)

    def _take_steps(self) -> bool:
        """Train on the rest of the epoch's samples. Return False if the gang is asked to stop before."""
        self.set_mode()
        for batch in self.timed(self.loader):
            self.times_seen[self.loader.share] += 1
            self._take_step(batch)
            stops = self.rank.should_stop()
            if stops or self._is_save_due():
                self.save()
            if stops:
                return False
        return True

    def _take_step(self, batch: tuple[Tensor, ...]) -> None:
        self.step += 1
        loss, sums = self.loss(*batch)
        self.follow(loss)
        self.sums = self.sums + sums
        if self.step % self.log_interval == 0:
            self.log_step(sums)

    def _is_save_due(self) -> bool:
        """Return True if a checkpoint is due within the epoch. The epoch's end has its own checkpoint."""
        interval = self.checkpoint_interval
        return interval > 0 and self.step % interval == 0 and self.loader.num_seen < self.loader.num_items

    def _end_epoch(self) -> None:
        """Evaluate the model, log the metrics, and start the next epoch."""
        check_seen_once(self._all_times_seen(), "training samples")
        seconds = time.perf_counter() - self.started
        with self.rank.evaluating():
            metrics = self.judge(sum_over_ranks(self.sums.clone(), self.group), seconds)
        self.log(self.shown(metrics))
        self.epochs.append(metrics)
        self._start_epoch()

    def _all_times_seen(self) -> Tensor:
        """Return how often the ranks together saw each sample in the epoch so far."""
        return sum_over_ranks(self.times_seen.to(self.rank.device, copy=True), self.group).cpu()
