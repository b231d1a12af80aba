"""What trainings do alike: epochs, steps, checkpoints, metrics. Runs in every rank of a gang, or in one process alone.

There is neither Flyte nor Dask in here: `current_rank()` says who this process is, and torch.distributed does the rest.
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
    """One epoch, as the whole gang saw it. Losses are means of the cross-entropy in nats."""

    epoch: int
    """1 … epochs."""
    loss: float
    """Over the epoch's training steps."""
    held_out_loss: float
    """At the end of the epoch, over what the model never trains on."""
    held_out_accuracy: float
    """The share of this that the model ranks first."""
    samples_per_second: float
    """Training samples per second of all ranks together."""


class Hyperparameters(Protocol):
    """Hyper-parameters that each training has."""

    epochs: int
    seed: int
    log_interval: int
    """Steps between two reports of the loss."""


class Model(nn.Module):
    """A model that a state dictionary brings back."""

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor]) -> Self:
        """Return a model with these weights, on this rank's device and in evaluation mode.

        Raises:
            RuntimeError: The weights are those of another model.
        """
        model = cls().to(current_rank().device)
        model.load_state_dict(state_dict)
        return model.eval()


class Rows(TensorDataset):
    """Rows of tensors that stay where they lie: a batch is cut out of them at once. For `collate_fn=tuple`."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(indices, device=self.tensors[0].device)]  # type: ignore[no-any-return]


class Trainer(ABC):
    """One rank's part in a training. What is derived from it says what the model is, its loss and its metrics.

    All ranks together see each sample exactly once per epoch, or the training fails. Saves a checkpoint after each
    epoch, every `checkpoint_interval` steps (0: none within an epoch), and when the gang is to stop; then the training
    ends early. Goes on from the gang's checkpoint, where there is one: on a CPU and with as many ranks as before,
    weights and losses are bit for bit those of a training without interruption. With another number of ranks it goes on
    with the next sample. Seeds torch's global random generator.
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
        """What goes into a checkpoint by its own state_dict."""
        self.step = 0
        """Steps taken in all epochs, with the one that is being taken."""
        self.epochs: list[Any] = []
        """The metrics of those that are over."""
        self.records: list[Any] = []
        """What else this rank has to tell; rank 0 keeps that of ranks that are gone, too."""
        self._start_epoch()

    # ---- What each training says

    @abstractmethod
    def loss(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Score this rank's share of a batch with `gang_model`.

        Returns:
            The loss whose gradient DDP averages over the ranks; and sums over the share, float64: of the loss, ... and
            last of what the loss is a mean over.
        """

    @abstractmethod
    def try_out(self) -> Tensor:
        """Make a single number with `gang_model`, of anything."""

    @abstractmethod
    def judge(self, sums: Tensor, seconds: float) -> EpochMetrics:
        """Evaluate the model, after an epoch of which all ranks have found these sums in so many seconds."""

    # ---- What may be said otherwise

    def set_mode(self) -> None:
        """Be ready to train."""
        self.model.train()

    def follow(self, loss: Tensor) -> None:
        """Take a step down the gradient."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def wrap(self) -> None:
        """Share the gradients of all weights that are trained now; DDP asks which these are only when it is made."""
        self.gang_model = self.model
        if self.rank.world_size > 1:
            self.gang_model = DistributedDataParallel(self.model, process_group=self.group)
            # After its first backward pass DDP deals the gradients out anew, and with them the order in which the ranks
            # add them up. That pass is made here, for nothing, so that all steps of a resumed training add alike.
            self.try_out().backward()
            self.optimizer.zero_grad()

    def log_step(self, sums: Tensor) -> None:
        """Report the loss over the gang's batch; all ranks call this at the same steps."""
        loss, *_, count = sum_over_ranks(sums.clone(), self.group)
        samples_per_second = self.loader.num_seen / (time.perf_counter() - self.started)
        self.log({"epoch": len(self.epochs) + 1, "loss": loss / count, "samples_per_second": samples_per_second})

    def shown(self, metrics: Any) -> dict[str, Any]:
        """What is logged of an epoch."""
        return asdict(metrics)

    def state(self) -> dict[str, Any]:
        """All that the steps to come depend on; all ranks call this at the same steps."""
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
        """Go on from such a state; every rank is given the same."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.step, self.waited = state["step"], state["waited"]
        self.started -= state["seconds"]
        before, own = state["ranks"], state["ranks"][self.rank.rank : self.rank.rank + 1]
        for rank in own:  # or it is new, and keeps the generators that it seeded
            set_generators(rank["generators"])
        if self.rank.is_main:  # takes what the ranks found together, and what ranks that are gone have found
            self.times_seen += state["times_seen"]
            own += before[self.rank.world_size :]
        for rank in own:
            self.sums = self.sums + rank["sums"].to(self.rank.device)
            self.records += rank["records"]
        logger.info("goes on after step %d, in epoch %d", self.step, len(self.epochs) + 1)

    def save(self) -> None:
        """Save a checkpoint."""
        self.rank.checkpoint.save(self.state(), self.step)

    # ---- What is always so

    def train(self) -> None:
        """Train to the end of the last epoch, or until the gang is to stop."""
        state = self.rank.checkpoint.load()
        if state is not None:
            self.epochs = list(state["epochs"])
        self.wrap()
        torch.manual_seed(self.seed + self.rank.rank + 1)  # each rank has dropout of its own
        if state is not None:
            self.resume(state)
        while len(self.epochs) < self.num_epochs and self._take_steps():
            self._end_epoch()
            self.save()

    def weights(self) -> dict[str, Tensor]:
        """The model's, as CPU tensors, under the names that they have without a gang."""
        return {name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()}

    @property
    def num_steps(self) -> int:
        """How many steps there will be: those taken, and those left with batches of this gang's size."""
        return self.step + self.loader.num_batches_left(self.num_epochs)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Report metrics of this step, or of the one given."""
        self.rank.log(metrics, step=step or self.step, num_steps=self.num_steps)

    def timed(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, ...]]:
        """The loader's batches on the device; adds up the seconds of waiting for them."""
        batches = iter(loader)
        asked = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - asked
            yield tuple(part.to(self.rank.device, non_blocking=True) for part in batch)
            asked = time.perf_counter()

    def _start_epoch(self) -> None:
        self.started, self.waited = time.perf_counter(), 0.0
        self.times_seen = torch.zeros(self.loader.num_items, dtype=torch.int32)
        # On the device: to read the sums at every step would make the host wait for each.
        self.sums = torch.zeros((), dtype=torch.float64, device=self.rank.device)

    def _take_steps(self) -> bool:
        """See the samples that are left of the epoch; False if the gang is to stop before it is over."""
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
        """Whether to save within the epoch; at its end that is done after the evaluation."""
        interval = self.checkpoint_interval
        return interval > 0 and self.step % interval == 0 and self.loader.num_seen < self.loader.num_items

    def _end_epoch(self) -> None:
        """Evaluate, report, and be ready for the next epoch."""
        check_seen_once(self._all_times_seen(), "training samples")
        seconds = time.perf_counter() - self.started
        with self.rank.evaluating():
            metrics = self.judge(sum_over_ranks(self.sums.clone(), self.group), seconds)
        self.log(self.shown(metrics))
        self.epochs.append(metrics)
        self._start_epoch()

    def _all_times_seen(self) -> Tensor:
        """How often the ranks together saw each sample in the epoch so far."""
        return sum_over_ranks(self.times_seen.to(self.rank.device, copy=True), self.group).cpu()
