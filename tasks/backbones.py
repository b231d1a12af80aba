"""Networks that classify pictures: torchvision's, and a small one. Runs in tasks and ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SMALL = "small"
"""Name of this project's own network. All other names are torchvision's."""
PIXEL_MEAN, PIXEL_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's pictures in red, green and blue from 0 to 1, as torchvision's weights expect."""
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Names of second heads in the weights of GoogLeNet and Inception. Only training uses them, so `load_start` drops
them."""
WIDTHS = (16, 32, 64)
DROPOUT = 0.1
"""Dropout of the small network."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Initial weights of a training."""

    weights: Mapping[str, Tensor]
    """Weights by the names of the backbone's own state_dict. Empty: random weights."""
    classes: Sequence[str] | None = None
    """Classes of the head. None: unknown, as in torchvision's files."""


class Classifier(nn.Module):
    """Trained network with the names of its classes."""

    def __init__(self, backbone: str, classes: Sequence[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = list(classes)
        self.model = build(backbone, len(classes))
        self.register_buffer("mean", torch.tensor(PIXEL_MEAN)[:, None, None] * 255, persistent=False)
        self.register_buffer("deviation", torch.tensor(PIXEL_DEVIATION)[:, None, None] * 255, persistent=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Classifier:
        """Read a file that `save` wrote.

        Raises:
            ValueError: The file has other content.
        """
        found = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or found.keys() != {"backbone", "classes", "model"}:
            raise ValueError(
                f"{os.fspath(path)} is not a trained classifier: it must hold backbone, classes and model, as the "
                "model_state of the workflow dogs does"
            )
        classifier = cls(found["backbone"], found["classes"])
        classifier.model.load_state_dict(found["model"])
        return classifier.eval()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file with names and CPU tensors only, for `torch.load(..., weights_only=True)`."""
        weights = {name: weight.detach().cpu().clone() for name, weight in self.model.state_dict().items()}
        torch.save({"backbone": self.backbone, "classes": self.classes, "model": weights}, path)

    def forward(self, images: Tensor) -> Tensor:
        """Score the classes.

        Args:
            images: (batch, 3, height, width), uint8.

        Returns:
            Logits, (batch, classes), float.
        """
        scores: Tensor = self.model((images.float() - self.mean) / self.deviation)
        return scores


class SmallNet(nn.Module):
    """Three convolutions with batch normalisation and pooling, and a dense layer: 25,000 weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        stem, *others = WIDTHS
        blocks = [nn.Conv2d(3, stem, kernel_size=5, stride=2, padding=2, bias=False), nn.BatchNorm2d(stem), nn.ReLU()]
        for before, after in zip(WIDTHS, others, strict=False):
            convolution = nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
            blocks += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(DROPOUT))
        self.classifier = nn.Linear(WIDTHS[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Score the classes of normalised pictures."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


def find_problems(backbone: str, weights: str) -> list[str]:
    """Return the problems with these names. The backbone `small` has no weights."""
    from torchvision import models  # the import takes a second, which the driver saves

    known = models.list_models(module=models)
    if backbone == SMALL:
        return [f"weights={weights!r}: there are none for backbone='small'; use ''"] if weights else []
    if backbone not in known:
        return [f"backbone={backbone!r}: must be auto, small or one of torchvision's: {', '.join(known)}"]
    kinds = list(models.get_model_weights(backbone).__members__)
    if weights and weights not in kinds:
        return [f"weights={weights!r}: must be auto, '' (none) or one of {backbone}'s: {', '.join(kinds)}"]
    return []


def build(backbone: str, num_classes: int) -> nn.Module:
    """Return a network with random weights and a head for this number of classes."""
    if backbone == SMALL:
        return SmallNet(num_classes)
    from torchvision import models

    # GoogLeNet and Inception expect pixels from -1 to 1, and convert them with `transform_input`.
    googles = {"aux_logits": False, "transform_input": True, "init_weights": True}
    options: dict[str, Any] = googles if backbone in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(backbone, weights=None, num_classes=num_classes, **options)
    return model


def head_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the name and the module of the head: the last dense or convolutional layer."""
    return [named for named in model.named_modules() if isinstance(named[1], (nn.Linear, nn.Conv2d))][-1]


def download(backbone: str, weights: str) -> Start:
    """Return torchvision's weights from torch's cache (`~/.cache/torch/hub`, or below `TORCH_HOME`) or the network.

    Args:
        backbone: Name of a network.
        weights: Name of its weights. Empty: no weights, so the training starts from random weights.

    Raises:
        ConnectionError: The weights are not in the cache, and cannot be downloaded.
    """
    if not weights:
        return Start(weights={})
    from torchvision import models

    chosen = models.get_model_weights(backbone)[weights]
    try:
        return Start(weights=chosen.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise ConnectionError(
            f"cannot download {weights} of {backbone} from {chosen.url}: {error}. Let this machine reach it, or "
            "download the file elsewhere and give it as state; weights='' starts from random weights."
        ) from error


def save_start(start: Start, path: str | os.PathLike[str]) -> None:
    """Write initial weights to a file for `read_start`."""
    content: dict[str, Any] = dict(start.weights)
    torch.save(content if start.classes is None else {"classes": list(start.classes), "model": content}, path)


def read_start(path: str | os.PathLike[str]) -> Start:
    """Read a state_dict, or the state of a `Classifier`.

    Raises:
        ValueError: The file has other content, or cannot be read without running its code.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many types for files of another format
        reason = str(error).split("WeightsUnpickler error: ")[-1].split(". ")[0].strip()  # drops torch's advice
        raise ValueError(
            f"cannot read the weights in {os.fspath(path)}: {reason}. Give the model_state of an earlier run of dogs, "
            "or a file with nothing but a state_dict, such as torchvision's."
        ) from error
    classes = found.get("classes") if isinstance(found, dict) else None
    weights = found.get("model", found) if isinstance(found, dict) else found
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ValueError(f"{os.fspath(path)} holds {type(found).__name__}, not a state_dict: names and tensors")
    return Start(weights={name.removeprefix("module."): weight for name, weight in weights.items()}, classes=classes)


def load_start(model: nn.Module, start: Start, classes: Sequence[str]) -> None:
    """Load the initial weights. The head keeps its random weights unless it was trained for the same classes.

    Raises:
        ValueError: The weights belong to another network.
    """
    if not start.weights:
        return
    head, own = head_of(model)[0] + ".", model.state_dict()
    keeps_head = start.classes is not None and list(start.classes) != list(classes)
    keeps_head |= any(name.startswith(head) and weight.shape != own[name].shape for name, weight in _given(start, own))
    taken = {
        name: weight
        for name, weight in start.weights.items()
        if not name.startswith(AUXILIARY) and not (keeps_head and name.startswith(head))
    }
    needed = {name for name in own if not (keeps_head and name.startswith(head))}
    wrong = sorted(needed ^ taken.keys()) or [
        n for n, w in _given(start, own) if n in taken and w.shape != own[n].shape
    ]
    if wrong:
        raise ValueError(
            f"the weights to start from are not those of {type(model).__name__}: {len(wrong)} differ, "
            f"first {wrong[0]!r}. Give the backbone that they were trained for."
        )
    model.load_state_dict(taken, strict=False)


def _given(start: Start, own: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the initial weights whose names the model has, too."""
    return [(name, weight) for name, weight in start.weights.items() if name in own]
