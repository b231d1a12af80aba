"""Transfer learning on a folder of pictures, with its training loop. Runs in every rank, or in one process alone.

`current_rank()` says which rank this process is, and torch.distributed connects the ranks. Flyte and Dask are not
imported here.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's own documentation uses
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Subset

from flytekitplugins.daskpytorch import StrictInputs, current_rank
from flytekitplugins.daskpytorch.data import RankLoader, split_by_class
from flytekitplugins.daskpytorch.results import DaskResultsHandler
from tasks import backbones
from tasks.backbones import Classifier, Start
from tasks.checks import is_between, is_whole, raise_if_wrong
from tasks.records import EVALUATION, TRAINING, Record, as_files
from tasks.together import sum_over_ranks
from tasks.training import EpochMetrics as CommonMetrics
from tasks.training import Trainer

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("raise", "skip")
AUTO = "auto"
AUTOMATIC: dict[str, tuple[Any, Any]] = {
    "backbone": ("resnet50", backbones.SMALL),
    "weights": ("DEFAULT", ""),
    "batch_size": (64, 16),
    "resize": (256, 64),
    "crop": (250, 60),
    "num_loader_workers": (2, 0),
}
"""Replacements of `auto`, 0 and -1 in `Hyperparameters`: with a bucket, and for quick runs without a bucket."""


class Pictures(Protocol):
    """Folder of pictures as `class/picture`, such as `S3ImageFolder` or torchvision's `ImageFolder`."""

    classes: list[str]
    targets: list[int]

    def __getitem__(self, index: int) -> Any:
        """Return a picture after the transform, and its label."""


@dataclass
class Hyperparameters(StrictInputs):
    """Hyper-parameters. A plain dataclass can be the input of a workflow."""

    backbone: str = AUTO
    """Name of the network: `small`, or one of `torchvision.models.list_models()`. auto: resnet50, or small without a
    bucket."""
    weights: str = AUTO
    """Name of torchvision's initial weights, for example IMAGENET1K_V2. Empty: random weights. auto: the best
    weights."""
    base_lr: float = 0.02
    """Learning rate per rank. The gang's learning rate is this value times the number of ranks."""
    momentum: float = 0.9
    """Momentum of stochastic gradient descent, from 0 to below 1."""
    batch_size: int = 0
    """Images per step and rank. 0: 64, or 16 without a bucket."""
    epochs: int = 8
    """Number of epochs. Each sees every training image once."""
    frozen_epochs: int = 0
    """Number of first epochs that train only the last layer and freeze the backbone."""
    patience: int = 2
    """Tolerated epochs without a lower held-out loss. After one more, the learning rate falls to a tenth."""
    resize: int = 0
    """Shorter edge of the images before the crop, in pixels. 0: 256, or 64 without a bucket."""
    crop: int = 0
    """Edge of the square crop from the middle, in pixels. 0: 250, or 60 without a bucket."""
    held_out: float = 0.2
    """Share of each class that is held out for tests, above 0 and below 1."""
    seed: int = 0
    """Seed of the split, the initial weights, the order of the images and the dropout."""
    num_loader_workers: int = -1
    """Processes per rank that fetch and decode images. 0: the rank itself. -1: 2, or 0 without a bucket."""
    checkpoint_interval: int = 100
    """Number of steps between two checkpoints within an epoch. 0: only at the end of each epoch."""
    log_interval: int = 10
    """Number of steps between two readings of the statistics. Each reading waits for the device."""
    precision: str = AUTO
    """Type of the activations: float32, bfloat16 or float16. auto: bfloat16 or float16 on a GPU, float32 on a CPU."""
    on_error: str = "raise"
    """Handling of a broken image in a bucket: `raise` fails the training, `skip` leaves the image out and counts it."""

    def __post_init__(self) -> None:
        or_zero, or_auto = "a whole number from 0 up", "a whole number from 0 (auto) up"
        checks = {
            "base_lr": (is_between(self.base_lr, 0, math.inf), "a finite number above 0"),
            "batch_size": (is_whole(self.batch_size, 0), or_auto),
            "frozen_epochs": (is_whole(self.frozen_epochs, 0), or_zero),
            "patience": (is_whole(self.patience, 0), or_zero),
            "resize": (is_whole(self.resize, 0), or_auto),
            "crop": (is_whole(self.crop, 0), or_auto),
            "num_loader_workers": (is_whole(self.num_loader_workers, -1), "a whole number from -1 (auto) up"),
            "precision": (self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
            "on_error": (self.on_error in POLICIES, f"one of {', '.join(POLICIES)}"),
        }
        raise_if_wrong(self, checks)

    def settled(self, *, has_bucket: bool) -> Hyperparameters:
        """Return these hyper-parameters with every `auto`, 0 and -1 replaced by its value.

        Raises:
            ValueError: Values contradict each other, or the backbone or weights are unknown.
        """
        chosen = {name: values[0 if has_bucket else 1] for name, values in AUTOMATIC.items()}
        given = {name: value for name in chosen if (value := getattr(self, name)) not in (AUTO, -1)}
        if given.get("backbone", chosen["backbone"]) == backbones.SMALL:
            chosen["weights"] = ""
        elif "backbone" in given:
            chosen["weights"] = "DEFAULT"
        chosen |= {n: v for n, v in given.items() if v != 0 or n == "num_loader_workers"}
        settled = replace(self, **chosen)
        problems = backbones.find_problems(settled.backbone, settled.weights)
        if settled.crop > settled.resize:
            problems.append(f"crop={settled.crop}: must not be above resize={settled.resize}")
        if settled.frozen_epochs > settled.epochs:
            problems.append(f"frozen_epochs={settled.frozen_epochs}: must not be above epochs={settled.epochs}")
        if problems:
            raise ValueError("; ".join(f"Hyperparameters: {problem}" for problem in problems))
        return settled


@dataclass(frozen=True, kw_only=True)
class EpochMetrics(CommonMetrics):
    """Metrics of one epoch over all ranks. Losses are per image."""

    accuracy: float
    """Share of the training images whose class the model ranked first during training, from 0 to 1."""
    learning_rate: float
    """Learning rate of the epoch's steps."""
    num_skipped: int
    """Number of broken images that all ranks left out, in training and evaluation. See `on_error`."""
    waiting_share: float
    """Share of the epoch's time in steps that this rank spent waiting for images, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Result of a training. Only timing and records differ between ranks."""

    classifier: Classifier
    """Trained network, on this rank's device and in evaluation mode."""
    epochs: list[EpochMetrics]
    """Metrics of the epochs, in order. A gang that was stopped has fewer epochs than `Hyperparameters.epochs`."""
    records: list[Record]
    """Statistics of this rank. Rank 0 also has those of ranks that left the gang."""


def transform(hp: Hyperparameters) -> Callable[[Any], Tensor]:
    """Return a transform from a picture of any size to a uint8 tensor of (3, crop, crop).

    The device converts the bytes to floats, so transfers to the device are a quarter as large.
    """
    from torchvision.transforms import v2

    made: Callable[[Any], Tensor] = v2.Compose(
        [v2.PILToTensor(), v2.Resize(hp.resize, antialias=True), v2.CenterCrop(hp.crop)]
    )
    return made


def split(pictures: Pictures, hp: Hyperparameters) -> tuple[list[int], list[int]]:
    """Return the indices of the training pictures, and of the held-out pictures."""
    return split_by_class(pictures, hp.held_out, hp.seed)


def train(pictures: Pictures, hp: Hyperparameters, start: Start | None = None) -> TrainingResult:
    """Train together with the other ranks of the gang. Every rank calls this function with the same arguments.

    Each held-out image is evaluated once after every epoch. If the number of ranks changes after a restart, the
    learning rate changes in proportion. `Trainer` describes checkpoints and the stop of a gang.

    Args:
        pictures: The pictures, with the transform `transform(hp)`.
        hp: Hyper-parameters after `settled`.
        start: Initial weights. None: random weights.

    Raises:
        ValueError: The pictures are too few, the initial weights belong to another network, or the checkpoint belongs
            to other pictures.
        RuntimeError: The ranks together did not see every image exactly once.
    """
    trainer = _Trainer(pictures, hp, start or Start(weights={}))
    trainer.train()
    return TrainingResult(classifier=trainer.model.eval(), epochs=trainer.epochs, records=trainer.records)


class _Trainer(Trainer):
    """One rank's part in the training."""

    model: Classifier

    def __init__(self, pictures: Pictures, hp: Hyperparameters, start: Start) -> None:
        self.hp = hp
        rank = current_rank()
        training, held_out = split(pictures, hp)
        self.tests = RankLoader(Subset(pictures, held_out), hp.batch_size, shuffle=False, **_options(hp))
        self.results = DaskResultsHandler()
        self.precision = _precision(hp.precision, rank.device)
        self.scaler = torch.amp.GradScaler(rank.device.type, enabled=self.precision == torch.float16)
        self.unread: list[tuple[int, Tensor]] = []
        torch.manual_seed(hp.seed)  # the same initial weights on every rank
        model = Classifier(hp.backbone, pictures.classes)
        backbones.load_start(model.model, start, pictures.classes)
        model.to(rank.device)
        # Frozen weights have no gradients, so the optimizer skips them.
        optimizer = torch.optim.SGD(model.parameters(), lr=hp.base_lr * rank.world_size, momentum=hp.momentum)
        self.scheduler = ReduceLROnPlateau(optimizer, patience=hp.patience)
        super().__init__(
            model,
            optimizer,
            RankLoader(Subset(pictures, training), hp.batch_size, seed=hp.seed, **_options(hp)),
            hp,
            checkpoint_interval=hp.checkpoint_interval,
        )
        self.parts |= {"scheduler": self.scheduler, "scaler": self.scaler}

    # ---- Steps

    def wrap(self) -> None:
        self.model.requires_grad_(not self._is_frozen)
        backbones.head_of(self.model)[1].requires_grad_(requires_grad=True)
        self.model.eval()  # the trial pass must not change the batch norms' means
        super().wrap()

    def try_out(self) -> Tensor:
        blank = torch.zeros(1, 3, self.hp.crop, self.hp.crop, device=self.rank.device)
        return self.gang_model(blank).sum()

    def set_mode(self) -> None:
        """Put the model into training mode, and unfreeze the backbone when due. Frozen batch norms keep their means."""
        if self._is_frozen == next(self.model.parameters()).requires_grad:
            self.wrap()
        self.model.train(not self._is_frozen)
        backbones.head_of(self.model)[1].train()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss_sum, sums = self._score(self.gang_model, images, labels)
        is_own = bool(self.loader.weight)
        sums *= is_own
        self.unread.append((self.step, sums))
        # DDP averages the ranks' gradients as if all ranks had the same number of images.
        return loss_sum * is_own * self.rank.world_size / len(self.loader.global_batch), sums

    def follow(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def log_step(self, sums: Tensor) -> None:
        self._read_statistics()

    def _read_statistics(self) -> None:
        """Log and record the steps since the last call, with this rank's statistics."""
        unread, self.unread = self.unread, []
        for record in self._note(TRAINING, unread):
            metrics = {name: value for name, value in asdict(record).items() if name != "step"}
            self.log(metrics, step=record.step)

    @property
    def _is_frozen(self) -> bool:
        """True if the epoch trains only the head."""
        return len(self.epochs) < self.hp.frozen_epochs

    @property
    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _score(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss, and a float64 tensor of the loss, the number of right images and of all images."""
        with torch.autocast(images.device.type, dtype=self.precision, enabled=self.precision != torch.float32):
            logits = model(images).float()
        loss_sum = F.cross_entropy(logits, labels, reduction="sum")
        correct, count = (logits.argmax(dim=1) == labels).sum(), torch.full_like(loss_sum, len(labels))
        return loss_sum, torch.stack([loss_sum.detach().double(), correct.double(), count.double()])

    def _note(self, phase: str, found: Sequence[tuple[int, Tensor]]) -> list[Record]:
        """Add and return records of batches, whose sums lie on the device, and of their steps."""
        own = (record for record in reversed(self.records) if (record.worker, record.phase) == (self.rank.rank, phase))
        sample = next((record.sample for record in own), 0)
        rows = torch.stack([sums for _, sums in found]).tolist() if found else []
        records = []
        for (step, _), (loss_sum, correct, count) in zip(found, rows, strict=True):
            sample += int(count)
            record = Record(
                step=step,
                loss=loss_sum / max(1, count),
                lr=self._learning_rate,
                correct=int(correct),
                epoch=len(self.epochs) + 1,
                count=int(count),
                worker=self.rank.rank,
                sample=sample,
                phase=phase,
            )
            records.append(record)
        self.records += records
        return records

    # ---- Epochs

    def judge(self, sums: Tensor, seconds: float) -> EpochMetrics:
        self._read_statistics()
        waiting_share = self.waited / seconds  # before the evaluation, which adds waiting time
        loss, accuracy, num_skipped = self._means(sums, self.loader, "training")
        learning_rate = self._learning_rate
        held_out_loss, held_out_accuracy, num_untested = self._evaluate()
        self.scheduler.step(held_out_loss)  # all ranks have the same loss, and therefore the same learning rate
        return EpochMetrics(
            epoch=len(self.epochs) + 1,
            loss=loss,
            accuracy=accuracy,
            held_out_loss=held_out_loss,
            held_out_accuracy=held_out_accuracy,
            learning_rate=learning_rate,
            samples_per_second=self.loader.num_items / seconds,
            num_skipped=num_skipped + num_untested,
            waiting_share=waiting_share,
        )

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float, int]:
        """Return the result of `_means` over the held-out images. Each rank tests its share once."""
        if self.rank.world_size > 1:  # DDP shares rank 0's batch statistics only before a step
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)
        self.model.eval()
        found = [(self.step, self._score(self.model, *batch)[1]) for batch in self.timed(self.tests)]
        self._note(EVALUATION, found)
        return self._means(sum_over_ranks(sum(sums for _, sums in found)), self.tests, "held-out")

    def _means(self, sums: Tensor, loader: RankLoader, kind: str) -> tuple[float, float, int]:
        """Return loss and accuracy per image and the number of skipped images, over all ranks. Check the counts."""
        loss, correct, count = sums.tolist()
        num_skipped = loader.num_items - int(count)
        if num_skipped and (self.hp.on_error == "raise" or num_skipped < 0 or not count):
            raise RuntimeError(
                f"the ranks saw {count:.0f} {kind} images in epoch {len(self.epochs) + 1}, but there are "
                f"{loader.num_items}, and each must be seen once. The likely cause is that the ranks were given "
                "different pictures or seeds, or with on_error='skip' that all of them are broken."
            )
        return loss / count, correct / count, num_skipped

    # ---- Checkpoints

    def state(self) -> dict[str, Any]:
        return super().state() | {"classes": self.model.classes}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the training, and scale the learning rate to the number of ranks.

        Raises:
            ValueError: The checkpoint belongs to other pictures.
        """
        if state["classes"] != self.model.classes:
            raise ValueError(
                f"the checkpoint of step {state['step']} was saved with {len(state['classes'])} classes, but now there "
                f"are {len(self.model.classes)} or others. The likely cause is that the bucket changed between two "
                "starts of the task; start a new execution."
            )
        super().resume(state)
        for group in self.optimizer.param_groups:
            group["lr"] *= self.rank.world_size / len(state["ranks"])
        self._submit(self.records)  # the driver may be new

    def save(self) -> None:
        self._read_statistics()
        super().save()
        self._submit(record for record in self.records if record.epoch == self.records[-1].epoch)

    def _submit(self, records: Iterable[Record]) -> None:
        """Send records to the driver, which replaces those of the same epoch and rank. Drivers may take no results.

        The trainer sends them only with a checkpoint. An epoch's records are sent as a whole, so sending at each
        reading would send too much.
        """
        if self.rank.link.takes_results:
            for path, text in as_files(records).items():
                self.results.submit_result(path, text)


def _options(hp: Hyperparameters) -> dict[str, Any]:
    """Return the loader's options."""
    options: dict[str, Any] = {
        "num_workers": hp.num_loader_workers,
        "collate_fn": _collate,
        "pin_memory": current_rank().device.type == "cuda",
    }
    if hp.num_loader_workers:
        # A rank has threads (process group, Weights & Biases) and perhaps a GPU, so forking it is unsafe.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchvision.transforms.v2"])  # imported once instead of by each worker
        options |= {"multiprocessing_context": context, "persistent_workers": True}
    return options


def _collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return a batch of images and their labels."""
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(labels)


def _precision(wanted: str, device: torch.device) -> torch.dtype:
    """Return the type of the activations. GPUs that only emulate bfloat16 use float16."""
    if wanted != AUTO:
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
