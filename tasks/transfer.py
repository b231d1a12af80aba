"""Transfer learning on a folder of pictures, and its training loop. Runs in every rank of a gang, or in one process.

There is neither Flyte nor Dask in here: `current_rank()` says who this process is, and torch.distributed does the rest.
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
"""Values for `auto`, 0 and -1 in `Hyperparameters`: with a bucket; without one, so that two cores take seconds."""


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
        """The same with every `auto`, 0 and -1 replaced by what it stands for.

        Raises:
            ValueError: These do not go together, or there is no such backbone or no such weights of it.
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
    """One epoch, as the whole gang saw it; losses are per image."""

    accuracy: float
    """The share of the training images whose class the model ranked first when it saw them."""
    learning_rate: float
    """That of the epoch's steps."""
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

    Each held-out image is evaluated once after every epoch. With another number of ranks than before, a training goes
    on with the learning rate of as many. What becomes of checkpoints and of a gang that is to stop, `Trainer` says.

    Args:
        pictures: With `transform(hp)`.
        hp: How to train, settled.
        start: The weights to start from; None: random ones.

    Raises:
        ValueError: There are too few pictures, the weights to start from are those of another network, or the
            checkpoint is that of other pictures.
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
        # Frozen weights have no gradients, and the optimizer passes over them.
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
        self.model.eval()  # trying it out is to leave no trace
        super().wrap()

    def try_out(self) -> Tensor:
        blank = torch.zeros(1, 3, self.hp.crop, self.hp.crop, device=self.rank.device)
        return self.gang_model(blank).sum()

    def set_mode(self) -> None:
        """Thaw the backbone when it is time; frozen layers do not even count the means of their batch normalisation."""
        if self._is_frozen == next(self.model.parameters()).requires_grad:
            self.wrap()
        self.model.train(not self._is_frozen)
        backbones.head_of(self.model)[1].train()

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss_sum, sums = self._score(self.gang_model, images, labels)
        is_own = bool(self.loader.weight)
        sums *= is_own
        self.unread.append((self.step, sums))
        # DDP takes the mean of the ranks' gradients, as if every rank had equally many images.
        return loss_sum * is_own * self.rank.world_size / len(self.loader.global_batch), sums

    def follow(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def log_step(self, sums: Tensor) -> None:
        self._read_statistics()

    def _read_statistics(self) -> None:
        """Have the steps since the last time logged and written down, as far as this rank knows of them."""
        unread, self.unread = self.unread, []
        for record in self._note(TRAINING, unread):
            metrics = {name: value for name, value in asdict(record).items() if name != "step"}
            self.log(metrics, step=record.step)

    @property
    def _is_frozen(self) -> bool:
        """Whether the epoch trains the head only."""
        return len(self.epochs) < self.hp.frozen_epochs

    @property
    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _score(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss summed over the images; and as float64 it, how many are ranked right, and how many there are."""
        with torch.autocast(images.device.type, dtype=self.precision, enabled=self.precision != torch.float32):
            logits = model(images).float()
        loss_sum = F.cross_entropy(logits, labels, reduction="sum")
        correct, count = (logits.argmax(dim=1) == labels).sum(), torch.full_like(loss_sum, len(labels))
        return loss_sum, torch.stack([loss_sum.detach().double(), correct.double(), count.double()])

    def _note(self, phase: str, found: Sequence[tuple[int, Tensor]]) -> list[Record]:
        """Make records of what lies on the device: the sums of each batch, and at which step."""
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
        waiting_share = self.waited / seconds  # before the evaluation waits, too
        loss, accuracy, num_skipped = self._means(sums, self.loader, "training")
        learning_rate = self._learning_rate
        held_out_loss, held_out_accuracy, num_untested = self._evaluate()
        self.scheduler.step(held_out_loss)  # the same number on all ranks, and so the same learning rate
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
        """As `_means`, over the held-out images; each rank tests its share of them once."""
        if self.rank.world_size > 1:  # one and the same model: DDP brings rank 0's batch statistics before a step only
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)
        self.model.eval()
        found = [(self.step, self._score(self.model, *batch)[1]) for batch in self.timed(self.tests)]
        self._note(EVALUATION, found)
        return self._means(sum_over_ranks(sum(sums for _, sums in found)), self.tests, "held-out")

    def _means(self, sums: Tensor, loader: RankLoader, kind: str) -> tuple[float, float, int]:
        """Loss and accuracy per image over all ranks, and how many they skipped; proves that it was each image once."""
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
        """Also with the learning rate of as many ranks.

        Raises:
            ValueError: It is the checkpoint of other pictures.
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
        self._submit(self.records)  # the driver may be another one

    def save(self) -> None:
        self._read_statistics()
        super().save()
        self._submit(record for record in self.records if record.epoch == self.records[-1].epoch)

    def _submit(self, records: Iterable[Record]) -> None:
        """Have the driver write them down, where there is one that does, in place of those of the same epoch and rank.

        When a checkpoint has them, too: the whole epoch anew at each reading would be too much in a long one.
        """
        if self.rank.link.takes_results:
            for path, text in as_files(records).items():
                self.results.submit_result(path, text)


def _options(hp: Hyperparameters) -> dict[str, Any]:
    """How pictures are loaded."""
    options: dict[str, Any] = {
        "num_workers": hp.num_loader_workers,
        "collate_fn": _collate,
        "pin_memory": current_rank().device.type == "cuda",
    }
    if hp.num_loader_workers:
        # A rank has threads (the process group's, Weights & Biases') and perhaps a GPU, which do not bear forking.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchvision.transforms.v2"])  # imported once, not by each worker
        options |= {"multiprocessing_context": context, "persistent_workers": True}
    return options


def _collate(items: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A batch of images and their labels."""
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
