"""Transfer learning on a folder of pictures, and its training loop. Runs in every rank of a gang, or in one process.

There is neither Flyte nor Dask in here: `current_rank()` says who this process is, and torch.distributed does the rest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from flytekitplugins.daskpytorch.data import RankBatches, split_by_class
from flytekitplugins.daskpytorch.results import DaskResultsHandler
from tasks import backbones
from tasks.backbones import Classifier, Start
from tasks.checks import is_between, is_number, is_whole, raise_if_wrong
from tasks.records import EVALUATION, TRAINING, Record, as_files
from tasks.together import gather_from_ranks, generators, set_generators, sum_over_ranks

__all__ = ["EpochMetrics", "Hyperparameters", "Pictures", "TrainingResult", "read", "split", "train", "transform"]

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("raise", "skip")
AUTO = "auto"
FOR_A_BUCKET = {
    "backbone": "resnet50",
    "weights": "DEFAULT",
    "batch_size": 64,
    "resize": 256,
    "crop": 250,
    "num_loader_workers": 2,
}
FOR_GENERATED = {
    "backbone": backbones.SMALL,
    "weights": "",
    "batch_size": 16,
    "resize": 64,
    "crop": 60,
    "num_loader_workers": 0,
}
"""What is `auto`, 0 or -1 in `Hyperparameters`; without a bucket a run on two cores takes seconds."""


class Pictures(Protocol):
    """A folder of pictures, `class/picture`: `S3ImageFolder`, and torchvision's `ImageFolder`."""

    classes: list[str]
    targets: list[int]

    def __getitem__(self, index: int) -> Any:
        """A picture, as the transform makes it, and its label."""


@dataclass
class Hyperparameters(StrictInputs):
    """How to train. A plain dataclass, so that it can be the input of a workflow."""

    backbone: str = AUTO
    """The network: `small`, or one of `torchvision.models.list_models()`; auto: resnet50, small without a bucket."""
    weights: str = AUTO
    """The name of torchvision's weights to start from, such as IMAGENET1K_V2; empty: random ones; auto: the best."""
    base_lr: float = 0.02
    """The learning rate is this times the number of ranks."""
    momentum: float = 0.9
    """The share of the last step that goes into the next."""
    batch_size: int = 0
    """Images per step and rank; 0: 64, or 16 without a bucket."""
    epochs: int = 8
    """How often every training image is seen."""
    frozen_epochs: int = 0
    """So many of these train the last layer only, and leave the backbone as it is."""
    patience: int = 2
    """After more epochs than this without a lower held-out loss, the learning rate falls to a tenth."""
    resize: int = 0
    """The shorter edge of the images in pixels, before they are cropped; 0: 256, or 64 without a bucket."""
    crop: int = 0
    """The edge of the square cut from their middle; 0: 250, or 60 without a bucket."""
    held_out: float = 0.2
    """The share of each class that the model is tested on and never trained on."""
    seed: int = 0
    """Fixes the split, the initial weights, the order of the images and the dropout."""
    num_loader_workers: int = -1
    """Processes per rank that fetch and decode images; 0: the rank itself; -1: 2, or 0 without a bucket."""
    checkpoint_interval: int = 100
    """Steps between two checkpoints within an epoch; 0: only at the end of each epoch."""
    log_interval: int = 10
    """Steps whose statistics are read together; each reading waits for the device."""
    precision: str = AUTO
    """Of the activations: float32, bfloat16 or float16; auto: bfloat16 or float16 on a GPU, float32 on a CPU."""
    on_error: str = "raise"
    """What becomes of a broken image in a bucket: `raise` ends the training, `skip` leaves it out and counts it."""

    def __post_init__(self) -> None:
        count, or_auto = "a whole number from 1 up", "a whole number from 0 (auto) up"
        checks = {
            "base_lr": (is_between(self.base_lr, 0, math.inf), "a finite number above 0"),
            "momentum": (is_number(self.momentum) and 0 <= self.momentum < 1, "a number from 0 to below 1"),
            "batch_size": (is_whole(self.batch_size, 0), or_auto),
            "epochs": (is_whole(self.epochs, 1), count),
            "frozen_epochs": (is_whole(self.frozen_epochs, 0), "a whole number from 0 up"),
            "patience": (is_whole(self.patience, 0), "a whole number from 0 up"),
            "resize": (is_whole(self.resize, 0), or_auto),
            "crop": (is_whole(self.crop, 0), or_auto),
            "held_out": (is_between(self.held_out, 0, 1), "a fraction above 0 and below 1"),
            "seed": (is_whole(self.seed, 0) and self.seed < 2**63, "a whole number from 0 up and below 2**63"),
            "num_loader_workers": (is_whole(self.num_loader_workers, -1), "a whole number from -1 (auto) up"),
            "checkpoint_interval": (is_whole(self.checkpoint_interval, 0), "a whole number from 0 up"),
            "log_interval": (is_whole(self.log_interval, 1), count),
            "precision": (self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
            "on_error": (self.on_error in POLICIES, f"one of {', '.join(POLICIES)}"),
        }
        raise_if_wrong(self, checks)

    def settled(self, *, has_bucket: bool) -> Hyperparameters:
        """The same with every `auto`, 0 and -1 replaced by what it stands for.

        Raises:
            ValueError: These do not go together, or there is no such backbone or no such weights of it.
        """
        chosen = dict(FOR_A_BUCKET if has_bucket else FOR_GENERATED)
        given = {name: value for name in chosen if (value := getattr(self, name)) not in (AUTO, -1)}
        if given.get("backbone", chosen["backbone"]) == backbones.SMALL:
            chosen["weights"] = ""
        elif "backbone" in given:
            chosen["weights"] = "DEFAULT"
        chosen |= {n: v for n, v in given.items() if v != 0 or n == "num_loader_workers"}
        settled = replace(self, **chosen)  # type: ignore[arg-type]
        problems = backbones.find_problems(settled.backbone, settled.weights)
        if settled.crop > settled.resize:
            problems.append(f"crop={settled.crop}: must not be above resize={settled.resize}")
        if settled.frozen_epochs > settled.epochs:
            problems.append(f"frozen_epochs={settled.frozen_epochs}: must not be above epochs={settled.epochs}")
        if problems:
            raise ValueError("; ".join(f"Hyperparameters: {problem}" for problem in problems))
        return settled


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """One epoch, as the whole gang saw it."""

    epoch: int
    """1 … epochs."""
    loss: float
    """Mean cross-entropy in nats per image over the epoch's training steps."""
    accuracy: float
    """The share of the training images whose class the model ranked first when it saw them."""
    held_out_loss: float
    """The same over the held-out images, at the end of the epoch."""
    held_out_accuracy: float
    """The share of the held-out images whose class the model ranks first."""
    learning_rate: float
    """That of the epoch's steps."""
    samples_per_second: float
    """Training images per second of all ranks together, as far as this process has seen the epoch."""
    num_skipped: int
    """Images that all ranks together left out as broken, in training and evaluation; see `on_error`."""
    waiting_share: float
    """The share of the time of the epoch's steps in which this rank waited for images."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training run leaves; the same on every rank, but for the timing and the records."""

    classifier: Classifier
    """On this rank's device, in evaluation mode."""
    epochs: list[EpochMetrics]
    """One entry per epoch, in order; fewer than were wanted if the gang was told to stop."""
    records: list[Record]
    """This rank's statistics; on rank 0 also those of ranks that are gone."""


@dataclass
class _Sums:
    """What was found so far in a phase of an epoch."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class _RankState:
    """What only one rank knows of the training."""

    sums: _Sums
    records: list[Record]
    generators: dict[str, Tensor]
    """The states of torch's global random generators, by the type of device; they draw the dropout."""


@dataclass(frozen=True, kw_only=True)
class _TrainingState:
    """A checkpoint: all that the steps to come depend on. The epoch that they are in is the one after `epochs`."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scaler: dict[str, Any]
    classes: list[str]
    num_training: int
    step: int
    """Steps taken in all epochs."""
    num_seen: int
    """Images of the epoch that all ranks together have been given: other ranks may cut other batches."""
    epochs: list[EpochMetrics]
    ranks: list[_RankState]
    """Of each rank."""


class _Batches(Dataset[Any]):
    """Lets a rank have no image at all, as it may after a restart with more ranks than there are images left."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return read(self.pictures, indices) if indices else []


def read(pictures: Pictures, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
    """Some pictures, all at once where they can be had so, and without those that it leaves out."""
    if hasattr(pictures, "__getitems__"):
        found: list[tuple[Tensor, int]] = pictures.__getitems__(indices)
        return found
    return [pictures[index] for index in indices]


def transform(hp: Hyperparameters) -> Callable[[Any], Tensor]:
    """What makes a picture, or an image tensor, of any size a tensor of (3, crop, crop), uint8.

    It is left to the device to make numbers of a network of the bytes, a quarter as many on their way.
    """
    from torchvision.transforms import v2

    made: Callable[[Any], Tensor] = v2.Compose(
        [v2.Resize(hp.resize, antialias=True), v2.CenterCrop(hp.crop), v2.ToImage(), v2.ToPureTensor()]
    )
    return made


def split(pictures: Pictures, hp: Hyperparameters) -> tuple[list[int], list[int]]:
    """The indices of the pictures to train on, and those held out."""
    return split_by_class(pictures, hp.held_out, hp.seed)


def train(pictures: Pictures, hp: Hyperparameters, start: Start | None = None) -> TrainingResult:
    """Train together with the other ranks of the gang; every rank calls this with the same arguments.

    All ranks together see each training image exactly once per epoch, and evaluate each held-out one once after it.
    Seeds torch's global random generator.

    Saves a checkpoint after each epoch, every `hp.checkpoint_interval` steps, and when the gang is to stop; then it
    returns with what there is. Starts from the gang's checkpoint, where there is one: on a CPU and with as many ranks
    as before, the weights and losses are bit for bit those of a training without interruption. With another number of
    ranks it goes on with the next image, and the learning rate of as many ranks.

    Args:
        pictures: With `transform(hp)`.
        hp: How to train, settled.
        start: The weights to start from; None: random ones.

    Raises:
        ValueError: There are too few pictures, the weights to start from are those of another network, or the
            checkpoint is that of other pictures.
        RuntimeError: The ranks together did not see every image exactly once.
    """
    trainer = _Trainer(pictures, hp, start)
    if (state := current_rank().checkpoint.load()) is not None:
        trainer.resume(state)
    trainer.run()
    return TrainingResult(classifier=trainer.model.eval(), epochs=trainer.epochs, records=trainer.records)


class _Trainer:
    """One rank's part in the training."""

    def __init__(self, pictures: Pictures, hp: Hyperparameters, start: Start | None) -> None:
        self.rank = current_rank()
        self.hp = hp
        training, held_out = split(pictures, hp)
        self.num_training, self.num_held_out = len(training), len(held_out)
        self.batches = RankBatches(training, hp.batch_size, seed=hp.seed)
        self.tests = RankBatches(held_out, hp.batch_size, shuffle=False)
        self.training_loader = self._loader(pictures, self.batches)
        self.test_loader = self._loader(pictures, self.tests)
        torch.manual_seed(hp.seed)  # the same initial weights on every rank …
        self.model = Classifier(hp.backbone, pictures.classes)
        backbones.load_start(self.model.model, start or Start(weights={}), pictures.classes)
        self.model.to(self.rank.device)
        torch.manual_seed(hp.seed + self.rank.rank + 1)  # … but dropout of its own
        # Frozen weights have no gradients, and the optimizer passes over them.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=hp.base_lr * self.rank.world_size, momentum=hp.momentum
        )
        self.scheduler = ReduceLROnPlateau(self.optimizer, patience=hp.patience)
        self.precision = _precision(hp.precision, self.rank.device)
        self.scaler = torch.amp.GradScaler(self.rank.device.type, enabled=self.precision == torch.float16)  # type: ignore[attr-defined]
        self.step = 0
        self.epochs: list[EpochMetrics] = []
        self.records: list[Record] = []
        self.results = DaskResultsHandler()
        self._start_epoch()
        self._wrap()

    def run(self) -> None:
        """Train to the end of the last epoch, or until the gang is to stop."""
        while len(self.epochs) < self.hp.epochs:
            if not self._take_steps():
                return
            self._end_epoch()
            self._save()

    def resume(self, state: _TrainingState) -> None:
        """Go on from a checkpoint; every rank is given the same.

        Raises:
            ValueError: It is the checkpoint of other pictures.
        """
        if (state.classes, state.num_training) != (self.model.classes, self.num_training):
            raise ValueError(
                f"the checkpoint of step {state.step} was saved with {state.num_training} training images of "
                f"{len(state.classes)} classes, but now there are {self.num_training} of {len(self.model.classes)}. "
                "The likely cause is that the bucket changed between two starts of the task; start a new execution."
            )
        self.step, self.epochs = state.step, list(state.epochs)
        self._start_epoch(state.num_seen)
        self._wrap()
        self.model.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        self.scheduler.load_state_dict(state.scheduler)
        self.scaler.load_state_dict(state.scaler)
        for group in self.optimizer.param_groups:
            group["lr"] *= self.rank.world_size / len(state.ranks)
        if self.rank.rank < len(state.ranks):  # else the rank is new, and keeps the generators that it seeded
            own = state.ranks[self.rank.rank]
            set_generators(own.generators)
        self._take_over(state.ranks)
        logger.info("goes on after step %d, in epoch %d", self.step, len(self.epochs) + 1)

    def _take_over(self, ranks: Sequence[_RankState]) -> None:
        """Keep what this rank has found; rank 0 also keeps that of ranks that are gone."""
        kept = ranks[self.rank.rank : self.rank.rank + 1]
        if self.rank.is_main:
            kept = [*kept, *ranks[self.rank.world_size :]]
        self.records = [record for state in kept for record in state.records]
        for state in kept:
            self.sums.loss += state.sums.loss
            self.sums.correct += state.sums.correct
            self.sums.count += state.sums.count
        self._submit(self.records)  # the driver may be another one

    @property
    def _is_frozen(self) -> bool:
        """Whether the epoch trains the head only."""
        return len(self.epochs) < self.hp.frozen_epochs

    @property
    def _num_steps(self) -> int:
        """How many steps there will be at the end: those taken, those left of the epoch and of the later ones."""
        per_epoch = math.ceil(self.num_training / (self.hp.batch_size * self.rank.world_size))
        this_epoch = len(self.batches) - self.num_steps_of_epoch
        return self.step + this_epoch + (self.hp.epochs - len(self.epochs) - 1) * per_epoch

    def _loader(self, pictures: Pictures, batches: RankBatches) -> DataLoader[Any]:
        num_workers = self.hp.num_loader_workers
        own: dict[str, Any] = {}
        if num_workers:
            # A rank has threads (the process group's, Weights & Biases') and perhaps a GPU, which do not bear forking.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torchvision.transforms.v2"])  # imported once, not by each worker
            own = {"multiprocessing_context": context, "persistent_workers": True}
        return DataLoader(
            _Batches(pictures),
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=self.rank.device.type == "cuda",
            generator=torch.Generator().manual_seed(self.hp.seed),  # else each epoch would draw from the dropout's
            **own,
        )

    def _wrap(self) -> None:
        """Share the gradients of all weights that are trained now; DDP asks which these are only when it is made."""
        head = backbones.head_of(self.model)[1]
        self.model.requires_grad_(not self._is_frozen)
        head.requires_grad_(requires_grad=True)
        self.gang_model: nn.Module = self.model
        if self.rank.world_size > 1:
            self.gang_model = DistributedDataParallel(self.model)
        # After its first backward pass DDP deals the gradients out anew, and with them the order in which the ranks add
        # them up. That pass is made here, for nothing, so that all steps of a resumed training add as they would have.
        self.model.eval()
        blank = torch.zeros(1, 3, self.hp.crop, self.hp.crop, device=self.rank.device)
        self.gang_model(blank).sum().backward()
        self.optimizer.zero_grad()

    def _start_epoch(self, num_seen: int = 0) -> None:
        """Before the first image of an epoch, or those that are left of it."""
        self.batches.set_epoch(len(self.epochs), num_seen)
        self.num_seen, self.num_steps_of_epoch = num_seen, 0
        self.sums = _Sums()
        self.started, self.waited, self.num_timed = time.perf_counter(), 0.0, 0
        self.unread: list[tuple[int, float, int, Tensor]] = []

    def _take_steps(self) -> bool:
        """See the images that are left of the epoch; False if the gang is to stop before it is over."""
        self._set_training_mode()
        sizes = self.batches.global_batch_sizes
        for global_size, (images, labels) in zip(sizes, self._timed(self.training_loader), strict=True):
            self._take_step(images, labels, global_size)
            stops = self.rank.should_stop()
            is_save_due = self._is_save_due()
            if stops or is_save_due or self.step % self.hp.log_interval == 0:
                self._read_statistics()
            if stops or is_save_due:
                self._save()
            if stops:
                return False
        self._read_statistics()
        return True

    def _set_training_mode(self) -> None:
        """Frozen layers do not even count the means of their batch normalisation."""
        self.model.train(not self._is_frozen)
        backbones.head_of(self.model)[1].train()

    def _timed(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's batches on the device; takes the time of waiting for them."""
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - asked
            yield tuple(part.to(self.rank.device, non_blocking=True) for part in batch)  # type: ignore[misc]

    def _take_step(self, images: Tensor, labels: Tensor, global_size: int) -> None:
        """Follow the gradient of the mean loss over the gang's batch."""
        count = len(labels)
        if not count:
            # Stand-ins with weight zero, since the others wait for this rank's gradients; two, for their statistics.
            images, labels = images.new_zeros(2, 3, self.hp.crop, self.hp.crop), labels.new_zeros(2)
        with self._autocast():
            logits = self.gang_model(images).float()
        loss_sum = F.cross_entropy(logits, labels, reduction="sum") * (count > 0)
        # DDP takes the mean of the ranks' gradients, as if every rank had equally many images.
        self.scaler.scale(loss_sum * self.rank.world_size / global_size).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        self.num_steps_of_epoch += 1
        self.num_seen += global_size
        self.num_timed += global_size
        correct = (logits.detach().argmax(dim=1) == labels).sum() * (count > 0)
        # They stay on the device: to read them at every step would make the host wait for each.
        self.unread.append((self.step, self._learning_rate, count, torch.stack([loss_sum.detach(), correct])))

    @property
    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.rank.device.type, dtype=self.precision)

    def _read_statistics(self) -> None:
        """Have the steps since the last time counted, logged and written down."""
        if not self.unread:
            return
        found = self._note(TRAINING, self.sums, self.unread)
        self.unread = []
        for record in found:
            metrics = {name: value for name, value in asdict(record).items() if name != "step"}
            self.rank.log(metrics, step=record.step, num_steps=self._num_steps)

    def _note(self, phase: str, sums: _Sums, unread: Sequence[tuple[int, float, int, Tensor]]) -> list[Record]:
        """Make records of what lies on the device."""
        sample = next((r.sample for r in reversed(self.records) if self._is_own(r) and r.phase == phase), 0)
        found = []
        rows = torch.stack([row for *_, row in unread]).tolist()
        for (step, learning_rate, count, _), (loss_sum, correct) in zip(unread, rows, strict=True):
            sums.loss, sums.correct, sums.count = sums.loss + loss_sum, sums.correct + int(correct), sums.count + count
            sample += count
            record = Record(
                step=step,
                loss=loss_sum / max(1, count),
                lr=learning_rate,
                correct=int(correct),
                epoch=len(self.epochs) + 1,
                count=count,
                worker=self.rank.rank,
                sample=sample,
                phase=phase,
            )
            found.append(record)
        self.records += found
        return found

    def _is_own(self, record: Record) -> bool:
        return record.worker == self.rank.rank

    def _submit(self, records: Iterable[Record]) -> None:
        """Have the driver write them down, where there is one that does, in place of those of the same epoch and rank.

        When a checkpoint has them, too: the whole epoch anew at each reading would be too much in a long one.
        """
        if self.rank.submit is not None:
            for path, text in as_files(records).items():
                self.results.submit_result(path, text)

    def _end_epoch(self) -> None:
        """Evaluate, report, and be ready for the next epoch."""
        seconds, num_timed, waited = time.perf_counter() - self.started, self.num_timed, self.waited
        loss, accuracy, num_skipped = self._means(self.sums, self.num_training, "training")
        learning_rate = self._learning_rate
        held_out_loss, held_out_accuracy, num_untested = self._evaluate()
        metrics = EpochMetrics(
            epoch=len(self.epochs) + 1,
            loss=loss,
            accuracy=accuracy,
            held_out_loss=held_out_loss,
            held_out_accuracy=held_out_accuracy,
            learning_rate=learning_rate,
            samples_per_second=num_timed / seconds,
            num_skipped=num_skipped + num_untested,
            waiting_share=waited / seconds,
        )
        self.scheduler.step(held_out_loss)  # the same number on all ranks, and so the same learning rate
        self.rank.log(asdict(metrics), step=self.step, num_steps=self._num_steps)
        was_frozen = self._is_frozen
        self.epochs.append(metrics)
        self._start_epoch()
        if was_frozen and not self._is_frozen and len(self.epochs) < self.hp.epochs:
            self._wrap()

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float, int]:
        """As `_means`, over the held-out images; each rank tests its share of them once."""
        self._share_buffers()
        self.model.eval()
        unread = []
        for images, labels in self._timed(self.test_loader):
            with self._autocast():
                logits = self.model(images).float()
            found = [F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(dim=1) == labels).sum()]
            unread.append((self.step, self._learning_rate, len(labels), torch.stack(found)))
        sums = _Sums()
        self._note(EVALUATION, sums, unread)
        return self._means(sums, self.num_held_out, "held-out")

    def _share_buffers(self) -> None:
        """Test one and the same model: DDP brings rank 0's batch statistics to all before a step, not after it."""
        if self.rank.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)

    def _means(self, sums: _Sums, num_images: int, kind: str) -> tuple[float, float, int]:
        """Loss and accuracy per image over all ranks, and how many they skipped; proves that it was each image once."""
        totals = torch.tensor([sums.loss, sums.correct, sums.count], dtype=torch.float64, device=self.rank.device)
        loss, correct, count = sum_over_ranks(totals).tolist()
        if count != num_images and (self.hp.on_error == "raise" or count > num_images or not count):
            raise RuntimeError(
                f"the ranks saw {count:.0f} {kind} images in epoch {len(self.epochs) + 1}, but there are {num_images}, "
                "and each must be seen once. The likely cause is that the ranks were given different pictures or "
                "seeds, or with on_error='skip' that all of them are broken."
            )
        return loss / count, correct / count, num_images - int(count)

    def _is_save_due(self) -> bool:
        """Whether to save within the epoch; at its end that is done after the evaluation."""
        interval = self.hp.checkpoint_interval
        return interval > 0 and self.step % interval == 0 and self.num_seen < self.num_training

    def _save(self) -> None:
        """Save a checkpoint; all ranks call this at the same steps, since each has something to tell."""
        own = _RankState(sums=replace(self.sums), records=list(self.records), generators=generators())
        state = _TrainingState(
            model=self.model.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
            scaler=self.scaler.state_dict(),
            classes=self.model.classes,
            num_training=self.num_training,
            step=self.step,
            num_seen=self.num_seen,
            epochs=self.epochs,
            ranks=gather_from_ranks(own),
        )
        self.rank.checkpoint.save(state, self.step)
        self._submit(record for record in self.records if record.epoch == self.records[-1].epoch)


def _collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A batch of images and their labels; of none at all, too."""
    if not items:
        return torch.zeros(0, 3, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(labels)


def _precision(wanted: str, device: torch.device) -> torch.dtype:
    """What the activations are; float16 on GPUs that only imitate bfloat16."""
    if wanted != AUTO:
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
